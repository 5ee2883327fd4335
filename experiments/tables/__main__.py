"""Tables of the papers: every run of a table, each in its folder, and the table with our results beside the paper's.

    python -m experiments.tables --paper fedpac --table 1 --dataset fashion_mnist --clients 20 --seeds 3

Repeating the command resumes where it stopped: finished runs stay, an interrupted one resumes. --method and
--setting narrow what is run, --dry-run only shows it. All other words (--rounds 50, --train-size 100, --source
embedded, ...) are options of `python -m experiments.DATASET`, go to every run, and are noted in the table.

Runs whose results the repository keeps, in results/, are finished too; --anew runs them all the same.

Table 1 of FedPAC on Fashion-MNIST with 20 clients: 15 methods of 200 rounds for each seed.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, get_args

from rich.console import Console

from experiments.commands import batch
from experiments.config.cell import Cell
from experiments.config.measures import AVERAGES, PROTOCOLS, Score
from experiments.config.options import flag
from experiments.execution import cached_runs, committed
from experiments.execution.committed import Library
from experiments.papers import published, settings
from experiments.papers.published import Published
from experiments.papers.settings import Measure
from experiments.results import load
from experiments.results.run_folder import SUMMARY
from experiments.runtime.progress import duration
from experiments.tables import comparison, layout
from experiments.tables.comparison import Comparison, Figure
from pfl_jax.errors import InvalidInput

ROOT = Path("runs/tables")


class TableRequest(NamedTuple):
    """Checked command line.

    Attributes:
      paper, table: which table.
      rows: all of it.
      wanted: what is to be run and printed of it, and can be.
      shown: what is to be printed.
      seeds: how many, from 0.
      words: for every run.
      measure: which accuracy counts.
      out: folder of the runs and the table.
      dry_run: only print the commands.
      anew: whether to ignore committed results.
    """

    paper: str
    table: int
    rows: list[Published]
    wanted: list[Published]
    shown: list[Published]
    seeds: int
    words: tuple[str, ...]
    measure: Measure
    out: Path
    dry_run: bool
    anew: bool

    def runs(self, row: Published) -> list[tuple[Cell, Path]]:
        """Cells of a place of the table, one for each seed, and their folders; none if it cannot be run."""
        if not comparison.is_runnable(row):
            return []
        arguments, folder = (*row.arguments, *self.words), self.out / comparison.place(row)
        return [(Cell(row.dataset, arguments, seed), folder / f"seed-{seed}") for seed in range(self.seeds)]

    def library(self) -> Library | None:
        """Committed results that count as finished runs; none beside runs on embedded data."""
        if self.anew or any(not load.read_config(path.parent)["data"]["is_real"] for path in _summaries(self.out)):
            return None
        return Library(committed.ROOT)

    def compare(self) -> tuple[Comparison, Comparison]:
        """The requested part of the table, and the same with all other stored results."""
        library = self.library()
        figures = [comparison.figure(row, self.runs(row), self.measure, library) for row in self.rows]
        there = [figure for figure in figures if figure.accuracies]
        columns = {figure.column for figure in there} | {comparison.column(row) for row in self.shown}
        methods = {figure.row.method for figure in there} | {row.method for row in self.shown}
        saved = [figure for figure in figures if figure.column in columns and figure.row.method in methods]
        shown = [figure for figure in figures if figure.row in self.shown]
        return self._compare(shown), self._compare(saved)

    def _compare(self, figures: Sequence[Figure]) -> Comparison:
        return comparison.compare(self.paper, self.table, figures, self.measure, self.seeds)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a table.

    Args:
      arguments: command-line arguments; by default those of this process.

    Returns:
      The exit code, see `exit_codes.exit_code`.
    """
    return batch.command(arguments, parse, _dry_run, _run)


def _summaries(folder: Path) -> list[Path]:
    """Summaries of the finished runs in a table's folder."""
    return sorted(folder.glob(f"*/*/seed-*/{SUMMARY}"))


def _parser() -> batch.Parser:
    parser = batch.Parser("experiments.tables", __doc__)
    tables = "; ".join(f"{name}: {', '.join(map(str, _numbers(name)))}" for name in settings.PAPERS)
    parser.add_argument("--paper", required=True, help=", ".join(settings.PAPERS))
    parser.add_argument("--table", type=int, required=True, metavar="NUMBER", help=tables)
    parser.add_argument("--dataset", nargs="+", action="extend", help="only these of its datasets")
    parser.add_argument("--clients", nargs="+", action="extend", metavar="N", help="only these numbers of clients")
    parser.add_argument("--setting", nargs="+", help="only settings with these words, such as beta=0.1")
    parser.add_argument("--method", nargs="+", action="extend", help="only these of its methods, as the table has them")
    parser.add_argument("--seeds", type=int, default=1, metavar="K", help="seeds 0 to K - 1 (default 1)")
    usual = "by default as the paper has it"
    parser.add_argument(
        "--eval-protocol",
        metavar="PROTOCOL",
        help=f"received, trained or before_aggregation: what is compared, {usual}. Runs measure the third by request "
        "only, and all three then: with the same --out, tables of the other two are made of the same runs",
    )
    parser.add_argument("--score", help=f"last or best: which round counts, {usual}")
    parser.add_argument("--average", help=f"clients or examples: whether each client counts the same, {usual}")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of runs and table; by default in runs/tables")
    parser.add_argument("--dry-run", action="store_true", help="say each command and what is there, and run nothing")
    parser.add_argument("--anew", action="store_true", help="run what only the committed results have, too")
    return parser


def parse(words: Sequence[str]) -> TableRequest:
    """Check a command line.

    Raises:
      InvalidInput: an unknown paper, table, dataset, number of clients, setting, method or option.
    """
    parser = _parser()
    own, rest = parser.parse_known_args(words)
    batch.choose("paper", [own.paper], settings.PAPERS)
    batch.choose("table", [str(own.table)], [str(number) for number in _numbers(own.paper)], f" in {own.paper}")
    measure = _measure(own)
    if measure.protocol == "before_aggregation":
        rest += ["--eval-protocol", measure.protocol]
    if own.seeds < 1:
        raise InvalidInput(f"--seeds must be at least 1, not {own.seeds}")
    rows = [row for row in published.load() if (row.paper, row.table) == (own.paper, own.table)]
    shown = _select(rows, own)
    request = TableRequest(
        paper=own.paper,
        table=own.table,
        rows=rows,
        wanted=[row for row in shown if comparison.is_runnable(row)],
        shown=shown,
        seeds=own.seeds,
        words=tuple(rest),
        measure=measure,
        out=(own.out or ROOT / batch.folder_name(own.paper, own.table, rest)).expanduser(),
        dry_run=own.dry_run,
        anew=own.anew,
    )
    _check_words(request)
    return request


def _measure(own: argparse.Namespace) -> Measure:
    """Definition of the accuracy: the paper's, with the requested changes."""
    measure = settings.MEASURES[own.paper]
    for field, name, choices in (
        ("protocol", "eval-protocol", PROTOCOLS),
        ("score", "score", get_args(Score)),
        ("average", "average", AVERAGES),
    ):
        asked = getattr(own, name.replace("-", "_"))
        if asked is not None:
            batch.choose(name, [asked], choices)
            measure = measure._replace(**{field: asked})
    return measure


def _numbers(name: str) -> list[int]:
    return [number for of, number in settings.TABLES if of == name]


def _select(rows: Sequence[Published], own: argparse.Namespace) -> list[Published]:
    """Requested rows; each option narrows the selection further."""
    chosen, where = list(rows), f" in {own.paper}'s Table {own.table}"
    for name, words in (("dataset", "dataset"), ("clients", "number of clients"), ("method", "method")):
        asked = getattr(own, name)
        if asked is None:
            continue
        batch.choose(words, asked, dict.fromkeys(str(getattr(row, name)) for row in chosen), where)
        chosen = [row for row in chosen if str(getattr(row, name)) in asked]
    if own.setting is not None:
        asked = " ".join(own.setting).split()
        named = list(dict.fromkeys(row.setting for row in chosen))
        chosen = [row for row in chosen if set(asked) <= set(row.setting.split())]
        if not chosen:
            raise InvalidInput(f"no setting '{' '.join(asked)}'{where} (there are {'; '.join(named)})")
    return chosen


def _check_words(request: TableRequest) -> None:
    """Refuse options that would change the cells, or that a method does not accept."""
    fixed = sorted(batch.given(request.words) & settings.FIXED)
    if fixed:
        hints = {"seed": ": use --seeds", "resume": ": the same command goes on where it was stopped"}
        hint = hints.get(fixed[0], ": it is what the table compares, or a part of its setting")
        raise InvalidInput(f"{flag(fixed[0])} cannot be given for a table{hint}")
    if {"-h", "--help"} & set(request.words):
        raise InvalidInput("--help stands alone")
    # What a word means depends on the dataset and the method, not on the setting.
    for row in {(row.dataset, row.method): row for row in request.wanted}.values():
        Cell(row.dataset, (*row.arguments, *request.words)).request()


def _dry_run(request: TableRequest, console: Console) -> None:
    library = request.library()
    for row in request.wanted:
        for cell, folder in request.runs(row):
            kept = None if library is None else library.find(cell)
            cached_runs.print_state(cell, folder, console, None if kept is None else kept.path)


def _run(request: TableRequest, console: Console) -> None:
    """Run what is missing, save the table after each run, and print it."""
    _claim_table(request)
    cells = [
        (row, *run)
        for seed in range(request.seeds)
        for row in request.wanted
        for run in request.runs(row)
        if run[0].seed == seed
    ]
    # All folders first: what is refused is refused before hours of work.
    states = {folder: cached_runs.inspect(cell, folder) for _, cell, folder in cells}
    seconds = {folder: _seconds(folder) for folder, state in states.items() if state == "finished"}
    there, library = len(seconds), request.library()
    for _, cell, folder in cells:
        kept = None if library is None else library.find(cell)
        if kept is not None:
            seconds.setdefault(folder, kept.seconds)
    console.print(
        f"{len(seconds)} of {len(cells)} runs are there, in {request.out}"
        + (f" and {committed.ROOT.name} ({len(seconds) - there})" if len(seconds) > there else ""),
        highlight=False,
    )
    try:
        for number, (row, cell, folder) in enumerate(cells, start=1):
            if folder in seconds:
                continue
            left = _seconds_left(cells[number - 1 :], seconds)
            console.print(
                f"run {number} of {len(cells)}: {row.method} on {row.dataset}, {row.clients} clients, {row.setting}, "
                f"seed {cell.seed}" + ("" if left is None else f"; about {duration(left)} left"),
                style="bold",
                soft_wrap=True,
                highlight=False,
                markup=False,
            )
            cached_runs.run_cell(cell, folder, console)
            seconds[folder] = _seconds(folder)
            layout.save(request.compare()[1], request.out)
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(
            f"{stop or 'interrupted'}; {len(seconds)} of {len(cells)} runs are finished and stay in {request.out}: the "
            "same command goes on"
        ) from None
    shown, saved = request.compare()
    layout.save(saved, request.out)
    layout.show(shown, console)
    console.print(f"saved in {request.out / layout.MARKDOWN}", soft_wrap=True, highlight=False)


def _claim_table(request: TableRequest) -> None:
    """Refuse a folder with another table, which would be overwritten."""
    path = request.out / layout.JSON
    if not path.exists():
        return
    there = load.read_json(path)
    if (there.get("paper"), there.get("table")) != (request.paper, request.table):
        raise InvalidInput(f"{request.out} holds another table, which is never overwritten: give --out another folder")


def _seconds(folder: Path) -> float:
    return load.read_summary(folder)["seconds"]


def _seconds_left(cells: Sequence[tuple[Published, Cell, Path]], seconds: dict[Path, float]) -> float | None:
    """Estimate from other seeds of the same place, else from the mean of all runs; None before the first run."""
    if not seconds:
        return None
    by_place: dict[Path, list[float]] = {}
    for folder, value in seconds.items():
        by_place.setdefault(folder.parent, []).append(value)
    usual = statistics.fmean(seconds.values())
    places = (folder.parent for _, _, folder in cells if folder not in seconds)
    return math.fsum(statistics.fmean(by_place.get(place, [usual])) for place in places)


if __name__ == "__main__":
    sys.exit(main())
