"""What is counted in the rounds of a run, and what its summary says, from rounds and evaluations made by hand."""

import dataclasses
import json
import time
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
from test_run_folder import line, scores

from experiments.cli.request import parse
from experiments.folder.run_folder import CONFIG, METRICS, SUMMARY, RunFolder
from experiments.host.processes import Processes
from experiments.host.signals import Stop
from experiments.run import build
from experiments.run.outcome import summary
from experiments.run.records import unused_shares
from experiments.run.rounds import Counts, Run, run_rounds
from pfl_jax import InvalidInput, RoundResult

QUIET = Console(quiet=True)
BUDGET = SimpleNamespace(unit="example", epsilon=float, record=lambda rounds: {"after": rounds})
"""A budget that says after how many rounds it was asked."""


@pytest.fixture(scope="module")
def experiment():
    """Clients with 20, 60, 20, and 60 training examples; nothing of it is run."""
    words = "--rounds 5 --epochs 3 --batch-size 20 --chunk 2 --devices 1 --eval-protocol trained --num-clients 4"
    words += " --size-choices 20 60 --test-size 10"
    made = build.build_experiment(parse("digits", words.split()), QUIET)
    data = made.data._replace(train_count=np.array([20, 60, 20, 60]))
    return dataclasses.replace(made, data=data, privacy=(BUDGET,))


def run_of(experiment, folder, counts=None):
    """A run of two clients with 30 and 10 test examples."""
    data = experiment.data._replace(test_count=np.array([30, 10]))
    return Run(dataclasses.replace(experiment, data=data), folder, counts or Counts(), track=lambda _: None)


def test_wasted_steps_are_those_of_the_cohort(experiment):
    assert unused_shares(experiment, np.array([0, 2])).steps == 0
    # The client with 20 examples waits for two of three steps.
    assert unused_shares(experiment, np.array([0, 1])).steps == pytest.approx(1 / 3)


def test_rounds_are_counted(experiment, tmp_path):
    def round_of(number, examples, seconds):
        cohort, some = np.array([0, 1]), scores([0.5, 0.7])
        result = RoundResult(number, None, {}, cohort, cohort == 1, cohort >= 0, some, some, None, examples, seconds)
        return [result]

    run = run_of(experiment, RunFolder.claim(tmp_path / "run", ""), Counts(elapsed=100.0))
    run.folder.write(CONFIG, {})
    rounds = [round_of(1, 100, 2.0), round_of(2, 140, 3.0)]
    everything = {"stop": Stop(), "save": lambda _: None, "processes": Processes()}
    run_rounds([run], rounds, None, QUIET, began=time.perf_counter(), **everything)
    lines = [json.loads(line) for line in (run.folder.path / METRICS).read_text().splitlines()]
    # Three epochs of 100 examples in 2 seconds, and of 140 in 3.
    assert [line["examples_per_second"] for line in lines] == [150, 140]
    assert [line["epsilon"] for line in lines] == [{"example": 1}, {"example": 2}]
    # 30 examples of the first client, 10 of the second.
    assert (lines[0]["received"]["mean"], lines[0]["received"]["pooled"]) == (60, 55)
    assert 100 <= lines[0]["seconds"] <= lines[1]["seconds"] < 160
    assert run.counts.wasted == pytest.approx(2 / 3)
    # Of two clients one message arrived.
    sent = run.experiment.traffic
    assert (lines[1]["bytes_up"], lines[1]["bytes_down"]) == (2 * sent.up, 4 * sent.down)
    run.counts.idle = 1.2
    run.folder.finish(summary(run))
    written = json.loads((run.folder.path / SUMMARY).read_text())
    assert (written["wasted_step_share"], written["idle_device_share"]) == (0.3333, 0.6)
    # As a checkpoint has it.
    again, record = run_of(experiment, run.folder), json.loads(json.dumps(run.record()))
    again.restore(record)
    assert (again.counts, again.lines) == (run.counts, run.lines)
    with (run.folder.path / METRICS).open("a") as file:
        file.write('{"round": 3, "rec')
    again.restore(record)
    assert len((run.folder.path / METRICS).read_text().splitlines()) == 2
    (run.folder.path / METRICS).write_text("")
    with pytest.raises(InvalidInput, match="is not as it was at the last checkpoint"):
        again.restore(record)


def test_a_summary_is_of_the_last_and_of_the_best_rounds(experiment, tmp_path):
    run = run_of(experiment, RunFolder.claim(tmp_path / "run", ""), Counts(3, 0.3, 0.6))
    run.lines = [
        line(1, [0.7, 0.7], [0.4, 0.9], speed=1.0),
        line(2, [0.1, 0.2], [0.6, 0.5], speed=3.0),
        line(3, [0.8, 0.8], [0.2, 0.3], speed=1.5),
    ]
    found = summary(run)
    assert (found["rounds"], found["rounds_done"], found["trained_accuracy"]) == (5, 3, 25.0)
    assert found["best"] == {"round": 1, "received_accuracy": 70.0, "trained_accuracy": 65.0}
    # 30 examples of the first client, 10 of the second.
    assert found["best_pooled"] == {"round": 2, "received_accuracy": 12.5, "trained_accuracy": 57.5}
    assert found["per_client_accuracy"] == [20.0, 30.0]
    assert found["privacy"] == [{"after": 3}]
    assert found["examples_per_second"] == 1.5
    assert (found["wasted_step_share"], found["idle_device_share"]) == (0.1, 0.2)
    # A process's first round compiles.
    run.counts.starts = [0]
    assert run.steady_speeds == [3.0, 1.5]
    run.counts.starts = [0, 1, 2]
    assert run.steady_speeds == [1.0, 3.0, 1.5]
