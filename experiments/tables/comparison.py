"""Comparison of a paper's table with our results: for the terminal, and as Markdown, CSV and JSON.

Results on embedded data are never compared with the paper's, and deviations from the paper are noted below.
"""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console, Group
from rich.text import Text

from experiments.fields import flag
from experiments.folder import load
from experiments.folder.load import Run, data_name
from experiments.folder.run_folder import rounded, slug, strict_json
from experiments.identity import differences
from experiments.papers import settings
from experiments.papers.published import Published
from experiments.papers.settings import Measure
from experiments.presets import DEFAULT_PRESET, PROCEDURES
from experiments.show.tables import NOTHING, comma_separated, latex_of_text, markdown, number, terminal, with_deviation
from pfl_jax.atomic_write import write_text
from pfl_jax.compare import margin
from pfl_jax.errors import InvalidInput

MARKDOWN, LATEX, CSV, JSON = "table.md", "table.tex", "table.csv", "table.json"

WIDTH = 21
"""Characters of a column on the terminal: mean, deviation, and how many seeds there are."""


class Column(NamedTuple):
    """Key of a column of a table."""

    dataset: str
    clients: int
    setting: str


def place(row: Published) -> Path:
    """Folder of a place of a table, relative to the table's folder; it has a folder for each seed."""
    where = slug(f"{row.dataset} {row.clients} clients {row.setting}")
    return Path(where, slug(row.method.replace(" -", " no-")))


class Entry(NamedTuple):
    """Our accuracies by finished seed and the published one at a place.

    Attributes:
      row: the published accuracy.
      accuracies: seed -> accuracy in percent.
      description: of the data; None without a result.
      is_real: whether the data is the dataset, not its stand-in; None without a result.
      deviations: option -> its value here and in the paper, where they differ.
      error: half of the 95 % interval of our mean in points, over seeds, or with one seed over its clients, see
        `pfl_jax.compare.margin`; the paper's own is unknown. None if the table has no means over clients in the last
        round.
      data: name of the data, "cifar10, JPEG copy"; "" without a result.
      over: over how many clients the accuracies are, see `load.over`.
      measure: definition of our accuracies.
    """

    row: Published
    accuracies: dict[int, float]
    description: str | None
    is_real: bool | None
    deviations: dict[str, tuple[Any, Any]]
    measure: Measure
    error: float | None = None
    data: str = ""
    over: str = ""

    @property
    def column(self) -> Column:
        return Column(self.row.dataset, self.row.clients, self.row.setting)

    @property
    def mean(self) -> float | None:
        """Mean over seeds."""
        return statistics.fmean(self.accuracies.values()) if self.accuracies else None

    @property
    def std(self) -> float | None:
        """Sample standard deviation over seeds; None for one seed."""
        return statistics.stdev(self.accuracies.values()) if len(self.accuracies) > 1 else None

    @property
    def published(self) -> float | None:
        """The paper's accuracy; None beside results on embedded data."""
        return None if self.is_real is False else self.row.accuracy_percent

    @property
    def difference(self) -> float | None:
        """Our accuracy minus the paper's."""
        return None if self.mean is None or self.published is None else self.mean - self.published


class Comparison(NamedTuple):
    """Table of a paper, whole or in part, with its entries in the paper's order and the requested number of seeds."""

    paper: str
    number: int
    entries: tuple[Entry, ...]
    seeds: int

    @property
    def measures(self) -> dict[Measure, list[str]]:
        """Each definition of an accuracy, the most frequent one first, and the methods that it belongs to."""
        found: dict[Measure, list[str]] = {}
        for entry in self.entries:
            found.setdefault(entry.measure, []).append(entry.row.method)
        ordered = sorted(found.items(), key=lambda item: -len(item[1]))
        return {measure: list(dict.fromkeys(methods)) for measure, methods in ordered}

    @property
    def columns(self) -> list[Column]:
        return list(dict.fromkeys(entry.column for entry in self.entries))

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(entry.row.method for entry in self.entries))

    @property
    def title(self) -> str:
        """Title: table, kind of accuracy, and the data that was used."""
        data = dict.fromkeys(entry.description for entry in self.entries if entry.description)
        title, *_ = settings.PAPERS[self.paper].tables[self.number]
        # Only the protocol differs between methods.
        measure, *others = self.measures
        how = measure.in_words(measure._fields[1:] if others else measure._fields)
        return f"{settings.PAPERS[self.paper].name}, Table {self.number}: {title}. Accuracy in percent {how}" + (
            f", on {'; '.join(data)}" if data else ": no results yet"
        )

    def at(self, column: Column, method: str) -> Entry | None:
        """Entry at a place; None if the paper has none."""
        return next((entry for entry in self.entries if (entry.column, entry.row.method) == (column, method)), None)


def entry(row: Published, results: Sequence[Run], measure: Measure) -> Entry:
    """Results of finished runs at one place of a table; InvalidInput if only some are on the dataset itself."""
    if not results:
        return Entry(row, {}, None, None, {}, measure)
    means = {result.config["options"]["seed"]: result.accuracy(*measure) for result in results}
    data = [result.config["data"] for result in results]
    return Entry(
        row,
        {seed: mean for seed, mean in means.items() if mean is not None},
        "; ".join(dict.fromkeys(one["description"] for one in data)),
        _one_kind({one["is_real"] for one in data}, row.dataset),
        _deviations(row, [result.config for result in results]),
        measure,
        _error([result.lines[-1][measure.protocol] for result in results])
        if measure[1:] == ("last", "clients")
        else None,
        "; ".join(dict.fromkeys(data_name(result.config) for result in results)),
        load.over((one.clients(*measure) for one in results), load.number_of_clients(results[0].config)),
    )


def _error(scores: Sequence[dict[str, Any]]) -> float | None:
    """Half of the 95 % interval of the mean in the last round of some runs, see `Entry`."""
    columns: list[list[Any]] = [[summary.get(name) for summary in scores] for name in ("mean", "std", "clients")]
    means, stds, clients = columns
    if any(value is None for value in (*means, *stds, *clients)):
        return None
    half = margin(stds[0], clients[0]) if len(means) == 1 else margin(statistics.pstdev(means), len(means))
    return half if math.isfinite(half) else None


def compare(paper: str, number: int, entries: Sequence[Entry], seeds: int) -> Comparison:
    """Combine entries into a table.

    A column with a result on a stand-in shows no figure of the paper, not even where there is no result of ours.
    """
    kinds: dict[Column, set[Any]] = {}
    for one in entries:
        kinds.setdefault(one.column, set()).add(one.is_real)
    real = {column: _one_kind(kind - {None}, column.dataset) for column, kind in kinds.items()}
    entries = [one if real[one.column] else one._replace(is_real=False) for one in entries]
    return Comparison(paper, number, tuple(entries), seeds)


def _one_kind(kinds: set[Any], dataset: str) -> bool:
    if len(kinds) > 1:
        raise InvalidInput(
            f"some results on {dataset} are on the dataset and some on its stand-in: give --source, and --out a new "
            "folder"
        )
    return next(iter(kinds), True)


def _deviations(row: Published, configs: Sequence[dict[str, Any]]) -> dict[str, tuple[Any, Any]]:
    """Deviations of finished runs from the paper's setting."""
    # How often matters where the best round counts, and FedPAC does not say it.
    silent = {"seed"} if settings.PAPERS[row.paper].measure.score == "best" else {"seed", "eval_every"}
    found = [differences(row.spec(), config) for config in configs]
    return {name: pair for one in found for name, pair in one.items() if name not in silent}


def notes(comparison: Comparison) -> list[str]:
    """Notes needed to read the table, a line each."""
    entries = comparison.entries
    there = [entry for entry in entries if entry.description]
    over = f"seeds 0 to {comparison.seeds - 1}, ± their standard deviation" if comparison.seeds > 1 else "seed 0 alone"
    of = {"clients": "mean over clients", "examples": "mean over the test examples of all clients"}
    average = entries[0].measure.average
    lines = [f"Each place: our {of[average]}, {over} / the paper's figure / the difference."]
    if any(entry.error is not None for entry in entries):
        lines.append("± of the difference: the 95 % interval of our mean, over seeds; with one seed, over its clients.")
    if procedure := entries[0].row.procedure:
        lines.append(f"Procedure {procedure}, {PROCEDURES[procedure].title}.")
    by_method = {measure: ", ".join(methods) for measure, methods in comparison.measures.items()}
    if len(by_method) > 1:
        lines += [f"Measured {measure.in_words(['protocol'])}: {methods}." for measure, methods in by_method.items()]
    for measure in dict.fromkeys(entry.row.measure for entry in entries if entry.measure != entry.row.measure):
        of_measure = dict.fromkeys(entry.row.method for entry in entries if entry.row.measure == measure)
        limits = f" of {', '.join(of_measure)}" if len(of_measure) < len(comparison.methods) else ""
        lines.append(f"The paper's figures{limits} are taken to be {measure.in_words()}.")
    lines += _deviation_notes(there)
    for description in dict.fromkeys(entry.description for entry in there if not entry.is_real):
        lines.append(f"{description} only stands in for the dataset: the paper's figures do not belong beside it.")
    for data in dict.fromkeys(entry.data for entry in there if entry.is_real and entry.data != entry.row.dataset):
        lines.append(f"{data}: not the pixels of the paper, which may be a part of the differences.")
    for method in comparison.methods:
        if not settings.has(method):
            lines.append(f"{method}: not a method of pfl_jax.")
    for dataset in dict.fromkeys(column.dataset for column in comparison.columns):
        if dataset not in DEFAULT_PRESET:
            lines.append(f"{dataset}: not an experiment of pfl_jax.")
    runnable = [entry for entry in entries if is_runnable(entry.row)]
    finished, wanted = sum(len(entry.accuracies) for entry in runnable), len(runnable) * comparison.seeds
    if finished < wanted:
        lines.append(f"{finished} of {wanted} runs are finished; {NOTHING} marks what is not there.")
    return lines + list(settings.PAPERS[comparison.paper].tables[comparison.number][1:])


def is_runnable(row: Published) -> bool:
    """Whether the project has the row's dataset and method."""
    return row.dataset in DEFAULT_PRESET and settings.has(row.method)


def _deviation_notes(entries: Sequence[Entry]) -> list[str]:
    """Notes on deviations from the paper: a line for those everywhere, and lines for those in some places."""
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        for name, (had, paper) in entry.deviations.items():
            found.setdefault(f"{flag(name)} {had} instead of {paper}", []).append(entry)
    by_place: dict[str, list[str]] = {}
    for words, where in found.items():
        limits = ""
        for kind, of in (("on", lambda entry: entry.row.dataset), ("for", lambda entry: entry.row.method)):
            names = dict.fromkeys(map(of, where))
            if len(names) < len(set(map(of, entries))):
                limits += f" {kind} {', '.join(names)}"
        by_place.setdefault(limits, []).append(words)
    return [f"Not as in the paper{limits}: {', '.join(words)}." for limits, words in by_place.items()]


def show(comparison: Comparison, console: Console) -> None:
    """Print the table, in blocks of as many columns as fit on the console."""
    columns = comparison.columns
    first = max(map(len, (*comparison.methods, "method"))) + 4
    most = max(1, (console.width - first) // (WIDTH + 3))
    blocks = []
    for start in range(0, len(columns), most):
        part = columns[start : start + most]
        heads = ["method", *(_heading(comparison, column, "\n") for column in part)]
        table = terminal(heads, _rows(comparison, part, "\n"), show_lines=True)
        for column in table.columns[1:]:
            column.max_width = WIDTH
        blocks.append(table)
    title = Text(comparison.title, style="bold")
    console.print(Group(title, *blocks, *notes(comparison)), highlight=False)


def save(comparison: Comparison, folder: Path) -> None:
    """Write table.md, table.tex, table.csv and table.json, each atomically."""
    columns, measure = comparison.columns, next(iter(comparison.measures))
    heads = ["method", *(_heading(comparison, column, ", ") for column in columns)]
    rows = _rows(comparison, columns, " / ")
    write_text(folder / LATEX, latex_of_text(heads, rows, " ".join([f"{comparison.title}.", *notes(comparison)])))
    rows = [[f"`{method}`", *places] for method, *places in rows]
    lines = "\n".join(f"- {note}" for note in notes(comparison))
    write_text(folder / MARKDOWN, f"**{comparison.title}**\n\n{markdown(heads, rows)}\n{lines}\n")
    records = [_entry(entry) for entry in comparison.entries]
    write_text(folder / CSV, comma_separated(records))
    places = [
        record
        | {"accuracies": {str(seed): rounded(value) for seed, value in entry.accuracies.items()}}
        | {"deviations": {name: {"here": had, "paper": paper} for name, (had, paper) in entry.deviations.items()}}
        | {"arguments": entry.row.arguments}
        for record, entry in zip(records, comparison.entries, strict=True)
    ]
    record = {"paper": comparison.paper, "table": comparison.number, "title": comparison.title}
    record |= measure._asdict()
    record |= {"procedure": comparison.entries[0].row.procedure} if comparison.entries[0].row.procedure else {}
    record |= {"seeds": comparison.seeds, "notes": notes(comparison), "places": places}
    write_text(folder / JSON, strict_json(record))


def _rows(comparison: Comparison, columns: list[Column], line: str) -> list[list[str]]:
    """Each method and its places."""
    return [
        [method, *(_place(comparison.at(column, method), comparison.seeds, line) for column in columns)]
        for method in comparison.methods
    ]


def _heading(comparison: Comparison, column: Column, line: str) -> str:
    """Setting, and the substitute of the dataset if there is one; the source of the dataset is in the title."""
    data = dict.fromkeys(entry.data for entry in comparison.entries if entry.column == column and entry.data)
    return line.join(("; ".join(data) or column.dataset, f"{column.clients} clients", column.setting))


def _place(entry: Entry | None, seeds: int, line: str) -> str:
    """Our accuracy, the paper's, and the difference with the interval of ours."""
    if entry is None:
        return ""
    ours = with_deviation(entry.mean, entry.std)
    if 0 < len(entry.accuracies) < seeds:
        ours += f" ({len(entry.accuracies)} of {seeds})"
    ours += f" over {entry.over}" if entry.over else ""
    return f"{ours}{line}{number(entry.published)} / {difference_text(entry)}"


def difference_text(entry: Entry) -> str:
    """Difference to the published accuracy, with half of the 95 % interval of ours where there is one."""
    text = number(entry.difference, "+.2f")
    return text if entry.difference is None or entry.error is None else f"{text} ± {entry.error:.2f}"


def _entry(entry: Entry) -> dict[str, Any]:
    """Record of one place."""
    values = {"mean": entry.mean, "std": entry.std, "paper": entry.published, "difference": entry.difference}
    values["error"] = entry.error
    return {
        **{name: getattr(entry.row, name) for name in ("dataset", "clients", "setting", "method")},
        "data": entry.description,
        "seeds": len(entry.accuracies),
        **{name: None if value is None else rounded(value) for name, value in values.items()},
        "over": entry.over,
        **entry.measure._asdict(),
    }
