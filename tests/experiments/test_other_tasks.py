"""A run of another task, that of a user's own model: files, the best round, a target, sweeps, resuming."""

import json
import re
import sys

import numpy as np
import pytest
from run_folders import log

from experiments.folder import load, stored_runs
from experiments.report import charts, tables
from experiments.report.__main__ import main as report
from experiments.run.command import main
from experiments.show.curves import picture

MODEL = """
from pfl_jax import models, tasks


def regressor(input_shape, num_classes):
    return models.mlp(input_shape, 1, hidden=(8,))._replace(task=tasks.REGRESSION)
"""

RUN = ["--model", "nets.py:regressor", "--method", "fedavg", "--num-clients", "4", "--train-size", "20"]
RUN = [*RUN, "--test-size", "10", "--epochs", "1", "--eval-every", "1", "--no-compilation-cache"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    (tmp_path / "nets.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def test_files_have_the_scores_of_the_task_and_the_best_round_has_the_smallest_error(here, capsys):
    assert main("digits", [*RUN, "--lr", "0.01", "--rounds", "3", "--checkpoint-every", "1", "--out", "run"]) == 0
    shown = capsys.readouterr().out
    assert "mean mse over clients" in shown
    for heading in ("mae", "r2"):
        assert heading in shown
    assert re.search(r"round 3/3 · received \d+\.\d\d mse ·", shown)
    lines, config = log(here / "run"), load.read_config(here / "run")
    assert config["task"] == {
        "name": "regression",
        "scores": ["mse", "mae", "r2"],
        "in_percent": [],
        "higher_is_better": False,
    }
    own = {name for name in lines[0] if name.startswith("received")}
    assert own == {"received", "received_per_client", "received_mae_per_client", "received_r2_per_client"}
    means = [line["received"]["mean"] for line in lines]
    assert {"mae", "r2", "worst_decile"} <= lines[0]["received"].keys()
    assert lines[0]["received"]["worst_decile"] == max(lines[0]["received_per_client"])
    best = json.loads((here / "run" / "summary.json").read_text())["best"]
    assert best["received_accuracy"] == min(means) < max(means)
    assert load.read_result(here / "run").accuracy("received", "best") == min(means)
    # As from an uninterrupted run.
    assert main("digits", ["--resume", "run", "--rounds", "4"]) == 0
    assert [line["received"] for line in log(here / "run")[:3]] == [line["received"] for line in lines]
    assert report(["run", "--out", "report.html"]) == 0
    page = (here / "report.html").read_text()
    assert "Values are of mse; in percent: none." in page
    assert "Clients in order of their mse (received)" in page
    text = re.sub("<(style|svg|pre|code).*?</\\1>", "", page, flags=re.DOTALL)
    assert "accuracy" not in text.replace("--target-accuracy", "")
    groups = stored_runs.group([stored_runs.read(here / "run")])[0]
    assert {panel.y_label for panel in picture(groups).panels} == {"mse"}
    columns = tables.results(groups)["received"].columns
    assert columns[columns.index("Jain") + 1 :][:2] == ["mae", "r2"]
    # All clients are in the histogram.
    _, histogram = charts.clients(groups)
    assert np.sum(histogram.panel.series[0].y) == 4


def test_a_target_is_reached_from_above(here):
    assert main("digits", [*RUN, "--lr", "0.01", "--rounds", "6", "--out", "run"]) == 0
    means = [line["received"]["mean"] for line in log(here / "run")]
    # Files round.
    target = sorted(means)[-2] + 0.001
    assert (
        main("digits", [*RUN, "--lr", "0.01", "--rounds", "6", "--target-accuracy", str(target), "--out", "short"]) == 0
    )
    assert len(log(here / "short")) == next(number for number, mean in enumerate(means, 1) if mean <= target) < 6
