"""`python -m experiments` lists what there is and runs it by name; `experiments.sizes`."""

import re
import runpy

import jax
import pytest

import experiments
from experiments.sizes import in_words, main, sizes
from pfl_jax.networks.models import MODELS
from pfl_jax.primitives import byte_count


def command(monkeypatch, *words):
    """Does what `python -m experiments WORDS` does."""
    monkeypatch.setattr("sys.argv", ["experiments", *words])
    runpy.run_module("experiments", run_name="__main__")


def test_the_list_has_what_a_user_runs_first_each_with_a_line_and_an_example(monkeypatch, capsys):
    command(monkeypatch)
    text = capsys.readouterr().out
    listed = re.findall(r"^  (\S+) +(\S.+)\n +python -m experiments\.(\S+) ?.*$", text, re.MULTILINE)
    names = [name for name, _, _ in listed]
    assert names == [example for _, _, example in listed]
    assert all(len(words.split()) > 3 for _, words, _ in listed)
    assert names[: len(experiments.DATASETS)] == list(experiments.DATASETS)
    assert {"export", "figures", "report", "sizes", "sweep", "tables"} <= set(names)
    assert not {"cli", "run", "options", "__main__"} & set(names)


# Other tests have imported the modules already.
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("name", ["sweep", "tables", "figures", "digits"])
def test_a_name_runs_its_module(monkeypatch, capsys, name):
    with pytest.raises(SystemExit) as stop:
        command(monkeypatch, name, "--help")
    assert not stop.value.code
    out = capsys.readouterr().out
    assert f"python -m experiments.{name}" in out
    assert "alone it lists the commands" not in out


def test_an_unknown_name_is_refused_with_the_nearest(monkeypatch, capsys):
    with pytest.raises(SystemExit) as stop:
        command(monkeypatch, "digts")
    assert stop.value.code == 2
    assert "did you mean digits?" in capsys.readouterr().err


def test_sizes_are_those_of_the_models():
    model = MODELS["mlp"]((8, 8, 1), 10)
    whole = jax.eval_shape(model.init, jax.random.key(0))
    everything, head = byte_count(whole), byte_count(whole["head"])
    # FedAvg keeps nothing; FedPer keeps the head and sends the rest.
    assert sizes("digits", "fedavg", 1000, 50) == (0, everything, everything, everything)
    assert sizes("digits", "fedper", 1000, 50)[:2] == (head, everything - head)


def test_amounts_in_words():
    said = [in_words(amount) for amount in (0, 1023, 1024, 1536, 3 * 2**40)]
    assert said == ["0 B", "1023 B", "1 KiB", "1.5 KiB", "3 TiB"]


def test_the_table(capsys):
    assert main(["--dataset", "digits", "--method", "fedper", "--num-clients", "1000000", "--cohort", "300"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "1,000,000 states" in printed[0]
    assert printed[2].startswith("| `fedper` |")
