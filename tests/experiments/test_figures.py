"""The papers' figures: their runs, what is made of results, and the command from end to end."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from run_folders import FakeRuns

from experiments import figures
from experiments.commands import batch, paper_figures
from experiments.commands.figure import compose
from experiments.commands.paper_figures import FIGURES, SHARES, by_group, equal_steps, heat_rounds, replace_first
from experiments.figures import main
from experiments.folder import stored_runs
from experiments.run import run
from experiments.show.pictures import draw
from experiments.spec.option_notes import option_words

pytestmark = pytest.mark.without_f1_auc

EVERY = [(paper, number) for paper, figures in FIGURES.items() for number in figures]
SMALL = ["--num-clients", "4", "--train-size", "20", "--test-size", "10", "--rounds", "2", "--epochs", "1"]


def every_runs(paper, number, *words, folder="here"):
    """Runs on each dataset of a command."""
    return batch.read(figures.Figures, ["--paper", paper, "--figure", number, "--out", str(folder), *words]).every


@pytest.fixture(autouse=True)
def without_folder(monkeypatch, tmp_path):
    """Runs are made in the test's folder, and replaced parameters are not measured."""
    monkeypatch.chdir(tmp_path)
    scores = {"highest": 0.1, "at_random": 0.3}

    def replaced(runs):
        # A client without a score, and large ones with twice the accuracy of the others.
        large = np.arange(20) % 2 == 0
        found = {name: np.tile(np.where(large, 2 * value, value), (len(SHARES), 1)) for name, value in scores.items()}
        for rows in found.values():
            rows[:, :2] = np.nan
        return [found | {"test_count": np.where(large, 30, 10)}]

    monkeypatch.setattr(paper_figures, "replaced", replaced)


def info(clients, number):
    """What a round's Info has, in the order of the cohort, which is the reverse of the clients'."""
    rows = np.arange(1.0, clients**2 + 1).reshape(clients, clients) + number
    return {"head_weights": rows[::-1, ::-1], "trace": rows[0][::-1], "weights": rows[0][::-1] / 1000}


def finished(paper, number, folder, *words, is_real=False, accuracies=lambda options: [0.5, 0.4]):
    """The figure's runs on each dataset, with made-up results."""
    fake = FakeRuns()
    fake.is_real, fake.accuracies, fake.info = is_real, accuracies, info
    every = every_runs(paper, number, *words, folder=folder)
    jobs = {job.folder: job for runs in every for of_key in runs.jobs.values() for job in of_key}
    for job in jobs.values():
        fake(job.spec.in_folder(job.folder))
    return every


# The runs of every figure.


@pytest.mark.parametrize(("paper", "number"), EVERY)
def test_the_runs_of_every_figure_parse_and_differ(paper, number):
    for runs in every_runs(paper, number, "--seeds", "2"):
        firsts = [jobs[0].spec for jobs in runs.jobs.values()]
        assert [job.spec.seed for job in next(iter(runs.jobs.values()))] == [0, 1]
        # FedAS's Figure 7 has its usual setting in both panels, which is made once.
        once = len(firsts) - ((paper, number) == ("fedas", "7"))
        assert len({spec.command() for spec in firsts}) == once
        assert len({job.folder for jobs in runs.jobs.values() for job in jobs}) == 2 * once


def test_batch_sizes_and_epochs_are_compared_at_equal_steps(tmp_path):
    (runs,) = every_runs("fedas", "7")
    for (job,) in runs.jobs.values():
        request = job.spec
        own = request.hyper_parameters
        assert request.rounds * own["epochs"] / own["batch_size"] == 40 * 5 / 16
    assert (equal_steps(40, 0.2), equal_steps(1, 4)) == (200, 1)


def test_chosen_methods_rounds_and_words_reach_every_run(tmp_path):
    words = ["--method", "fedas", "fedper", "--rounds", "3", "--train-size", "30"]
    runs, _ = every_runs("fedas", "5", *words)
    # The paper's own method is drawn last, over the others.
    assert runs.methods == ("fedper", "fedas")
    for (job,) in runs.jobs.values():
        options = job.spec
        assert (options.rounds, options.train_size) == (3, 30)
    assert option_words({"alignment": False, "beta": 0.5, "s": 20}) == ["--no-alignment", "--beta", "0.5", "--s", "20"]


# From results to pictures.


@pytest.mark.parametrize(("paper", "number", "is_real"), [*((*one, False) for one in EVERY), ("fedas", "4", True)])
def test_every_figure_says_what_it_is_and_on_which_data(paper, number, is_real, tmp_path):
    content, every = FIGURES[paper][number], finished(paper, number, tmp_path, is_real=is_real)
    picture = compose(every)
    assert picture.title.startswith(f"{content.title}: ")
    for dataset in content.datasets:
        label = dataset if is_real else f"{dataset} (embedded digits)"
        assert label in picture.title or any(label in panel.title for panel in picture.panels)
        assert label in picture.caption
    assert ("Not the paper's setting, but --" in picture.caption) == (not is_real)
    draw(picture)
    # Strict JSON: no NaN.
    json.dumps(picture.record(), allow_nan=False)


# Those of Figure 5 that are measured otherwise have all clients; Figure 7 shows single rounds.
@pytest.mark.parametrize(("number", "shown"), [("5", "2 to 20 of 20 clients"), ("7", "4 of 20 clients")])
def test_means_over_some_clients_are_told_apart(number, shown, tmp_path):
    """Of trained models a round has those of the clients that were drawn until then."""
    (runs, *_) = finished("fedas", number, tmp_path, is_real=True, accuracies=lambda options: [0.5, 0.5])
    full = [panel.title for panel in compose([runs]).panels]
    assert not any("over" in title for title in full)
    for jobs in runs.jobs.values():
        for job in jobs:
            log = [json.loads(line) for line in (job.folder / "metrics.jsonl").read_text().splitlines()]
            for many, line in zip((2, 4), log, strict=True):
                line["trained"]["clients"] = many
            (job.folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in log))
    titles = [panel.title for panel in compose([dataclasses.replace(runs)]).panels]
    assert titles == [f"{title}; over {shown}" for title in full]


def test_sweeps_show_the_last_round_of_each_run(tmp_path):
    (runs,) = finished(
        "fedpac", "1", tmp_path, "--seeds", "2", accuracies=lambda o: [0.9, (o.s + o.train_size + o.seed) / 10000]
    )
    heterogeneity, sizes = compose([runs]).panels
    for _, (_, s, y, low, high) in heterogeneity.frame.iterrows():
        # 300 training examples on a stand-in.
        np.testing.assert_allclose([y, high - low], [3.005 + s / 100, 0.01], atol=1e-3)
    assert set(heterogeneity.frame.iloc[:, 1]) == {0, 20, 40, 60, 80}
    assert sizes.frame.line.unique().tolist()[-1] == sizes.draw.keywords["main"] == "fedpac"


def test_hyper_parameters_are_shown_about_their_mean(tmp_path):
    (runs,) = finished(
        "fedas", "7", tmp_path, "--seeds", "2", accuracies=lambda o: [0.6 + o.seed / 10 + o.rounds / 1000] * 2
    )
    epochs = compose([runs]).panels[1]
    rounds = np.array([equal_steps(40, step / 5) for step in (1, 2, 5, 10)])
    # Each seed about its own mean: the second seed's runs are all better by as much.
    for values in epochs.frame.iloc[:, 2:].to_numpy().T:
        np.testing.assert_allclose(values, (rounds - rounds.mean()) / 10, atol=1e-3)
    # FedAS's measure, as in its tables: trained models, pooled, in the best round.
    assert f"mean {57.5 + rounds.mean() / 10:.1f} %" in epochs.title


def test_replaced_parameters_are_measured_as_the_paper_does(tmp_path):
    finished("fedas", "3", tmp_path)
    for average, factor in (("examples", 1.75), ("clients", 1.5)):
        (runs,) = every_runs("fedas", "3", "--average", average, folder=tmp_path)
        found = compose([runs]).panels[0].frame.groupby("line", sort=False)["accuracy in %"].first()
        # Of two clients one has three quarters of the examples, and twice the accuracy.
        np.testing.assert_allclose(found, [30 * factor, 10 * factor])
    # Means over the cohort.
    _, rounds, traces, *_ = compose([runs]).panels[1].frame.items()
    np.testing.assert_allclose(traces[1], [info(20, number)["trace"].mean() for number in rounds[1]])


@pytest.mark.parametrize(
    ("figure", "words", "values"),
    [
        ("fedas 5", "", [62.5, 52.5]),
        # Its released code measures them before aggregation, and runs the one in place of the other.
        ("fedas 5", "--method fedper", [52.5, 42.5]),
        ("fedas 5", "--method fedavg_ft", [52.5, 42.5]),
        ("fedas 5", "--method fedavg_ft --procedure print", [72.5, 62.5]),
        ("fedas 5", "--method fedala --eval-protocol trained", [62.5, 52.5]),
        ("fedas 5", "--eval-protocol received", [72.5, 62.5]),
        ("fedpac 1", "--score best", [70] * 5),
    ],
)
def test_what_is_drawn_is_what_was_asked_for(figure, words, values, tmp_path, monkeypatch):
    fake = FakeRuns()
    fake.accuracies = lambda options: [0.7, 0.6]
    monkeypatch.setattr(run, "run", fake)
    monkeypatch.setattr(figures, "save", lambda *_: None)
    paper, number = figure.split()
    chosen = ["--paper", paper, "--figure", number, "--dataset", "digits", "--out", str(tmp_path), *words.split()]
    assert main([*chosen, *([] if "--method" in words else ["--method", paper])]) == 0
    record = json.loads((tmp_path / f"{paper}-figure-{number}.json").read_text())
    np.testing.assert_allclose([row[2] for row in record["panels"][0]["frame"]["data"]], values)
    # The paper's own method stands out.
    assert record["panels"][0]["main"] == ("" if "--method" in words else paper)


def test_stragglers_and_online_clients_stand_apart(tmp_path, monkeypatch):
    (runs,) = finished("fedas", "4", tmp_path)
    monkeypatch.setattr("pfl_jax.simulate.stragglers", lambda key, clients, share: np.arange(clients) % 2 == 0)
    _, draw, frame, _ = compose([runs]).panels[0]
    weights = info(20, 20)["weights"][::-1]
    for name, first in (("online clients", 1), ("stragglers", 0)):
        assert frame[name].dropna().to_dict() == pytest.approx({i: weights[i] for i in range(first, 20, 2)})
    assert draw.keywords["level"] == 1 / 20


def test_head_weights_are_shown_group_by_group():
    assert heat_rounds(range(1, 51)) == [1, 20, 50]
    assert (heat_rounds([1]), heat_rounds([7, 14, 20])) == ([1], [7, 20])
    group = np.arange(7) % 3
    frame, blocks = by_group((group[:, None] == group).astype(float), 3)
    assert blocks == [3, 2, 2]
    np.testing.assert_array_equal(frame, jax.scipy.linalg.block_diag(*[np.ones((size, size)) for size in blocks]))


def test_head_weights_are_of_the_clients_and_their_statistics_are_said(tmp_path):
    (runs,) = finished("fedpac", "2", tmp_path, "--seeds", "2")
    # Ten classes are five groups.
    expected, _ = by_group(info(20, 1)["head_weights"][::-1, ::-1], 5)
    np.testing.assert_allclose(compose([runs]).panels[0].frame, expected)
    words = ("--covariance", "empirical")
    (asked,) = finished("fedpac", "2", tmp_path / "asked", *words, is_real=True)
    assert "Not the paper's setting, but --covariance empirical." in compose([asked]).caption
    log = runs.jobs["s=0",][0].folder / "metrics.jsonl"
    log.write_text(log.read_text().replace("head_weights", "other"))
    assert "digest" not in (log.parent / "summary.json").read_text()
    with pytest.raises(figures.InvalidInput, match="has no head_weights"):
        compose([dataclasses.replace(runs)])


# Replaced parameters.


def test_replace_first_takes_the_highest_scores():
    generator = np.random.default_rng(0)
    trees = [{"a": generator.normal(size=(3, 4)), "b": generator.normal(size=8)} for _ in range(3)]
    params, fresh, scores = (jax.tree.map(jnp.float32, tree) for tree in trees)
    flat = [np.concatenate([tree["a"].ravel(), tree["b"]]) for tree in trees]
    for share, count in ((0, 0), (0.05, 1), (0.5, 10), (1, 20)):
        want = np.where(np.argsort(np.argsort(-flat[2])) < count, flat[1], flat[0])
        got = replace_first(params, fresh, scores, share)
        np.testing.assert_allclose(np.concatenate([np.ravel(got["a"]), got["b"]]), want, rtol=1e-6)


# The command.


@pytest.mark.slow
def test_fisher_information_from_end_to_end(tmp_path, monkeypatch):
    monkeypatch.undo()
    words = ["--paper", "fedas", "--figure", "3", "--dataset", "digits", *SMALL, "--out", str(tmp_path)]
    assert main(words) == 0
    panels = json.loads((tmp_path / "fedas-figure-3.json").read_text())["panels"]
    replaced, growth = (pd.DataFrame(**panel["frame"]) for panel in panels)
    accuracies = {name: rows["accuracy in %"].tolist() for name, rows in replaced.groupby("line")}
    at_random, highest = accuracies["random parameters"], accuracies["highest Fisher information"]
    # Nothing replaced: the clients' own models, which the run has evaluated as `trained`.
    trained = stored_runs.read(tmp_path / "digits-fedas" / "seed-0").accuracy("trained", "last", "examples")
    assert highest[0] == at_random[0] == pytest.approx(trained, abs=1e-3)
    # Replaced parameters are other ones.
    assert highest != at_random
    assert min(highest) < highest[0]
    assert growth["round"].tolist() == [1, 2]
    assert growth.iloc[:, 2].min() > 0
