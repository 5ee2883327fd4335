"""The papers' figures: their runs, what is made of results, how it is drawn, and the command from end to end."""

import dataclasses
import itertools
import json
import xml.etree.ElementTree as ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import tiny_federation, tiny_model

from experiments.cli import parser, presets
from experiments.cli.options import option_words
from experiments.cli.request import parse
from experiments.cli.run_command import RunCommand
from experiments.figures import __main__ as figures
from experiments.figures import fedpac, substitution
from experiments.figures.__main__ import Figures, main
from experiments.figures.compose import compose
from experiments.figures.fedas import SHARES, equal_steps
from experiments.figures.fedpac import by_group, heat_rounds
from experiments.figures.figure import Results, arrays_path
from experiments.figures.index import FIGURES
from experiments.figures.substitution import accuracies_after_replacement, replace_first
from experiments.folder import load
from experiments.papers import settings
from experiments.run import batch, run
from experiments.run.estimate import examples_visited
from experiments.show import drawing
from experiments.show.pictures import Bars, Heat, Lines, Picture, Series, over_seeds
from pfl_jax.data.federated import client_data
from pfl_jax.primitives.metrics import score

EVERY = [(paper, number) for paper, figures in FIGURES.items() for number in figures]
SMALL = ["--num-clients", "4", "--train-size", "20", "--test-size", "10", "--rounds", "2", "--epochs", "1"]


def text_of(figure):
    """All words of a drawn figure."""
    return " ".join(artist.get_text() for artist in figure.findobj(match=lambda artist: hasattr(artist, "get_text")))


# The runs of every figure.


def test_the_papers_figures_are_there():
    assert list(FIGURES["fedpac"]) == ["1", "2", "3", "4", "5"]
    assert list(FIGURES["fedas"]) == ["3", "4", "5", "6", "7"]
    assert list(FIGURES["fedpac_replication"]) == ["1", "2", "3", "4"]


@pytest.mark.parametrize(("paper", "number"), EVERY)
@pytest.mark.parametrize("short", [False, True])
def test_the_runs_of_every_figure_parse_and_differ(paper, number, short):
    content = FIGURES[paper][number]
    for dataset in content.datasets:
        runs = content.runs(dataset, short=short, seeds=2)
        cells = runs.cells()
        assert [cell.seed for cell in next(iter(cells.values()))] == [0, 1]
        # FedAS's Figure 7 has its usual setting in both panels.
        differing = {of_key[0].arguments for of_key in cells.values()}
        assert len(differing) == len(cells) - ((paper, number) == ("fedas", "7"))
        # Parsing is slow: of runs that differ in values alone, one.
        kinds = {(own["method"], *own): key for key, own in runs.variants.items()}
        for key in kinds.values():
            options = cells[key][0].request().options
            assert options.preset == content.preset
            assert options.rounds <= (80 if short else 200)


@pytest.mark.parametrize("short", [False, True])
def test_fedpacs_curves_are_those_of_the_methods_that_its_text_names(short):
    methods = FIGURES["fedpac"]["4"].runs("emnist", short=short).methods
    assert {"fedfomo", "fedavg_ft", "ditto"} < set(methods)
    assert methods[-1] == "fedpac"


def test_a_run_that_two_places_show_is_made_once(tmp_path):
    order = batch.read(Figures, ["--paper", "fedas", "--figure", "7", "--out", str(tmp_path)])
    runs = order.places(order.runs_on("cifar10", real=True))
    assert runs["batch_size=16",] == runs["epochs=5",]
    assert len({folder for of_key in runs.values() for _, folder in of_key}) == len(runs) - 1


def test_examples_visited():
    content = FIGURES["fedas"]["5"]
    (cell,) = content.runs("cifar10", short=True).cells()["fedas",]
    assert examples_visited(cell.request()) == 12 * 12 * 100 * 5
    (cell,) = content.runs("cifar10", short=False).cells()["fedas",]
    assert examples_visited(cell.request()) == 40 * 12 * 45_000 // 20 * 5
    embedded, _ = RunCommand("fashion_mnist", ("--method", "fedavg")).request().on_embedded_data()
    # Before the data is loaded.
    asked = RunCommand("fashion_mnist", ("--method", "fedavg", "--source", "embedded")).request()
    assert examples_visited(asked) == examples_visited(embedded) < examples_visited(parse("fashion_mnist", []))


@pytest.mark.parametrize(
    ("paper", "number", "wanted"),
    [
        ("fedpac", "1", {"rounds": 200, "num_clients": 20, "participation": 1.0}),
        ("fedpac", "2", {"rounds": 50, "train_size": 1000}),
        ("fedpac", "4", {"rounds": 200, "s": 20.0}),
        ("fedas", "5", {"rounds": 40, "num_clients": 20, "participation": 0.6, "beta": 0.1, "partition": "dirichlet"}),
    ],
)
def test_real_data_gets_the_papers_setting(paper, number, wanted):
    content = FIGURES[paper][number]
    for (cell,) in content.runs(content.datasets[0], short=False).cells().values():
        options = vars(cell.request().options)
        assert {name: options[name] for name in wanted} == wanted


def test_batch_sizes_and_epochs_are_compared_at_equal_steps():
    content = FIGURES["fedas"]["7"]
    for (cell,) in content.runs("cifar10", short=False).cells().values():
        request = cell.request()
        per_example = (
            request.options.rounds * request.hyper_parameters["epochs"] / request.hyper_parameters["batch_size"]
        )
        assert per_example == 40 * 5 / 16
    assert equal_steps(40, 0.2) == 200
    assert equal_steps(1, 4) == 1


def test_chosen_methods_rounds_and_words_reach_every_run():
    content = FIGURES["fedas"]["5"]
    words = ["--train-size", "30"]
    runs = content.runs("cifar10", short=False, methods=("fedas", "fedper"), rounds=3, words=words)
    # The paper's own method is drawn last, over the others.
    assert runs.methods == ("fedper", "fedas")
    for (cell,) in runs.cells().values():
        options = cell.request().options
        assert (options.rounds, options.train_size) == (3, 30)
    assert option_words({"alignment": False, "beta": 0.5, "s": 20}) == ["--no-alignment", "--beta", "0.5", "--s", "20"]


# From results to pictures.


def write_run(path, config, number):
    """A finished run whose accuracies differ by protocol and average, and are 5 points better in the first round."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    lines = [
        {
            "round": place,
            "received": {"mean": 40 + more, "pooled": 50 + more},
            "trained": {"mean": 60 + more, "pooled": 70 + more},
        }
        for place, more in ((1, number + 5), (config["options"]["rounds"], number))
    ]
    (path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    (path / "summary.json").write_text("{}")


def made_up_results(content, folder, dataset, *, short=True, seeds=1):
    """Finished runs of a figure with accuracies that grow from run to run, and random arrays."""
    runs = content.runs(dataset, short=short, seeds=seeds)
    generator = np.random.default_rng(0)
    folders = {}
    for index, (key, own) in enumerate(runs.variants.items()):
        folders[key] = []
        options = presets.values(content.preset, dataset) | runs.values | own
        for seed in range(seeds):
            path = folder / dataset / parser.slug(" ".join(key)) / f"seed-{seed}"
            data = {"source": "embedded digit pairs" if short else "files", "num_classes": 10}
            config = {
                "data": data,
                "options": options,
                "hyper_parameters": {"covariance": "identity"} | options,
                "train_examples": [50] * options["num_clients"],
            }
            write_run(path, config, index + seed)
            folders[key].append(path)
            if content.observe is None:
                continue
            clients = options["num_clients"]
            # A client without a score, and large ones with twice the accuracy of the others.
            large = np.arange(clients) % 2 == 0
            scores = {"highest": 0.1, "at_random": 0.3}
            arrays = {"stragglers": large, "test_count": np.where(large, 30, 10)}
            for name, value in scores.items():
                arrays[name] = np.tile(np.where(large, 2 * value, value), (len(SHARES), 1))
                arrays[name][:, :2] = np.nan
            for number in range(1, options["rounds"] + 1):
                rows = generator.random((clients, clients))
                is_heat = options["method"] == "fedpac"
                arrays[f"weights_{number}"] = rows / rows.sum(1, keepdims=True) if is_heat else rows[0] / rows[0].sum()
                arrays[f"trace_{number}"] = rows[0]
                arrays[f"cohort_{number}"] = np.arange(clients)[::-1]
            np.savez(arrays_path(path), **arrays)
    return Results(runs, folders, settings.MEASURES[content.paper])


@pytest.mark.parametrize(
    ("paper", "number", "short"), [*((*one, True) for one in EVERY), ("fedpac", "4", False), ("fedas", "4", False)]
)
def test_every_figure_says_what_it_is_and_on_which_data(paper, number, short, tmp_path):
    content = FIGURES[paper][number]
    results = [made_up_results(content, tmp_path, dataset, short=short) for dataset in content.datasets]
    picture = compose(results)
    assert picture.title.startswith(f"{content.title}: ")
    for dataset in content.datasets:
        label = f"{dataset} ({'embedded digit pairs' if short else 'files'})"
        assert label in picture.title or sum(label in panel.title for panel in picture.panels) >= 1
        assert label in picture.caption
    assert ("(shortened)" in picture.title) == short
    assert ("--rounds" in picture.caption) == short
    figure = drawing.draw(picture)
    words = text_of(figure)
    for panel in picture.panels:
        assert panel.x_label in words
        assert panel.y_label in words
        labels = [series.label for series in panel.series] if isinstance(panel, Lines) else []
        assert len(labels) < 2 or all(label in words for label in labels)
    # Strict JSON: no NaN.
    json.dumps(picture.record(), allow_nan=False)


def test_sweeps_show_the_last_round_of_each_run(tmp_path):
    content = FIGURES["fedpac"]["1"]
    results = made_up_results(content, tmp_path, "cifar10", seeds=2)
    heterogeneity, sizes = compose([results]).panels
    assert heterogeneity.x_ticks == (0, 20, 40, 60, 80)
    keys = list(results.keys)
    for series in heterogeneity.series:
        for x, y, low, high in zip(series.x, series.y, series.low, series.high, strict=True):
            index = keys.index((f"s={x}", series.label))
            assert (y, low, high) == (40.5 + index, 40 + index, 41 + index)
    assert [series.is_main for series in sizes.series] == [False, False, False, True]
    assert "Means over seeds 0 to 1" in compose([results]).caption


def test_hyper_parameters_are_shown_about_their_mean(tmp_path):
    content = FIGURES["fedas"]["7"]
    batches, epochs = compose([made_up_results(content, tmp_path, "cifar10", seeds=2)]).panels
    for series in (batches.series[0], epochs.series[0]):
        # Each seed about its own mean: the second seed's runs are all better by as much.
        np.testing.assert_allclose([series.y, series.low, series.high], [[-1.5, -0.5, 0.5, 1.5]] * 3)
    # FedAS's measure, as in its tables: trained models, pooled, in the best round.
    assert "mean 81.0 %" in epochs.title
    caption = compose([made_up_results(content, tmp_path / "again", "cifar10")]).caption
    said = "after local training (trained), in the best evaluated round, pooled over all test examples"
    assert f"Accuracy in percent {said}." in caption


def test_replaced_parameters_are_measured_as_the_paper_does(tmp_path):
    results = made_up_results(FIGURES["fedas"]["3"], tmp_path, "cifar10")
    replaced = compose([results]).panels[0]
    assert [series.label for series in replaced.series] == ["random parameters", "highest Fisher information"]
    # Of two clients one has three quarters of the examples, and twice the accuracy.
    np.testing.assert_allclose([series.y[0] for series in replaced.series], [30 * 1.75, 10 * 1.75])
    results.measure = results.measure._replace(average="clients")
    np.testing.assert_allclose([series.y[0] for series in compose([results]).panels[0].series], [30 * 1.5, 10 * 1.5])
    assert "Accuracy in percent mean over clients; in the paper pooled" in compose([results]).caption


@pytest.mark.parametrize(
    ("figure", "words", "values", "said"),
    [
        ("fedas 5", "", [75, 70], "after local training (trained), pooled over all test examples."),
        ("fedas 5", "--eval-protocol received", [55, 50], "(received), pooled over all test examples; in the paper"),
        ("fedas 5", "--average clients", [65, 60], "(trained), mean over clients; in the paper after local"),
        ("fedpac 4", "", [45, 40], "after aggregation (received), mean over clients."),
        ("fedpac 4", "--eval-protocol trained", [65, 60], "(trained), mean over clients; in the paper after aggreg"),
        ("fedpac 1", "", [40] * 5, "after aggregation (received), in the last round, mean over clients."),
        ("fedpac 1", "--score best", [45] * 5, "(received), in the best evaluated round, mean over clients; in the"),
        (
            "fedpac 1",
            "--eval-protocol trained --average examples",
            [70] * 5,
            "(trained), in the last round, pooled over",
        ),
    ],
)
def test_what_is_drawn_is_what_was_asked_for(figure, words, values, said, tmp_path, monkeypatch):
    def stand_in(cell, folder, console, keep, trust):
        request = cell.request()
        data = {"source": "digits", "is_real": True, "description": "digits", "num_classes": 10}
        config = {"dataset": cell.dataset, "data": data, "options": dataclasses.asdict(request.options)}
        write_run(folder, config | {"hyper_parameters": request.hyper_parameters, "train_examples": [50]}, 0)

    monkeypatch.setattr(figures, "run_with_arrays", stand_in)
    monkeypatch.setattr(drawing, "save", lambda *_: [])
    paper, number = figure.split()
    chosen = ["--paper", paper, "--figure", number, "--dataset", "digits", "--method", paper, "--out", str(tmp_path)]
    assert main([*chosen, *words.split()]) == 0
    record = json.loads((tmp_path / f"{paper}-figure-{number}.json").read_text())
    assert [series["y"] for series in record["panels"][0]["series"]] == [values]
    assert said in record["caption"]
    assert "eval-protocol" not in record["caption"]


def test_traces_are_means_over_the_cohort(tmp_path):
    results = made_up_results(FIGURES["fedas"]["3"], tmp_path, "cifar10", seeds=2)
    growth = compose([results]).panels[1].series[0]
    traces = [[one[f"trace_{number}"] for number in growth.x] for one in results.arrays(("fedas",))]
    np.testing.assert_allclose(growth.y, np.mean(traces, axis=(0, 2)))


def test_stragglers_and_online_clients_stand_apart(tmp_path):
    content = FIGURES["fedas"]["4"]
    results = made_up_results(content, tmp_path, "cifar10")
    bars = compose([results]).panels[0]
    (arrays,) = results.arrays(("stragglers",))
    assert bars.labels == [[str(i) for i in range(1, 20, 2)], [str(i) for i in range(0, 20, 2)]]
    # The cohort is in the reverse order of the clients.
    expected = arrays["weights_12"][::-1]
    np.testing.assert_allclose(bars.values, [expected[1::2], expected[::2]])
    assert bars.level == 1 / 20


def test_head_weights_are_shown_group_by_group():
    assert heat_rounds(50) == (1, 20, 50)
    assert heat_rounds(1) == (1,)
    group = np.arange(7) % 3
    matrix, blocks = by_group((group[:, None] == group).astype(float), 3)
    assert blocks == [3, 2, 2]
    np.testing.assert_array_equal(matrix, jax.scipy.linalg.block_diag(*[np.ones((size, size)) for size in blocks]))


@pytest.mark.parametrize(("number", "dataset"), [("2", "emnist"), ("3", "cifar10")])
def test_the_statistics_behind_the_head_weights_are_an_option_and_in_the_caption(number, dataset, tmp_path):
    content, words = FIGURES["fedpac"][number], ("--covariance", "empirical")
    for (cell,) in content.runs(dataset, short=False, words=words).cells().values():
        assert cell.request().hyper_parameters["covariance"] == "empirical"
    usual = compose([made_up_results(content, tmp_path / "identity", dataset, short=False)]).caption
    assert "Weights by Eq. 46, from class means and variances" in usual
    asked = dataclasses.replace(content, values=content.values | {"covariance": "empirical"})
    caption = compose([made_up_results(asked, tmp_path / "empirical", dataset, short=False)]).caption
    assert "Weights by A.2 and A.3 (Eq. 33 to 39)" in caption
    given = made_up_results(content, tmp_path / "given", dataset, short=False)
    given.runs = dataclasses.replace(given.runs, words=words)
    assert "Not the paper's setting" not in compose([given]).caption


def test_head_weights_are_means_over_seeds(tmp_path):
    results = made_up_results(FIGURES["fedpac"]["2"], tmp_path, "emnist", seeds=2)
    first, second = (one["weights_1"] for one in results.arrays(("s=0", "fedpac")))
    # Ten classes are five groups.
    expected, _ = by_group((first + second) / 2, 5)
    np.testing.assert_allclose(compose([results]).panels[0].matrix, expected)


def test_over_seeds():
    series = over_seeds("a", [1, 2], [[1.0, 5.0], [3.0, 4.0]], is_main=True)
    assert series == Series("a", [1, 2], [2.0, 4.5], [1.0, 4.0], [3.0, 5.0], True)
    assert over_seeds("a", [1], [[7.0]]) == Series("a", [1], [7.0])


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


def test_the_parameters_with_most_information_are_replaced_first(monkeypatch):
    """Each accuracy is whether the scores of the parameters are their Fisher information, here the parameters."""
    monkeypatch.setattr(substitution, "diagonal_fisher", lambda loss, params, data: params)
    monkeypatch.setattr(substitution, "replace_first", lambda params, fresh, scores, share: (params, scores))
    monkeypatch.setattr(substitution, "score", lambda apply, both, test: {"accuracy": equal(*both)})
    model, clients = tiny_model(), np.array([2, 0])
    params = jax.vmap(model.init)(jax.random.split(jax.random.key(0), 4))
    key, shares = jax.random.key(3), (0.1, 0.2)
    highest, at_random = accuracies_after_replacement(key, model, params, tiny_federation(), clients, shares)
    assert highest.all()
    assert not at_random.any()


def equal(one, other):
    return jnp.all(jax.flatten_util.ravel_pytree(one)[0] == jax.flatten_util.ravel_pytree(other)[0])


@pytest.mark.slow
def test_replaced_models_go_from_the_trained_to_an_untrained_one():
    model, data, key = tiny_model(), tiny_federation(), jax.random.key(3)
    params = jax.vmap(model.init)(jax.random.split(jax.random.key(0), 4))
    clients = np.array([2, 0])
    highest, at_random = accuracies_after_replacement(key, model, params, data, clients, (0.0, 0.3, 1.0))
    assert highest.shape == at_random.shape == (3, 2)
    for column, client in enumerate(clients):
        test = client_data(data, client, "test")
        own = score(model.apply, jax.tree.map(lambda leaf, c=client: leaf[c], params), test)["accuracy"]
        fresh_key, _ = jax.random.split(jax.random.fold_in(key, client))
        untrained = score(model.apply, model.init(fresh_key), test)["accuracy"]
        for rows in (highest, at_random):
            np.testing.assert_allclose(rows[[0, 2], column], [own, untrained], atol=1e-6)


# Drawing.


def everything():
    series = [Series(f"method {i}", [1, 2, 3], [i, i + 1, None], is_main=i == 9) for i in range(10)]
    return Picture(
        "A title on cifar100 (embedded digit pairs)",
        "A caption.",
        [
            Lines("lines", "round", "accuracy in %", series),
            Lines("at ticks", "size", "points", [Series("x", [8, 64], [1, -1], [0, -2], [2, 0])], (8, 64), True),
            Bars("bars", "client", "weight", ["on", "off"], [["0"], ["1", "2"]], [[0.5], [0.2, 0.3]], 0.4, "equal"),
            Heat("heat", "j", "i", np.eye(5), [2, 3]),
        ],
        2,
    )


def test_pictures_are_saved_whole_and_alike(tmp_path):
    paths = drawing.save(everything(), tmp_path, "figure")
    assert [path.name for path in paths] == ["figure.png", "figure.svg"]
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    words = " ".join(ElementTree.parse(paths[1]).getroot().itertext())
    assert "A title on cifar100 (embedded digit pairs)" in words
    assert "A caption." in words
    before = [path.read_bytes() for path in paths]
    drawing.save(everything(), tmp_path, "figure")
    assert [path.read_bytes() for path in paths] == before
    assert len(list(tmp_path.iterdir())) == 2


def test_lines_differ_without_colors():
    axes = drawing.draw(everything()).axes[0]
    looks = [(line.get_marker(), str(line._unscaled_dash_pattern)) for line in axes.get_lines()]  # pyright: ignore
    assert len(looks) == 10
    assert all(a != b and a[0] != b[0] for a, b in itertools.combinations(looks, 2))
    assert axes.get_lines()[-1].get_color() == "black"


def test_bars_and_lines_stand_where_they_belong():
    figure = drawing.draw(everything())
    _, ticks, bars, heat = figure.axes[:4]
    assert [label.get_text() for label in ticks.get_xticklabels()] == ["8", "64"]
    assert ticks.get_lines()[1].get_xdata().tolist() == [0, 1]
    assert [patch.get_height() for patch in bars.patches] == [0.5, 0.2, 0.3]
    assert [label.get_text() for label in bars.get_xticklabels()] == ["0", "1", "2"]
    np.testing.assert_array_equal(heat.images[0].get_array(), np.eye(5))


# The command.


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--paper", "fedavg", "--figure", "1"],
            "unknown paper 'fedavg' (there are fedpac, fedas, fedpac_replication)",
        ),
        (["--paper", "fedas", "--figure", "1"], "unknown figure '1' in fedas (there are 3, 4, 5, 6, 7)"),
        (["--paper", "fedpac"], "--figure"),
        (
            ["--paper", "fedpac", "--figure", "4", "--dataset", "imagenet"],
            "unknown dataset 'imagenet' (there are cifar10",
        ),
        (["--paper", "fedpac", "--figure", "4", "--method", "sgd"], "unknown method 'sgd' (there are local"),
        (["--paper", "fedpac", "--figure", "2", "--method", "fedas"], "compares no methods"),
        (["--paper", "fedpac", "--figure", "5", "--epochs", "3"], "--epochs cannot be given for FedPAC, Figure 5"),
        (["--paper", "fedpac", "--figure", "2", "--target-accuracy", "0.5"], "--target-accuracy cannot be given for"),
        (["--paper", "fedpac", "--figure", "4", "--target-accuracy", "50"], "whose runs have all their rounds"),
        (
            ["--paper", "fedpac", "--figure", "3", "--participation", "0.5"],
            "--participation must be 1.0 for FedPAC, Figure 3, not 0.5",
        ),
        (["--paper", "fedpac", "--figure", "2", "--partition", "iid"], "--partition must be grouped for"),
        (["--paper", "fedpac", "--figure", "2", "--held-out-clients", "1"], "--held-out-clients must be 0 for"),
        (
            ["--paper", "fedpac", "--figure", "2", "--eval-protocol", "trained"],
            "--eval-protocol has no effect on FedPAC, Figure 2",
        ),
        (["--paper", "fedpac", "--figure", "4", "--score", "best"], "--score has no effect on FedPAC, Figure 4"),
        (["--paper", "fedpac", "--figure", "4", "--eval-protocol", "all"], "unknown eval-protocol 'all'"),
        (["--paper", "fedpac", "--figure", "4", "--source", "web"], "unknown source 'web' (there are auto, tfds"),
        (["--paper", "fedpac", "--figure", "4", "--seeds", "0"], "--seeds must be at least 1, not 0"),
        (["--paper", "fedpac", "--figure", "4", "--rounds", "many"], "--rounds"),
        (["--paper", "fedpac", "--figure", "4", "--bacth-size", "3"], "did you mean --batch-size?"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_says_every_command_and_runs_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["--paper", "fedpac", "--figure", "4", "--source", "embedded", "--seeds", "2", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * 3 * 4 + 1
    assert all(line.startswith("python -m experiments.") and line.endswith("# absent") for line in lines[:-1])
    assert lines[-1].startswith("24 runs, ")
    assert list(tmp_path.iterdir()) == []


def test_folders_are_apart_for_other_options():
    plain = ["--paper", "fedas", "--figure", "3"]
    assert batch.read(Figures, plain).folder.as_posix() == "runs/figures/fedas-3"
    assert batch.read(Figures, [*plain, "--rounds", "5"]).folder != batch.read(Figures, plain).folder
    assert batch.read(Figures, [*plain, "--num-clients", "5"]).folder != batch.read(Figures, plain).folder
    assert batch.read(Figures, [*plain, "--chunk", "5"]).folder == batch.read(Figures, plain).folder


@pytest.mark.slow
def test_head_weights_from_end_to_end_and_again(tmp_path, capsys, monkeypatch):
    # Two runs of four will do.
    monkeypatch.setattr(fedpac, "HEAT_HETEROGENEITY", (20, 80))
    out = tmp_path / "figure"
    words = ["--paper", "fedpac", "--figure", "2", "--dataset", "digits", *SMALL, "--out", str(out)]
    assert main(words) == 0
    record = json.loads((out / "fedpac-figure-2.json").read_text())
    assert [panel["kind"] for panel in record["panels"]] == ["heat"] * 4
    np.testing.assert_allclose([np.sum(panel["matrix"], 1) for panel in record["panels"]], np.ones((4, 4)), rtol=1e-5)
    assert "digits (scikit-learn digits)" in record["title"]
    assert record["data"][0]["is_real"]
    assert {"fedpac-figure-2.png", "fedpac-figure-2.svg"} <= {path.name for path in out.iterdir()}

    # One run was cut off: it alone is made anew, with the same result; and then none.
    cut = out / "digits-s=20-fedpac" / "seed-0"
    (cut / "summary.json").unlink()
    arrays_path(cut).unlink()
    capsys.readouterr()
    # What is drawn has been seen.
    monkeypatch.setattr(drawing, "save", lambda *_: [])
    assert main(words) == 0
    assert "1 of 2 runs are there" in capsys.readouterr().out
    assert json.loads((out / "fedpac-figure-2.json").read_text()) == record

    def refuse(*_):
        raise AssertionError("a finished run is run again")

    monkeypatch.setattr(run, "run", refuse)
    assert main(words) == 0
    assert "2 of 2 runs are there" in capsys.readouterr().out
    # Other runs do not take the place of these.
    assert main([*words, "--batch-size", "7"]) == 2
    assert "holds another run (--batch-size" in capsys.readouterr().err
    arrays_path(cut).unlink()
    assert main(words) == 2
    assert "is gone" in capsys.readouterr().err


@pytest.mark.slow
def test_fisher_information_from_end_to_end(tmp_path):
    words = ["--paper", "fedas", "--figure", "3", "--dataset", "digits", *SMALL, "--out", str(tmp_path)]
    assert main(words) == 0
    replaced, growth = json.loads((tmp_path / "fedas-figure-3.json").read_text())["panels"]
    at_random, highest = replaced["series"]
    assert highest["label"] == "highest Fisher information"
    # Nothing replaced: the clients' own models, which the run has evaluated as `trained`.
    trained = load.read_result(tmp_path / "digits-fedas" / "seed-0").accuracy("trained", "last", "examples")
    assert highest["y"][0] == at_random["y"][0] == pytest.approx(trained, abs=1e-3)
    # Replaced parameters are other ones.
    assert highest["y"] != at_random["y"]
    assert min(highest["y"]) < highest["y"][0]
    assert growth["series"][0]["x"] == [1, 2]
    assert min(growth["series"][0]["y"]) > 0
