"""--patience: the end of a run, the round whose scores and model count, resumption, sweeps, and runs of before."""

import json

import numpy as np
import pytest
from interrupts import ask_to_stop
from run_folders import log, summary, untimed
from test_sweep_command import SMALL

from experiments import compare
from experiments.cli.command import main, parse
from experiments.folder import stored_runs
from experiments.run import rounds
from experiments.run.loaded_run import load_run
from experiments.spec.identity import notes, relevant_options
from experiments.spec.spec import Spec
from experiments.sweep import main as sweep

pytestmark = pytest.mark.without_f1_auc

WORDS = ["--method", "fedper", *SMALL, "--eval-every", "1", "--val-fraction", "0.3", "--no-compilation-cache"]
WORDS[WORDS.index("--rounds") + 1] = "12"
STOPS = ["--patience", "3", "--keep-state", "always"]


def kept_of(lines, protocol="received"):
    means = [line["validation"][protocol]["mean"] for line in lines]
    return lines[int(np.argmax(means))]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Folders of a run with patience, and of the same without."""
    folder = tmp_path_factory.mktemp("patience")
    assert main("digits", [*WORDS, *STOPS, "--out", str(folder / "stopped")]) == 0
    assert main("digits", [*WORDS, "--out", str(folder / "whole")]) == 0
    return folder / "stopped", folder / "whole"


def test_a_run_ends_and_counts_with_its_best_round(stopped):
    run, whole = stopped
    lines, kept = untimed(run), kept_of(log(run))
    assert lines == untimed(whole)[: len(lines)]
    assert 3 < len(lines) < 12
    assert lines[-1]["round"] - kept["round"] == 3
    found = summary(run)
    assert (found["kept_round"], found["rounds_done"]) == (kept["round"], lines[-1]["round"])
    assert found["received_accuracy"] == kept["received"]["mean"]
    assert found["received_per_client"] == kept["received_per_client"]
    assert found["bytes_up"] == lines[-1]["bytes_up"]
    # Everything that reads runs takes that round, and the model is of it.
    read = stored_runs.read(run)
    assert read.accuracy("received") == read.accuracy("received", "best") == kept["received"]["mean"]
    (row,) = stored_runs.load_runs(run).to_dict("records")
    assert (row["round"], row["received_accuracy"]) == (kept["round"], kept["received"]["mean"])
    model = load_run(run)
    assert int(model.state.round) == kept["round"]
    accuracy = [
        np.mean(
            model.predict(i, model.client_data(i, "test").x).argmax(1) == np.asarray(model.client_data(i, "test").y)
        )
        for i in range(4)
    ]
    np.testing.assert_allclose(100 * np.array(accuracy), kept["received_per_client"], atol=1e-3)


def test_an_interrupted_run_ends_in_the_same_round(stopped, tmp_path, monkeypatch):
    add = rounds.ActiveRun.add

    def stopping(self, result, *times):
        add(self, result, *times)
        if result.round == kept_of(log(stopped[0]))["round"] + 1:
            ask_to_stop()

    with monkeypatch.context() as patch:
        patch.setattr(rounds.ActiveRun, "add", stopping)
        assert main("digits", [*WORDS, *STOPS, "--out", str(tmp_path / "cut")]) == 130
    assert main("digits", ["--resume", str(tmp_path / "cut")]) == 0
    assert untimed(tmp_path / "cut") == untimed(stopped[0])
    one, other = summary(tmp_path / "cut"), summary(stopped[0])
    assert {k: v for k, v in one.items() if "second" not in k and k != "digests"} == {
        k: v for k, v in other.items() if "second" not in k and k != "digests"
    }


def test_runs_of_a_sweep_end_each_for_itself(stopped, tmp_path, capsys):
    words = ["--dataset", "digits", *WORDS, *STOPS, "--grid", "lr=0.1,0.01", "--out", str(tmp_path)]
    assert sweep([*words, "--no-shuffle"]) == 0
    runs = [tmp_path / f"lr={lr}" / "seed-0" for lr in ("0.1", "0.01")]
    logs = [log(run) for run in runs]
    assert len({len(lines) for lines in logs}) == 2
    for lines, run in zip(logs, runs, strict=True):
        kept = kept_of(lines)
        assert summary(run)["kept_round"] == kept["round"] == int(load_run(run).state.round)
        assert len(lines) == min(12, kept["round"] + 3)
    record = json.loads((tmp_path / "sweep.json").read_text())
    assert [row["received"]["mean"] for row in record["settings"]] == [
        kept_of(lines)["received"]["mean"] for lines in logs
    ]
    assert "of the kept round" in (tmp_path / "sweep.md").read_text()
    capsys.readouterr()
    assert compare.main([str(tmp_path), "--reference", "fedper lr=0.1"]) == 0
    assert "in the kept rounds" in capsys.readouterr().out


def test_patience_alone_changes_no_run_and_targets_use_validation(tmp_path, capsys):
    plain, asked = (Spec.of("digits", method="fedper", **more) for more in ({}, {"patience": 3}))
    assert relevant_options(plain) == relevant_options(asked)
    assert notes(asked, {"patience"}, "cpu") == ["--patience has no effect without --val-fraction"]
    assert relevant_options(parse("digits", WORDS)) != relevant_options(parse("digits", [*WORDS, *STOPS]))
    # A target between both means of the first round.
    assert main("digits", [*WORDS, "--rounds", "1", "--out", str(tmp_path / "first")]) == 0
    (line,) = log(tmp_path / "first")
    test, validation = line["received"]["mean"], line["validation"]["received"]["mean"]
    assert test != validation
    target = str((test + validation) / 2)
    words = [*WORDS, "--rounds", "2", "--target-accuracy", target, "--out", str(tmp_path / "target")]
    assert main("digits", words) == 0
    assert len(log(tmp_path / "target")) == (1 if validation > test else 2)
    capsys.readouterr()
    words = ["--method", "local", *SMALL, "--rounds", "1", "--target-accuracy", "99", "--out", str(tmp_path / "none")]
    assert main("digits", words) == 0
    assert "--target-accuracy is compared with scores on test examples" in capsys.readouterr().out
