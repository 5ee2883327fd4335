"""`python -m experiments.report`: what the page says is what the folders hold, and it needs nothing else."""

import base64
import dataclasses
import json
import math
import re
import statistics
import xml.etree.ElementTree as ElementTree
from html import escape
from html.parser import HTMLParser

import numpy as np
import pytest
from run_folders import SMALL, write_run

from experiments import report as page
from experiments.commands import report_charts as charts
from experiments.folder import stored_runs
from experiments.folder.stored_runs import goodness, ordered
from experiments.folder.stored_runs import grouped as groups_of
from experiments.report import main
from experiments.show import curves
from experiments.show.curves import picture, plot_curves, shown_groups
from experiments.show.pictures import draw
from pfl_jax.errors import InvalidInput
from pfl_jax.frames import find_runs

PAPER = ("--method", "fedper", "--num-clients", "20")
"""FedPAC's Table 1 on Fashion-MNIST, whole: 87.43."""
DATA = "data:image/svg+xml;base64,"
SECTIONS = ["results", "curves", "clients", "weights", "partition", "configuration", "runs", "versions"]


@pytest.fixture
def drawings():
    """For tests of what is drawn."""


@pytest.fixture(autouse=True)
def _without_drawings(request, monkeypatch):
    """Matplotlib draws a page in seconds: only the tests that have a browser, or all of a page, need that."""
    if "drawings" not in request.fixturenames:
        monkeypatch.setattr(page, "as_svg", lambda panel: f"<svg>{panel.title}</svg>")


@pytest.fixture
def runs(tmp_path):
    """Two seeds of one method, one unfinished of another, older run."""
    write_run(tmp_path / "a" / "seed-0")
    write_run(tmp_path / "a" / "seed-1", seed=1)
    write_run(tmp_path / "b", ("--method", "fedas", *SMALL[2:]), finished=False, rounds=(2,))
    return tmp_path


def test_several_networks_have_a_mean_each(runs):
    (group, _), _ = groups_of(runs)
    assert "by network" not in page.results([group])["received"].heads
    for run in group.runs:
        run.config["networks"] = ["mlp", "resnet8", "mlp", "resnet8", "mlp"]
        # A client without a score is in no mean.
        run.lines[-1]["received_per_client"][0] = None
    scores = np.array([run.lines[-1]["received_per_client"] for run in group.runs], float)
    want = f"mlp {scores[:, 2::2].mean():.2f}, resnet8 {scores[:, 1::2].mean():.2f}"
    table = page.results([group])["received"]
    assert dict(zip(table.heads, table.rows[0], strict=True))["by network"] == want


def test_a_mean_over_some_of_the_clients_says_so(runs):
    (group, _), _ = groups_of(runs)
    assert "clients" not in page.results([group])["trained"].heads
    for run, count in zip(group.runs, (3, 4), strict=True):
        run.lines[-1]["trained"]["clients"] = count
    made = page.results([group])
    assert dict(zip(made["trained"].heads, *made["trained"].rows, strict=True))["clients"] == "3 to 4 of 5"
    assert "clients" not in made["received"].heads
    curve = next(one for one in charts.curves([group]) if one.title == charts.PROTOCOL_TITLES["trained"])
    assert curve.caption.startswith("Means over 3 to 5 of 5 clients.")
    # Over the megabytes that all clients sent and received until then.
    *_, by_bytes = charts.curves([group])
    assert by_bytes.panels[0].frame.iloc[:, 1].tolist() == [6, 12]


class Reader(HTMLParser):
    """Checks that elements are closed as they were opened; keeps ids and links."""

    VOID = ("meta", "br", "img")

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.links = [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, name, attributes):
        attributes = dict(attributes)
        if name not in self.VOID:
            self.open.append(name)
        self.ids += filter(None, [attributes.get("id")])
        self.links += [attributes[key] for key in ("href", "src", "xlink:href", "data", "srcset") if key in attributes]

    def handle_startendtag(self, name, attributes):
        self.ids += [value for key, value in attributes if key == "id"]
        self.links += [value for key, value in attributes if key in ("href", "src", "xlink:href")]

    def handle_endtag(self, name):
        assert self.open.pop() == name


def test_runs_are_found_below_the_folders_given(runs):
    (runs / "a" / "seed-0" / "checkpoints" / "2").mkdir(parents=True)
    for name in ("config.json", "metrics.jsonl"):
        (runs / "a" / "seed-0" / "checkpoints" / "2" / name).write_text("")
    found = find_runs(runs / "b", runs, runs / "a")
    assert [path.name for path in found] == ["b", "seed-0", "seed-1"]


def test_seeds_are_one_group_and_unfinished_runs_do_not_count_beside_finished_ones(runs):
    write_run(runs / "c", seed=2, finished=False, rounds=(2,), level=10.0)
    write_run(runs / "again", seed=1, finished=False, rounds=())
    groups, repeated = groups_of(runs)
    assert [(group.label, [run.seed for run in group.runs]) for group in groups] == [
        ("fedpac", [0, 1, 2]),
        ("fedas", [0]),
    ]
    assert [run.path.name for run in repeated] == ["again"]
    fedpac, fedas = groups
    assert [run.seed for run in fedpac.counted] == [0, 1]
    assert fedpac.rounds == [2, 4]
    assert fedpac.runs[2].state == "unfinished: round 2 of 4"
    assert not fedas.is_finished
    assert fedas.rounds == [2]


def test_rounds_are_those_of_all_seeds(tmp_path):
    write_run(tmp_path / "0", rounds=(2, 4))
    write_run(tmp_path / "1", rounds=(1, 2, 4), seed=1)
    assert groups_of(tmp_path)[0][0].rounds == [2, 4]


def shown_results(folder):
    section = re.search('<section id="results">.*?</section>', page.page(groups_of(folder)[0]), re.DOTALL)[0]
    return "".join(re.findall("<table.*?</table>", section, re.DOTALL))


def test_results_are_the_figures_of_the_runs(tmp_path):
    runs = [write_run(tmp_path / str(seed), seed=seed)[-1] for seed in range(3)]
    text = shown_results(tmp_path)
    values, pooled = np.mean(runs, axis=1), np.average(runs, axis=1, weights=[3, 1, 1, 1, 1])
    assert f"{values.mean():.2f} ± {statistics.stdev(values):.2f}" in text
    assert f">{pooled.mean():.2f}</td>" in text
    for words in ("0.432", "71.50", "96.25", "55.50", "44.50"):
        assert f">{words}</td>" in text
    assert "paper" not in text


def test_the_third_protocol_is_shown_where_there_is_one(tmp_path):
    write_run(tmp_path / "a", ("--method", "fedas", *SMALL[2:]))
    groups, _ = groups_of(tmp_path)
    assert "before_aggregation" not in page.page(groups)
    words = ("--eval-protocol", "before_aggregation")
    values = write_run(tmp_path / "b", (*SMALL, *words), middle=True)[-1]
    groups, _ = groups_of(tmp_path)
    text = page.page(groups)
    Reader(text)
    assert f"{values.mean() - 2:.2f}" in text
    # Both ask first for their own; of several runs the order of the protocols decides.
    assert ordered(groups) == ["received", "trained", "before_aggregation"]
    assert ordered(groups[1:]) == ["before_aggregation", "received", "trained"]
    # The run that was not evaluated so has no line there.
    drawn = {one.title: one.frame.line.unique().tolist() for one in picture(groups).panels}
    assert drawn == {"received": ["fedas", "fedpac"], "trained": ["fedas", "fedpac"], "before_aggregation": ["fedpac"]}


def test_labels_tell_settings_and_data_apart(tmp_path):
    for name, words in {"a": (), "b": ("--lam", "0.5"), "c": ("--no-alignment",)}.items():
        write_run(tmp_path / name, (*SMALL, *words))
    write_run(tmp_path / "e", ("--method", "fedper", *SMALL[2:]))
    write_run(tmp_path / "f", description="others")
    of_kinds = page.kinds(groups_of(tmp_path)[0])
    assert {heading: [one.label for one in some] for heading, some in of_kinds.items()} == {
        "digits (files)": ["fedpac lam=1 alignment", "fedpac lam=0.5 alignment", "fedpac lam=1 no-alignment", "fedper"],
        "others": ["fedpac"],
    }
    apart, alike = page.configuration(of_kinds["digits (files)"])
    (row,) = [row for row in apart.rows if "--lam<" in row[0]]
    assert list(row[1:]) == ["1", "0.5", "1", "—"]
    assert (alike["--rounds"], alike["dataset"]) == ("4", "digits")


def test_a_seed_that_diverged_leaves_no_mean_and_is_named(runs):
    (group, _), _ = groups_of(runs)
    group.runs[1].lines[-1]["received"]["mean"] = None
    table = page.results([group])["received"]
    cells = dict(zip(table.heads, *table.rows, strict=True))
    assert cells["mean"] == "— (none of seed 1)"
    assert goodness(group, "received", "test") == -math.inf
    assert cells["each seed"].endswith(" —")


def test_the_papers_figure_of_the_best_pooled_round(tmp_path):
    """FedAS's tables have the best round, over all test examples."""
    words = ("--preset", "fedas", "--method", "fedper", "--partition", "dirichlet", "--beta", "0.1")
    write_run(tmp_path / "a", words, dataset="cifar100", rounds=(30, 40), level=60.0)
    path = tmp_path / "a" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0]["trained"]["pooled"] = 77.77
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (group,), _ = groups_of(tmp_path)
    assert group.published is not None
    difference = f"{77.77 - group.published.accuracy_percent:+.2f}".replace("-", "\N{MINUS SIGN}")
    assert f"{difference}<small>best pooled</small>" in page.page([group])


def test_the_papers_figure_stands_beside_its_setting_on_the_dataset_itself_only(tmp_path):
    write_run(tmp_path / "real", PAPER, dataset="fashion_mnist", rounds=(200,), level=86.43)
    write_run(tmp_path / "other", (*PAPER, "--lr", "0.5"), dataset="fashion_mnist", rounds=(200,))
    groups, _ = groups_of(tmp_path)
    mean = groups[1].mean("received").value
    text = page.page(groups)
    assert "87.43<small>FedPAC, Table 1</small>" in text
    assert f"{mean - 87.43:+.2f}".replace("-", "\N{MINUS SIGN}") in text
    drawn = picture(groups[1:])
    assert drawn.panels[0].draw.keywords["points"] == {"fedper lr=0.01": (200, 87.43)}
    write_run(
        tmp_path / "x" / "0",
        PAPER,
        dataset="fashion_mnist",
        rounds=(200,),
        is_real=False,
        description="fashion_mnist (embedded digits)",
    )
    text = page.page(groups_of(tmp_path / "x")[0])
    assert "87.43" not in text
    assert "Stand-in data. </strong>fashion_mnist (embedded digits)" in text


@pytest.mark.usefixtures("drawings")
def test_the_page_is_whole_escaped_and_needs_nothing_else(runs):
    write_run(runs / "<d>", description="digits <script>alert(1)</script>")
    groups, repeated = groups_of(runs)
    text = page.page(groups, repeated)
    read = Reader(text)
    assert read.ids == SECTIONS
    drawn = [link.removeprefix(DATA) for link in read.links if link.startswith(DATA)]
    assert len(drawn) + len([link for link in read.links if link.startswith("#")]) == len(read.links)
    for one in drawn:
        text_of_drawing = base64.b64decode(one).decode()
        ElementTree.fromstring(text_of_drawing)
        assert "url(http" not in text_of_drawing
    assert "url(" not in text.replace("url(#", "")
    assert "@import" not in text
    assert "<script" not in text
    assert escape("digits <script>alert(1)</script>") in text


@pytest.mark.usefixtures("drawings")
def test_runs_without_evaluations_and_without_seconds_apart_have_a_page(tmp_path):
    write_run(tmp_path / "a", rounds=(), finished=False)
    text = page.page(groups_of(tmp_path)[0])
    Reader(text)
    write_run(tmp_path / "b", ("--method", "fedper", *SMALL[2:]), rounds=(4,))
    Reader(page.page(groups_of(tmp_path)[0]))


def test_clients_are_shown_in_order_whatever_their_number(tmp_path):
    values = write_run(tmp_path / "a")[-1]
    (group,), _ = groups_of(tmp_path)
    (chart,) = charts.clients([group])
    _, x, y, *_ = chart.panels[0].frame.columns
    assert chart.panels[0].frame[y][::25].tolist() == sorted(values)
    assert chart.panels[0].frame[x][::25].tolist() == [0, 25, 50, 75, 100]
    assert not chart.caption
    # A client without an accuracy is left out, one with an accuracy of 0 is not.
    group.runs[0].lines[-1]["received_per_client"] = [50.0, None, 0.0]
    np.testing.assert_array_equal(group.per_client(group.lines(4), "received"), [[0.0, 50.0]])
    write_run(tmp_path / "b", seed=1)
    (group,), _ = groups_of(tmp_path)
    group.runs[0].lines[-1]["received_per_client"] = [10.0, 20.0, 60.0]
    group.runs[1].lines[-1]["received_per_client"] = [0.0, 50.0]
    (chart,) = charts.clients([group])
    frame = chart.panels[0].frame
    assert (frame[y][50], frame.low[0], frame.high[100]) == (pytest.approx(np.mean([20, 25])), 0, 60)
    assert chart.caption == "Bands: from the lowest to the highest seed."


def test_what_a_method_of_ones_own_tells_is_shown_as_its_docstring_says(tmp_path):
    write_run(tmp_path / "a")
    (group,), _ = groups_of(tmp_path)
    (run,) = group.runs
    line = run.lines[-1]
    cohort, matrix = line["cohort"], np.arange(25.0).reshape(5, 5) - 3
    run.config["info"] = {"drift": "[M, K], per class.", "counts": "[K], examples.", "mixture": "[cohort, M], shares."}
    line["info"] = {
        "drift": matrix.tolist(),
        "counts": [1, 2, 3, 4, 5],
        "mixture": matrix.tolist(),
        "said_nowhere": matrix[:, :2].tolist(),
        "<b>": [0.5, 2.5],
        "cube": [[[1.0]]],
        "nothing": [],
        "text": "a",
        "hole": [1.0, None],
        "number": 3.0,
    }
    found = {chart.title.partition(":")[0]: chart for chart in charts.information([group])}
    # The first is of the evaluation before; what is within rounding of zero everywhere, as its gap, is not drawn.
    assert list(found) == ["Head weights", "Mixture weights", "drift", "counts", "said_nowhere", "<b>"]
    order = np.argsort(cohort)
    for name in ("drift", "Mixture weights"):
        (panel,) = found[name].panels
        np.testing.assert_array_equal(panel.frame, matrix[order])
        assert panel.frame.index.tolist() == [0, 1, 2, 3, 4]
    # Five classes, and five clients in the cohort.
    assert found["counts"].panels[0].frame.index.name == "entry"
    assert found["said_nowhere"].panels[0].frame.loc[2].tolist() == matrix[cohort.index(2), :2].tolist()


def test_info_is_shown_over_the_rounds_and_seeds(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path / str(seed), seed=seed, rounds=(1, 2, 3, 4, 5, 6))
    (group,), _ = groups_of(tmp_path)
    for run in group.runs:
        run.config["info"] = {"head_weights": "[M, M], alpha.", "trace": "[M], traces."}
        for line in run.lines:
            line["info"]["trace"] = [line["round"] + client / 10 for client in line["cohort"]]
        # Who was not there has no weight.
        del run.lines[2]["cohort"][1:], run.lines[2]["info"]["trace"][1:]
    weights, traces = charts.information([group])
    titles = [f"seed {seed}, round {number}" for seed in (0, 1) for number in (1, 3, 4, 6)]
    assert [panel.title for panel in weights.panels] == titles
    last, line = weights.panels[-1].frame, group.runs[1].lines[-1]
    order = np.argsort(line["cohort"])
    np.testing.assert_array_equal(last, np.take(np.take(line["info"]["head_weights"], order, 0), order, 1))
    (first, _), alone = traces.panels, group.runs[0].lines[2]["cohort"]
    expected = np.arange(1, 7) + np.arange(5)[:, None] / 10
    expected[:, 2] = np.where(np.arange(5) == alone[0], expected[:, 2], np.nan)
    np.testing.assert_allclose(first.frame, expected)
    assert (first.frame.columns.tolist(), first.frame.columns.name) == ([1, 2, 3, 4, 5, 6], "round")
    # One scale of grays for all maps of a chart.
    limits = {panel.draw.keywords["limits"] for panel in weights.panels}
    assert limits == {(0.0, max(panel.frame.max(axis=None) for panel in weights.panels))}
    assert "seed 1" in page.page([group])


def test_a_client_has_a_section(tmp_path, capsys):
    values = write_run(tmp_path / "a")
    write_run(tmp_path / "b", ("--method", "fedas", *SMALL[2:]))
    group, _ = groups_of(tmp_path)[0]
    (run,) = group.runs
    run.config["info"] = {"head_weights": "[M, M], alpha."}
    labels, scores, teachers = charts.client([group], 3)
    assert labels.panels[0].frame[""].tolist() == run.config["class_table"][3]
    assert scores.panels[0].frame["accuracy in %"].tolist() == values[:, 3].tolist()
    place = run.lines[-1]["cohort"].index(3)
    by_client = dict(zip(run.lines[-1]["cohort"], run.lines[-1]["info"]["head_weights"][place], strict=True))
    assert teachers.panels[0].frame[""].to_dict() == {client: by_client[client] for client in range(5)}
    out = str(tmp_path / "r.html")
    assert main([str(tmp_path), "--client", "3", "--out", out]) == 0
    assert '<section id="client-3"><h2>Client 3</h2>' in (tmp_path / "r.html").read_text()
    assert main([str(tmp_path), "--client", "5", "--out", out]) == 2
    assert "the clients of fedpac are 0 to 4" in capsys.readouterr().err


def test_runs_of_other_clients_or_rounds_are_in_no_ranking(tmp_path):
    write_run(tmp_path / "a", level=60.0)
    write_run(tmp_path / "b", ("--method", "fedas", *SMALL[2:]), level=70.0)
    write_run(tmp_path / "c", (*SMALL, "--num-clients", "6"), level=90.0)
    write_run(tmp_path / "d", (*SMALL, "--rounds", "8"), rounds=(4, 8), level=90.0)
    assert main([str(tmp_path), "--out", str(tmp_path / "r.html")]) == 0
    text = (tmp_path / "r.html").read_text()
    results = text[text.index('id="results"') : text.index('id="curves"')]
    headings = re.findall("<h3>(.*?)</h3>", results)
    assert sorted(headings) == [
        f"digits (files), rounds={rounds}, num_clients={clients}" for rounds, clients in ((4, 5), (4, 6), (8, 5))
    ]
    # Of each protocol: only two runs stand side by side.
    assert results.count('class="strong"') == 2
    assert len(re.findall('class="strong">\\s*<th scope="row">fedas</th>', results)) == 2


def test_one_setting_of_each_method_is_chosen_on_validation_examples(tmp_path, capsys):
    for name, method, lr, level in (("a", "fedpac", 0.1, 60.0), ("b", "fedpac", 0.2, 70.0), ("c", "fedas", 0.1, 65.0)):
        write_run(tmp_path / name, ("--method", method, *SMALL[2:], "--lr", str(lr)), level=level)
    command = [str(tmp_path), "--select", "validation", "--name", "Ours=fedpac", "--out", str(tmp_path / "r.html")]
    assert main(command) == 2
    assert "needs runs with validation examples" in capsys.readouterr().err
    for name, value in (("a", 90.0), ("b", 50.0), ("c", 70.0)):
        path = tmp_path / name / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        lines[-1]["validation"] = {name: {"mean": value} for name in ("received", "trained")}
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(command) == 0
    text = (tmp_path / "r.html").read_text()
    names = re.findall('<th scope="row">(.*?)</th>', text[text.index('id="results"') : text.index('id="curves"')])
    assert names == ["Ours", "fedas"] * 2


def test_many_settings_show_the_best_lines(tmp_path):
    for number in range(10):
        write_run(tmp_path / str(number), (*SMALL, "--lam", str(number)), level=40.0 + 5 * number)
    groups, _ = groups_of(tmp_path)
    assert [group.label for group in shown_groups(groups)] == [f"fedpac lam={number}" for number in range(2, 10)]
    for number, group in enumerate(groups):
        group.runs[0].lines[-1]["validation"] = {"received": {"mean": 90.0 - number}}
    # Those that validation chooses; of errors, the lowest ones.
    assert [group.label for group in shown_groups(groups)] == [f"fedpac lam={number}" for number in range(8)]
    for group in groups:
        group.runs[0].config["task"] = {"higher_is_better": False}
    assert [group.label for group in shown_groups(groups)] == [f"fedpac lam={number}" for number in range(2, 10)]
    assert page.results(groups)["received"].strong == [9]


def test_the_picture_of_one_run_has_the_spread_over_its_clients(tmp_path):
    values = write_run(tmp_path / "a")
    drawn = picture(groups_of(tmp_path)[0])
    assert [panel.title for panel in drawn.panels] == ["received", "trained"]
    frame = drawn.panels[0].frame
    np.testing.assert_allclose(frame["accuracy in %"], values.mean(1))
    np.testing.assert_allclose(frame.low, np.percentile(values, 10, axis=1))
    assert "Band: the middle 80 % of the clients." in drawn.caption
    means = np.array([values.mean(1), write_run(tmp_path / "b", seed=1).mean(1)])
    both = picture(groups_of(tmp_path)[0])
    np.testing.assert_allclose(both.panels[0].frame[["low", "high"]], np.sort(means, axis=0).T)
    assert "Bands: from the lowest to the highest seed." in both.caption


def test_the_best_round_is_chosen_on_validation_examples(tmp_path):
    write_run(tmp_path / "run")
    run = stored_runs.read(tmp_path / "run")
    plain = stored_runs.Group("", (run,))
    rounds, means = plain.curve("received")
    assert len(rounds) > 1
    assert page.results([plain])["received"].heads.count("validation") == 0
    worst = int(means[0].argmin())
    lines = [
        line | {"validation": {"received": {"mean": 70.0 if place == worst else 60.0}}}
        for place, line in enumerate(run.lines)
    ]
    table = page.results([stored_runs.Group("", (dataclasses.replace(run, lines=lines),))])["received"]
    cells = dict(zip(table.heads, table.rows[0], strict=True))
    assert cells["best (round)"] == f"{means[0][worst]:.2f} ({rounds[worst]})"
    assert cells["validation"] == ("70.00" if worst == len(rounds) - 1 else "60.00")
    # Where one round lacks them, on test examples.
    del lines[worst]["validation"]
    table = page.results([stored_runs.Group("", (dataclasses.replace(run, lines=lines),))])["received"]
    best = int(means[0].argmax())
    assert table.rows[0][table.heads.index("best (round)")] == f"{means[0][best]:.2f} ({rounds[best]})"


@pytest.mark.usefixtures("drawings")
def test_curves_for_a_paper_have_the_band_that_is_asked_for(tmp_path):
    table = np.array([write_run(tmp_path / "runs" / str(seed), seed=seed).mean(1) for seed in range(3)])
    write_run(tmp_path / "runs" / "b", ("--method", "fedas", *SMALL[2:]))
    drawn = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curves, "save", lambda picture, *_, style: drawn.append(draw(picture, style, is_narrow=True)))
        for band in ("deviation", "interval", "range"):
            plot_curves(tmp_path / "runs", "a.pdf", band=band)
    mean, deviation = table.mean(0), table.std(0, ddof=1)
    # 4.303 is the 97.5 % quantile of Student's t with two degrees of freedom.
    halves = (deviation, 4.303 * deviation / np.sqrt(3))
    edges = [*((mean - half, mean + half) for half in halves), (table.min(0), table.max(0))]
    for figure, (lows, highs) in zip(drawn, edges, strict=True):
        (band,) = figure.axes[0].collections
        corners = band.get_paths()[0].vertices
        for at, low, high in zip((2, 4), lows, highs, strict=True):
            heights = corners[corners[:, 0] == at, 1]
            np.testing.assert_allclose([heights.min(), heights.max()], [low, high], rtol=1e-3)
        assert figure.get_figwidth() == 3.3
        assert [text.get_text() for text in figure.legends[0].get_texts()] == ["fedpac", "fedas"]
    plot_curves(tmp_path / "runs", tmp_path / "a.pdf", names=["Ours=fedpac"])
    command = [str(tmp_path / "runs"), "--plot", str(tmp_path / "b.pdf"), "--width", "3.3", "--name", "Ours=fedpac"]
    assert main(command) == 0
    assert (tmp_path / "a.pdf").read_bytes() == (tmp_path / "b.pdf").read_bytes()
    # No Type 3 fonts, which publishers refuse.
    assert b"/FontType 3" not in (tmp_path / "a.pdf").read_bytes()
    with pytest.raises(InvalidInput, match="the name must end in"):
        plot_curves(tmp_path / "runs", tmp_path / "a.tif")


def test_the_command_repeats_the_run(tmp_path):
    words = (*SMALL, "--no-alignment", "--size-choices", "10", "20", "--data-dir", "my data")
    write_run(tmp_path / "a", words, seed=3)
    (group,), _ = groups_of(tmp_path)
    command = group.first.spec.command()
    assert command.startswith("python -m experiments.digits --method fedpac --no-alignment --data-dir 'my data' ")
    assert "--size-choices 10 20" in command
    assert command.endswith("--seed 3")


def test_the_command_writes_a_page_or_a_picture(runs, tmp_path):
    assert main([str(runs), "--out", str(tmp_path / "r.html")]) == 0
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    assert main([str(runs / "b"), "--plot", str(tmp_path / "p.svg")]) == 0
    # A page is made anew, and a picture stays.
    assert main([str(runs), "--out", str(tmp_path / "r.html")]) == 0
    assert main([str(runs / "b"), "--plot", str(tmp_path / "p.svg")]) == 2
