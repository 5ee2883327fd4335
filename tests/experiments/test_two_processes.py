"""Two processes on one folder: one of them works and the other says one line, or both results are consistent."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from bad_input import RUN
from rich.console import Console
from run_folders import untimed

from experiments.cli.command import main
from experiments.folder import load, run_folder, stored_runs
from experiments.folder.run_folder import METRICS, RunFolder, lock_run
from experiments.run import build, driver, run
from experiments.run.driver import RunDriver
from experiments.spec.spec import Spec
from pfl_jax import InvalidInput

ROOT = Path(__file__).parents[2]


def refuse(*_, **__):
    raise AssertionError("this must not be reached")


def test_who_did_not_get_the_lock_removes_nothing(tmp_path, monkeypatch, capsys):
    """A table may take over the folder of a run that has just begun, and has no lock yet."""
    folder = tmp_path / "run"

    def taken(folder):
        # The table's run stands there now.
        raise InvalidInput(f"another process is at work in {folder}: wait for it")

    monkeypatch.setattr(driver, "lock_run", taken)
    monkeypatch.setattr(build, "build_experiment", refuse)
    assert main("digits", [*RUN.split(), "--out", str(folder)]) == 2
    assert capsys.readouterr().err == f"error: another process is at work in {folder}: wait for it\n"
    assert (folder / METRICS).exists()


def test_a_sweep_changes_nothing_before_it_has_all_locks(tmp_path, monkeypatch):
    specs = []
    for name in ("one", "two"):
        RunFolder.claim(tmp_path / name, "never")
        (tmp_path / name / METRICS).write_text('{"round": 1}\n{"round": 2}\n')
        specs.append(Spec.of("digits", resume=str(tmp_path / name)))
    group = run.JointRuns.__new__(run.JointRuns)
    RunDriver.__init__(group, specs)
    monkeypatch.setattr(run.JointRuns, "build", refuse)
    with lock_run(tmp_path / "two"), pytest.raises(InvalidInput, match=r"another process is at work in .*two"):
        group.drive(Console(quiet=True))
    for name in ("one", "two"):
        assert [path.name for path in (tmp_path / name).iterdir()] == [METRICS]
        assert (tmp_path / name / METRICS).read_text() == '{"round": 1}\n{"round": 2}\n'


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def flock(file, operation):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(run_folder.fcntl, "flock", flock)
    told = r"cannot lock .*metrics.jsonl: Function not implemented; give --out a folder on"
    with pytest.raises(InvalidInput, match=told), lock_run(tmp_path):
        pass


def test_a_report_of_a_run_that_ends_meanwhile(tmp_path, monkeypatch):
    """Its lines are read while it goes on, and it is finished a moment later: it counts as one that goes on."""
    from run_folders import write_run

    write_run(tmp_path / "run", rounds=(2,), finished=False)
    write_run(tmp_path / "whole", rounds=(2, 4))
    usual = load.read_metrics

    def ends(folder):
        lines = usual(folder)
        for name in (METRICS, "summary.json"):
            (tmp_path / "run" / name).write_bytes((tmp_path / "whole" / name).read_bytes())
        return lines

    monkeypatch.setattr(load, "read_metrics", ends)
    found = stored_runs.read(tmp_path / "run")
    assert [line["round"] for line in found.lines] == [2]
    assert found.summary is None
    monkeypatch.undo()
    found = stored_runs.read(tmp_path / "run")
    assert [line["round"] for line in found.lines] == [2, 4]
    assert found.summary is not None


# Real processes


def start(module, *words, cwd):
    variables = os.environ | {"PYTHONPATH": str(ROOT), "PFL_JAX_CACHE": str(cwd / "cache")}
    command = [sys.executable, "-m", f"experiments.{module}", *words]
    return subprocess.Popen(command, cwd=cwd, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ends(children):
    """Exit codes and what stood on stderr, of those that worked first."""
    told = [(*child.communicate(timeout=240), child.returncode) for child in children]
    return sorted((code, err) for _, err, code in told)


@pytest.mark.slow
def test_two_of_each_at_once(tmp_path):
    words = [word for word in RUN.split() if word != "--no-compilation-cache"]
    words += ["--eval-every", "1", "--checkpoint-every", "1"]
    (done, none), (code, told) = ends([start("digits", *words, "--out", "run", cwd=tmp_path) for _ in range(2)])
    assert (done, none, code, told.count("\n")) == (0, "", 2, 1)
    assert "holds a run already" in told
    want = untimed(tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    (done, none), (code, told) = ends([start("digits", "--resume", "run", cwd=tmp_path) for _ in range(2)])
    assert (done, none, code, told.count("\n")) == (0, "", 2, 1)
    assert "another process is at work" in told or "the run is finished" in told
    assert untimed(tmp_path / "run") == want
    sweep = ["--dataset", "digits", *words, "--seeds", "2", "--out", "sweep"]
    found = ends([start("sweep", *sweep, cwd=tmp_path) for _ in range(2)])
    assert found[0] == (0, "")
    # The second one may have begun when the first one was done.
    assert found[1] == (0, "") or (found[1][0] == 2 and "another process is at work in sweep" in found[1][1])
    assert len(list((tmp_path / "sweep").rglob("summary.json"))) == 2
