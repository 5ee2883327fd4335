"""The table and the picture of a sweep, from runs with known scores: which setting is the best, and their names."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from run_folders import FakeRuns

from experiments.run import batch
from experiments.sweep import results as sweep_results
from experiments.sweep.__main__ import Sweep

WORDS = ["--dataset", "digits", "--num-clients", "2", "--rounds", "2"]
RATES = ["--method", "fedper", "--grid", "lr=0.05,0.1,0.2"]


@pytest.fixture
def pictures(monkeypatch):
    """What is drawn, in place of the drawings."""
    found = []
    monkeypatch.setattr(sweep_results, "save_picture", lambda picture, *paths: found.append(picture))
    return found


def results(folder, words, of_settings, change=None):
    """sweep.json, sweep.md and what is printed, of settings with these (accuracies, accuracies on validation)."""
    sweep = batch.read(Sweep, [*WORDS, *words, "--out", str(folder)])
    settings = {sweep.title(setting): sweep.jobs_of(setting) for setting in sweep.settings()}
    fake = FakeRuns()
    # What a setting gets by the other protocol is the opposite.
    fake.trained = lambda accuracy: 1 - accuracy
    for jobs, (accuracies, validation) in zip(settings.values(), of_settings, strict=True):
        fake.accuracies = lambda options, found=accuracies: found
        fake.validation = None if validation is None else lambda options, found=validation: found
        for job in jobs:
            fake(job.cell.request(job.folder))
            if change is not None:
                change(job.folder / "config.json")
    console = Console(file=io.StringIO(), width=200)
    sweep_results.save(settings, folder, console)
    record, table = json.loads((folder / "sweep.json").read_text()), (folder / "sweep.md").read_text()
    return record, table, " ".join(console.file.getvalue().split())


def test_the_best_setting_is_chosen_on_validation_examples(tmp_path, pictures):
    # On test examples lr=0.1 is the best; what counts is the last round.
    validated = [((0.7, 0.8), (0.9, 0.6)), ((0.9, 0.9), (0.5, 0.5)), ((0.75, 0.7), (0.4, 0.65))]
    record, table, printed = results(tmp_path, [*RATES, "--val-fraction", "0.2"], validated)
    assert (record["best"], record["best_chosen_on"]) == ("lr=0.2", "validation")
    (best,) = (row for row in record["settings"] if row["setting"] == record["best"])
    assert best["validation"]["mean"] == pytest.approx(65)
    assert best["received"]["mean"] == pytest.approx(70)
    assert "| setting | validation | received | received, pooled | trained | trained, pooled |" in table
    assert "| lr=0.2 (best) | 65.00 | 70.00 | 72.50 | 30.00 | 32.50 |" in table
    for text in (table, printed):
        assert "on validation examples, by received" in text
    assert "Black: the best, chosen on validation examples, by received." in pictures[0].caption
    assert [one.label for one in pictures[0].panels[0].series if one.is_main] == ["lr=0.2"]


def test_the_best_setting_is_chosen_by_the_protocol_asked_for(tmp_path, pictures):
    words = [*RATES, "--val-fraction", "0.2", "--eval-protocol", "trained"]
    record, *_ = results(tmp_path, words, [((0.7,), (0.9,)), ((0.7,), (0.6,)), ((0.7,), (0.7,))])
    assert record["best"] == "lr=0.1"
    assert record["settings"][1]["validation"]["mean"] == pytest.approx(40)


def test_of_errors_the_lowest_is_the_best(tmp_path, pictures):
    task = {"name": "regression", "scores": ["accuracy", "loss", "macro_f1", "auc"], "in_percent": []}

    def change(path):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"task": task | {"higher_is_better": False}}))

    words = ["--method", "fedper", "--grid", "lr=" + ",".join(f"0.0{number}" for number in range(1, 10))]
    record, *_ = results(tmp_path, words, [((number / 10,), None) for number in range(1, 10)], change)
    assert record["best"] == "lr=0.01"
    assert "lr=0.09" not in [one.label for one in pictures[0].panels[0].series]


def test_the_picture_has_the_best_settings_and_says_on_which_examples(tmp_path, pictures):
    rates = [f"{0.01 * number:g}" for number in range(1, 11)]
    words = ["--method", "fedper", "--grid", "lr=" + ",".join(rates)]
    results(tmp_path, words, [((number / 20,), None) for number in range(1, 11)])
    assert [one.label for one in pictures[0].panels[0].series] == [f"lr={rate}" for rate in rates[2:]]
    assert "The best 8 of 10 settings on test examples, by received." in pictures[0].caption
    assert "Black: the best, chosen on test examples, by received." in pictures[0].caption


def test_without_validation_examples_the_best_setting_is_chosen_on_test_examples_and_says_so(tmp_path):
    words = ["--method", "fedper", "--seeds", "2", "--grid", "lr=0.05,0.1"]
    record, table, _ = results(tmp_path, words, [((float("nan"),), None), ((0.9,), None)])
    # A setting that diverged is never the best one.
    assert (record["best"], record["best_chosen_on"]) == ("lr=0.1", "test")
    assert record["settings"][0]["received"] == {"mean": None, "std": None, "per_seed": [None, None]}
    assert "validation" not in record["settings"][1]
    assert "| lr=0.05 | — | — |" in table
    assert "| lr=0.1 (best) | 90.00 ± 0.00 |" in table
    assert "optimistic estimate: --val-fraction 0.1 chooses it on examples set apart." in table


def test_a_sweep_that_diverged_whole_is_told_too(tmp_path):
    record, table, _ = results(tmp_path, ["--method", "fedper", "--grid", "lr=1,2"], [((float("nan"),), None)] * 2)
    assert record["settings"][1]["received"]["mean"] is None
    assert "| lr=2 | — |" in table
    assert (tmp_path / "sweep.svg").is_file()


def test_settings_are_named_by_their_methods_and_the_title_has_a_few(tmp_path, pictures):
    words = ["--grid", "method=fedpac,fedper", "--grid", "lr=0.05,0.1"]
    record, table, _ = results(tmp_path / "a", words, [((0.5 + place / 10,), None) for place in range(4)])
    assert record["title"] == "fedpac, fedper on digits, seed 0"
    assert [row["setting"] for row in record["settings"]] == [
        *("fedpac lr=0.05", "fedpac lr=0.1", "fedper lr=0.05", "fedper lr=0.1")
    ]
    assert "fedper lr=0.1 (best)" in table
    assert pictures[0].title == record["title"]
    record, *_ = results(tmp_path / "b", ["--grid", "method=fedavg,local,fedrep,fedper"], [((0.5,), None)] * 4)
    assert record["title"] == "4 methods on digits, seed 0"
    assert [row["setting"] for row in record["settings"]] == ["fedavg", "local", "fedrep", "fedper"]


def test_methods_in_files_of_the_same_name_are_settings_of_their_own(tmp_path, monkeypatch, pictures):
    monkeypatch.chdir(tmp_path)
    for folder in ("one", "other"):
        Path(folder).mkdir()
        Path(folder, "mine.py").write_text("from pfl_jax.methods.fedavg import fedavg\n")
    words = ["--grid", "method=one/mine.py:fedavg,other/mine.py:fedavg,fedper"]
    record, table, _ = results(Path("sweep"), words, [((0.5,), None), ((0.6,), None), ((0.7,), None)])
    assert [row["setting"] for row in record["settings"]] == ["one/mine.py:fedavg", "other/mine.py:fedavg", "fedper"]
    assert "| other/mine.py:fedavg | 60.00 |" in table
