"""The table of a sweep, from made-up folders of runs: which setting is the best, and the names of settings."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from scores import line_of, scores_of

from experiments.folder.run_folder import CONFIG, Counts, RunFolder
from experiments.run import batch
from experiments.sweep.__main__ import Sweep
from experiments.sweep.results import save

COUNTS = np.array([30, 10])
WORDS = ["--dataset", "digits", "--num-clients", "2"]


def scores(accuracy, validation=None):
    return scores_of(np.full(2, accuracy), validation=None if validation is None else scores(validation))


def make_run(folder, config, accuracies, validation):
    """Folder of a finished run with an accuracy (and one on validation examples) for each round."""
    run = RunFolder.claim(folder, "")
    run.write(CONFIG, config)
    counts = Counts(COUNTS, None if validation is None else COUNTS)
    for number, accuracy in enumerate(accuracies):
        apart = None if validation is None else validation[number]
        # What a setting gets by the other protocol is the opposite.
        both = scores(accuracy, apart), scores(1 - accuracy, None if apart is None else 1 - apart)
        run.log(line_of(number + 1, *both, counts=counts))
    run.finish({"seconds": 1.0})


def results(tmp_path, words, of_settings):
    """Files of the results of a sweep whose settings have these (accuracies, accuracies on validation examples)."""
    sweep = batch.read(Sweep, [*WORDS, *words, "--out", str(tmp_path)])
    runs = {sweep.title(setting): sweep.runs(setting) for setting in sweep.settings()}
    for of, (accuracies, validation) in zip(runs.values(), of_settings, strict=True):
        for cell, folder in of:
            options = vars(cell.request().options)
            data = {"description": "digits (made up)", "is_real": True}
            make_run(folder, {"options": options, "data": data}, accuracies, validation)
    console = Console(file=io.StringIO(), width=200)
    save(runs, tmp_path, console)
    return (
        json.loads((tmp_path / "sweep.json").read_text()),
        (tmp_path / "sweep.md").read_text(),
        console.file.getvalue(),
    )


def test_the_best_setting_is_chosen_on_validation_examples(tmp_path):
    # On test examples lr=0.1 is the best; what counts is the last round.
    validated = [((0.7, 0.8), (0.9, 0.6)), ((0.9, 0.9), (0.5, 0.5)), ((0.75, 0.7), (0.4, 0.65))]
    words = ["--method", "fedper", "--grid", "lr=0.05,0.1,0.2", "--val-fraction", "0.2"]
    record, table, printed = results(tmp_path, words, validated)
    assert (record["best"], record["best_chosen_on"]) == ("lr=0.2", "validation")
    (best,) = (row for row in record["settings"] if row["setting"] == record["best"])
    assert best["validation"]["mean"] == pytest.approx(65)
    assert best["received"]["mean"] == pytest.approx(70)
    assert "| setting | validation | received |" in table
    assert "| lr=0.2 (best) | 65.00 | 70.00 |" in table
    for text in (table, printed):
        assert "on validation examples, by received" in " ".join(text.split())


def test_the_best_setting_is_chosen_by_the_protocol_asked_for(tmp_path):
    words = ["--method", "fedper", "--grid", "lr=0.05,0.1", "--val-fraction", "0.2", "--eval-protocol", "trained"]
    record, *_ = results(tmp_path, words, [((0.7,), (0.9,)), ((0.7,), (0.6,))])
    assert record["best"] == "lr=0.1"
    assert record["settings"][1]["validation"]["mean"] == pytest.approx(40)


def test_the_picture_has_the_best_settings(tmp_path):
    rates = [f"{0.01 * number:g}" for number in range(1, 11)]
    words = ["--method", "fedper", "--grid", "lr=" + ",".join(rates)]
    results(tmp_path, words, [((number / 20,), None) for number in range(1, 11)])
    drawn = (tmp_path / "sweep.svg").read_text()
    assert "lr=0.1" in drawn
    assert "lr=0.02" not in drawn


def test_without_validation_examples_the_best_setting_is_chosen_on_test_examples_and_says_so(tmp_path):
    words = ["--method", "fedper", "--seeds", "2", "--grid", "lr=0.05,0.1"]
    record, table, _ = results(tmp_path, words, [((float("nan"),), None), ((0.9,), None)])
    # A setting that diverged is never the best one.
    assert (record["best"], record["best_chosen_on"]) == ("lr=0.1", "test")
    assert "validation" not in record["settings"][1]
    assert "| lr=0.05 | — | — |" in table
    assert "| lr=0.1 (best) | 90.00 ± 0.00 |" in table
    assert "optimistic estimate: --val-fraction 0.1 chooses it on examples set apart." in table


def test_a_sweep_over_methods_names_them(tmp_path):
    words = ["--grid", "method=fedpac,fedper", "--grid", "lr=0.05,0.1", "--rounds", "1"]
    record, table, _ = results(tmp_path, words, [((0.5 + place / 10,), None) for place in range(4)])
    assert record["title"] == "fedpac, fedper on digits (made up), seed 0"
    assert [row["setting"] for row in record["settings"]] == [
        *("fedpac lr=0.05", "fedpac lr=0.1", "fedper lr=0.05", "fedper lr=0.1")
    ]
    assert "fedper lr=0.1 (best)" in table
    legend = Path(tmp_path / "sweep.svg").read_text()
    assert "fedper lr=0.1" in legend
    assert "method=" not in legend


def test_a_title_has_a_few_methods(tmp_path):
    words = ["--grid", "method=fedavg,local,fedrep,fedper"]
    record, *_ = results(tmp_path, words, [((0.5,), None)] * 4)
    assert record["title"] == "4 methods on digits (made up), seed 0"
    assert [row["setting"] for row in record["settings"]] == ["fedavg", "local", "fedrep", "fedper"]


def test_methods_in_files_of_the_same_name_are_settings_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("one", "other"):
        Path(folder).mkdir()
        Path(folder, "mine.py").write_text("from pfl_jax.methods.fedavg import fedavg\n")
    words = ["--grid", "method=one/mine.py:fedavg,other/mine.py:fedavg,fedper"]
    record, table, _ = results(Path("sweep"), words, [((0.5,), None), ((0.6,), None), ((0.7,), None)])
    assert [row["setting"] for row in record["settings"]] == ["one/mine.py:fedavg", "other/mine.py:fedavg", "fedper"]
    assert "| other/mine.py:fedavg | 60.00 |" in table
