"""Evaluations in TensorBoard's files and at Weights & Biases, in step with the metrics log."""

import importlib.util
import json
import struct
import sys
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock

import numpy as np
import pytest
from rich.console import Console
from scores import line_of, scores_of

from experiments.cli.command import main, parse
from experiments.folder.run_folder import CONFIG, TENSORBOARD, WANDB, ExampleCounts, RunFolder
from experiments.run import build
from experiments.run.records import configuration
from experiments.run.resume import spec_of
from experiments.run.trackers import open_trackers, scalars
from experiments.spec.identity import relevant_options
from experiments.spec.options import Options
from experiments.spec.own_code import function
from pfl_jax import InvalidInput

BASE = {"method": "fedavg", "preset": "fedpac", "model": "mlp", "rounds": 3, "num_clients": 2, "participation": 1.0}
NAN = float("nan")


def evaluation(number, accuracy=0.5, *, middle=False):
    received, trained = (scores(np.array(values)) for values in ([accuracy, accuracy + 0.25], [NAN, 0.75]))
    counts = ExampleCounts(np.array([1, 3]), newcomers=np.array([1, 3]))
    newcomers = {"received": received, "trained": trained}
    middle = received if middle else None
    return line_of(number, received, trained, middle, counts=counts, newcomers=newcomers, seconds=2.0 * number)


def scores(accuracy):
    return scores_of(accuracy, 1 - accuracy, accuracy, accuracy)


def claimed(path, config=None):
    """Folder of a run with a configuration."""
    folder = RunFolder.claim(path, "")
    folder.write(CONFIG, config or {})
    return folder


def cut_off(folder, options, *evaluations):
    with open_trackers(folder, options) as track:
        for one in evaluations:
            folder.log(one)
            track(one)
        raise KeyboardInterrupt


def events(folder):
    """The events of a folder in the order of its files."""
    from tensorboardX.proto import event_pb2

    found = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            # The length, its checksum, the event, its checksum.
            (length,) = struct.unpack("<Q", data[:8])
            found.append(event_pb2.Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return found


def by_step(events):
    """What TensorBoard shows: step -> {tag: number}, without what a later file repeats."""
    shown = {}
    for event in events:
        if event.HasField("session_log"):
            shown = {step: values for step, values in shown.items() if step < event.step}
        for value in event.summary.value:
            shown.setdefault(event.step, {})[value.tag] = value.simple_value
    return shown


def test_every_number_of_an_evaluation_is_a_scalar():
    found = scalars(evaluation(3))
    assert found["received/mean"] == pytest.approx(62.5)
    assert found["received/pooled"] == pytest.approx(68.75)
    assert found["trained/clients"] == 1
    assert found["received/loss"] == pytest.approx(0.375)
    assert found["new_clients/received/mean"] == pytest.approx(62.5)
    assert (found["seconds"], found["bytes_up"]) == (6, 3_000_000)
    assert not any("per_client" in name or name == "round" for name in found)
    # What does not exist is left out.
    assert "before_aggregation/pooled" not in found
    assert scalars(evaluation(3, middle=True))["before_aggregation/pooled"] == pytest.approx(68.75)


def test_tensorboard_shows_the_log_without_doubled_steps(tmp_path):
    options = Options(**BASE, tensorboard=True)
    folder = claimed(tmp_path / "run")
    first, second, third = evaluation(1), evaluation(2, 0.6), evaluation(3, 0.7, middle=True)
    with pytest.raises(KeyboardInterrupt):
        cut_off(folder, options, first, evaluation(2, 0.1))
    assert by_step(events(folder.path / TENSORBOARD)).keys() == {1, 2}
    # The checkpoint was after round 1: round 2 is done again.
    log = folder.path / "metrics.jsonl"
    log.write_text(log.read_text().splitlines(keepends=True)[0])
    with open_trackers(folder, options) as track:
        track(second)
        track(third)
    found = events(folder.path / TENSORBOARD)
    assert by_step(found) == {one["round"]: pytest.approx(scalars(one), rel=1e-6) for one in (first, second, third)}


def test_a_tensorboard_folder_that_cannot_be_written_is_one_line(tmp_path):
    folder = claimed(tmp_path / "run")
    (folder.path / TENSORBOARD).write_text("in the way")
    with (
        pytest.raises(InvalidInput, match=r"cannot write .*tensorboard"),
        open_trackers(folder, Options(**BASE, tensorboard=True)),
    ):
        pass


@pytest.fixture
def wandb(monkeypatch):
    """Stands in for the package, whose run has the id abc."""
    for name in ("WANDB_PROJECT", "WANDB_NAME", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    module = MagicMock(Error=type("Error", (Exception,), {}), __spec__=ModuleSpec("wandb", None))
    module.init.return_value.id = "abc"
    module.init.return_value.__exit__.return_value = False
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def logged(wandb):
    """Steps and values that the run got, and of each of its ends whether it was a failure."""
    run = wandb.init.return_value
    values = [(call.kwargs["step"], *call.args) for call in run.log.call_args_list]
    return values, [call.args[0] is not None for call in run.__exit__.call_args_list]


def test_wandb_gets_the_evaluations_and_the_run_goes_on_under_its_name(tmp_path, wandb, monkeypatch):
    options = Options(**BASE, wandb=True)
    config = {"dataset": "digits", "class_table": [[1]], "validation_examples": [1], "options": {"lr": 1}}
    folder = claimed(tmp_path / "run", config)
    with pytest.raises(KeyboardInterrupt):
        cut_off(folder, options, evaluation(1))
    begun = wandb.init.call_args.kwargs
    assert begun["config"] == {"dataset": "digits", "options": {"lr": 1}}
    assert (begun["project"], begun["name"], begun["id"], begun["resume"]) == ("pfl_jax", "run", None, "allow")
    assert logged(wandb) == ([(1, scalars(evaluation(1)))], [True])
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    with open_trackers(folder, options) as track:
        track(evaluation(2))
    begun = wandb.init.call_args.kwargs
    assert (begun["id"], begun["resume"], begun["project"]) == ("abc", "allow", "mine")
    values, failures = logged(wandb)
    assert ([step for step, _ in values], failures) == ([1, 2], [True, False])


def test_a_run_without_a_result_leaves_nothing_of_its_trackers(tmp_path, wandb):
    folder = claimed(tmp_path / "new" / "run")
    (folder.path / WANDB).mkdir()
    with pytest.raises(KeyboardInterrupt):
        cut_off(folder, Options(**BASE, wandb=True, tensorboard=True))
    folder.discard()
    assert not folder.path.exists()


def test_wandb_refusals_are_one_line(tmp_path, wandb, monkeypatch, capsys):
    wandb.init.side_effect = wandb.Error("No API key configured.")
    folder = claimed(tmp_path / "run")
    with (
        pytest.raises(InvalidInput, match=r"W&B: No API key configured; set WANDB_MODE=offline"),
        open_trackers(folder, Options(**BASE, wandb=True)),
    ):
        pass
    monkeypatch.delitem(sys.modules, "wandb")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main("digits", ["--method", "fedavg", "--wandb", "--out", str(tmp_path / "other")]) == 2
    assert capsys.readouterr().err == "error: --wandb needs a package that is not installed: pip install wandb\n"
    assert not (tmp_path / "other").exists()


OWN = """
received = []

def keeps(configuration):
    received.append(configuration)
    return lambda number, scores: received.append((number, scores))

def fails(configuration):
    return lambda number, scores: 1 / 0

def nothing(configuration):
    return None
"""


def test_a_tracker_of_ones_own_gets_each_evaluation(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    folder = claimed(tmp_path / "run", {"options": {"method": "fedavg"}, "class_table": [[1]]})
    with open_trackers(folder, Options(**BASE, tracker=f"{file}:keeps")) as track:
        track(line := evaluation(2))
    (about, *received) = function("tracker", f"{file}:keeps").__globals__["received"]
    assert about == {"options": {"method": "fedavg"}, "folder": str(folder.path)}
    assert received == [(2, scalars(line))]
    for name, words in (("fails", "fails: ZeroDivisionError: division by zero"), ("nothing", "nothing returns None")):
        with (
            pytest.raises(InvalidInput, match=words),
            open_trackers(folder, Options(**BASE, tracker=f"{file}:{name}")) as track,
        ):
            track(line)


def test_a_tracker_is_executed_only_where_the_command_names_it(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "run.toml").write_text('tracker = "mine.py:keeps"\n')
    assert main("digits", ["--config", "run.toml"]) == 2
    assert "gives --tracker, which acts on this machine and cannot come from a file" in capsys.readouterr().err
    config = json.loads(json.dumps(configuration(build.build_experiment(parse("digits", SMALL), Console(quiet=True)))))
    config["options"]["tracker"] = "mine.py:fails"
    assert spec_of(config, tmp_path).tracker is None
    own = parse("digits", [*SMALL, "--tracker", "mine.py:keeps"])
    assert relevant_options(own) == relevant_options(parse("digits", SMALL))


SMALL = ["--method", "fedavg", "--rounds", "1", "--num-clients", "2", "--train-size", "10", "--test-size", "5"]
