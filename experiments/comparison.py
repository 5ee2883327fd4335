"""A table of a paper with our figures in it: for the terminal, and as Markdown, CSV and JSON.

Results on a stand-in never stand beside the paper's figures, and whatever was not run as in the paper is said below.
"""

import csv
import io
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from experiments import catalogue
from experiments.paper import Published
from experiments.presets import DEFAULT_PRESET
from experiments.study import Cell, Score, accuracy, bearing, inspect, read_config
from pfl_jax.errors import InvalidInput
from pfl_jax.reporting import Protocol, rounded, strict_json, write_whole

MARKDOWN, CSV, JSON = "table.md", "table.csv", "table.json"

PROTOCOL_WORDS = {"received": "after aggregation (received)", "trained": "after local training (trained)"}
SCORE_WORDS = {"last": "in the last round", "best": "in the best round"}
NOTHING = "—"

CELL_WIDTH = 18
"""Characters that a column needs on the terminal, borders included."""


class Column(NamedTuple):
    """What a column of a table has in common."""

    dataset: str
    clients: int
    setting: str


class Figure(NamedTuple):
    """One place of a table.

    Attributes:
      row: what is published there.
      accuracies: ours by finished seed, means over clients in percent.
      description: what the data really was; None before there is a result.
      is_real: whether it was the dataset itself; None before there is a result.
      deviations: option -> (what it was, what the paper's setting is).
    """

    row: Published
    accuracies: dict[int, float]
    description: str | None
    is_real: bool | None
    deviations: dict[str, tuple[Any, Any]]

    @property
    def column(self) -> Column:
        return Column(self.row.dataset, self.row.clients, self.row.setting)

    @property
    def mean(self) -> float | None:
        """Over seeds."""
        return statistics.fmean(self.accuracies.values()) if self.accuracies else None

    @property
    def std(self) -> float | None:
        """Sample standard deviation over seeds; one seed has none."""
        return statistics.stdev(self.accuracies.values()) if len(self.accuracies) > 1 else None

    @property
    def published(self) -> float | None:
        """The paper's figure, None beside results on a stand-in."""
        return None if self.is_real is False else self.row.accuracy_percent

    @property
    def difference(self) -> float | None:
        """Ours less the paper's."""
        return None if self.mean is None or self.published is None else self.mean - self.published


class Comparison(NamedTuple):
    """A table, whole or in part.

    Attributes:
      paper, number: which.
      figures: its places in the paper's order.
      protocol, score: which accuracy of a run counts.
      seeds: how many were asked for.
    """

    paper: str
    number: int
    figures: tuple[Figure, ...]
    protocol: Protocol
    score: Score
    seeds: int

    @property
    def columns(self) -> list[Column]:
        return list(dict.fromkeys(figure.column for figure in self.figures))

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(figure.row.method for figure in self.figures))

    @property
    def title(self) -> str:
        """Which table, which accuracy, and what the data really was."""
        data = dict.fromkeys(figure.description for figure in self.figures if figure.description)
        table = catalogue.TABLES[self.paper, self.number]
        return (
            f"{catalogue.PAPERS[self.paper]}, Table {self.number}: {table.title}. Accuracy in percent "
            f"{PROTOCOL_WORDS[self.protocol]}, {SCORE_WORDS[self.score]}"
            + (f", on {'; '.join(data)}" if data else ": no results yet")
        )

    def at(self, column: Column, method: str) -> Figure | None:
        """A place, None where the paper has none."""
        return next((figure for figure in self.figures if (figure.column, figure.row.method) == (column, method)), None)


def figure(row: Published, runs: Sequence[tuple[Cell, Path]], protocol: Protocol, score: Score) -> Figure:
    """Gathers what there is of one place of a table.

    Args:
      row: what is published there.
      runs: its cells, one for each seed, with their folders. A folder with anything else counts as empty.
      protocol, score: which accuracy counts.

    Raises:
      InvalidInput: a result cannot be read, or some are on the dataset and some on a stand-in.
    """
    accuracies, configs = {}, []
    for cell, folder in runs:
        if not _is_finished(cell, folder):
            continue
        mean = accuracy(folder, protocol, score)
        if mean is not None:
            accuracies[cell.seed] = mean
        configs.append((cell, read_config(folder)))
    if not configs:
        return Figure(row, {}, None, None, {})
    descriptions = dict.fromkeys(config["data"]["description"] for _, config in configs)
    deviations: dict[str, tuple[Any, Any]] = {}
    for cell, config in configs:
        deviations |= _deviations(row, cell, config)
    real = {config["data"]["is_real"] for _, config in configs}
    return Figure(row, accuracies, "; ".join(descriptions), _one_kind(real, row), deviations)


def check(comparison: Comparison) -> None:
    """InvalidInput if a column has results on the dataset beside results on a stand-in."""
    for column in comparison.columns:
        kinds = {figure.is_real for figure in comparison.figures if figure.column == column} - {None}
        _one_kind(kinds, column)


def _one_kind(kinds: set[Any], where: Published | Column) -> bool:
    if len(kinds) > 1:
        raise InvalidInput(
            f"some results on {where.dataset} are on the dataset and some on its stand-in: give --source, and --out a "
            "new folder"
        )
    return next(iter(kinds), True)


def _is_finished(cell: Cell, folder: Path) -> bool:
    try:
        return inspect(cell, folder) == "finished"
    except InvalidInput:
        return False


def _deviations(row: Published, cell: Cell, config: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What a finished run had otherwise than the paper's setting."""
    had = config["options"] | config["hyper_parameters"]
    paper = bearing(Cell(cell.dataset, row.arguments).request())
    return {name: (had[name], value) for name, value in paper.items() if name in had and not _equal(had[name], value)}


def _equal(stored: Any, value: Any) -> bool:
    """Whether a value that was stored as JSON is this one."""
    return stored == (list(value) if isinstance(value, tuple) else value)


def notes(comparison: Comparison) -> list[str]:
    """What has to be known to read the table, a line each."""
    figures = comparison.figures
    there = [figure for figure in figures if figure.description]
    over = f"seeds 0 to {comparison.seeds - 1}" if comparison.seeds > 1 else "seed 0 alone, so without deviation"
    lines = [f"Each place: our mean ± standard deviation over {over}, of means over clients / the paper / difference."]
    lines += _deviation_notes(there)
    for description in dict.fromkeys(figure.description for figure in there if not figure.is_real):
        lines.append(f"{description} only stands in for the dataset: the paper's figures do not belong beside it.")
    for method in comparison.methods:
        if not catalogue.has(method):
            lines.append(f"{method}: pfl_jax has no such method; the figure is the paper's.")
    for dataset in dict.fromkeys(column.dataset for column in comparison.columns):
        if dataset not in DEFAULT_PRESET:
            lines.append(f"{dataset}: pfl_jax has no such experiment; the figures are the paper's.")
    runnable = [figure for figure in figures if is_runnable(figure.row)]
    finished, wanted = sum(len(figure.accuracies) for figure in runnable), len(runnable) * comparison.seeds
    if finished < wanted:
        lines.append(f"{finished} of {wanted} runs are finished; {NOTHING} marks what is not there.")
    return lines + list(catalogue.TABLES[comparison.paper, comparison.number].notes)


def is_runnable(row: Published) -> bool:
    """Whether the project has the row's dataset and method."""
    return row.dataset in DEFAULT_PRESET and catalogue.has(row.method)


def _deviation_notes(figures: Sequence[Figure]) -> list[str]:
    """One line for each option that was otherwise than in the paper, and where, unless it was so everywhere."""
    found: dict[str, list[Figure]] = {}
    for figure in figures:
        for name, (had, paper) in figure.deviations.items():
            found.setdefault(f"--{name.replace('_', '-')} {had}, the paper's is {paper}", []).append(figure)
    lines = []
    for words, where in found.items():
        limits = []
        for kind, of in (("on", lambda figure: figure.row.dataset), ("for", lambda figure: figure.row.method)):
            names = dict.fromkeys(map(of, where))
            if len(names) < len(set(map(of, figures))):
                limits.append(f"{kind} {', '.join(names)}")
        lines.append(" ".join(["Not as in the paper:", words, *limits]) + ".")
    return lines


def show(comparison: Comparison, console: Console) -> None:
    """Prints the table, in blocks of as many columns as the console is wide."""
    columns = comparison.columns
    first = max(map(len, (*comparison.methods, "method"))) + 4
    most = max(1, (console.width - first) // CELL_WIDTH)
    blocks = []
    for start in range(0, len(columns), most):
        table = Table(title=comparison.title if start == 0 else None, title_justify="left", show_lines=True)
        table.add_column("method", no_wrap=True)
        for column in columns[start : start + most]:
            table.add_column(_heading(comparison, column, "\n"), justify="right")
        for method in comparison.methods:
            places = (comparison.at(column, method) for column in columns[start : start + most])
            table.add_row(method, *(_place(place, comparison.seeds, "\n") for place in places))
        blocks.append(table)
    text = [Text(line) for line in notes(comparison)]
    console.print(Group(*blocks, *text), highlight=False)


def save(comparison: Comparison, folder: Path) -> None:
    """Writes table.md, table.csv and table.json, each whole.

    Raises:
      InvalidInput: the folder cannot be written.
    """
    write_whole(folder / MARKDOWN, _markdown(comparison))
    write_whole(folder / CSV, _csv(comparison))
    write_whole(folder / JSON, strict_json(_record(comparison)))


def _heading(comparison: Comparison, column: Column, line: str) -> str:
    """What the data really was, and the setting."""
    found = dict.fromkeys(figure.description for figure in comparison.figures if figure.column == column)
    data = "; ".join(filter(None, found)) or column.dataset
    return line.join((data, f"{column.clients} clients", column.setting))


def _place(figure: Figure | None, seeds: int, line: str) -> str:
    """Ours, the paper's and the difference."""
    if figure is None:
        return ""
    ours = NOTHING if figure.mean is None else f"{figure.mean:.2f}"
    if figure.std is not None:
        ours += f" ± {figure.std:.2f}"
    if 0 < len(figure.accuracies) < seeds:
        ours += f" ({len(figure.accuracies)} of {seeds})"
    paper = NOTHING if figure.published is None else f"{figure.published:.2f}"
    return f"{ours}{line}{paper} / {NOTHING if figure.difference is None else f'{figure.difference:+.2f}'}"


def _markdown(comparison: Comparison) -> str:
    columns = comparison.columns
    rows = [["method", *(_heading(comparison, column, ", ") for column in columns)], ["---"] + ["---:"] * len(columns)]
    for method in comparison.methods:
        places = (_place(comparison.at(column, method), comparison.seeds, " / ") for column in columns)
        rows.append([f"`{method}`", *places])
    lines = [f"**{comparison.title}**", "", *(f"| {' | '.join(row)} |" for row in rows), ""]
    return "\n".join([*lines, *(f"- {note}" for note in notes(comparison))]) + "\n"


def _records(comparison: Comparison) -> list[dict[str, Any]]:
    """The places one by one."""
    return [
        {
            "dataset": figure.row.dataset,
            "clients": figure.row.clients,
            "setting": figure.row.setting,
            "method": figure.row.method,
            "data": figure.description,
            "seeds": len(figure.accuracies),
            "mean": _rounded(figure.mean),
            "std": _rounded(figure.std),
            "paper": figure.published,
            "difference": _rounded(figure.difference),
        }
        for figure in comparison.figures
    ]


def _csv(comparison: Comparison) -> str:
    text = io.StringIO()
    records = _records(comparison)
    extra = {"protocol": comparison.protocol, "score": comparison.score}
    writer = csv.DictWriter(text, [*records[0], *extra], lineterminator="\n")
    writer.writeheader()
    writer.writerows(record | extra for record in records)
    return text.getvalue()


def _record(comparison: Comparison) -> dict[str, Any]:
    places = [
        record
        | {
            "accuracies": {str(seed): rounded(value) for seed, value in figure.accuracies.items()},
            "deviations": {name: {"here": had, "paper": paper} for name, (had, paper) in figure.deviations.items()},
            "arguments": figure.row.arguments,
        }
        for record, figure in zip(_records(comparison), comparison.figures, strict=True)
    ]
    return {
        "paper": comparison.paper,
        "table": comparison.number,
        "title": comparison.title,
        "protocol": comparison.protocol,
        "score": comparison.score,
        "seeds": comparison.seeds,
        "notes": notes(comparison),
        "places": places,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else rounded(value)
