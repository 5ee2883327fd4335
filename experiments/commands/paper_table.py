"""Comparison of a paper's table with our results: for the terminal, and as Markdown, CSV and JSON.

Results on embedded data are never compared with the paper's. Notes below the table name deviations from the paper.
"""

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from experiments.folder.load import StoredRun, coverage_text
from experiments.folder.run_folder import rounded, slug, strict_json
from experiments.folder.stored_runs import NOTHING, Mean
from experiments.host.console import print_text
from experiments.papers import settings
from experiments.papers.published import Published
from experiments.papers.settings import Measure
from experiments.show.tables import Table, number
from experiments.spec.identity import differences
from experiments.spec.option_notes import flag, option_words
from experiments.spec.presets import PROCEDURES
from pfl_jax.atomic_write import write_text
from pfl_jax.compare import margin
from pfl_jax.errors import InvalidInput

MARKDOWN, LATEX, CSV, JSON = "table.md", "table.tex", "table.csv", "table.json"


def folder_of(row: Published) -> Path:
    """Folder of a cell, relative to the table's folder; it has a subfolder for each seed."""
    where = slug(f"{row.dataset} {row.clients} clients {row.setting}")
    return Path(where, slug(row.method.replace(" -", " no-")))


@dataclass(frozen=True)
class Entry:
    """Cell of a table: our finished runs, one for each seed, and the published accuracy.

    Attributes:
      row: the published accuracy.
      runs: our finished runs.
      measure: definition of our accuracies.
      beside_stand_in: whether the column has results on a stand-in; the paper's figures are then not shown.
    """

    row: Published
    runs: Sequence[StoredRun]
    measure: Measure
    beside_stand_in: bool = False

    @property
    def column(self) -> tuple[str, int, str]:
        """Dataset, number of clients and setting of the cell."""
        return self.row.dataset, self.row.clients, self.row.setting

    @functools.cached_property
    def accuracies(self) -> Mean:
        """Our accuracy in percent by finished seed."""
        return Mean({run.seed: run.accuracy(*self.measure) for run in self.runs})

    @property
    def mean(self) -> float | None:
        """Our mean over seeds, see `Mean`."""
        return self.accuracies.value

    @property
    def description(self) -> str:
        """Description of the data; "" without a result."""
        return "; ".join(dict.fromkeys(run.data for run in self.runs))

    @property
    def data(self) -> str:
        """Name of the data, "cifar10, JPEG copy"; "" without a result."""
        return "; ".join(dict.fromkeys(run.data_name for run in self.runs))

    @functools.cached_property
    def deviations(self) -> dict[str, tuple[Any, Any]]:
        """Option -> its value here and in the paper's setting, where they differ."""
        measure = self.row.measure
        # `eval_every` affects only the best round, unless training itself scores every round; FedPAC does not state it.
        is_silent = measure.score != "best" or measure.protocol == "trained"
        silent = {"seed", "eval_every"} if is_silent else {"seed"}
        found = [differences(self.row.spec(), run.config) for run in self.runs]
        return {name: pair for run in found for name, pair in run.items() if name not in silent}

    @property
    def deviation_words(self) -> list[str]:
        """Deviations as "--rounds 50 instead of 200"."""
        return [f"{flag(name)} {had} instead of {paper}" for name, (had, paper) in self.deviations.items()]

    @property
    def error(self) -> float | None:
        """Half of the 95 % interval of our mean in points, over seeds or, with one seed, over its clients, see
        `pfl_jax.compare.margin`. None unless the measure is the mean over clients in the last round."""
        if self.measure[1:] != ("last", "clients") or not self.runs:
            return None
        return error_of([run.final[self.measure.protocol] for run in self.runs])

    @property
    def over(self) -> str:
        """Number of clients behind the accuracies, see `coverage_text`; the same in the best round as in the last."""
        if not self.runs:
            return ""
        return coverage_text((run.final[self.measure.protocol] for run in self.runs), self.runs[0].everyone)

    @property
    def published(self) -> float | None:
        """The paper's accuracy; None beside results on embedded data."""
        return None if self.beside_stand_in else self.row.accuracy_percent

    @property
    def difference(self) -> float | None:
        return None if self.mean is None or self.published is None else self.mean - self.published

    @property
    def difference_text(self) -> str:
        """Difference with `error`, if there is one."""
        text = number(self.difference, "+.2f")
        return text if self.difference is None or self.error is None else f"{text} ± {self.error:.2f}"

    def text(self, seeds: int) -> str:
        """Our accuracy / the paper's / the difference; it names the finished seeds if some seeds are missing."""
        ours = self.accuracies.text() or NOTHING
        if 0 < len(self.runs) < seeds:
            ours += f" (seed {', '.join(map(str, self.accuracies.per_seed))} alone)"
        ours += f" over {self.over}" if self.over else ""
        return f"{ours} / {number(self.published)} / {self.difference_text}"

    @property
    def record(self) -> dict[str, Any]:
        """Values for table.csv."""
        values = {"mean": self.mean, "std": self.accuracies.deviation, "paper": self.published}
        values |= {"difference": self.difference, "error": self.error}
        return {
            **{name: getattr(self.row, name) for name in ("dataset", "clients", "setting", "method")},
            "data": self.description or None,
            "seeds": len(self.accuracies.known),
            **{name: None if value is None else rounded(value) for name, value in values.items()},
            "over": self.over,
            **self.measure._asdict(),
        }


def error_of(summaries: Sequence[dict[str, Any]]) -> float | None:
    """Half of the 95 % interval of the mean of some runs, from their summaries over clients, see `Entry.error`."""
    columns: list[list[Any]] = [[one.get(name) for one in summaries] for name in ("mean", "std", "clients")]
    means, stds, clients = columns
    if any(value is None for value in (*means, *stds, *clients)):
        return None
    half = margin(stds[0], clients[0]) if len(means) == 1 else margin(statistics.pstdev(means), len(means))
    return half if math.isfinite(half) else None


class Comparison(NamedTuple):
    """Table of a paper, whole or in part, with its entries in the paper's order and the requested number of seeds."""

    paper: str
    number: int
    entries: tuple[Entry, ...]
    seeds: int

    @property
    def measures(self) -> dict[Measure, list[str]]:
        """Definition of an accuracy -> the methods it applies to; the most frequent definition comes first."""
        found: dict[Measure, list[str]] = {}
        for entry in self.entries:
            found.setdefault(entry.measure, []).append(entry.row.method)
        ordered = sorted(found.items(), key=lambda item: -len(item[1]))
        return {measure: list(dict.fromkeys(methods)) for measure, methods in ordered}

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


def compare(paper: str, number: int, entries: Sequence[Entry], seeds: int) -> Comparison:
    """Combine entries into a table.

    A column with a result on a stand-in shows none of the paper's figures, not even in cells without a result of ours.

    Raises:
      InvalidInput: only some results of a column are on the dataset itself.
    """
    kinds: dict[tuple[str, int, str], set[bool]] = {}
    for one in entries:
        kinds.setdefault(one.column, set()).update(run.is_real for run in one.runs)
    if mixed := [dataset for (dataset, *_), found in kinds.items() if len(found) > 1]:
        raise InvalidInput(
            f"some results on {mixed[0]} are on the dataset and some on its stand-in: give --source, and --out a new "
            "folder"
        )
    shown = [replace(one, beside_stand_in=False in kinds[one.column]) for one in entries]
    return Comparison(paper, number, tuple(shown), seeds)


def notes(comparison: Comparison) -> list[str]:
    """Notes needed to read the table, a line each."""
    entries = comparison.entries
    with_runs = [entry for entry in entries if entry.runs]
    over = f"seeds 0 to {comparison.seeds - 1}, ± their standard deviation" if comparison.seeds > 1 else "seed 0 alone"
    of = {"clients": "mean over clients", "examples": "mean over the test examples of all clients"}
    average = entries[0].measure.average
    lines = [f"Each cell: our {of[average]}, {over} / the paper's figure / the difference."]
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
    lines += _deviation_notes(with_runs)
    for description in dict.fromkeys(entry.description for entry in with_runs if entry.beside_stand_in):
        lines.append(f"{description} only stands in for the dataset: the paper's figures do not belong beside it.")
    real = [entry for entry in with_runs if not entry.beside_stand_in]
    for data in dict.fromkeys(entry.data for entry in real if entry.data != entry.row.dataset):
        lines.append(f"{data}: not the pixels of the paper, which may be a part of the differences.")
    finished, wanted = sum(len(entry.runs) for entry in entries), len(entries) * comparison.seeds
    if finished < wanted:
        lines.append(f"{finished} of {wanted} runs are finished; {NOTHING} marks missing results.")
    return lines + list(settings.PAPERS[comparison.paper].tables[comparison.number][1:])


def _deviation_notes(entries: Sequence[Entry]) -> list[str]:
    """Notes on deviations from the paper, a line for each set of datasets and methods with the same deviations."""
    found: dict[str, dict[str, None]] = {}
    for words in dict.fromkeys(words for entry in entries for words in entry.deviation_words):
        where, limits = [entry for entry in entries if words in entry.deviation_words], ""
        for kind, name in (("on", "dataset"), ("for", "method")):
            names, every = ({getattr(one.row, name): None for one in some} for some in (where, entries))
            limits += f" {kind} {', '.join(names)}" if len(names) < len(every) else ""
        found.setdefault(limits, {})[words] = None
    return [f"Not as in the paper{limits}: {', '.join(words)}." for limits, words in found.items()]


def table(comparison: Comparison) -> Table:
    entries = {(entry.column, entry.row.method): entry for entry in comparison.entries}
    columns = list(dict.fromkeys(column for column, _ in entries))
    rows = [
        [method, *(one.text(comparison.seeds) if (one := entries.get((column, method))) else "" for column in columns)]
        for method in comparison.methods
    ]
    heads = ["method"]
    for column in columns:
        # Name a substitute of the dataset; the title has the source of the data.
        data = dict.fromkeys(one.data for one in comparison.entries if one.column == column and one.data)
        dataset, clients, setting = column
        heads.append(f"{'; '.join(data) or dataset}, {clients} clients, {setting}")
    return Table(comparison.title, heads, rows, notes(comparison))


def show(comparison: Comparison, console: Console) -> None:
    """Print the table column by column, which fits on any terminal."""
    print_text(console, comparison.title, style="bold")
    made = table(comparison)
    for place, head in enumerate(made.heads[1:], start=1):
        rows = [[row[0], *row[place].split(" / ")] for row in made.rows if row[place]]
        console.print(Table(head, ["method", "ours", "paper", "difference"], rows).terminal())
    for note in made.notes:
        print_text(console, note)


def save(comparison: Comparison, folder: Path) -> None:
    """Write table.md, table.tex, table.csv and table.json, each atomically."""
    table(comparison).save(folder / MARKDOWN, folder / LATEX)
    records = [entry.record for entry in comparison.entries]
    Table("", list(records[0]), [list(record.values()) for record in records]).save(folder / CSV)
    places = [
        record
        | {"accuracies": {str(run): rounded(one) for run, one in entry.accuracies.per_seed.items() if one is not None}}
        | {"deviations": {name: {"here": had, "paper": paper} for name, (had, paper) in entry.deviations.items()}}
        | {"arguments": option_words(entry.row.options)}
        for record, entry in zip(records, comparison.entries, strict=True)
    ]
    procedure = comparison.entries[0].row.procedure
    record = {
        "paper": comparison.paper,
        "table": comparison.number,
        "title": comparison.title,
        **next(iter(comparison.measures))._asdict(),
        **({"procedure": procedure} if procedure else {}),
        "seeds": comparison.seeds,
        "notes": notes(comparison),
        "places": places,
    }
    write_text(folder / JSON, strict_json(record))
