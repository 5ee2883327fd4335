"""Run folders: nobody's results are overwritten, files are whole, JSON is strict; what is counted, and the table."""

import dataclasses
import io
import json
import math
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
from scores import line_of, scores_of

from experiments.cli.command import parse
from experiments.folder import load
from experiments.folder.best_round import best
from experiments.folder.run_folder import (
    CONFIG,
    METRICS,
    SUMMARY,
    ExampleCounts,
    RunFolder,
    rounded,
    score_text,
)
from experiments.host.console import Terminal
from experiments.host.exit_codes import Stop
from experiments.run import build, rounds
from experiments.run.outcome import summary
from experiments.run.run import SingleRun
from experiments.show.tables import Table, results_table
from experiments.spec.choices import PROTOCOLS
from pfl_jax import InvalidInput, RoundResult
from pfl_jax.primitives.metrics import Summary
from pfl_jax.tasks import CLASSIFICATION, REGRESSION

NAN = float("nan")


COUNTS = np.array([30, 10])


def scores(accuracy):
    accuracy = np.array(accuracy)
    return scores_of(accuracy, 1 - accuracy, accuracy / 2, accuracy)


def line(number, received, trained, middle=None, **others):
    """Line of the log from accuracies of two clients."""
    middle = None if middle is None else scores(middle)
    return line_of(number, scores(received), scores(trained), middle, **{"counts": ExampleCounts(COUNTS)} | others)


HISTORY = [line(1, [0.5, 0.7], [0.9, NAN]), line(2, [0.8, 0.9], [0.6, 0.6]), line(3, [0.6, 0.8], [0.7, 0.8])]


def test_best_is_of_the_asked_protocol_and_of_rounds_with_all_clients_that_have_an_accuracy():
    assert best(HISTORY, "received")["round"] == 2
    # In round 1 only one client has been trained.
    assert best(HISTORY, "trained")["round"] == 3
    untrained = line(4, [0.1, 0.1], [NAN, NAN])
    assert best([untrained, HISTORY[1]], "trained")["round"] == 2


def test_scores_keep_their_digits_whatever_their_size():
    assert [rounded(value) for value in (93.33333333, 1.23456789e-6, 7)] == [93.3333, 1.23457e-06, 7]
    # Of large ones no digit is told that files do not have.
    assert [score_text(value, percent=False) for value in (7.6512e8, 3020.5, 0.25, 0.0034123, 0.0)] == [
        *("7.6512e+08", "3020.5", "0.250", "0.00341", "0.000"),
    ]
    assert score_text(-0.014, percent=True, sign="+") == "-0.01"


def test_rounds_that_are_equal_in_the_files_are_a_tie():
    # As the report, which has only the files: the first one.
    history = [line(1, [0.5, 0.7], [0.5, 0.5]), line(2, [0.5 + 1e-9, 0.7], [0.5, 0.5])]
    assert best(history, "received")["round"] == 1


def test_the_log_is_strict_json_with_percentages(tmp_path):
    folder = RunFolder.claim(tmp_path / "run", "x")
    for item in HISTORY:
        folder.log(item)

    def refuse(constant):
        raise AssertionError(constant)

    lines = [json.loads(line, parse_constant=refuse) for line in (tmp_path / "run" / METRICS).read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2, 3]
    assert lines[0]["received_per_client"] == [50.0, 70.0]
    assert lines[0]["trained_per_client"] == [90.0, None]
    assert lines[0]["received_loss_per_client"] == [0.5, 0.3]
    assert lines[0]["received_macro_f1_per_client"] == [25.0, 35.0]
    assert lines[0]["received"] == {
        "mean": 60.0,
        "pooled": 55.0,
        "std": 10.0,
        "worst_decile": 50.0,
        "jain": 0.972973,
        "clients": 2,
        "loss": 0.4,
        "macro_f1": 30.0,
        "auc": 60.0,
    }
    assert lines[0]["trained"]["clients"] == 1
    # The client without an accuracy does not count.
    assert lines[0]["trained"]["pooled"] == 90.0
    assert not any("before_aggregation" in name for name in lines[0])


def test_files_are_whole_and_strict(tmp_path):
    folder = RunFolder.claim(tmp_path / "run", "x")
    folder.write(SUMMARY, {"mean": NAN, "list": [math.inf, np.float32(0.5), np.int64(3)], "tuple": (1, 2)})
    assert json.loads((tmp_path / "run" / SUMMARY).read_text()) == {
        "mean": None,
        "list": [None, 0.5, 3],
        "tuple": [1, 2],
    }
    with pytest.raises(TypeError):
        folder.write(CONFIG, {"not": object()})
    assert sorted(entry.name for entry in (tmp_path / "run").iterdir()) == [METRICS, SUMMARY]


def test_numbered_folders_are_never_shared(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: RunFolder.claim(None, "digits-fedpac-seed0", tmp_path).path, range(24)))
    assert len(set(folders)) == 24
    assert min(folders).name == "digits-fedpac-seed0-001"
    assert max(folders).name == "digits-fedpac-seed0-024"


@pytest.mark.parametrize("name", [CONFIG, METRICS, SUMMARY])
def test_a_folder_with_a_run_is_refused_and_left_alone(tmp_path, name):
    (tmp_path / name).write_text("precious")
    with pytest.raises(InvalidInput, match="holds a run already"):
        RunFolder.claim(tmp_path, "x")
    assert (tmp_path / name).read_text() == "precious"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_run_without_results_leaves_no_folder(tmp_path):
    folder = RunFolder.claim(tmp_path / "new" / "run", "x")
    folder.write(CONFIG, {})
    folder.discard()
    assert not (tmp_path / "new" / "run").exists()
    # What is not the run's stays.
    folder = RunFolder.claim(tmp_path / "mine", "x")
    (tmp_path / "mine" / "notes").write_text("")
    folder.discard()
    assert [entry.name for entry in (tmp_path / "mine").iterdir()] == ["notes"]
    # With a result nothing is given back.
    folder = RunFolder.claim(tmp_path / "kept", "x")
    folder.write(CONFIG, {})
    folder.log(HISTORY[0])
    folder.discard()
    assert sorted(entry.name for entry in (tmp_path / "kept").iterdir()) == [CONFIG, METRICS]


def rows(table):
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(table)
        text = console.export_text()
    # Cells may have single spaces in them, columns are further apart.
    found = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]
    return [cells for cells in found if cells[0] in PROTOCOLS]


def test_the_best_round_by_trained_may_lie_between_evaluations():
    history = [line(2, [0.4, 0.9], [0.3, 0.5]), line(4, [0.6, 0.5], [0.6, 0.5])]
    history[1]["trained_between"] = {"round": [3], "mean": [88.0], "pooled": [87.0], "clients": [2]}
    (best,) = (row for row in rows(results_table(history, CLASSIFICATION, "title", "received")) if "best (3)" in row)
    # Such a round has means alone.
    assert best[:4] == ["trained", "best (3)", "88.00", "87.00"]
    assert {*best[4:]} == {"—"}


def test_a_mean_over_some_of_the_clients_says_so():
    assert load.coverage_text([{"clients": 2}, {}], 2) == load.coverage_text([], 2) == ""
    assert load.coverage_text([{"clients": 5}, {"clients": 8}, {"clients": 6}], 8) == "5 to 8 of 8 clients"
    history = [line(1, [0.4, 0.9], [NAN, 0.5]), line(2, [0.6, 0.5], [NAN, 0.4])]
    table = rows(results_table(history, CLASSIFICATION, "title", "received"))
    assert [(row[0], row[1], row[-1]) for row in table] == [
        *[("received", word, "2") for word in ("last (2)", "best (1)", "best pooled (2)")],
        *[("trained", word, "1 of 2") for word in ("last (2)", "best (1)")],
    ]
    # The best round may be one of fewer clients than the last; none of these is.
    history.append(line(3, [0.6, 0.5], [0.6, 0.5]))
    assert len(rows(results_table(history, CLASSIFICATION, "title", "received"))[0]) == len(table[0]) - 1


def test_the_table_has_the_third_protocol_and_the_best_round_over_test_examples():
    history = [line(1, [0.4, 0.9], [0.5, 0.5], [0.3, 0.7]), line(2, [0.6, 0.5], [0.5, 0.5], [0.2, 0.4])]
    how = {"paper_is": "best pooled", "paper_by": "received"}
    table = rows(results_table(history, CLASSIFICATION, "title", "before_aggregation", "81.67", **how))
    assert [row[:4] for row in table] == [
        ["before_aggregation", "last (2)", "30.00", "25.00"],
        ["before_aggregation", "best (1)", "50.00", "40.00"],
        ["received", "last (2)", "55.00", "57.50"],
        ["received", "best (1)", "65.00", "52.50"],
        ["received", "best pooled (2)", "55.00", "57.50"],
        ["trained", "last (2)", "50.00", "50.00"],
        ["trained", "best (1)", "50.00", "50.00"],
    ]
    # The published figure is of the best round over test examples.
    assert [row[-1] for row in table] == ["—", "—", "—", "—", "81.67", "—", "—"]
    record = history[0]
    assert record["before_aggregation"]["pooled"] == 40.0
    assert record["before_aggregation_per_client"] == [30.0, 70.0]


def test_the_best_round_is_chosen_on_validation_examples():
    counts, history = ExampleCounts(COUNTS, np.array([1, 3])), []
    accuracies = ([0.5, 0.7], [0.9, NAN]), ([0.8, 0.9], [0.6, 0.6]), ([0.6, 0.8], [0.7, 0.8])
    for number, (both, apart) in enumerate(zip(accuracies, ([0.9, NAN], [0.2, 0.4], [0.8, 0.9]), strict=True), 1):
        received, trained = (replace(scores(one), validation=scores(apart)) for one in both)
        history.append(line_of(number, received, trained, counts=counts))
    # On test examples it is round 2, in the pooled mean too.
    assert [best(some, "received")["round"] for some in (HISTORY, history)] == [2, 1]
    assert best(history[1:], "received", "examples")["round"] == 3
    assert history[1]["validation"]["received"]["pooled"] == pytest.approx(35.0)
    table = rows(results_table(history, CLASSIFICATION, "title", "received", "91.83"))
    assert [row[1:3] + row[-2:] for row in table[:2]] == [
        ["last (3)", "70.00", "85.00", "91.83"],
        ["best (1)", "60.00", "90.00", "—"],
    ]
    assert history[2]["validation"]["trained"]["mean"] == 85.0
    assert "validation" not in HISTORY[2]


# What is counted in the rounds of a run.

QUIET = Console(quiet=True)
BUDGET = SimpleNamespace(unit="example", epsilon=float, record=lambda rounds: {"after": rounds})
"""A budget that says after how many rounds it was asked."""
WITHOUT_NOISE = SimpleNamespace(unit="client", epsilon=lambda rounds: math.inf, record=lambda rounds: {})


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
    return rounds.ActiveRun(
        dataclasses.replace(experiment, data=data), folder, counts or rounds.Totals(), track=lambda _: None
    )


def test_rounds_are_counted(experiment, tmp_path):
    def round_of(number, seconds):
        cohort, some = np.array([0, 1]), scores([0.5, 0.7])
        info = {"gap": np.array([NAN, 1.0])}
        result = RoundResult(number, None, info, cohort, cohort == 1, cohort >= 0, some, some, None, 80, seconds)
        return [result]

    told = dataclasses.replace(experiment, privacy=(BUDGET, WITHOUT_NOISE))
    run = run_of(told, RunFolder.claim(tmp_path / "run", ""), rounds.Totals(elapsed=100.0))
    run.folder.write(CONFIG, {})
    made = [round_of(1, 2.0), round_of(2, 3.0)]
    single = SingleRun([told.spec])
    single.runs, single.rounds = [run], lambda state, console: made
    single.train(None, QUIET, time.perf_counter(), Stop())
    lines = [json.loads(line) for line in (run.folder.path / METRICS).read_text().splitlines()]
    # Three epochs of 60 and 20 examples in 2 seconds, and in 3.
    assert [line["examples_per_second"] for line in lines] == [120, 80]
    # What is infinite or unknown is null.
    assert [line["epsilon"] for line in lines] == [{"example": 1, "client": None}, {"example": 2, "client": None}]
    assert lines[0]["info"] == {"gap": [None, 1.0]}
    # 30 examples of the first client, 10 of the second.
    assert (lines[0]["received"]["mean"], lines[0]["received"]["pooled"]) == (60, 55)
    assert 100 <= lines[0]["seconds"] <= lines[1]["seconds"] < 160
    # Of two clients one message arrived.
    sent = run.experiment.traffic
    assert (lines[1]["bytes_up"], lines[1]["bytes_down"]) == (2 * sent.up, 4 * sent.down)
    run.folder.finish(summary(run))
    # As a checkpoint has it.
    again, record = run_of(experiment, run.folder), json.loads(json.dumps(run.record()))
    record["counts"]["of_earlier_code"] = 1
    again.restore(record)
    assert (again.counts, again.lines) == (run.counts, run.lines)
    with (run.folder.path / METRICS).open("a") as file:
        file.write('{"round": 3, "rec')
    again.restore(record)
    assert len((run.folder.path / METRICS).read_text().splitlines()) == 2
    (run.folder.path / METRICS).write_text("")
    with pytest.raises(InvalidInput, match="has changed since the last checkpoint"):
        again.restore(record)


def test_a_summary_is_of_the_last_and_of_the_best_rounds(experiment, tmp_path):
    run = run_of(experiment, RunFolder.claim(tmp_path / "run", ""), rounds.Totals(3))
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
    assert found["trained_per_client"] == [20.0, 30.0]
    assert found["privacy"] == [{"after": 3}]
    assert found["examples_per_second"] == 1.5
    # A process's first round compiles.
    run.counts.starts = [0]
    assert run.steady_speeds == [3.0, 1.5]
    run.counts.starts = [0, 1, 2]
    assert run.steady_speeds == [1.0, 3.0, 1.5]


def test_the_table_shows_each_protocol_last_and_best():
    figures = (("last (3)", "70.00", "65.00", "10.00", "60.00"), ("best (2)", "85.00", "82.50", "5.00", "80.00"))
    table = rows(results_table(HISTORY, CLASSIFICATION, "title", "received", "91.83 (FedPAC, Table 1)"))
    assert [tuple(row[1:6]) for row in table[:2]] == list(figures)
    # The paper's accuracy stands beside ours by its own protocol.
    assert [row[10] for row in table] == ["91.83 (FedPAC, Table 1)", "—", "—", "—"]
    trained = ["75.00", "72.50", "5.00", "70.00", "0.996", "0.250", "37.50", "75.00", "—"]
    # An earlier round, in which fewer clients had been trained, is never the best.
    assert table[2:] == [["trained", f"{word} (3)", *trained] for word in ("last", "best")]
    assert [row[0] for row in rows(results_table(HISTORY, CLASSIFICATION, "title", "trained"))] == ["trained"] * 2 + [
        "received"
    ] * 2
    assert {len(row) for row in rows(results_table(HISTORY, CLASSIFICATION, "title", "trained"))} == {10}


def test_names_are_no_markup_on_the_terminal():
    made = Table("[b]title", ["a [red]head", "n"], [["w[red]x[/bold] :bug:", "1"]])
    table = made.terminal(caption="[i]caption")
    console = Terminal(file=io.StringIO(), width=80)
    console.print(table)
    shown = console.file.getvalue()
    assert all(text in shown for text in ("a [red]head", "w[red]x[/bold] :bug:", "[b]title", "[i]caption"))


def test_narrow_tables_lose_no_digit_whatever_the_names():
    def text(table):
        console = Console(file=io.StringIO(), width=80)
        console.print(table)
        return console.file.getvalue()

    values = Summary(0.000743815, 0.000743815, 0.000434567, 0.00123456, 0.875, {"mae": 0.0231, "r2": -19929.8}, 4)
    last = {"round": 2, "received": values._asdict() | values.others, "received_per_client": [0.0] * 4}
    last["validation"] = {"received": last["received"]}
    assert "…" not in text(results_table([last], REGRESSION, "title", "received"))
    named = "fedavg model=mymodel.py:net task=none model_digest=0e7adbb2d4cb"
    shown = text(Table("", ["method", *"abcdef"], [[named, *["0.00246 ± 0.00236"] * 6]]).terminal())
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if "│" in line]
    name, *numbers = ("".join(cells).replace(" ", "") for cells in zip(*lines, strict=True))
    assert (name, set(numbers)) == (named.replace(" ", ""), {"0.00246±0.00236"})


def test_the_table_has_the_new_clients():
    newcomers = {"received": scores([0.5, 0.7]), "trained": scores([0.7, 0.8])}
    counts = ExampleCounts(COUNTS, newcomers=np.array([10, 30]))
    last = line(3, [0.6, 0.8], [0.7, 0.8], counts=counts, newcomers=newcomers)
    table = rows(results_table([*HISTORY[:2], last], CLASSIFICATION, "title", "received"))
    assert [row[:4] for row in table[4:]] == [
        ["received", "new clients", "60.00", "65.00"],
        ["trained", "new clients", "75.00", "77.50"],
    ]
    assert last["new_clients"]["received"]["mean"] == 60.0
    assert last["new_clients"]["received"]["pooled"] == 65.0
