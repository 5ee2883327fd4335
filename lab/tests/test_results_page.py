"""What docs/results.md and README's table say of results, and what is open."""

import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
from run_folders import write_run

from experiments import fashion_mnist
from experiments.commands.paper_table import Entry
from experiments.papers.settings import PAPERS
from experiments.spec.option_notes import option_words
from experiments.spec.spec import stored_options
from lab import committed, results
from lab.committed import ResultStore
from lab.pages import compared
from lab.pages.compared import SECTIONS, published_in
from lab.pages.results import page, readme_table
from lab.queue.field import FIELDS, possible_runs, search_runs, tuned_run
from lab.queue.planned import planned_runs
from pfl_jax.data import sites

ROOT = committed.ROOT.parent
RUNS = {run.name: run for run in (*planned_runs(), *possible_runs())}
MAIN = "fashion_mnist-20-clients-grouped-s=20"
ROUNDS = (10, 100, 200)
SENT = 1_000_000 // 20 // 1000
"""What a client of `write_run` sends in a round, in kB."""


def store(tmp_path, name, level, **rounds):
    """Commits a run of these percent in its first evaluation and two more in its last; returns the mean of the last."""
    run, folder = RUNS[name], tmp_path / "runs" / name
    accuracies = write_run(folder, option_words(run.options), dataset=run.dataset, seed=run.seed, rounds=ROUNDS)
    accuracies += level - 80.0
    record = results.distill(folder)
    means = accuracies.mean(1)
    record["rounds"]["received"]["mean"], record["rounds"]["trained"]["mean"] = means.tolist(), (means - 1).tolist()
    record["rounds"] |= rounds
    results.store(run, record | {"commit": None, "summary": {"seconds": 3600.0}}, tmp_path / "results")
    shutil.rmtree(folder)
    return means[-1]


def made(tmp_path):
    library = ResultStore(tmp_path / "results")
    found = compared.compared(library, [])
    return page(library, found), readme_table(library, found)


def line_of(text, start, section=None):
    """The first line that starts so, below a heading."""
    text = text if section is None else text.split(f"## {section}")[1]
    return next(line for line in text.splitlines() if line.startswith(start))


def single(text, paper, table, method):
    """The row of a place in the table of those whose own table is not finished."""
    source = {"fedpac": "FedPAC", "fedpac_replication": "FedPAC replication"}[paper]
    return line_of(text, f"| {source}, Table {table}; 20 clients | `{method}` ", "Rows of tables")


def test_a_place_has_ours_the_papers_and_the_difference(tmp_path):
    means = [store(tmp_path, f"{MAIN}/fedpac/seed-{seed}", level) for seed, level in ((0, 89.0), (1, 90.0), (2, 89.5))]
    mean, std = np.mean(means), np.std(means, ddof=1)
    text = made(tmp_path)[0]
    every = list(ResultStore(tmp_path / "results").named.values())
    ends = [one.curve("received") for one in every]
    error = Entry(published_in(SECTIONS[0])[0], every, PAPERS["fedpac"].measure).error
    last = f"{np.min(ends):.2f} to {np.max(ends):.2f}"
    apart = f"{mean - 91.83:+.2f} ± {error:.2f}"
    expected = (
        f"| `fedpac` | {mean:.2f} ± {std:.2f} (3) | 91.83 | {apart} | {last} | {mean - 1:.2f} | {mean - 92.83:+.2f} |"
    )
    assert expected in single(text, "fedpac", 1, "fedpac")
    assert expected in single(text, "fedpac", 2, "fedpac")
    # The replication's FedPAC is the same run beside another figure.
    other = single(text, "fedpac_replication", 1, "fedpac (replicated)")
    assert f"| {mean:.2f} ± {std:.2f} (3) | 91.95 | {mean - 91.95:+.2f} ± {error:.2f} |" in other
    readme = made(tmp_path)[1]
    assert f"| `fedpac` | {mean:.2f} ± {std:.2f} (3) | 91.83 | {apart} |" in readme
    # README has all places of the main table, the page no place without a run.
    assert "| `local` | — | 85.68 | — |  |" in readme
    assert "`local`" not in text.split("## All methods")[0]


def test_the_header_of_the_experiment_has_the_committed_accuracy():
    result = ResultStore().named[f"{MAIN}/fedpac/seed-0"]
    assert f"Here: {result.accuracy('received'):.2f} % received." in fashion_mnist.__doc__


def validated(tmp_path, run, level, validation):
    """Commits a run with an accuracy on validation examples; returns its mean of the last round."""
    return store(tmp_path, run.name, level, validation={"received": {"mean": [validation] * len(ROUNDS)}})


def test_a_tuned_method_has_the_rate_that_validation_chooses_and_the_mean_of_its_seeds(tmp_path):
    tried, rate = search_runs("field-digits", "ditto"), FIELDS["field-digits"].rates[1]
    levels = [(90.0, 60), (80.0, 75), *[(85.0, 70)] * (len(tried) - 2)]
    first = [validated(tmp_path, run, *level) for run, level in zip(tried, levels, strict=True)][1]
    # Another method has not finished.
    store(tmp_path, search_runs("field-digits", "local")[0].name, 99.0)
    start = f"| `ditto` | {rate} | 75.00 |"
    text = made(tmp_path)[0]
    assert line_of(text, start, "All methods") == f"{start} {first:.2f} | {first - 1:.2f} | {SENT} |"
    assert f"{len(tried) + 1} runs have finished" in text.split("### digits")[1]
    assert "| `local` " not in text.split("### digits")[1].split("###")[0]
    others = [store(tmp_path, tuned_run("field-digits", "ditto", rate, seed).name, 81.0 + seed) for seed in (1, 2)]
    mean, spread = np.mean([first, *others]), f"± {np.std([first, *others], ddof=1):.2f} (3)"
    want = f"{start} {mean:.2f} {spread} | {mean - 1:.2f} {spread} | {SENT} |"
    assert line_of(made(tmp_path)[0], start, "All methods") == want


BEST = {"received": 71.5, "trained": 73.25}


def test_fedas_columns_are_pooled_as_its_tables_are(tmp_path):
    place = "fashion_mnist-20-clients-dirichlet-beta=0.1-participation=0.2/fedas/seed-0"
    for method in ("fedper", "fedala", "fedavg", "fedas"):
        # A setting is shown once all its methods have a run.
        assert "FedAS's Dirichlet partitions" not in made(tmp_path)[0]
        pooled = {protocol: {"pooled": [best - 2, best, best - 1]} for protocol, best in BEST.items()}
        store(tmp_path, place.replace("fedas", method), 80.0, **pooled)
    line = line_of(made(tmp_path)[0], "| 0.1 | 0.2 |", "FedAS's Dirichlet partitions")
    assert line == f"| 0.1 | 0.2 |{' 71.50 / 73.25 |' * 4}"


def options_of(command):
    """Options of a command line, each with its last values, paths without folders; 20.0 is 20."""
    parts = [part.split() for part in command.replace("'", "").split(" --")[1:]]
    last = {name: tuple(Path(word).name.removesuffix(".0") for word in words) for name, *words in parts}
    return set(last.items())


def can_be_read(dataset):
    package, _ = sites.INSTALLED.get(dataset, (None, None))
    return package is None or importlib.util.find_spec(package) is not None


def test_each_committed_result_is_the_run_that_its_name_says():
    library, found_in = ResultStore(), set()
    for file in committed.ROOT.glob("queue/*.jsonl"):
        for name, record in committed.read(file).items():
            run = RUNS[name]
            assert run.block == file.stem
            if "error" in record:
                assert options_of(record["command"]) == options_of(run.spec.command())
                continue
            config, asked = record["config"], options_of(run.spec.command())
            had = options_of(" ".join(["", *option_words(stored_options(config) | config["hyper_parameters"])]))
            # To look for every run would take its time: one of each block, and those with options beyond the queue's.
            looked_for = run.block not in found_in or not options_of(record["command"]) <= asked
            if name in library.named and looked_for and can_be_read(run.dataset):
                found_in.add(run.block)
                assert library.find(run.spec) is library.named[name], name
            assert asked <= had, name
            assert config["data"]["is_real"], name
            assert len(json.dumps(record)) < 40_000
