"""The protocol before_aggregation in the folders of runs: written, gone on with, swept; and test examples counted."""

import io
import json
from dataclasses import replace

import numpy as np
import pytest
from interrupts import ask_to_stop
from rich.console import Console
from scores import scores_of

from experiments.cli.request import parse
from experiments.cli.run_command import RunCommand
from experiments.folder.run_folder import Counts
from experiments.run import run
from experiments.run.cached_runs import run_cell
from experiments.run.command import main
from experiments.run.history import History
from experiments.sweep import __main__ as sweep

pytestmark = pytest.mark.without_f1_auc

SMALL = ["--num-clients", "5", "--train-size", "20", "--test-size", "10", "--epochs", "1", "--no-compilation-cache"]
RUN = ["--method", "fedper", "--rounds", "4", "--eval-every", "2", "--participation", "0.4", *SMALL]
RUN = [*RUN, "--eval-protocol", "before_aggregation"]


def metrics(folder):
    """The log without times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if "second" not in name} for line in lines]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run's folder, and what it printed."""
    folder, said = tmp_path_factory.mktemp("whole") / "run", io.StringIO()
    run.run(parse("digits", [*RUN, "--out", str(folder)]), Console(file=said, width=200))
    return folder, said.getvalue()


def test_a_run_that_asks_for_it_has_it_everywhere(whole):
    folder, said = whole
    lines, summary = metrics(folder), json.loads((folder / "summary.json").read_text())
    for line in lines:
        members = np.isin(np.arange(5), line["cohort"])
        trained, middle = (np.array(line[f"{name}_per_client"], float) for name in ("trained", "before_aggregation"))
        np.testing.assert_array_equal(middle[members], trained[members])
        assert line["before_aggregation"]["mean"] == pytest.approx(middle.mean(), abs=1e-3)
    assert summary["before_aggregation_accuracy"] == lines[-1]["before_aggregation"]["mean"]
    assert summary["per_client_accuracy"] == lines[-1]["before_aggregation_per_client"]
    means = [line["before_aggregation"]["mean"] for line in lines]
    assert summary["best"]["before_aggregation_accuracy"] == max(means)
    assert summary["best"]["round"] == 2 * (1 + means.index(max(means)))
    assert "round 4/4 · before_aggregation" in said
    assert said.count("before_aggregation  last (4)") == 1


@pytest.mark.slow
def test_it_is_the_same_after_an_interruption(whole, tmp_path, capsys):
    def observe(experiment, result):
        if result.round == 3:
            ask_to_stop()

    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run.run(parse("digits", [*RUN, "--out", str(folder)]), Console(quiet=True), observe)
    # The evaluations so far have it, and those to come must.
    assert main("digits", ["--resume", str(folder), "--eval-protocol", "received"]) == 2
    assert "the run has --eval-protocol before_aggregation, not received" in capsys.readouterr().err
    assert len(metrics(folder)) == 1
    # Who goes on does not have to ask for it again.
    assert main("digits", ["--resume", str(folder)]) == 0
    assert metrics(folder) == metrics(whole[0])
    ours, theirs = (json.loads((path / "summary.json").read_text()) for path in (folder, whole[0]))
    for name in ("before_aggregation", "best", "best_pooled"):
        assert ours[name] == theirs[name]


@pytest.mark.slow
def test_a_sweep_measures_it_too(tmp_path):
    words = ["--dataset", "digits", *RUN, "--seeds", "2", "--out", str(tmp_path / "sweep")]
    assert sweep.main(words) == 0
    heading = "| setting | before_aggregation | before_aggregation, pooled | received | received, pooled | trained |"
    assert heading in (tmp_path / "sweep" / "sweep.md").read_text()
    record = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert record["eval_protocol"] == "before_aggregation"
    run_cell(RunCommand("digits", tuple(RUN), 1), tmp_path / "alone", Console(quiet=True))
    together, alone = (metrics(path) for path in (next((tmp_path / "sweep").rglob("seed-1")), tmp_path / "alone"))
    for one, other in zip(together, alone, strict=True):
        name = "before_aggregation_per_client"
        np.testing.assert_allclose(np.array(one[name], float), np.array(other[name], float), atol=0.02)
    assert record["settings"][0]["before_aggregation"]["per_seed"][1] == together[-1]["before_aggregation"]["mean"]


def test_pooled_accuracies_count_examples(tmp_path):
    """Clients of different sizes: the weighted mean is that of all their test examples."""
    words = ["--method", "local", "--rounds", "1", "--num-clients", "5", "--epochs", "1", "--partition", "dirichlet"]
    words += ["--dirichlet-protocol", "fedas", "--train-size", "None", "--test-size", "None", "--beta", "0.5"]
    words += ["--held-out-clients", "2", "--no-compilation-cache", "--out", str(tmp_path / "run")]
    run.run(parse("digits", words), Console(quiet=True))
    counts = np.array(json.loads((tmp_path / "run" / "config.json").read_text())["test_examples"])
    assert len(set(counts.tolist())) == len(counts) == 3
    (line,) = metrics(tmp_path / "run")
    for protocol in ("received", "trained"):
        accuracies = np.array(line[f"{protocol}_per_client"])
        right = accuracies * counts / 100
        np.testing.assert_allclose(right, np.round(right), atol=1e-3)
        assert line[protocol]["pooled"] == pytest.approx(100 * np.round(right).sum() / counts.sum(), abs=1e-3)
        assert line[protocol]["mean"] == pytest.approx(accuracies.mean(), abs=1e-3)
        assert line["new_clients"][protocol]["pooled"] != line["new_clients"][protocol]["mean"]


def scores(seed, clients, *, validation=False):
    found = scores_of(*np.random.default_rng(seed).random((4, clients)).astype(np.float32))
    return replace(found, validation=scores(seed + 10, clients)) if validation else found


@pytest.mark.parametrize("middle", [False, True])
@pytest.mark.parametrize("held_out", [False, True])
@pytest.mark.parametrize("validation", [False, True])
def test_evaluations_come_back_from_a_checkpoint(middle, held_out, validation):
    others, apart = (np.array([5, 4]) if held_out else None), (np.array([2, 0, 7]) if validation else None)
    counts = Counts(np.array([3, 1, 2]), apart, others)
    history = History(wasted=[0.0, 0.0], visits=8.0, seconds=2.0)
    newcomers = (scores(1, 2), scores(2, 2)) if held_out else None
    received, trained, before = (scores(seed, 3, validation=validation) for seed in (4, 5, 3))
    more = {"newcomers": newcomers, "before_aggregation": before if middle else None}
    history.evaluate(2, received, trained, counts, **more)
    found = History.from_arrays(history.arrays(), counts)
    assert ("validation" in history.evaluations[0].record()) == validation
    (one,), (other,) = history.evaluations, found.evaluations
    assert one.protocols == other.protocols
    assert json.dumps(one.record()) == json.dumps(other.record())
    assert History.from_arrays(History().arrays(), counts).evaluations == []
