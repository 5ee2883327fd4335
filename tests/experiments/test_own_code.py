"""Methods and models in the user's own files: options, results, resumption, sweeps, and texts that change."""

import json
import re
import sys

import jax
import numpy as np
import pytest

from experiments import export
from experiments.cli.command import main, parse
from experiments.folder import stored_runs
from experiments.folder.load import inspect
from experiments.report import main as report
from experiments.run.models import own_model
from experiments.run.resume import resumed, spec_of
from experiments.spec import own_code
from experiments.spec.identity import relevant_options
from pfl_jax import InvalidInput

pytestmark = pytest.mark.without_f1_auc

METHOD = '''
import helper_beside_it
from typing import Literal

import jax
from pfl_jax import LocalTraining, methods
from pfl_jax.validation import NotNegative


def slow(
    model,
    training=LocalTraining(lr=0.07),
    *,
    server_lr: NotNegative = 0.5,
    kind: Literal["a", "b"] = "a",
    start: int | None = None,
    layers: tuple[int, ...] = (1, 2),
    sizes: tuple[float, ...] | None = None,
):
    """FedAvg with a server that is slow.

    Args:
      server_lr: part of the way to the mean.
    """
    base = methods.fedavg(model, training)

    def aggregate(key, server, clients, messages, cohort):
        mean, clients, info = base.aggregate(key, server, clients, messages, cohort)
        return jax.tree.map(lambda old, new: old + server_lr * (new - old), server, mean), clients, info

    return base._replace(aggregate=aggregate)
'''

MODEL = """
import flax.linen as nn


class Net(nn.Module):
    classes: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.classes, name="head")(nn.relu(nn.Dense(9)(x.reshape(x.shape[0], -1))))


def net(input_shape, num_classes):
    return Net(num_classes)
"""

SMALL = ["--rounds", "2", "--num-clients", "4", "--train-size", "20", "--test-size", "10", "--epochs", "1"]
SMALL = [*SMALL, "--no-compilation-cache"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with both files, in which the test runs."""
    (tmp_path / "mine.py").write_text(METHOD)
    (tmp_path / "nets.py").write_text(MODEL)
    (tmp_path / "helper_beside_it.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def forget():
    own_code._load.cache_clear()


def test_options_and_help_are_those_of_its_factory(here, capsys):
    request = parse("digits", ["--method", "mine.py:slow"])
    assert request.hyper_parameters["server_lr"] == 0.5
    # The preset's learning rate comes before the factory's, as for all methods.
    assert request.hyper_parameters["lr"] == 0.05
    request = parse("digits", ["--method=./mine.py:slow", "--server-lr", "0.25", "--kind", "b", "--start", "0"])
    own = {name: request.hyper_parameters[name] for name in ("server_lr", "kind", "start")}
    assert own == {"server_lr": 0.25, "kind": "b", "start": 0}
    with pytest.raises(SystemExit):
        main("digits", ["--method", "mine.py:slow", "--help"])
    assert "Part of the way to the mean." in capsys.readouterr().out
    assert main("digits", ["--method", "mine.py:slow", "--kind", "c"]) == 2
    assert "unknown kind 'c' (there are a, b)" in capsys.readouterr().err


def test_an_option_of_several_numbers_is_theirs(here):
    def of(*words):
        request = parse("digits", ["--method", "mine.py:slow", *words])
        return tuple(request.hyper_parameters[name] for name in ("layers", "sizes"))

    assert of() == ((1, 2), None)
    assert of("--layers", "3", "--sizes", "0.5", "1") == ((3,), (0.5, 1.0))
    assert of("--layers=3", "--sizes", "None") == ((3,), None)
    assert main("digits", ["--method", "mine.py:slow", *SMALL, "--layers", "4", "5", "--out", "run"]) == 0
    (here / "run" / "summary.json").unlink()
    forget()
    request = parse("digits", ["--resume", "run", "--method", "mine.py:slow"])
    assert resumed(request).hyper_parameters["layers"] == (4, 5)


def test_nothing_that_a_folder_names_is_executed_unasked(here, capsys):
    """Text that leaves a file when it is executed; a run names it, and the folder comes from somebody else."""
    (here / "mine.py").write_text(f"open('executed', 'a').close()\n{METHOD}")
    assert main("digits", ["--method", "mine.py:slow", *SMALL, "--out", "run"]) == 0
    (here / "executed").unlink()
    forget()
    longer, model = ["--resume", "run", "--rounds", "3"], ["run", "--to", "model.safetensors"]
    why = r"executed only where you name it: read it, then add --method .*:slow"
    for refused in (lambda: main("digits", longer), lambda: export.main(model)):
        assert refused() == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert re.search(why, line)
    with pytest.raises(InvalidInput, match=why):
        export.load_run("run")
    assert main("digits", [*longer, "--layers", "3"]) == 2
    assert re.search(why, capsys.readouterr().err)
    config = json.loads(written := (here / "run/config.json").read_text())
    other = config | {"options": config["options"] | {"model": str(here / "mine.py:slow")}}
    for edited, says in (
        (config | {"own_code": {}}, "mine.py:slow as --method, without the digest of its text"),
        (other, "mine.py:slow as --model, without the digest of its text"),
        (config | {"options": config["options"] | {"trust": True}}, "which is executed only where you name it"),
    ):
        (here / "run/config.json").write_text(json.dumps(edited))
        assert main("digits", longer) == 2
        assert says in capsys.readouterr().err
    assert not (here / "executed").exists()
    (here / "run/config.json").write_text(written)
    # Where the command names the file itself.
    forget()
    assert export.load_run("run", method="mine.py:slow").summary["method"] == "mine.py:slow"
    (here / "elsewhere").mkdir()
    (here / "mine.py").rename(here / "elsewhere/mine.py")
    forget()
    found = resumed(parse("digits", [*longer, "--method", "elsewhere/mine.py:slow"]))
    assert found.method == "elsewhere/mine.py:slow"
    assert (here / "executed").exists()
    (here / "elsewhere/mine.py").write_text(METHOD)
    with pytest.raises(InvalidInput, match=r"began with another text of .*mine\.py, its --method"):
        export.load_run("run", method="elsewhere/mine.py:slow")


def test_a_report_executes_nothing(here):
    words = ["--method", "mine.py:slow", "--model", "nets.py:net"]
    assert main("digits", [*words, *SMALL, "--out", "net"]) == 0
    config = json.loads((here / "net/config.json").read_text())
    assert set(config["own_code"]) == {"method", "model"}
    assert config["bytes_per_client_and_round"]["up"] == 4 * (65 * 9 + 10 * 10)
    (here / "mine.py").unlink()
    (here / "nets.py").unlink()
    assert report(["net", "--out", "page.html"]) == 0
    assert "mine.py:slow" in (here / "page.html").read_text()
    assert stored_runs.read(here / "net").setting["model"] == "nets.py:net"


def test_a_finished_run_of_another_text_is_not_taken_for_it(here):
    words = ("--method", "mine.py:slow", *SMALL)
    assert main("digits", [*words, "--out", "run"]) == 0
    assert inspect(parse("digits", words), here / "run") == "finished"
    # The folder of the file does not matter.
    (here / "deeper").mkdir()
    (here / "mine.py").rename(here / "deeper/mine.py")
    forget()
    moved = ("--method", "deeper/mine.py:slow", *SMALL)
    assert inspect(parse("digits", moved), here / "run") == "finished"
    (here / "deeper/mine.py").write_text(METHOD.replace("new - old", "2 * (new - old)"))
    forget()
    with pytest.raises(InvalidInput, match=r"made with another text of mine\.py:slow"):
        inspect(parse("digits", moved), here / "run")


def test_the_head_of_a_flax_module_is_named_on_the_command_line(tmp_path, capsys):
    file = tmp_path / "nets.py"
    file.write_text(
        "import flax.linen as nn\n"
        "def net(input_shape, num_classes):\n"
        "    return nn.Sequential([nn.Dense(4), nn.relu, nn.Dense(num_classes)])\n"
        "from pfl_jax import networks\n"
        "def model(input_shape, num_classes):\n"
        "    return networks.from_flax(net(input_shape, num_classes), input_shape, num_classes, head='layers_2')\n"
    )
    made = own_model(f"{file}:net", (8,), 3, np.float32, None, "layers_2")
    shapes = jax.tree.map(lambda leaf: leaf.shape, jax.eval_shape(made.init, jax.random.key(0)))
    assert shapes["head"] == {"bias": (3,), "kernel": (4, 3)}
    with pytest.raises(InvalidInput, match="it is a Model, which has its head already"):
        own_model(f"{file}:model", (8,), 3, np.float32, None, "layers_2")
    # It is a part of what a run is.
    one, other = (parse("digits", ["--model", f"{file}:net", "--head", name]) for name in ("layers_0", "layers_2"))
    assert relevant_options(one) != relevant_options(other)


def test_all_own_files_that_a_command_must_name_are_said_at_once(tmp_path):
    options = {"method": "a.py:slow", "model": "b.py:net", "loss": None}
    entries = {name: {"file": f"/own/{options[name][:4]}", "digest": ""} for name in ("method", "model")}
    config = {"options": options, "own_code": entries, "hyper_parameters": {}}
    with pytest.raises(InvalidInput, match=r"add --model /own/b\.py:net --method /own/a\.py:slow \(load_run"):
        spec_of(config, tmp_path)


CHOICE = """
import jax.numpy as jnp

def first(key, round_index, counts, losses, size):
    return jnp.float32(jnp.arange(len(counts)) < size)
"""


def test_clients_are_chosen_by_a_function_of_ones_own(tmp_path, capsys):
    """In a run, and in its resumption if the command names the file again."""
    (tmp_path / "choice.py").write_text(CHOICE)
    run, own = f"{tmp_path}/run", ["--select-clients", f"{tmp_path}/choice.py:first"]
    words = ["--method", "fedavg", "--num-clients", "6", "--participation", "0.5", "--model", "mlp", "--rounds", "2"]
    assert main("digits", [*words, *own, "--out", run]) == 0
    assert list(json.loads((tmp_path / "run/config.json").read_text())["own_code"]) == ["select_clients"]
    *_, last = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    assert [score is not None for score in last["trained_per_client"]] == [True] * 3 + [False] * 3
    assert main("digits", ["--resume", run, "--rounds", "3"]) == 2
    assert f"add --select-clients {tmp_path}/choice.py:first" in capsys.readouterr().err
    assert main("digits", ["--resume", run, "--rounds", "3", *own]) == 0
