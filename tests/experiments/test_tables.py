"""The papers' tables: a cell runs once, and the table says what it is made of."""

import csv
import dataclasses
import json
import shlex
import statistics
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
from rich.console import Console
from run_folders import FakeRuns

from experiments import tables
from experiments.cli.command import parse
from experiments.commands import batch
from experiments.commands.paper_table import Entry, compare, error_of
from experiments.folder import load
from experiments.folder.run_folder import CONFIG, SUMMARY
from experiments.papers import published, settings
from experiments.run import run
from experiments.spec.spec import Spec
from pfl_jax import InvalidInput

pytestmark = pytest.mark.without_f1_auc

ROWS = published.load()
TABLE = ["--paper", "fedpac", "--table", "5", "--dataset", "fashion_mnist"]
SMALL = ["--source", "embedded", "--model", "mlp", "--rounds", "1", "--epochs", "1", "--train-size", "20"]
SMALL += ["--test-size", "10"]


# A cell runs once.


def accuracies(options):
    last = {"local": 0.5, "fedavg_ft": 0.75}.get(options.method, 0.25) + 0.02 * options.seed
    return [last + 0.1, last]


@pytest.fixture
def runs(monkeypatch):
    stand_in = FakeRuns()
    stand_in.accuracies = accuracies
    monkeypatch.setattr(run, "run", stand_in)
    return stand_in


def made(runs):
    """Method and seed of each run, in their order."""
    return [(request.method, request.seed) for request in runs.done]


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def places(folder):
    """The places of the saved table by dataset and method."""
    table = json.loads((folder / "table.json").read_text())
    return {(place["dataset"], place["method"]): place for place in table["places"]}


def test_a_table_beside_the_papers_figures(runs, tmp_path, capsys):
    out = tmp_path / "table"
    words = [*TABLE, "--method", "local", "fedavg_ft", "--seeds", "3", "--out", str(out)]
    assert tables.main(words) == 0
    assert made(runs) == [(method, seed) for seed in (0, 1, 2) for method in ("local", "fedavg_ft")]
    ours = [50, 52, 54]
    place = places(out)["fashion_mnist", "local"]
    assert place["mean"] == pytest.approx(statistics.fmean(ours), abs=1e-3)
    assert place["std"] == pytest.approx(statistics.stdev(ours), abs=1e-3)
    assert (place["paper"], place["seeds"], place["deviations"]) == (85.68, 3, {})
    assert place["difference"] == pytest.approx(52 - 85.68, abs=1e-3)
    assert place["error"] == pytest.approx(statistics.stdev(ours) * scipy.stats.t.ppf(0.975, 2) / 3**0.5, abs=1e-3)
    text = capsys.readouterr().out
    for shown in (text, (out / "table.md").read_text()):
        assert "52.00 ± 2.00" in shown
    assert "52.00 ± 2.00 / 85.68 / -33.68" in (out / "table.md").read_text()
    with (out / "table.csv").open(newline="") as file:
        lines = {line["method"]: line for line in csv.DictReader(file)}
    assert (lines["local"]["mean"], lines["local"]["paper"], lines["local"]["score"]) == ("52.0", "85.68", "last")
    assert (lines["local"]["protocol"], lines["local"]["average"]) == ("received", "clients")


def test_the_same_command_goes_on_after_an_interrupt(runs, tmp_path):
    out = tmp_path / "table"
    words = [*TABLE, "--method", "local", "fedavg_ft", "--seeds", "2", "--out", str(out)]
    runs.stop_at = 3
    assert tables.main(words) == 130
    saved = places(out)
    assert (saved["fashion_mnist", "local"]["seeds"], saved["fashion_mnist", "fedavg_ft"]["seeds"]) == (2, 1)
    assert saved["fashion_mnist", "fedavg_ft"]["std"] is None
    runs.stop_at = None
    assert tables.main(words) == 0
    assert made(runs)[3:] == [("fedavg_ft", 1)]


def test_a_mean_over_some_of_the_clients_says_so(runs, tmp_path):
    runs.trained = lambda accuracy: np.where(np.arange(20) < 15, accuracy, np.nan)
    words = [*TABLE, "--method", "local", "fedavg_ft", "--eval-protocol", "trained", "--out", str(tmp_path)]
    assert tables.main(words) == 0
    assert places(tmp_path)["fashion_mnist", "local"]["over"] == "15 of 20 clients"
    assert tables.main(words[:-4] + words[-2:]) == 0
    assert places(tmp_path)["fashion_mnist", "local"]["over"] == ""


@pytest.mark.parametrize("missing", [(), (SUMMARY,)])
def test_results_of_another_run_are_refused(runs, tmp_path, capsys, missing):
    out = tmp_path / "table"
    assert tables.main([*TABLE, "--method", "local", "--lr", "0.5", "--out", str(out)]) == 0
    folder = next(out.rglob(SUMMARY)).parent
    for name in missing:
        (folder / name).unlink()
    before = contents(out)
    capsys.readouterr()
    for words, difference in ((["--lr", "0.25"], "--lr 0.5, not 0.25"), (["--source", "embedded"], "not --source")):
        assert tables.main([*TABLE, "--method", "fedavg_ft", "local", *words, "--out", str(out)]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert difference in err
    assert len(runs.done) == 1
    assert contents(out) == before


# The table says what it is made of.


def test_deviations_are_said(runs, tmp_path):
    words = ["--paper", "fedpac", "--table", "5", "--method", "local", "fedpac", "--out", str(tmp_path)]
    assert tables.main([*words, "--rounds", "50", "--lr", "0.02", "--eval-every", "10"]) == 0
    place = places(tmp_path)["fashion_mnist", "local"]
    assert place["deviations"] == {"rounds": {"here": 50, "paper": 200}, "lr": {"here": 0.02, "paper": 0.01}}


def half_of_the_interval(values):
    low, high = scipy.stats.ttest_1samp(values, 0).confidence_interval()
    return pytest.approx((high - low) / 2)


def test_the_interval_is_over_seeds_and_with_one_seed_over_its_clients():
    clients = np.random.default_rng(0).normal(80, 5, (3, 20))
    scores = [{"mean": of.mean(), "std": of.std(), "clients": 20} for of in clients]
    assert error_of(scores[:1]) == half_of_the_interval(clients[0])
    assert error_of(scores) == half_of_the_interval(clients.mean(1))
    assert error_of([{**scores[0], "mean": None}]) is None
    assert error_of([{"mean": 80.0, "std": 0.0, "clients": 1}]) is None


def test_a_stand_in_never_passes_for_the_dataset(runs, tmp_path, capsys):
    runs.is_real = False
    assert tables.main([*TABLE, "--method", "local", "fedpac", "--out", str(tmp_path)]) == 0
    for (_, method), place in places(tmp_path).items():
        assert (place["paper"], place["difference"]) == (None, None)
        assert place["data"] == "fashion_mnist (embedded digits)", method
    shown = capsys.readouterr().out
    for text in (shown, (tmp_path / "table.md").read_text(), (tmp_path / "table.csv").read_text()):
        assert "85.68" not in text
        assert "91.83" not in text
        assert "fashion_mnist (embedded digits)" in text


def test_beside_a_stand_in_a_place_without_result_has_no_figure_of_the_paper():
    there, missing, *_ = (row for row in ROWS if (row.paper, row.table, row.dataset) == ("fedpac", 5, "fashion_mnist"))
    measure = settings.PAPERS["fedpac"].measure
    entries = [Entry(there, [SimpleNamespace(is_real=False)], measure), Entry(missing, [], measure)]
    table = compare("fedpac", 5, entries, 1)
    assert [entry.published for entry in table.entries] == [None, None]


def test_dataset_and_stand_in_do_not_mix(runs, tmp_path, capsys):
    assert tables.main([*TABLE, "--method", "local", "--out", str(tmp_path)]) == 0
    runs.is_real = False
    assert tables.main([*TABLE, "--method", "fedpac", "--out", str(tmp_path)]) == 2
    assert "some results on fashion_mnist are on the dataset and some on its stand-in" in capsys.readouterr().err


FEDAS_4 = ["--paper", "fedas", "--table", "4", "--setting", "participation=0.2"]
FEDAS = [*FEDAS_4, "--method", "fedas", "--procedure", "print"]
MIDDLE = ["--eval-protocol", "before_aggregation"]


@pytest.mark.parametrize(
    ("words", "mean"),
    [
        ([], 52.5),
        (["--average", "clients"], 50),
        (["--score", "last"], 42.5),
        (["--eval-protocol", "received"], 62.5),
        (MIDDLE, 42.5),
    ],
)
def test_which_accuracy_counts(runs, tmp_path, words, mean):
    runs.accuracies = lambda options: [0.6, 0.5]
    assert tables.main([*FEDAS, *words, "--out", str(tmp_path)]) == 0
    assert places(tmp_path)["cifar10", "fedas"]["mean"] == pytest.approx(mean, abs=1e-3)
    table = json.loads((tmp_path / "table.json").read_text())
    named = {"protocol": "trained", "score": "best", "average": "examples"}
    if words:
        named[words[0].removeprefix("--").removeprefix("eval-")] = words[1]
    assert {name: table[name] for name in named} == named


def test_tables_of_best_rounds_are_of_all_rounds(runs, tmp_path):
    assert tables.main([*FEDAS, "--out", str(tmp_path / "a")]) == 0
    config = json.loads(next((tmp_path / "a").rglob(CONFIG)).read_text())
    assert config["options"]["eval_every"] == 5
    assert places(tmp_path / "a")["cifar10", "fedas"]["deviations"] == {}
    assert tables.main([*FEDAS, "--eval-every", "4", "--lr", "0.5", "--out", str(tmp_path / "b")]) == 0
    deviations = places(tmp_path / "b")["cifar10", "fedas"]["deviations"]
    assert deviations == {"lr": {"here": 0.5, "paper": 0.005}}
    # Training itself gives the scores of FedAS in every round, but not those of other methods.
    assert tables.main([*FEDAS_4, "--eval-every", "4", "--out", str(tmp_path / "c")]) == 0
    found = {method: row["deviations"] for (_, method), row in places(tmp_path / "c").items()}
    assert found.pop("fedas -alignment -synchronization") == {"eval_every": {"here": 4, "paper": 1}}
    assert len(found) == 3
    assert not any(found.values())


BATCHES, CHOICES = ("drop_last", "shuffle"), ("target", "align_loss", "first_alignment", "reduction")


@pytest.mark.parametrize(
    ("words", "procedure", "batches", "choices"),
    [
        ([], "release", [True, False], ["class_mean", "class_sum", True, "batch_means"]),
        (["--procedure", "print"], "print", [False, True], ["example", "mean", False, "mean"]),
    ],
)
def test_a_table_of_fedas_is_wholly_as_printed_or_as_released(runs, tmp_path, words, procedure, batches, choices):
    assert tables.main([*FEDAS_4, *words, "--out", str(tmp_path)]) == 0
    configs = [json.loads(path.read_text()) for path in tmp_path.rglob(CONFIG)]
    assert len(configs) == 4
    assert {tuple(config["options"][name] for name in BATCHES) for config in configs} == {tuple(batches)}
    for own in [config["hyper_parameters"] | {"config": config} for config in configs]:
        if own["config"]["options"]["method"] != "fedas":
            continue
        # In turn, where there is an alignment; a part that is switched off has no choices.
        assert not own["alignment"] or own["manner"] == {"release": "in_turn", "print": "serial"}[procedure]
        read = [own["alignment"]] * 3 + [own["synchronization"]]
        found = [own[name] for name in CHOICES]
        assert all(value == wanted for value, wanted, is_read in zip(found, choices, read, strict=True) if is_read)
    table = json.loads((tmp_path / "table.json").read_text())
    assert table["procedure"] == procedure
    assert all(place["deviations"] == {} and place["difference"] is not None for place in table["places"])


def test_the_other_procedure_is_another_run(runs, tmp_path):
    words = [*FEDAS_4, "--method", "fedas"]
    order = batch.read(tables.Tables, words)
    ((cell, *_),) = order.jobs_of(order.shown[0])
    assert cell.command().startswith("python -m experiments.cifar10 --method fedas --beta 0.1")
    plain = order.shown[0]._replace(procedure="print").spec()
    for one, other in ((cell, plain), (plain, cell)):
        folder = tmp_path / str(one.procedure)
        run.run_cell(one, folder, Console(quiet=True))
        assert load.inspect(one, folder) == "finished"
        with pytest.raises(InvalidInput, match="holds another run"):
            load.inspect(other, folder)


def test_each_method_of_fedas_is_measured_as_its_code_does(runs, tmp_path):
    runs.accuracies = lambda options: [0.6, 0.5]
    setting = ["--setting", "beta=0.1", "participation=0.2"]
    command = ["--paper", "fedas", "--table", "3", *setting, "--out", str(tmp_path)]
    assert tables.main(command) == 0
    table = json.loads((tmp_path / "table.json").read_text())
    protocols = {place["method"]: place["protocol"] for place in table["places"]}
    middle = ("fedavg_ft", "fedprox_ft", "fedper")
    assert protocols == dict.fromkeys(protocols, "trained") | dict.fromkeys(middle, "before_aggregation") | {
        "fedala": "received"
    }
    means = {place["method"]: place["mean"] for place in table["places"]}
    # Half of the clients are better by 0.05 and have three times as many examples.
    assert [means[name] for name in ("fedala", "fedas", "fedper")] == pytest.approx([62.5, 52.5, 42.5], abs=1e-3)
    # The code's FedAvg-P is FedAvg.
    assert {"fedavg", "fedprox"} <= {request.method for request in runs.done}
    # As printed, their global models are fine-tuned.
    printed = batch.read(tables.Tables, [*command[:-2], "--procedure", "print"])
    found = {row.method: row.spec().method for row in printed.shown}
    assert (found["fedavg_ft"], found["fedprox_ft"]) == ("fedavg_ft", "fedprox_ft")


def test_sizes_that_are_drawn_are_no_deviation(runs, tmp_path):
    runs.is_real = False
    words = ["--paper", "fedpac", "--table", "6", "--dataset", "fashion_mnist", "--method", "local"]
    assert tables.main([*words, "--out", str(tmp_path)]) == 0
    assert "--train-size" not in (tmp_path / "table.md").read_text()


def test_the_third_protocol_is_measured_by_request(runs, tmp_path, capsys):
    usual, asked = tmp_path / "usual", tmp_path / "asked"
    assert tables.main([*FEDAS, "--out", str(usual)]) == 0
    before = contents(usual)
    assert tables.main([*FEDAS, *MIDDLE, "--out", str(usual)]) == 2
    assert "(--eval-protocol received, not before_aggregation)" in capsys.readouterr().err
    assert contents(usual) == before
    # Runs that have it serve all tables.
    for words in (MIDDLE, [], ["--eval-protocol", "received"]):
        assert tables.main([*FEDAS, *words, "--out", str(asked)]) == 0
    assert len(runs.done) == 2
    # One that goes on is measured alike to its end.
    (folder,) = {path.parent for path in asked.rglob(SUMMARY)}
    (folder / SUMMARY).unlink()
    assert tables.main([*FEDAS, "--out", str(asked)]) == 2
    assert "(--eval-protocol before_aggregation, not received)" in capsys.readouterr().err


def test_a_dry_run_says_the_commands_and_leaves_nothing(runs, tmp_path, capsys):
    out = tmp_path / "table"
    words = [*TABLE, "--method", "local", "fedpac", "--seeds", "2", "--rounds", "7", "--out", str(out)]
    assert tables.main([*words, "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert not out.exists()
    assert runs.done == []
    assert len(lines) == 5
    assert lines[4].startswith("4 runs, ")
    python, module, name, *arguments = shlex.split(lines[3], comments=True)
    assert (python, module, name) == ("python", "-m", "experiments.fashion_mnist")
    options = parse("fashion_mnist", arguments)
    assert (options.method, options.seed, options.rounds) == ("fedpac", 1, 7)
    assert lines[3].endswith("# absent")
    # The command is the run: what it leaves is a finished cell.
    run.run(parse("fashion_mnist", arguments), Console(quiet=True))
    assert tables.main([*words, "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines()[3].endswith("# finished")


def test_a_trial_has_a_folder_of_its_own():
    def folder(*words):
        return batch.read(tables.Tables, [*TABLE, *words]).folder.name

    assert folder() == folder("--chunk", "2", "--devices=1") == "fedpac-5"
    assert folder("--rounds", "5", "--train-size", "20") == folder("--train-size", "20", "--rounds", "5")
    assert folder("--rounds", "5") == "fedpac-5-rounds-5"
    assert folder("--source", "embedded") == "fedpac-5-source-embedded"
    # The default procedure is the same table, named or not.
    assert batch.read(tables.Tables, [*FEDAS_4, "--procedure", "release"]).folder.name == "fedas-4"
    asked = batch.read(tables.Tables, [*FEDAS, *MIDDLE])
    assert asked.folder.name == "fedas-4-eval-protocol-before_aggregation-procedure-print"


def test_what_has_no_bearing_on_results_is_no_other_run(runs, tmp_path):
    options = {"method": "local", "beta": 0.3, "seed": 4}
    cell = Spec.of("fashion_mnist", **options)
    run.run_cell(cell, tmp_path / "run", Console(quiet=True))
    same = Spec.of("fashion_mnist", **options, chunk=2, eval_protocol="trained")
    assert load.inspect(same, tmp_path / "run") == "finished"
    # The grouped partition does not read it.
    assert load.inspect(Spec.of("fashion_mnist", method="local", seed=4), tmp_path / "run") == "finished"
    for other in (dataclasses.replace(cell, seed=5), Spec.of("cifar10", **options)):
        with pytest.raises(InvalidInput, match="holds another run"):
            load.inspect(other, tmp_path / "run")
    (tmp_path / "run" / CONFIG).write_text("{}")
    with pytest.raises(InvalidInput, match="has no 'data'"):
        load.inspect(cell, tmp_path / "run")


def test_a_copy_of_a_dataset_is_named_beside_the_papers_figures(runs, tmp_path):
    runs.note = {"cifar10": "JPEG copy"}
    words = ["--paper", "fedpac", "--table", "5", "--method", "local", "--out", str(tmp_path)]
    assert tables.main(words) == 0
    text = (tmp_path / "table.md").read_text()
    assert "| cifar10, JPEG copy, 20 clients, grouped s=20 |" in text
    assert "| fashion_mnist, 20 clients, grouped s=20 |" in text
    assert "- cifar10, JPEG copy: not the pixels of the paper, which may be a part of the differences.\n" in text
    assert places(tmp_path)["cifar10", "local"]["difference"] is not None


def test_a_small_table_end_to_end(tmp_path, capsys):
    words = [*TABLE, "--method", "local", *SMALL, "--no-compilation-cache", "--out", str(tmp_path / "table")]
    assert tables.main(words) == 0
    place = places(tmp_path / "table")["fashion_mnist", "local"]
    summary = json.loads(next((tmp_path / "table").rglob(SUMMARY)).read_text())
    assert place["mean"] == pytest.approx(summary["received_accuracy"], abs=1e-3)
    assert place["data"] == "fashion_mnist (embedded digits)"
    before = contents(tmp_path)
    assert tables.main(words) == 0
    assert contents(tmp_path) == before
    assert "1 of 1 runs are finished" in capsys.readouterr().out
