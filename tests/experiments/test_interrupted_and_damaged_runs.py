"""Full disks, too little memory, signals, other processes: one line, the right exit code, and nothing lost."""

import dataclasses
import json
import re
import signal

import jax
import pytest
from bad_input import RUN, experiment_of, untrained
from interrupts import ask_to_stop
from rich.console import Console

from experiments.cli.command import main, parse
from experiments.folder.load import read_metrics
from experiments.folder.run_folder import lock_folder, lock_run
from experiments.run import build, driver, outcome, records, resume, run
from experiments.run.run import run_cell
from experiments.sweep import main as sweep
from pfl_jax import InvalidInput, simulate
from pfl_jax.primitives.tree import byte_count

WORDS = [*RUN.split(), "--checkpoint-every", "1"]
SHORTAGE = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 400000000000000 bytes.")


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    return experiment_of(tmp_path_factory.mktemp("made") / "run")


@pytest.fixture(scope="module")
def experiment(both):
    return both[0]


@pytest.fixture(scope="module")
def made(both):
    return both[1]


@pytest.fixture
def rounds(monkeypatch, made):
    """Stands in for `simulate.run`: rounds with results but without training. rounds[n] happens before round n."""
    happens = {}
    monkeypatch.setattr(simulate, "run", untrained(made, happens))
    return happens


def fail(error):
    def raising(*args, **options):
        raise error

    return raising


def line(capsys):
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    return text


def logged(folder):
    return [measured["round"] for measured in read_metrics(folder)]


# Full disks


@pytest.mark.parametrize("room", [10, 400])
def test_a_disk_that_fills_up_stops_a_run_that_goes_on_later(rounds, full_disk, tmp_path, capsys, room):
    folder = tmp_path / "run"
    held = []

    def fill():
        # Room for a part of the next line of the metrics.
        held.append(full_disk((folder / "metrics.jsonl").stat().st_size + room))
        held[0].__enter__()

    rounds[3] = fill
    try:
        assert main("digits", [*WORDS, "--out", str(folder)]) == 2
    finally:
        held[0].__exit__(None, None, None)
    said = line(capsys)
    assert re.search(
        r"cannot write .*metrics.jsonl: File too large; make room; --resume .* goes on after round 2", said
    )
    assert logged(folder) == [1, 2]
    rounds.clear()
    assert main("digits", ["--resume", str(folder)]) == 0
    assert logged(folder) == [1, 2, 3]
    assert json.loads((folder / "summary.json").read_text())["rounds"] == 3


def test_a_disk_without_room_for_the_summary(rounds, tmp_path, capsys):
    folder = tmp_path / "run"
    rounds[3] = lambda: (folder / ".summary.json.partial").mkdir()
    assert main("digits", [*WORDS, "--out", str(folder)]) == 2
    assert re.search(r"cannot write .*summary.json: .*; --resume .* goes on after round 3", line(capsys))
    (folder / ".summary.json.partial").rmdir()
    assert main("digits", ["--resume", str(folder)]) == 0
    assert logged(folder) == [1, 2, 3]


def test_a_full_disk_at_the_end_leaves_the_summary_to_be_made_without_training(rounds, tmp_path, capsys):
    """Also of a run that keeps no state."""
    folder = tmp_path / "run"
    rounds[3] = lambda: (folder / ".summary.json.partial").mkdir()
    assert main("digits", [*RUN.split(), "--eval-every", "1", "--keep-state", "never", "--out", str(folder)]) == 2
    assert re.search(r"cannot write .*summary.json: .*; --resume .*run writes the summary, without", line(capsys))
    log = (folder / "metrics.jsonl").read_bytes()
    (folder / ".summary.json.partial").rmdir()
    rounds[1] = rounds[2] = rounds[3] = fail(AssertionError("it trains again"))
    assert main("digits", ["--resume", str(folder)]) == 0
    assert (folder / "metrics.jsonl").read_bytes() == log
    assert json.loads((folder / "summary.json").read_text())["rounds_done"] == 3


def test_a_run_killed_before_its_first_checkpoint_begins_anew(rounds, tmp_path, capsys):
    folder = tmp_path / "run"
    rounds[2] = fail(RuntimeError("killed"))
    with pytest.raises(RuntimeError, match="killed"):
        main("digits", [*RUN.split(), "--eval-every", "1", "--out", str(folder)])
    # One round was evaluated, nothing was saved, and a line was half written.
    assert logged(folder) == [1]
    assert not (folder / "checkpoints").exists()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"round": 2, "rec')
    rounds.clear()
    assert main("digits", ["--resume", str(folder)]) == 0
    assert "from the beginning" in capsys.readouterr().out
    assert logged(folder) == [1, 2, 3]


# Memory


@pytest.mark.parametrize("error", [SHORTAGE, MemoryError("Unable to allocate")])
def test_too_little_memory_is_told_with_what_helps(rounds, tmp_path, capsys, error):
    rounds[1] = fail(error)
    assert main("digits", [*WORDS, "--out", str(tmp_path / "run")]) == 2
    assert re.search("the memory does not suffice: use a smaller --chunk, .* fewer --num-clients$", line(capsys))
    assert not (tmp_path / "run").exists()


def test_too_little_memory_later_and_before(rounds, tmp_path, capsys, monkeypatch):
    rounds[2] = fail(SHORTAGE)
    assert main("digits", [*WORDS, "--chunk", "2", "--out", str(tmp_path / "run")]) == 2
    assert re.search(r"fewer --num-clients; --resume .*run goes on after round 1$", line(capsys))
    monkeypatch.setattr(build, "build_experiment", fail(MemoryError("Unable to allocate 7. TiB for an array")))
    assert main("digits", [*WORDS, "--out", str(tmp_path / "other")]) == 2
    assert "fewer --num-clients" in line(capsys)
    # Other errors of JAX stay what they are.
    monkeypatch.setattr(build, "build_experiment", fail(jax.errors.JaxRuntimeError("INTERNAL: broken")))
    with pytest.raises(jax.errors.JaxRuntimeError, match="broken"):
        main("digits", [*WORDS, "--out", str(tmp_path / "other")])


def test_too_little_memory_in_a_sweep(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run.JointRuns, "rounds", fail(SHORTAGE))
    words = ["--dataset", "digits", *RUN.split(), "--chunk", "2", "--out", str(tmp_path / "sweep")]
    assert sweep(words) == 2
    assert "use a smaller --chunk" in line(capsys)
    assert [path.name for path in (tmp_path / "sweep").rglob("*") if path.is_file()] == [".lock"]


def test_states_are_where_they_fit(experiment, monkeypatch):
    assert experiment.state_place() == "device"
    size = byte_count(experiment.state_shapes().clients)
    # Both devices of a CPU keep all states, in one memory.
    monkeypatch.setattr(build, "free_bytes", lambda device: 6 * size)
    assert experiment.state_place() == "host"
    monkeypatch.setattr(build, "machine_bytes", lambda: 2 * size - 1)
    assert experiment.state_place() == "disk"
    several = dataclasses.replace(experiment.spec, distributed=True)
    assert dataclasses.replace(experiment, spec=several).state_place() == "host"


# Signals


def test_ctrl_c_before_the_first_round_leaves_nothing(rounds, tmp_path, capsys, monkeypatch):
    rounds[1] = fail(KeyboardInterrupt)
    assert main("digits", [*WORDS, "--out", str(tmp_path / "run")]) == 130
    assert line(capsys) == "interrupted before the first evaluation: nothing is left\n"
    nothing_yet = "interrupted while no run was going on\n"
    nothing_left = "interrupted before the first evaluation: nothing is left\n"
    for module, name, told in (
        (run, "prepare", nothing_yet),
        (build, "build_experiment", nothing_left),
        (driver, "configuration", nothing_left),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, fail(KeyboardInterrupt))
            assert main("digits", [*WORDS, "--out", str(tmp_path / "run")]) == 130
        assert line(capsys) == told
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_at_the_end_does_not_cost_the_summary(rounds, tmp_path, monkeypatch):
    summary = outcome.summary

    def interrupted(*args):
        ask_to_stop(signal.SIGINT)
        return summary(*args)

    monkeypatch.setattr(outcome, "summary", interrupted)
    assert main("digits", [*RUN.split(), "--out", str(tmp_path / "run")]) == 0
    assert (tmp_path / "run" / "summary.json").exists()


def test_an_interrupted_cell_goes_on_as_the_new_command_says(rounds, tmp_path):
    folder = tmp_path / "run"
    rounds[3] = fail(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run_cell(parse("digits", WORDS), folder, Console())
    rounds.clear()
    words = [*RUN.split(), "--checkpoint-every", "3", "--keep-state", "always", "--plot"]
    run_cell(parse("digits", words), folder, Console())
    assert logged(folder) == [1, 2, 3]
    assert {"curves.png", "checkpoints"} <= {path.name for path in folder.iterdir()}


# Other processes


def test_a_run_that_another_process_finished_meanwhile_stays(rounds, tmp_path, capsys, monkeypatch):
    folder = tmp_path / "run"
    assert main("digits", [*WORDS, "--out", str(folder)]) == 0
    before = (folder / "summary.json").read_bytes()
    # It was not finished yet when this process looked first.
    usual, looked = resume.refuse_finished, []
    monkeypatch.setattr(resume, "refuse_finished", lambda *args: usual(*args) if looked else looked.append(args))
    assert main("digits", ["--resume", str(folder)]) == 2
    assert "the run is finished" in line(capsys)
    assert (folder / "summary.json").read_bytes() == before


def test_a_lock_on_a_file_that_is_gone_is_none(tmp_path):
    with lock_folder(tmp_path / "table"):
        (tmp_path / "table" / ".lock").unlink()
        with lock_folder(tmp_path / "table"):
            pass
    with pytest.raises(InvalidInput, match="cannot write"), lock_run(tmp_path / "absent"):
        pass


def test_another_version_is_told(monkeypatch):
    versions, said = {"pfl_jax": "bb", "device": "cpu", "chunk": 2}, []
    own = {"run": {"--lr": 0.1}, "made_with": {"jax": "0.10.1"} | versions}
    # Of other sources `resume.record_code` tells.
    stored = {"run": {"--lr": 0.1}, "made_with": {"jax": "0.9.0"} | versions | {"pfl_jax": "aa", "chunk": 1}}
    monkeypatch.setattr(records, "identity", lambda experiment: own)
    records.check_identity({"identity": stored}, None, "run", said.append)
    assert said == [
        "Note: chunk 1 then and 2 now, jax 0.9.0 then and 0.10.1 now: results may differ in their last bits from an "
        "uninterrupted run's."
    ]
    records.check_identity({"identity": own}, None, "run", said.append)
    assert len(said) == 1
