"""--task and --loss: own data whose labels are no classes, losses in files, and what does not fit."""

import csv
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from run_folders import SMALL, log, write_run
from sklearn.datasets import load_diabetes

from experiments import report as page
from experiments.cli.command import main, parse
from experiments.commands import report_charts as charts
from experiments.folder import load, stored_runs
from experiments.report import main as report
from experiments.run import build, data, models
from experiments.show.curves import picture
from experiments.spec.choices import TARGETS
from pfl_jax import InvalidInput, tasks

OWN = """
import flax.linen as nn
import jax.numpy as jnp
import optax
from pfl_jax import models, tasks


def regressor(input_shape, num_classes):
    return models.mlp(input_shape, 1, hidden=(8,))._replace(task=tasks.REGRESSION)


def badly_named(name):
    def make(input_shape, num_classes):
        score = tasks.Score(name, lambda outputs, y, mask: jnp.float32(7))
        task = tasks.REGRESSION._replace(scores=(*tasks.REGRESSION.scores, score))
        return regressor(input_shape, num_classes)._replace(task=task)

    return make


spread, again = badly_named("std"), badly_named("mse")


def focal(logits, y, mask):
    log_p = -optax.softmax_cross_entropy_with_integer_labels(logits, y)
    return tasks.masked_mean(-((1 - jnp.exp(log_p)) ** 2) * log_p, mask)


def absolute(outputs, y, mask):
    return tasks.masked_mean(jnp.abs(outputs[:, 0] - y), mask)


def of_examples(outputs, y, mask):
    return jnp.square(outputs[:, 0] - y)


class Net(nn.Module):
    symbols: int

    @nn.compact
    def __call__(self, codes):
        return nn.Dense(self.symbols, name="head")(nn.Embed(5, 3)(codes))


def net(input_shape, num_classes):
    return Net(num_classes)
"""

RUN = ["--method", "fedavg", "--rounds", "2", "--epochs", "1", "--lr", "1e-6", "--no-compilation-cache"]
DATA = ["--data", "table.csv", "--label", "target", "--normalize"]
NATURAL = [*DATA, "--client-column", "group"]
OF_DIGITS = ["--model", "own.py:regressor", "--method", "fedavg", "--num-clients", "4", "--train-size", "20"]
OF_DIGITS = [*OF_DIGITS, "--test-size", "10", "--epochs", "1", "--eval-every", "1", "--no-compilation-cache"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder with a table of whole numbers to predict, arrays of each kind of labels, and a file of losses."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "own.py").write_text(OWN)
    x, y = load_diabetes(return_X_y=True, scaled=False)
    with open("table.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow([*(f"column{number}" for number in range(10)), "group", "target"])
        table.writerows([*row, row[0] // 30, round(value)] for row, value in zip(x, y, strict=True))
    text = Path("table.csv").read_text()
    Path("fractions.csv").write_text(text.replace("\n", ".5\n").replace("target.5", "target"))
    Path("words.csv").write_text(text.replace("\n", " mg\n").replace("target mg", "target"))
    generator = np.random.default_rng(0)
    labels = {
        "flags": generator.integers(0, 2, (40, 3)),
        "yes": generator.choice(["no", "yes"], 40),
        "kind": np.arange(40) % 3,
        "number": np.linspace(0, 1, 40),
    }
    np.savez("arrays.npz", x=generator.normal(size=(40, 4)), **labels)
    codes = generator.integers(0, 5, (40, 6))
    np.savez("symbols.npz", x=codes, y=np.roll(codes, -1, axis=1))
    return tmp_path


def experiment(*words):
    return build.build_experiment(parse("custom", words), Console(quiet=True))


def test_regression_from_the_table_to_the_results(here, capsys):
    words = [*NATURAL, *RUN, "--task", "regression"]
    assert main("custom", [*words, "--checkpoint-every", "1", "--target-accuracy", "200", "--out", "run"]) == 0
    shown = capsys.readouterr().out
    assert "mean mse over clients" in shown
    assert "classes" not in shown
    config, lines = load.read_config(here / "run"), log(here / "run")
    assert config["task"]["scores"] == ["mse", "mae", "r2"]
    assert config["data"]["num_classes"] == 0
    assert config["class_table"] is None
    # Whole numbers are no classes, and not scaled.
    assert all(10_000 < line["received"]["mean"] < 60_000 for line in lines)
    assert main("custom", ["--resume", "run", "--rounds", "4", "--task", "classification"]) == 2
    assert "the run has --task regression, not classification" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("data", "label", "task", "outputs"),
    [
        ("table.csv", "target", "regression", 1),
        ("fractions.csv", "target", "regression", 1),
        ("arrays.npz", "flags", "regression", 3),
        ("arrays.npz", "flags", "multi_label", 3),
        ("arrays.npz", "yes", "binary", 1),
        ("arrays.npz", "kind", "classification", 3),
        ("symbols.npz", "y", "next_symbol", 5),
    ],
)
def test_a_task_says_what_a_model_gives(data, label, task, outputs):
    words = ["--data", data, "--label", label, "--num-clients", "3", "--task", task, "--method", "fedavg"]
    made = experiment(*words, *(["--model", "own.py:net"] if task == "next_symbol" else []))
    model = models.models_of(made.spec, made.dataset)[0]
    assert model.task == tasks.TASKS[task]
    assert made.method.task == tasks.TASKS[task]
    assert model.num_classes == outputs
    # Rows without classes are divided at random.
    assert made.spec.partition == ("iid" if task in TARGETS else "dirichlet")


def test_a_loss_takes_the_place_of_the_tasks_own(here, capsys):
    words = [*NATURAL, *RUN, "--task", "regression", "--lr", "0.5"]
    assert main("custom", [*words, "--out", "usual"]) == 2
    assert "NaN" in capsys.readouterr().err
    # Squares are too steep for this learning rate, and absolute values are not.
    assert main("custom", [*words, "--loss", "own.py:absolute", "--checkpoint-every", "1", "--out", "own"]) == 0
    assert log(here / "own")[-1]["received"]["mean"] < 30_000
    assert load.read_config(here / "own")["own_code"]["loss"]["file"] == str(here / "own.py")


def test_a_loss_on_the_papers_data():
    request = parse("digits", ["--method", "fedper", "--loss", "own.py:focal"])
    model = models.models_of(request, data.load_data(request, Console(quiet=True))[1])[0]
    assert model.task.loss.__name__ == "focal"
    assert model.task.scores == tasks.CLASSIFICATION.scores


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--data", "symbols.npz", "--task", "next_symbol", "--normalize", "--model", "char_lstm"],
            "are not whole numbers: leave out --normalize",
        ),
        ([*DATA, "--task", "next_symbol", "--model", "own.py:net"], "are not a symbol's number at each position"),
        ([*NATURAL, "--task", "regression", "--loss", "own.py:focal"], "--loss own.py:focal fails for outputs"),
        ([*DATA, "--task", "regression", "--partition", "dirichlet"], "has no classes to divide"),
        ([*NATURAL, "--task", "regression", "--method", "fedpac"], "fedpac"),
    ],
)
def test_what_does_not_fit_is_one_line(words, message):
    with pytest.raises(InvalidInput) as raised:
        experiment("--method", "fedavg", *words)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


# A task of the user's own model on digits.


@pytest.mark.parametrize(("model", "name"), [("spread", "std"), ("again", "mse")])
def test_a_score_that_would_take_the_place_of_another_in_files_is_refused(model, name, capsys):
    words = ["--model", f"own.py:{model}", "--method", "fedavg", "--num-clients", "4", "--train-size", "20"]
    assert main("digits", [*words, "--rounds", "1", "--test-size", "10", "--out", "run"]) == 2
    assert f"the score {name} of the task regression needs a unique name" in capsys.readouterr().err


def test_files_have_the_scores_of_the_task_and_the_best_round_has_the_smallest_error(here, capsys):
    assert main("digits", [*OF_DIGITS, "--lr", "0.01", "--rounds", "3", "--checkpoint-every", "1", "--out", "run"]) == 0
    shown = capsys.readouterr().out
    assert "mean mse over clients" in shown
    assert re.search(r"round 3/3 · received \d+\.\d{3} mse ·", shown)
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
    assert best["received_mse"] == min(means) < max(means)
    assert stored_runs.read(here / "run").accuracy("received", "best") == min(means)
    # As from an uninterrupted run.
    assert main("digits", ["--resume", "run", "--rounds", "4", *OF_DIGITS[:2]]) == 0
    assert [line["received"] for line in log(here / "run")[:3]] == [line["received"] for line in lines]
    assert report(["run", "--out", "report.html"]) == 0
    written = (here / "report.html").read_text()
    text = re.sub("<(style|svg|pre|code).*?</\\1>", "", written, flags=re.DOTALL)
    assert "accuracy" not in text.replace("--target-accuracy", "")
    (row,) = stored_runs.load_runs(here / "run").to_dict("records")
    assert row["received_mse"] == log(here / "run")[-1]["received"]["mean"]
    assert {"trained_mae", "received_r2"} <= row.keys()
    assert "received_accuracy" not in row
    groups, _ = stored_runs.grouped(here / "run")
    assert all("mse" in panel.frame for panel in picture(groups).panels)
    columns = page.results(groups)["received"].heads
    assert columns[columns.index("Jain") + 1 :][:2] == ["mae", "r2"]
    (chart,) = charts.clients(groups)
    assert chart.panels[0].frame["mse"].max() == max(log(here / "run")[-1]["received_per_client"])


def test_a_target_is_reached_from_above(here):
    # An error is no percentage.
    words = [*OF_DIGITS, "--lr", "0.01", "--rounds", "6", "--target-accuracy", "250"]
    assert main("digits", [*words, "--out", "run"]) == 0
    assert len(log(here / "run")) == 1


def test_runs_with_different_scores_on_the_same_data_share_no_table(tmp_path, capsys):
    for name, scores in (("errors", ["mse", "mae"]), ("of shares", ["accuracy", "loss"]), ("usual", None)):
        write_run(tmp_path / name, ("--method", "fedavg", "--lr", f"0.{len(name)}", *SMALL[2:]))
        config = tmp_path / name / "config.json"
        task = {} if scores is None else {"task": {"scores": scores, "in_percent": scores[:1] * (name == "of shares")}}
        config.write_text(json.dumps(json.loads(config.read_text()) | task))
    groups, _ = stored_runs.grouped(*(tmp_path / name for name in ("errors", "of shares", "usual")))
    assert {heading: len(some) for heading, some in page.kinds(groups).items()} == {
        "digits (files), mse": 1,
        "digits (files), accuracy in %": 2,
    }
    # The runs of accuracies have other scores beside it.
    rows = page.results(page.kinds(groups)["digits (files), accuracy in %"])["received"]
    column = rows.heads.index("macro F1")
    assert [row[column] for row in rows.rows] == ["—", "71.50"]
    assert report([str(tmp_path), "--plot", str(tmp_path / "p.svg")]) == 2
    assert "different scores are not drawn together: mse; accuracy in %" in capsys.readouterr().err
