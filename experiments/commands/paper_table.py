"""Comparison of a paper's table with our results: for the terminal, and as Markdown, CSV and JSON.

Results on embedded data are never compared with the paper's, and deviations from the paper are noted below.
"""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from experiments.folder import load
from experiments.folder.load import StoredRun, data_name
from experiments.folder.run_folder import rounded, slug, strict_json
from experiments.host.console import print_text
from experiments.papers import settings
from experiments.papers.published import Published
from experiments.papers.settings import Measure
from experiments.show.tables import NOTHING, Table, number, with_deviation
from experiments.spec.identity import differences
from experiments.spec.option_notes import flag
from experiments.spec.presets import PROCEDURES
from pfl_jax.atomic_write import write_text
from pfl_jax.compare import margin
from pfl_jax.errors import InvalidInput

MARKDOWN, LATEX, CSV, JSON = "table.md", "table.tex", "table.csv", "table.json"


def folder_of(row: Published) -> Path:
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
      over: over how many clients the accuracies are, see `load.coverage_text`.
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
    def column(self) -> tuple[str, int, str]:
        """Dataset, number of clients and setting of the place."""
        return self.row.dataset, self.row.clients, self.row.setting

    @property
    def deviation_words(self) -> list[str]:
        """Deviations as "--rounds 50 instead of 200"."""
        return [f"{flag(name)} {had} instead of {paper}" for name, (had, paper) in self.deviations.items()]

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


def entry(row: Published, results: Sequence[StoredRun], measure: Measure) -> Entry:
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
        _error([result.final[measure.protocol] for result in results]) if measure[1:] == ("last", "clients") else None,
        "; ".join(dict.fromkeys(data_name(result.config) for result in results)),
        # The best round has as many as the last one.
        load.coverage_text((one.final[measure.protocol] for one in results), load.number_of_clients(results[0].config)),
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

    A column with a result on a stand-in shows no figure of the paper, also in places without a result of ours.
    """
    kinds: dict[tuple[str, int, str], set[Any]] = {}
    for one in entries:
        kinds.setdefault(one.column, set()).add(one.is_real)
    real = {column: _one_kind(kind - {None}, column[0]) for column, kind in kinds.items()}
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
    # How often matters where the best round counts, unless training itself scores every round; FedPAC does not say it.
    silent = {"seed"} if row.measure.score == "best" and row.measure.protocol != "trained" else {"seed", "eval_every"}
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
    finished, wanted = sum(len(entry.accuracies) for entry in entries), len(entries) * comparison.seeds
    if finished < wanted:
        lines.append(f"{finished} of {wanted} runs are finished; {NOTHING} marks what is not there.")
    return lines + list(settings.PAPERS[comparison.paper].tables[comparison.number][1:])


def _deviation_notes(entries: Sequence[Entry]) -> list[str]:
    """Notes on deviations from the paper: a line for those everywhere, and lines for those in some places."""
    found: dict[str, dict[str, None]] = {}
    for words in dict.fromkeys(words for entry in entries for words in entry.deviation_words):
        where, limits = [entry for entry in entries if words in entry.deviation_words], ""
        for kind, name in (("on", "dataset"), ("for", "method")):
            names, every = ({getattr(one.row, name): None for one in some} for some in (where, entries))
            limits += f" {kind} {', '.join(names)}" if len(names) < len(every) else ""
        found.setdefault(limits, {})[words] = None
    return [f"Not as in the paper{limits}: {', '.join(words)}." for limits, words in found.items()]


def table(comparison: Comparison) -> Table:
    """A row for each method, a column for each column of the paper's table."""
    entries = {(entry.column, entry.row.method): entry for entry in comparison.entries}
    columns = list(dict.fromkeys(column for column, _ in entries))
    rows = [
        [method, *(_text(entries.get((column, method)), comparison.seeds) for column in columns)]
        for method in comparison.methods
    ]
    heads = ["method"]
    for column in columns:
        # The substitute of the dataset if there is one; the source of the dataset is in the title.
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
    records = [_record(entry) for entry in comparison.entries]
    Table("", list(records[0]), [list(record.values()) for record in records]).save(folder / CSV)
    places = [
        record
        | {"accuracies": {str(seed): rounded(value) for seed, value in entry.accuracies.items()}}
        | {"deviations": {name: {"here": had, "paper": paper} for name, (had, paper) in entry.deviations.items()}}
        | {"arguments": entry.row.arguments}
        for record, entry in zip(records, comparison.entries, strict=True)
    ]
    record = {"paper": comparison.paper, "table": comparison.number, "title": comparison.title}
    record |= next(iter(comparison.measures))._asdict()
    record |= {"procedure": comparison.entries[0].row.procedure} if comparison.entries[0].row.procedure else {}
    record |= {"seeds": comparison.seeds, "notes": notes(comparison), "places": places}
    write_text(folder / JSON, strict_json(record))


def _text(entry: Entry | None, seeds: int) -> str:
    """Our accuracy / the paper's / the difference with the interval of ours; "" where the paper has none."""
    if entry is None:
        return ""
    ours = with_deviation(entry.mean, entry.std)
    if 0 < len(entry.accuracies) < seeds:
        ours += f" ({len(entry.accuracies)} of {seeds})"
    ours += f" over {entry.over}" if entry.over else ""
    return f"{ours} / {number(entry.published)} / {difference_text(entry)}"


def difference_text(entry: Entry) -> str:
    """Difference to the published accuracy, with half of the 95 % interval of ours where there is one."""
    text = number(entry.difference, "+.2f")
    return text if entry.difference is None or entry.error is None else f"{text} ± {entry.error:.2f}"


def _record(entry: Entry) -> dict[str, Any]:
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
