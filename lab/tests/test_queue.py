"""The queue of long runs: each is run once, in order, and is finished wherever its committed result came from."""

import dataclasses
import json
import shutil
import subprocess

import pytest
from rich.console import Console
from run_folders import FakeRuns

from experiments.folder import load, version
from experiments.folder.run_folder import SUMMARY
from experiments.run import run
from experiments.run.outcome import RunDiverged
from experiments.spec.identity import relevant_options
from lab import committed, results
from lab.committed import CommittedRun, ResultStore
from lab.queue import __main__ as queue
from lab.queue import field
from lab.queue.field import FIELDS, Comparison, Field, search_runs
from lab.queue.planned import BLOCKS, SEEDS, planned_runs
from pfl_jax import InvalidInput
from pfl_jax.methods import METHODS

RUNS = {run.name: run for run in planned_runs()}
MAIN = "fashion_mnist-20-clients-grouped-s=20"


class Runs(FakeRuns):
    """Leaves folders behind and trains nothing; one method is refused, and one diverges after some rounds at a rate."""

    refused = diverging = None

    def __call__(self, request, console):
        options = request
        if options.method == self.refused:
            raise InvalidInput("--lr 0.01 is too large")
        if (options.method, options.rounds, request.hyper_parameters["lr"]) == self.diverging:
            self.done.append(request)
            raise RunDiverged("round 1: --lr is too large", f"; a checkpoint stays in {options.out}")
        self.is_real = options.source != "embedded"
        super().__call__(request)


@pytest.fixture(autouse=True)
def nice(monkeypatch):
    asked = []
    monkeypatch.setattr(queue.os, "nice", asked.append)
    return asked


@pytest.fixture
def runs(monkeypatch):
    stand_in = Runs()
    monkeypatch.setattr(run, "run", stand_in)
    return stand_in


@pytest.fixture
def words(tmp_path):
    return ["--out", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]


def named(requests):
    return [(request.method, request.seed) for request in requests]


def stored(tmp_path, block):
    return committed.read(tmp_path / f"results/queue/{block}.jsonl")


# What there is to run.


def test_nothing_comes_twice():
    runs = planned_runs()
    assert list(dict.fromkeys(run.block for run in runs)) == [block for block in BLOCKS if block not in FIELDS]
    assert len(RUNS) == len(runs)
    parsed = {(run.seed, json.dumps(relevant_options(run.spec), sort_keys=True)) for run in runs}
    assert len(parsed) == len(runs)
    # Table 2's and the replication's FedPAC are Table 1's run.
    assert f"{MAIN}/fedpac-replicated/seed-0" not in RUNS
    assert [RUNS[f"{MAIN}/fedpac/seed-{seed}"].block for seed in range(3)] == ["table-1", "seeds", "seeds"]


@pytest.mark.parametrize("block", FIELDS)
def test_a_comparison_begins_with_every_learning_rate_of_every_method(block, tmp_path):
    there = Comparison(block, ResultStore(tmp_path)).runs
    assert there == [one for method in field.methods(block) for one in search_runs(block, method)]
    seeds = SEEDS if FIELDS[block].together else SEEDS[:1]
    assert len({one.name for one in there}) == len(field.methods(block)) * len(FIELDS[block].rates) * len(seeds)


@pytest.fixture
def small_field(runs, monkeypatch):
    """A comparison of three methods, the best one of which has three seeds; the second of two rates is the better."""
    monkeypatch.setattr(field, "METHODS", {name: METHODS[name] for name in ("local", "fedavg", "fedper")})
    small = {"field": Field("its title", "fashion_mnist", {"num_clients": 20}, 50, 20, ("0.01", "0.03"), best=1)}
    monkeypatch.setattr(field, "FIELDS", small)
    validation = {0.01: 60.0, 0.03: 70.0}
    monkeypatch.setattr(CommittedRun, "validation", lambda self, _: validation[self.config["hyper_parameters"]["lr"]])
    quality = {"local": 70.0, "fedavg": 90.0, "fedper": 80.0}
    monkeypatch.setattr(CommittedRun, "accuracy", lambda self, _: quality[self.config["options"]["method"]])


def described(requests):
    return [(one.method, one.rounds, one.hyper_parameters["lr"], one.seed) for one in requests]


def again(*methods):
    """Runs of the best methods and of the baseline with the other seeds."""
    return [(method, 50, rate, seed) for method, rate in methods for seed in (1, 2)]


def test_a_search_says_what_is_run_next(small_field, runs, words, tmp_path, capsys):
    assert queue.main([*words, "--only", "field"]) == 0
    chosen = [(method, 50, 0.03, 0) for method in ("local", "fedavg", "fedper")]
    assert described(runs.done) == [*SEARCH, *chosen, *again(("fedavg", 0.03), ("local", 0.03))]
    found = Comparison("field", ResultStore(tmp_path / "results"))
    assert [(one.method, one.rate, one.validation, len(one.results)) for one in found.tuned] == [
        ("fedavg", "0.03", 70.0, 3),
        ("fedper", "0.03", 70.0, 1),
        # The baseline of the intervals, whatever its place.
        ("local", "0.03", 70.0, 3),
    ]
    assert len(found.runs) == 13
    capsys.readouterr()
    assert queue.main([*words, "--only", "field", "--dry-run"]) == 0
    assert "13 runs, 13 of them finished" in capsys.readouterr().out


SEARCH = [(method, 20, rate, 0) for method in ("local", "fedavg", "fedper") for rate in (0.01, 0.03)]


@pytest.mark.parametrize(
    ("rounds", "long"), [(20, [("fedper", 50, 0.01, 0)]), (50, [("fedper", 50, 0.03, 0), ("fedper", 50, 0.01, 0)])]
)
def test_a_rate_at_which_all_clients_diverge_gives_way_to_the_next_best(
    small_field, runs, words, tmp_path, capsys, rounds, long
):
    runs.diverging = ("fedper", rounds, 0.03)
    for _ in range(2):
        # The second time, nothing runs again.
        assert queue.main([*words, "--only", "field"]) == 0
        assert described(runs.done)[:8] == [*SEARCH, ("local", 50, 0.03, 0), ("fedavg", 50, 0.03, 0)]
        assert described(runs.done)[8:] == [*long, *again(("fedavg", 0.03), ("local", 0.03))]
    assert "round 1: --lr is too large; a checkpoint stays in" in capsys.readouterr().out
    found = Comparison("field", ResultStore(tmp_path / "results"))
    assert {one.method: one.rate for one in found.tuned} == {"fedavg": "0.03", "fedper": "0.01", "local": "0.03"}
    assert len(found.runs) == 13
    # A committed line has no path of this machine.
    content = stored(tmp_path, "field")[f"field/fedper-lr=0.03{'-search' if rounds == 20 else ''}/seed-0"]
    assert content["error"] == "round 1: --lr is too large"
    assert str(tmp_path) not in content["command"]
    assert queue.main([*words, "--only", "field", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "diverged" in out or rounds == 50
    assert "13 runs, 13 of them finished" in out


def test_short_runs_of_a_method_train_together_and_the_mean_over_seeds_chooses(
    small_field, runs, words, tmp_path, monkeypatch
):
    small = field.FIELDS["field"]._replace(search_rounds=50, together=True)
    monkeypatch.setattr(field, "FIELDS", {"field": small})
    groups = []

    def train(specs, console):
        groups.append(described(specs))
        for spec in specs:
            runs(spec, console)

    monkeypatch.setattr(run, "run_together", train)
    # Seed 0 alone would choose the other rate.
    values = {(0.01, 0): 80.0, (0.01, 1): 50.0, (0.01, 2): 50.0}
    monkeypatch.setattr(
        CommittedRun, "validation", lambda self, _: values.get((self.config["hyper_parameters"]["lr"], self.seed), 70.0)
    )
    assert queue.main([*words, "--only", "field"]) == 0
    cells = [(rate, seed) for rate in (0.01, 0.03) for seed in SEEDS]
    assert groups == [[(method, 50, *cell) for cell in cells] for method in ("local", "fedavg", "fedper")]
    found = Comparison("field", ResultStore(tmp_path / "results"))
    assert [(one.method, one.rate, one.validation, len(one.results)) for one in found.tuned] == [
        (method, "0.03", 70.0, 3) for method in ("fedavg", "fedper", "local")
    ]
    # One that ended before it was stored is not run again.
    file = tmp_path / "results/queue/field.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-1]))
    assert queue.main([*words, "--only", "field"]) == 0
    assert (len(groups), len(stored(tmp_path, "field"))) == (3, len(lines))


# Running it.


def test_it_runs_what_is_missing_and_keeps_what_finishes(runs, words, nice, tmp_path, capsys):
    assert queue.main([*words, "--only", "apfl", "lg_fedavg"]) == 0
    first = [run for run in planned_runs() if run.method in ("lg_fedavg", "apfl")]
    assert named(runs.done) == [(run.method, run.seed) for run in first]
    assert nice == [19]
    # Little is lost with a machine, and a stand-in never passes for the dataset.
    assert {(one.checkpoint_every, one.source) for one in runs.done} == {(20, "files")}
    assert set(ResultStore(tmp_path / "results").named) == {run.name for run in first}
    assert f"run 1 of {len(first)}: {MAIN} lg_fedavg seed 0" in capsys.readouterr().out
    # On another machine: no folder of a run, only the committed results.
    shutil.rmtree(tmp_path / "runs")
    before = len(runs.done)
    assert queue.main([*words, "--only", "apfl", "lg_fedavg"]) == 0
    assert len(runs.done) == before
    assert queue.main([*words, "--only", "knn_per"]) == 0
    assert {method for method, _ in named(runs.done[before:])} == {"knn_per"}


def test_cifar_10_comes_from_the_same_folder(runs, words, tmp_path):
    assert queue.main([*words, "--only", "cifar10/fedpac", "--data-dir", str(tmp_path)]) == 0
    assert {(one.dataset, one.source, one.data_dir) for one in runs.done} == {("cifar10", "files", str(tmp_path))}


def test_the_list_says_what_is_left_and_runs_nothing(runs, words, tmp_path, nice, capsys):
    assert queue.main([*words, "--only", "lg_fedavg"]) == 0
    done = len(runs.done)
    folder = tmp_path / "runs" / MAIN / "local" / "seed-0"
    run.run_cell(RUNS[f"{MAIN}/local/seed-0"].spec, folder, Console(quiet=True))
    (folder / SUMMARY).unlink()
    nice.clear()
    capsys.readouterr()
    assert queue.main([*words, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert len(runs.done) == done + 1
    assert nice == []
    assert (out.count("python -m"), out.count("# finished\n")) == (len(RUNS), done)
    for method, state in (("lg_fedavg", "finished"), ("local", "round 200 of 200")):
        (line,) = [line for line in out.splitlines() if f"/{MAIN}/{method}/seed-0 " in line]
        assert line.endswith(f"# {state}")


# Committed results.


def test_a_result_is_small_and_only_the_same_run_counts(runs, words, tmp_path):
    job = RUNS[f"{MAIN}/lg_fedavg/seed-0"]
    assert queue.main([*words, "--only", "lg_fedavg"]) == 0
    content = stored(tmp_path, "table-1")[job.name]
    assert "per_client" not in json.dumps(content)
    assert not {"class_table", "train_examples", "info"} & (content["config"].keys() | content["rounds"].keys())
    assert content["config"]["options"]["out"] is None
    assert content["command"] == job.spec.command()
    lines = load.read_metrics(tmp_path / "runs" / job.name)
    assert content["rounds"]["trained"]["std"] == [line["trained"]["std"] for line in lines]
    library = ResultStore(tmp_path / "results")
    found = library.find(job.spec)
    assert found.curve("received") == [line["received"]["mean"] for line in lines]
    for other, same in (({"chunk": 2}, True), ({"lr": 0.02}, False), ({"source": "embedded"}, False)):
        assert (library.find(job.spec.having(other)) == found) == same, other
    assert library.find(dataclasses.replace(job.spec, seed=7)) is None


def test_results_of_another_version_of_their_method_do_not_count(small_field, runs, words, tmp_path, monkeypatch):
    runs.diverging = ("local", 20, 0.03)
    assert queue.main([*words, "--only", "field/local"]) == 0

    def versions():
        return [record["version"] for record in stored(tmp_path, "field").values()]

    assert versions() == [1, 1, 1]
    # Other sources of the same version are no reason to run anything again.
    monkeypatch.setattr(version, "own_version", lambda: "edited")
    monkeypatch.setattr(results, "commit_of", lambda digest: None)
    count = len(runs.done)
    assert queue.main([*words, "--only", "field/local"]) == 0
    assert len(runs.done) == count
    monkeypatch.setattr(version, "version_of", lambda factory: 2)
    assert ResultStore(tmp_path / "results").named == {}
    # Its folder has those of the other version.
    assert queue.main([*words, "--only", "field/local"]) == 2
    assert queue.main([*words, "--only", "field/local", "--out", str(tmp_path / "anew")]) == 0
    assert len(runs.done) == 2 * count
    assert versions() == [2, 2, 2]


def test_the_commit_is_the_one_whose_sources_made_the_run(tmp_path, monkeypatch):
    def git(*words):
        line = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(line, check=True, capture_output=True, text=True).stdout.strip()

    package = tmp_path / "library"
    (package / "part").mkdir(parents=True)
    monkeypatch.setattr(version, "PACKAGE", package)
    git("init", "-q")
    commits = {}
    for content in ("one = 1\n", "two = 2\n"):
        (package / "part" / "a.py").write_text(content)
        git("add", "-A")
        git("commit", "-qm", "x")
        commits[version.own_version.__wrapped__()] = git("rev-parse", "HEAD")
    assert len(commits) == 2
    assert {digest: version.commit_of(digest) for digest in commits} == commits
    assert version.commit_of("0" * 12) is None


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", "is damaged"),
        ('{"run": "a/b/seed-0"}\n{"run": "a/b/seed-0"}', "is damaged"),
        ('{"run": "a/b/seed-0"}', "a/b/seed-0 has no 'command'"),
        (json.dumps({"run": "a/b/seed-0"} | dict.fromkeys(set(committed.FIELDS) - {"version"})), "has no 'version'"),
    ],
)
def test_a_damaged_result_is_one_line(runs, words, tmp_path, capsys, line, expected):
    (tmp_path / "results/queue").mkdir(parents=True)
    (tmp_path / "results/queue/table-1.jsonl").write_text(f"{line}\n")
    assert queue.main([*words, "--dry-run"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert expected in err
