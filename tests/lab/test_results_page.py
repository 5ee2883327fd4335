"""What docs/results.md and README's table say of results, and what is open."""

import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from run_folders import write_run

from experiments import comparison, fashion_mnist
from experiments.cli.command import RunCommand
from experiments.fields import option_words
from experiments.folder import committed
from experiments.folder.committed import ResultStore
from experiments.lab import causes, results
from experiments.lab.pages import compared
from experiments.lab.pages.compared import SECTIONS, published_in
from experiments.lab.pages.results import METHODS, compared_clients, page, picture, readme_table
from experiments.lab.queue.field import FIELDS, Comparison, possible_runs, search_runs, tuned_run
from experiments.lab.queue.planned import planned_runs, reading_run
from experiments.papers.settings import PAPERS
from experiments.spec import stored_options
from experiments.tables.comparison import Entry, entry
from pfl_jax.compare import difference
from pfl_jax.data import sites

ROOT = committed.ROOT.parent
RUNS = {run.name: run for run in (*planned_runs(), *possible_runs())}
MAIN = "fashion_mnist-20-clients-grouped-s=20"
ROUNDS = (10, 100, 200)
SENT = 1_000_000 // 20 // 1000
"""What a client of `write_run` sends in a round, in kB."""


def store(tmp_path, name, level, note="", **rounds):
    """Commits a run of these percent in its first evaluation and two more in its last; returns the mean of the last."""
    run, folder = RUNS[name], tmp_path / "runs" / name
    accuracies = write_run(folder, run.cell.arguments, dataset=run.cell.dataset, seed=run.cell.seed, rounds=ROUNDS)
    accuracies += level - 80.0
    record = results.distill(folder)
    record["config"]["data"] |= {"note": note}
    means = accuracies.mean(1)
    record["rounds"]["received"]["mean"], record["rounds"]["trained"]["mean"] = means.tolist(), (means - 1).tolist()
    # Other rounds have no columns but these.
    record["rounds"] = rounds if "round" in rounds else record["rounds"] | rounds
    record["config"] |= {"procedure": name} if (name := run.cell.spec().kind_of_rounds) else {}
    results.store(run, record | {"commit": None, "summary": {"seconds": 3600.0}}, tmp_path / "results")
    shutil.rmtree(folder)
    return means[-1]


def made(tmp_path, causes=()):
    library = ResultStore(tmp_path / "results")
    found = compared.compared(library, causes)
    return page(library, found), readme_table(library, found)


def line_of(text, start, section=None):
    """The first line that starts so, below a heading."""
    text = text if section is None else text.split(f"## {section}")[1]
    return next(line for line in text.splitlines() if line.startswith(start))


def single(text, paper, table, method):
    """The row of a place in the table of those whose own table is not finished."""
    source = {"fedpac": "FedPAC", "fedpac_replication": "FedPAC replication"}[paper]
    return line_of(text, f"| {source}, Table {table}; 20 clients | `{method}` ", "Rows of tables")


def test_a_copy_of_cifar_10_has_a_table_of_its_own(tmp_path):
    assert "CIFAR-100, CINIC-10" not in made(tmp_path)[0]
    mean = store(tmp_path, "cifar10-20-clients-grouped-s=20/fedpac/seed-0", 80.0, note="JPEG copy")
    text, readme = made(tmp_path)
    row = line_of(text, "| FedPAC, Table 2 | `fedpac` |", "cifar10, JPEG copy")
    assert f"| {mean:.2f} | 81.13 | {mean - 81.13:+.2f} ± " in row
    assert "[on CIFAR-10](#cifar10-jpeg-copy)" in text
    assert "[On cifar10, JPEG copy](docs/results.md#cifar10-jpeg-copy): " in readme
    assert f"`fedpac` {mean:.2f} (paper 81.13, {mean - 81.13:+.2f} ± " in readme
    # Fashion-MNIST's counts are without it.
    rows = [row for section in SECTIONS for row in published_in(section)]
    assert f"| no finished run yet | {len(rows) - 4} | 4 |" in text


def test_a_place_has_ours_the_papers_and_the_difference(tmp_path):
    means = [store(tmp_path, f"{MAIN}/fedpac/seed-{seed}", level) for seed, level in ((0, 89.0), (1, 90.0), (2, 89.5))]
    mean, std = np.mean(means), np.std(means, ddof=1)
    text = made(tmp_path)[0]
    every = list(ResultStore(tmp_path / "results").named.values())
    ends = [one.curve("received") for one in every]
    error = entry(published_in(SECTIONS[0])[0], every, PAPERS["fedpac"].measure).error
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


def test_only_the_last_evaluations_are_in_the_range(tmp_path):
    values = {"mean": [10.0, *[80.0] * 8, 81.5, 79.25]}
    store(tmp_path, f"{MAIN}/fedper/seed-0", 84.0, round=list(range(11)), received=values, trained=values)
    assert "| 79.25 | 87.43 | -8.18 | 79.25 to 81.50 |" in single(made(tmp_path)[0], "fedpac", 1, "fedper")


def test_a_finished_table_stands_by_itself_and_says_what_collaboration_adds(tmp_path):
    folders = [f"fedpac{name}" for name in ("", "-no-collaboration", "-no-alignment", "-no-alignment-no-collaboration")]
    first, second, *_ = [store(tmp_path, f"{MAIN}/{name}/seed-0", 89.0 - at / 8) for at, name in enumerate(folders)]
    text = made(tmp_path)[0]
    table = text.split("## FedPAC, Table 2")[1].split("##")[0]
    assert table.count("| `fedpac") == 4
    assert f"adds {first - second:.2f} points to the alignment alone here, and 2.09 in the paper: that" in table
    assert "is not reproduced" in table
    assert "FedPAC, Table 2;" not in text


def cause_of(method):
    (found,) = [cause for cause in causes.load("fashion_mnist") if cause.row.method == method]
    return found


def test_it_counts_what_agrees_and_what_is_known_of_the_rest(tmp_path):
    close = store(tmp_path, f"{MAIN}/lg_fedavg/seed-0", 83.7)
    far = store(tmp_path, f"{MAIN}/fedbabu/seed-0", 70.0)
    other = store(tmp_path, f"{MAIN}/ditto/seed-0", 95.0)
    assert abs(close - 85.66) < 1 < min(abs(far - 89.68), abs(other - 90.43))
    cause = cause_of("fedbabu")
    assert cause.options == ("--finetune-epochs", "10")

    every = sum(map(len, map(published_in, SECTIONS)))

    def verdict():
        text = made(tmp_path, [cause])[0]
        starts = ("within", *(f"further away, {kind}" for kind in ("cause s", "supposed", "cause p", "o")))
        counts = [int(line_of(text, f"| {start}").split("|")[2]) for start in starts]
        assert int(line_of(text, "| no finished").split("|")[2]) == every - 4 - 3
        assert (counts[0], counts[-1]) == (1, 1)
        assert single(text, "fedpac", 1, "lg_fedavg").endswith("|  |")
        assert single(text, "fedpac", 1, "ditto").endswith("| open |")
        (row,) = [line for line in made(tmp_path, [cause])[1].splitlines() if "`fedbabu`" in line]
        last = single(text, "fedpac", 1, "fedbabu").split("|")[-2].strip()
        name = last.partition(":")[0]
        assert row.endswith(f"| {name} |")
        assert counts[1:4] == [int(name == kind) for kind in ("supported", "refuted", "plausible")]
        return last

    # Without the run that would show it, over all rounds, a cause is only plausible.
    assert verdict() == f"plausible: {cause.cause} `--finetune-epochs 10`: not run yet."
    for level, name in ((88.0, "supported"), (80.0, "refuted")):
        mean = store(tmp_path, f"{MAIN}/fedbabu-finetune-epochs-10/seed-0", level)
        told = f"{name}: {cause.cause} `--finetune-epochs 10`: {mean:.2f} ({mean - 89.68:+.2f} ± "
        assert verdict().startswith(told)
    readme = made(tmp_path)[1]
    have = f"of {every} published Fashion-MNIST accuracies have a run, from"
    assert f"3 {have} 3 different runs;\n1 of these" in readme
    # The same run in three tables and the replication's: close to two figures, and further from the others.
    store(tmp_path, f"{MAIN}/fedpac/seed-0", 90.0)
    text, readme = made(tmp_path)
    same = RunCommand.of(published_in(SECTIONS[0])[-1]).command()
    commands = [RunCommand.of(row).command() for section in SECTIONS for row in published_in(section)]
    assert commands.count(same) >= 4
    assert f"{3 + commands.count(same)} {have} 4 different runs;\n2 of these" in readme
    assert line_of(text, "| all |") == f"| all | {every - 4} | 4 | {len(set(commands))} |"


def test_the_point_of_measurement_is_a_plausible_cause_where_the_accuracy_after_training_fits(tmp_path):
    # `trained` is a point below.
    mean = store(tmp_path, f"{MAIN}/apfl/seed-0", 88.4)
    store(tmp_path, f"{MAIN}/ditto/seed-0", 80.0)
    close = store(tmp_path, f"{MAIN}/local/seed-0", 82.8)
    assert 1 < mean - 89.45 < 2
    assert 85.68 - 1 < close < 85.68
    text = made(tmp_path)[0]
    row = single(text, "fedpac", 1, "apfl")
    assert row.endswith(f"| {mean - 90.45:+.2f} | plausible: the paper may measure after local training |")
    assert single(text, "fedpac", 1, "ditto").endswith("| open |")
    said = text[text.index("*trained - paper*") :].partition("\n- ")[0]
    closer, further, lost = " ".join(said.split("point that come")[1].split()).split(". ")
    assert "`apfl` of FedPAC Table 1" in closer
    assert "`ditto` of FedPAC Table 1" in further
    assert "`local` of FedPAC Table 1" in lost


def test_other_readings_of_the_replication_stand_beside_the_paper(tmp_path):
    assert "Other readings" not in made(tmp_path)[0]
    for method in ("fedpac", "fedpac_proto-modified"):
        store(tmp_path, f"{MAIN}/{method}/seed-0", 86.0)
    run = reading_run("printed_index")
    mean = store(tmp_path, run.name, 70.0)
    row = line_of(made(tmp_path)[0], "| Eq. 13 as printed")
    assert row.endswith(f"| {mean:.2f} | 92.03 | {mean - 92.03:+.2f} | {mean - 1:.2f} |")


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


def test_methods_with_all_seeds_are_compared_client_by_client(tmp_path):
    rate = FIELDS["field-digits"].rates[0]
    for method, level in (("ditto", 85.0), ("local", 80.0)):
        for run in search_runs("field-digits", method):
            validated(tmp_path, run, level, 70 if run.name.endswith(f"={rate}/seed-0") else 60)
    assert "minus ditto" not in made(tmp_path)[0]
    for method, level in (("ditto", 85.0), ("local", 80.0)):
        for seed in (1, 2):
            store(tmp_path, tuned_run("field-digits", method, rate, seed).name, level)
    library = ResultStore(tmp_path / "results")
    names = {
        name: [tuned_run("field-digits", name, rate, seed).name for seed in range(3)] for name in ("ditto", "local")
    }
    scores = {name: [library.named[one].lines[-1]["received_per_client"] for one in names[name]] for name in names}
    best, other = sorted(scores, key=lambda name: -np.mean(scores[name]))
    found = difference(*([np.array(row) for row in scores[name]] for name in (other, best)))
    (row,) = [line for line in made(tmp_path)[0].splitlines() if line.startswith(f"| `{other}`") and " to " in line]
    assert f"| {found.mean:+.2f} | {found.low:+.2f} to {found.high:+.2f} | {100 * found.worse:.0f} % |" in row
    (panel,) = comparison.ranks(compared_clients(Comparison("field-digits", library))).panels
    assert set(panel.names) == set(scores)


def test_a_shorter_search_chooses_the_rate_of_the_tuned_run(tmp_path):
    searches = search_runs("field", "ditto")
    for run, validation in zip(searches, (60, 75, 70), strict=True):
        validated(tmp_path, run, 80.0, validation)
    section = made(tmp_path)[0].split("### fashion_mnist")[1]
    assert "compared after 20 rounds, to save time" in section
    # Without a run of all rounds there is nothing to compare.
    assert "| `ditto` |" not in section
    rate = FIELDS["field"].rates[1]
    mean = store(tmp_path, tuned_run("field", "ditto", rate).name, 85.0)
    text = made(tmp_path)[0]
    assert (
        line_of(text, "| `ditto` | 0", "All methods")
        == f"| `ditto` | {rate} | 75.00 | {mean:.2f} | {mean - 1:.2f} | {SENT} |"
    )
    assert f"{len(searches) + 1} runs have finished" in text.split("### fashion_mnist")[1]


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
                assert options_of(record["command"]) == options_of(run.cell.command())
                continue
            config, asked = record["config"], options_of(run.cell.command())
            had = options_of(" ".join(["", *option_words(stored_options(config) | config["hyper_parameters"])]))
            # To look for every run would take its time: one of each block, and those with options beyond the queue's.
            looked_for = run.block not in found_in or not options_of(record["command"]) <= asked
            if name in library.named and looked_for and can_be_read(run.cell.dataset):
                found_in.add(run.block)
                assert library.find(run.cell.spec()) is library.named[name], name
            assert asked <= had, name
            assert config["data"]["is_real"], name
            assert len(json.dumps(record)) < 40_000


def test_the_figure_has_curves_and_the_papers_marks(tmp_path):
    means = [store(tmp_path, f"{MAIN}/fedper/seed-{seed}", level) for seed, level in ((0, 84.0), (1, 86.0))]
    store(tmp_path, f"{MAIN}/local/seed-0", 84.0)
    shown = picture(ResultStore(tmp_path / "results"))
    (panel,) = shown.panels
    assert [series.label for series in panel.series] == [name for name in METHODS if name in ("fedper", "local")]
    line = panel.series[0]
    assert (line.x, line.y[-1]) == ([10, 100, 200], pytest.approx(np.mean(means)))
    assert line.mark == (pytest.approx(206.0), 87.43)
    assert "Fashion-MNIST, 20 clients, 1 to 2 seeds; diamonds" in shown.caption
    store(tmp_path, f"{MAIN}/ditto/seed-0", 84.0)
    assert picture(ResultStore(tmp_path / "results")).digest() != shown.digest()


def test_a_difference_of_a_point_is_close():
    row = published_in(SECTIONS[0])[0]

    def is_close(difference):
        entry = Entry(row, {0: row.accuracy_percent + difference}, "fashion_mnist", True, {}, row.measure)
        return compared.is_close(entry)

    # As the page shows it, with two decimals.
    assert [is_close(difference) for difference in (1.004, -1.004, 1.006)] == [True, True, False]
