"""`python -m experiments` lists what there is and runs it by name."""

import re
import runpy

import pytest

import experiments


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
    assert {"export", "figures", "report", "sweep", "tables"} <= set(names)
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
