"""`python -m experiments.compare`: from run folders to the table, its notes and the picture of ranks."""

import contextlib
import dataclasses
import json
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from run_folders import SMALL, write_run

from experiments.cli.command import parse
from experiments.commands.comparison import Compared, for_paper, read, rounds_to, table
from experiments.compare import main
from experiments.folder import stored_runs
from experiments.folder.stored_runs import Mean
from experiments.run import data
from experiments.show import draw
from experiments.show.pictures import Panel, Picture, as_svg, save
from experiments.show.pictures import draw as drawn
from experiments.show.tables import Table
from experiments.spec.option_notes import label
from pfl_jax.compare import difference
from pfl_jax.data import partition_files, sources

LEVELS = {"fedpac": 80.0, "fedper": 79.5, "local": 60.0}


def words(method):
    return ("--method", method, *SMALL[2:])


@contextlib.contextmanager
def last_line(path):
    """The last evaluation of a run, whose changes are written."""
    *before, last = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
    yield last
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*before, last]))


@pytest.fixture
def runs(tmp_path):
    """Folder of three methods with three seeds, and the accuracies [N] of each run's last evaluation."""
    found = {}
    for method, level in LEVELS.items():
        for seed in range(3):
            path = tmp_path / "runs" / f"{method}-{seed}"
            write_run(path, words(method), seed=seed, level=level)
            # Some clients are better with one method, some with another, and so are seeds.
            apart = (np.random.default_rng(seed).permutation([-3, -1, 0, 1, 3]) + seed - 1) * (method == "fedper")
            with last_line(path) as last:
                found[method, seed] = apart + last["received_per_client"]
                last["received_per_client"] = found[method, seed].tolist()
    return tmp_path / "runs", found


def compared(folder):
    groups, _ = stored_runs.grouped(folder)
    return read(groups, "received")


def test_clients_are_compared_one_by_one_after_the_last_round(runs):
    folder, accuracies = runs
    found = compared(folder)
    assert (list(found.means), found.seeds, found.round) == (["fedpac", "fedper", "local"], [0, 1, 2], 4)
    for method in LEVELS:
        np.testing.assert_array_equal(found.of_runs(method), [accuracies[method, seed] for seed in range(3)])
    _, heads, rows, notes, _ = table(found)
    assert heads[-2:] == ["worse than fedpac", "worse than local"]
    by_name = {row[0]: dict(zip(heads, row, strict=True)) for row in rows}
    want = difference(found.of_runs("local"), found.of_runs("fedpac"))
    assert by_name["local"]["minus fedpac"] == f"{want.mean:+.2f}"
    assert by_name["local"]["95 % interval"] == f"{want.low:+.2f} to {want.high:+.2f}"
    assert by_name["local"]["each seed"] == " ".join(f"{value:+.2f}" for value in want.runs)
    assert by_name["local"]["worse than fedpac"] == f"{100 * want.worse:.0f} %"
    assert by_name["fedper"]["worse than local"] == "0 %"
    assert any(note.startswith("Cannot be told apart from fedpac: fedper (") for note in notes)


def test_from_six_seeds_on_the_interval_of_the_median_is_shown(runs):
    found = compared(runs[0])
    later = found.scores.rename(index=lambda seed: seed + 3, level="seed") + np.array([0, 1, 2])
    found = found._replace(scores=pd.concat([found.scores, later]))
    _, heads, rows, *_ = table(found)
    local = dict(zip(heads, rows[-1], strict=True))
    want = difference(found.of_runs("local"), found.of_runs("fedpac"))
    assert local["95 % interval of the median"] == f"{want.median_low:+.2f} to {want.median_high:+.2f}"
    assert "95 % interval of the median" not in table(compared(runs[0])).heads


def test_the_reference_can_be_chosen_and_one_seed_is_named(runs):
    folder, _ = runs
    for path in folder.glob("*-[12]"):
        (path / "metrics.jsonl").unlink()
    _, heads, rows, notes, _ = table(compared(folder), "local")
    assert "minus local" in heads
    assert heads.count("worse than local") == 1
    assert rows[-1][0] == "local"
    assert any("One seed" in note for note in notes)
    # Without --reference the best one on validation examples, where there are some.
    assert [table(compared(folder)._replace(reference=name)).heads[4] for name in (None, "fedper")] == [
        *("minus fedpac", "minus fedper")
    ]


def test_the_digest_of_a_partition_tells_which_examples_its_clients_have():
    def digest(kind, *words):
        options = parse("digits", ["--partition", kind, *words, *SMALL[4:]])
        return partition_files.digest_of(data.divide(options, dataset), options.shift)

    dataset = sources.load("digits")
    found = {digest("iid"), digest("grouped"), digest("iid", "--seed", "1"), digest("iid", "--shift", "labels")}
    assert len(found | {digest("iid", "--val-fraction", "0.1")}) == 5
    assert digest("iid") in found


def test_of_errors_the_smallest_is_the_best(runs):
    folder, _ = runs
    for path in folder.iterdir():
        edit(path, task=OF_ERRORS)
    found = compared(folder)
    assert list(found.means) == ["local", "fedper", "fedpac"]
    _, heads, rows, _, _ = table(found)
    by_name = {row[0]: dict(zip(heads, row, strict=True)) for row in rows}
    assert by_name["fedpac"]["worse than local"] == "100 %"
    assert float(by_name["fedpac"]["worst tenth"]) > float(by_name["fedpac"]["mean"].split()[0])


def test_a_table_for_a_column_of_a_paper(runs, tmp_path):
    out, names = tmp_path / "table.tex", ["--name", "FedPAC (ours)=fedpac", "Local_1=local"]
    assert main([str(runs[0]), "--reference", "FedPAC (ours)", "--out", str(out), *names]) == 0
    details, _, text = out.read_text().partition(r"\begin{table}")
    assert all(line.startswith("% ") for line in details.splitlines())
    assert "| Local_1 |" in details
    caption = next(line for line in text.splitlines() if line.startswith(r"\caption"))
    # One sentence, with data, clients, protocol, seeds and reference.
    assert caption.count(". ") == 0
    for words in ("digits", "round 4", "5 clients", "(received)", "seeds 0 to 2", "FedPAC (ours)"):
        assert words in caption
    rows = dict(row.removesuffix(r" \\").split(" & ", 1) for row in text.splitlines() if row.endswith(r"\\"))
    assert rows["method"] == "accuracy & difference"
    # FedPAC and FedPer cannot be told apart, so that no mean is bold.
    assert [name for name, cells in rows.items() if cells.endswith(r"$^\dagger$")] == ["fedper"]
    assert r"Local\_1" in rows
    assert r"\textbf" not in text


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")
def test_tables_compile_with_latex(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ["--name", "Our_{s} & 50 %=fedpac", "Local#1^2$\\x~=local"]
    assert main([str(runs[0]), "--out", "table.tex", *names]) == 0
    signs = Table("100 % of them_", ["a & b", "-1.50"], [["±", "-2 to +3"], ["\N{MINUS SIGN}4", "—"]])
    signs.save(Path("signs.tex"))
    inputs = r"\input{table} \input{signs}"
    Path("paper.tex").write_text(
        rf"\documentclass[twocolumn]{{article}}\usepackage{{booktabs}}\begin{{document}}{inputs}\end{{document}}"
    )
    done = subprocess.run(["pdflatex", "-halt-on-error", "paper.tex"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "Missing character" not in done.stdout + Path("paper.log").read_text(errors="replace")
    assert "Overfull" not in done.stdout
    assert Path("paper.pdf").stat().st_size > 10_000


def test_the_best_is_bold_where_no_other_is_as_good():
    index = pd.MultiIndex.from_product([range(4), range(4)], names=["seed", "client"])
    seeds = index.get_level_values("seed")
    best = Compared("digits", "accuracy in %", True, 4, pd.DataFrame({"a": 90.0 + seeds, "b": 70.0 + seeds % 2}, index))
    text = for_paper(table(best), best).text(".tex")
    assert r"a & \textbf{91.50 $\pm$ 1.29} & --" in text
    assert "dagger" not in text


def test_the_files_of_the_command(runs, tmp_path, capsys):
    out, plot = tmp_path / "table.md", tmp_path / "ranks.svg"
    assert main([str(runs[0]), "--out", str(out), "--plot", str(plot)]) == 0
    printed = capsys.readouterr().out
    assert "fedper" in printed
    assert "| fedpac |" in out.read_text()
    picture = plot.read_text()
    assert all(f">{name}<" in picture for name in LEVELS)
    before = out.read_bytes()
    assert main([str(runs[0]), "--reference", "local", "--out", str(out)]) == 2
    assert "exists already: give another name, or --overwrite" in capsys.readouterr().err
    assert out.read_bytes() == before
    assert main([str(runs[0]), "--reference", "local", "--out", str(out), "--overwrite"]) == 0
    assert "minus local" in out.read_text()


def test_the_worst_tenth_is_the_number_of_clients_nearest_to_a_tenth():
    index = pd.MultiIndex.from_product([[0], range(15)], names=["seed", "client"])
    scores = pd.DataFrame({"one": np.arange(15.0), "other": np.arange(15.0)}, index)
    _, _, rows, _, _ = table(Compared("digits", "accuracy in %", True, 4, scores))
    assert rows[0][2] == "0.50"


def test_a_method_that_diverged_is_left_out(runs):
    folder, _ = runs
    with last_line(folder / "fedper-1") as last:
        last["received"]["mean"], last["received_per_client"] = None, [None] * 5
    _, _, rows, notes, _ = table(compared(folder))
    assert {row[0] for row in rows} == {"fedpac", "local"}
    assert "Left out, since a run has no finite mean in the end: fedper." in notes


def test_clients_that_a_run_does_not_score_are_told(runs):
    folder, _ = runs
    with last_line(folder / "fedper-1") as last:
        last["received_per_client"][:2] = [None, None]
    notes = table(compared(folder)).notes
    assert "Without 2 clients of seed 1 that some run does not score." in notes
    assert any(note.startswith("Scores of 3 to 5 clients, seeds") for note in notes)


def test_rounds_to_a_target(runs):
    """80 is reached by fedpac in the first evaluation, by fedper in the second, and by local with one seed alone."""
    folder, _ = runs
    assert main([str(folder), "--target", "80"]) == 0
    groups, _ = stored_runs.grouped(folder)
    means = {"fedpac": (80, 70), "fedper": (79.9, 81), "local": (60, 60)}
    for group in groups:
        for run in group.runs:
            for line, mean in zip(run.lines, means[group.method], strict=True):
                line["received"]["mean"] = 90 if (group.method, run.seed) == ("local", 1) else mean
    assert rounds_to(80, groups, compared(folder)) == {"rounds to 80": {"fedpac": "2.0", "fedper": "4.0", "local": "—"}}


def edit(path, **changes):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


def other_examples(folder):
    for path in folder.iterdir():
        edit(path, partition_digest=f"{path.name == 'local-1'}")


def another_score(folder):
    for path in folder.glob("local-[01]"):
        edit(path, task=OF_ERRORS)


def no_means(folder):
    for path in folder.glob("fed*-0"):
        with last_line(path) as last:
            last["received"]["mean"] = None


def no_common_seed(folder):
    for path in folder.glob("local-[12]"):
        (path / "summary.json").unlink()
    (folder / "fedpac-0" / "summary.json").unlink()


OTHER_DATA = {"description": "others", "is_real": True, "num_classes": 10}
OF_ERRORS = {"scores": ["mse"], "in_percent": [], "higher_is_better": False}
OTHER_EXAMPLES = "clients of fedpac and local have different examples with seed 1: give runs of one partition"


@pytest.mark.parametrize(
    ("spoil", "more", "said"),
    [
        (other_examples, [], OTHER_EXAMPLES),
        (lambda folder: edit(folder / "local-1", data=OTHER_DATA), [], "different data are not compared"),
        (another_score, [], "different scores are not compared: accuracy in %; mse"),
        (no_means, [], "two settings at least. Left out, since a run has no finite mean in the end: fedpac, fedper."),
        (no_common_seed, [], "no seed has a finished run of every setting"),
        (None, ["--reference", "fedavg"], "--reference fedavg is not among fedpac, fedper, local"),
        (None, ["--name", "Ours=fedpac", "--name", "Ours=local"], "several settings have the same name"),
        (None, ["--name", "x=y"], "give SHORT=NAME, with a NAME of fedpac, fedper, local"),
        (None, ["--eval-protocol", "before_aggregation"], "no scores of its clients by before_aggregation"),
    ],
)
def test_what_cannot_be_compared_is_one_line(runs, spoil, more, said, capsys):
    if spoil is not None:
        spoil(runs[0])
    assert main([str(runs[0]), *more]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def everything():
    rows = [(f"method {i}", number, i + number, None, None) for i in range(10) for number in (1, 2)]
    curves = pd.DataFrame([*rows, ("method 9", 3, None, None, None)], columns=["line", "round", "y", "low", "high"])
    spaced = pd.DataFrame({"line": "x", "size": [8, 64], "points": [1, -1], "low": [0, -2], "high": [2, 0]})
    heights = pd.DataFrame({"on": [0.5, None, None], "off": [None, 0.2, 0.3]}).rename_axis(
        index="client", columns="weight"
    )
    maps = [pd.DataFrame(np.eye(5)), pd.DataFrame(3 * np.eye(2), ["a", "b"], ["c", "d"])]
    gray = partial(draw.matrix, unit="weight", limits=draw.grays(maps))
    return Picture(
        "A title on cifar100 (embedded digit pairs)",
        "A caption.",
        [
            Panel("lines", partial(draw.lines, main="method 9"), curves),
            Panel("at ticks", partial(draw.lines, is_spaced=True, has_zero=True), spaced),
            Panel("bars", partial(draw.bars, level=0.4, level_label="equal"), heights),
            Panel("map", partial(gray, blocks=[2, 3]), maps[0]),
            Panel("totals", partial(gray, totals=(3, 12)), maps[1]),
        ],
        2,
    )


def test_pictures_are_saved_whole_and_alike(tmp_path):
    paths = [tmp_path / "figure.png", tmp_path / "figure.svg"]
    save(everything(), *paths)
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    words = " ".join(ElementTree.parse(paths[1]).getroot().itertext())
    assert all(text in words for text in ("A title on cifar100 (embedded digit pairs)", "A caption.", "method 9"))
    assert everything().digest() in words
    before = [path.read_bytes() for path in paths]
    save(everything(), *paths)
    assert [path.read_bytes() for path in paths] == before
    assert len(list(tmp_path.iterdir())) == 2


def test_a_panel_of_a_page_is_as_wide_as_a_telephone():
    for panel in everything().panels:
        # 72 points an inch, of which a browser shows 96 pixels.
        width = ElementTree.fromstring(as_svg(panel)).get("width")
        assert float(width.removesuffix("pt")) * 96 / 72 <= 390 - 2 * 16


def names_of(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_bars_lines_and_matrices_stand_where_they_belong():
    figure = drawn(everything())
    _, ticks, bars, heat, other = figure.axes[:5]
    assert [label.get_text() for label in ticks.get_xticklabels()] == ["8", "64"]
    assert ticks.get_lines()[0].get_xdata().tolist() == [0, 1]
    assert ticks.get_lines()[1].get_ydata() == [0, 0]
    assert [patch.get_height() for patch in bars.patches] == [0.5, 0.2, 0.3]
    assert [label.get_text() for label in bars.get_xticklabels()] == ["0", "1", "2"]
    assert set(names_of(bars)) == {"on", "off", "equal"}
    np.testing.assert_array_equal(heat.images[0].get_array(), np.eye(5))
    # One scale of grays for all of them.
    assert {(image.norm.vmin, image.norm.vmax) for axes in (heat, other) for image in axes.images} == {(0, 3)}
    assert [patch.get_height() for patch in other.child_axes[0].patches] == [3, 12]


def test_a_name_that_latex_would_read_as_its_own_is_a_name():
    text = Table("t", ["method", "mean"], [["[ours]", "1"], ["*ours", "2"], ["**3**", "**4**"]]).text(".tex")
    assert [line.partition(" &")[0] for line in text.splitlines() if line.endswith(r"\\")][1:] == [
        "{}[ours]",
        "{}*ours",
        r"\textbf{3}",
    ]


def test_files_of_one_name_in_two_folders_are_two_methods():
    def group(method, value):
        run = SimpleNamespace(spec=SimpleNamespace(method=method), task={"higher_is_better": True})
        known = {"label": method, "method": label(method), "is_finished": True}
        known |= {"counted": [SimpleNamespace(lines=[{"validation": {}}])], "mean": lambda *_, **__: Mean({0: value})}
        return Stub(first=run, **known)

    groups = [group("v1/mine.py:net", 1.0), group("v2/mine.py:net", 2.0), group("fedavg", 3.0), group("fedavg", 4.0)]
    best, _ = stored_runs.best_setting_per_method(groups, "received")
    assert [one.label for one in best] == ["v1/mine.py:net", "v2/mine.py:net", "fedavg"]
    assert best[-1].mean().value == 4.0


@dataclasses.dataclass
class Stub:
    """A group of runs that are not read."""

    label: str
    method: str
    first: Any
    is_finished: bool
    counted: list
    mean: Any


def test_settings_that_no_name_has_are_noted(runs):
    folder, _ = runs
    assert not compared(folder).notes
    for seed in range(3):
        write_run(folder / f"fedrep-{seed}", (*words("fedrep"), "--lr", "0.3"), seed=seed)
    (note,) = (note for note in table(compared(folder)).notes if note.startswith("Settings that the names leave out"))
    assert "fedrep lr=0.3" in note
    assert "fedpac lr=0.05" in note


def test_a_table_for_other_programs(runs, tmp_path):
    out = tmp_path / "table.csv"
    assert main([str(runs[0]), "--name", "Local_1=local", "--out", str(out)]) == 0
    assert out.read_text().startswith("method,mean,worst tenth,")
    # By another name it is still the method whose clients learn alone.
    assert ",worse than Local_1\n" in out.read_text()
    assert "\nLocal_1," in out.read_text()
