"""Runs with --device-trace: what they record, go on with, and are told apart by."""

import json

import numpy as np
import pytest
from run_folders import log, summary, untimed

from experiments.cli import batch
from experiments.cli.command import main, parse
from experiments.identity import fixed_rounds, notes, relevant_options, visits
from experiments.sweep.__main__ import Sweep
from lab import committed
from pfl_jax.engine.clock import read_devices, timetable

pytestmark = pytest.mark.without_f1_auc

SMALL = "--method fedper --num-clients 5 --train-size 30 --test-size 10 --batch-size 10 --epochs 2 --rounds 6"
EVERY = "--eval-every 1 --no-compilation-cache --devices 1 --schedule lr=exponential:0.9"
WORDS = [*SMALL.split(), *EVERY.split()]
LATE = ["--buffer", "2", "--concurrency", "4"]


@pytest.fixture
def trace(tmp_path):
    """A file of five devices, each slower than the one before."""
    rows = [{"seconds_per_example": 0.1 * 2**client, "bytes_per_second": 1000.0} for client in range(5)]
    path = tmp_path / "devices.json"
    path.write_text(json.dumps({"devices": rows}))
    return path


@pytest.mark.parametrize(
    ("more", "visited"),
    [
        ([], [60, 14, 50]),
        (["--drop-last"], [60, 14, 40]),
        # Three, one and three mini-batches are an epoch.
        (["--local-steps", "4"], [40, 28, 35]),
    ],
)
def test_a_client_takes_time_for_the_examples_that_it_visits(more, visited):
    words = SMALL if "--local-steps" not in more else SMALL.replace("--epochs 2", "")
    request = parse("digits", [*words.split(), *more])
    assert visits(request, np.array([30, 7, 25])).tolist() == visited


def test_a_run_its_resumption_and_its_virtual_time(trace, tmp_path, capsys):
    words = [*WORDS, *LATE, "--device-trace", str(trace), "--checkpoint-every", "1", "--keep-checkpoints", "9"]
    whole = tmp_path / "whole"
    assert main("digits", [*words, "--out", str(whole)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "--buffer 2, --concurrency 4" in printed
    assert "of virtual time); results in" in printed
    config, lines = json.loads((whole / "config.json").read_text()), log(whole)
    sent = config["bytes_per_client_and_round"]
    seconds = read_devices(trace).seconds(np.full(5, 2 * 30), sent["up"], sent["down"])
    want = timetable(read_devices(trace), seconds, 6, buffer=2, concurrency=4)
    assert [line["cohort"] for line in lines] == want.clients.tolist()
    assert [line["staleness"] for line in lines] == want.staleness.tolist()
    np.testing.assert_allclose([line["virtual_seconds"] for line in lines], want.seconds, atol=1e-4)
    assert want.largest_staleness > 1
    assert summary(whole)["virtual_seconds"] == lines[-1]["virtual_seconds"]
    assert committed.columns(lines)["virtual_seconds"][0] == lines[0]["virtual_seconds"]

    (whole / "summary.json").unlink()
    for number in (4, 5, 6):
        (whole / "checkpoints" / "0-of-1" / f"{number}.npz").unlink()
    before = untimed(whole)
    assert main("digits", ["--resume", str(whole)]) == 0
    assert untimed(whole) == before

    assert main("digits", ["--resume", str(whole), "--rounds", "9"]) == 2
    assert "--buffer" in capsys.readouterr().err


def test_runs_are_told_apart_by_what_the_trace_says(trace):
    def relevant():
        return relevant_options(parse("digits", [*WORDS, *LATE, "--device-trace", str(trace)]))

    first = relevant()
    assert first["device_trace"] == "devices.json"
    trace.write_text(trace.read_text() + "\n")
    assert first != relevant()
    request = parse("digits", [*WORDS, *LATE, "--device-trace", str(trace), "--participation", "0.5"])
    assert fixed_rounds(request) == "--buffer"
    assert "participation" not in relevant_options(request)
    assert notes(request, request.given, "cpu") == ["--participation has no effect with --buffer 2"]


def test_seeds_of_a_sweep_have_timetables_of_their_own(trace):
    def groups(*more):
        sweep = batch.read(Sweep, ["--dataset", "digits", "--seeds", "3", "--grid", "lr=0.1,0.2", *WORDS, *more])
        return [len(group) for group in sweep.groups([job for one in sweep.settings() for job in sweep.jobs_of(one)])]

    assert groups() == [6]
    assert groups("--device-trace", str(trace)) == [2, 2, 2]
