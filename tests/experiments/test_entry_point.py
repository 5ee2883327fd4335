"""`python -m experiments` lists what there is and runs it by name."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import experiments
from experiments import known_help


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
    assert "lists the commands" not in out


def test_an_unknown_name_is_refused_with_the_nearest(monkeypatch, capsys):
    with pytest.raises(SystemExit) as stop:
        command(monkeypatch, "digts")
    assert stop.value.code == 2
    assert "did you mean digits?" in capsys.readouterr().err


def test_help_that_was_shown_before_does_not_wait_for_jax(tmp_path):
    words = [sys.executable, "-X", "importtime", "-m", "experiments.digits", "--help"]
    environment = os.environ | {"PFL_JAX_CACHE": str(tmp_path)}
    options = {"env": environment, "cwd": Path(experiments.__path__[0]).parent, "capture_output": True, "text": True}
    first, again = (subprocess.run(words, **options, check=True) for _ in range(2))
    assert "--lam" in first.stdout
    assert again.stdout == first.stdout
    assert [bool(re.search(r"\| +jax$", one.stderr, re.MULTILINE)) for one in (first, again)] == [True, False]


def test_a_kept_help_is_of_these_words_and_sources(tmp_path):
    (tmp_path / "code.py").write_text("1")

    def path(*words):
        return known_help._path(["python", "-m", "experiments.digits", *words], [tmp_path])

    before = path("--help")
    assert before not in (None, path("--help", "--method", "fedper"))
    assert path() is path("--help", "--config", "run") is path("--help", "--method", "my.py:mine") is None
    (tmp_path / "code.py").write_text("12")
    assert path("--help") != before
