"""Tables of a page: results beside the papers, configuration, timings, versions."""

import itertools
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from experiments.config.measures import FIELD, Protocol
from experiments.config.options import flag
from experiments.papers import settings
from experiments.papers.published import Published
from experiments.plots.selection import ordered
from experiments.results.gather import Group, Run, mean_and_deviation, plain
from experiments.runtime.progress import duration

NOTHING = "—"
_FIGURES = {
    "pooled": ("pooled", 2),
    "std": ("std over clients", 2),
    "worst_decile": ("worst decile", 2),
    "jain": ("Jain", 3),
    "loss": ("loss", 3),
    "macro_f1": ("macro F1", 2),
    "auc": ("AUC", 2),
}
"""Name in the metrics log -> heading and decimals."""
_WORDS = {"state", "device, chunk", "folder", "program", "version", "runs"}
"""Headings of columns that hold no numbers."""


class Cell(NamedTuple):
    """Cell of a table.

    Attributes:
      text: what it says; nothing is shown as a dash.
      note: small, below.
      kind: "unfinished", "code" or nothing.
    """

    text: str | None
    note: str = ""
    kind: str = ""


class Table(NamedTuple):
    """Table whose first column names the rows.

    Attributes:
      columns: headings.
      rows: a cell for each column.
      strong: numbers of rows that stand out.
    """

    columns: list[str]
    rows: list[list[Cell]]
    strong: Sequence[int] = ()

    def is_number(self, column: int) -> bool:
        """Whether a column holds numbers."""
        return column > 0 and self.columns[column] not in _WORDS


def _table(columns: Sequence[str], rows: Sequence[Sequence[Cell | str | None]], strong: Sequence[int] = ()) -> Table:
    cells = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows]
    return Table(list(columns), cells, strong)


def results(groups: Sequence[Group]) -> dict[Protocol, Table]:
    """Results of each protocol after the last round, beside the paper's, on one kind of data."""
    return {protocol: _results(groups, protocol) for protocol in ordered(groups)}


def _results(groups: Sequence[Group], protocol: Protocol) -> Table:
    there = [name for name in _FIGURES if any(_values(group, protocol, name) for group in groups)]
    unseen, published = [_new_clients(group, protocol) for group in groups], [group.published for group in groups]
    columns = ["setting", "mean", *(_FIGURES[name][0] for name in there), "best (round)"]
    columns += ["new clients"] if any(unseen) else []
    columns += ["paper", "difference"] if any(published) else []
    rows, means = [], []
    for group, new, figure in zip(groups, unseen, published, strict=True):
        values = _values(group, protocol, "mean")
        mean, deviation = mean_and_deviation(values) if values else (None, None)
        means.append(-1.0 if mean is None else mean)
        spread = "" if deviation is None else f" ± {deviation:.2f}"
        row = [group.label, None if mean is None else f"{mean:.2f}{spread}"]
        for name in there:
            found = _values(group, protocol, name)
            row.append(f"{statistics.fmean(found):.{_FIGURES[name][1]}f}" if found else None)
        row += [_best(group, protocol), *([new] if any(unseen) else [])]
        if figure is not None:
            row += [Cell(f"{figure.accuracy_percent:.2f}", figure.source), _difference(group, protocol, figure)]
        elif any(published):
            row += [None, None]
        rows.append([*row, str(len(group.counted)), _round(group)])
    best = [number for number, mean in enumerate(means) if mean == max(means) >= 0 and len(means) > 1]
    return _table([*columns, "seeds", "round"], rows, best)


def _values(group: Group, protocol: Protocol, name: str) -> list[float]:
    return group.values(group.rounds[-1], protocol, name) if group.rounds else []


def _difference(group: Group, protocol: Protocol, figure: Published) -> Cell:
    """Our result minus the paper's: the mean after the last round, or the paper's own measure."""
    measure = settings.MEASURES[figure.paper]
    name, last = FIELD[measure.average], measure.score == "last"
    ours = _values(group, protocol, name) if last else [max(row) for row in group.curve(protocol, name)[1] if len(row)]
    if not ours:
        return Cell(None)
    words = f"{statistics.fmean(ours) - figure.accuracy_percent:+.2f}".replace("-", "\N{MINUS SIGN}")
    return Cell(words, "" if last else "best pooled")


def _round(group: Group) -> Cell:
    last = group.rounds[-1] if group.rounds else 0
    if group.is_finished:
        return Cell(str(last))
    return Cell(f"{last} of {group.runs[0].request.options.rounds}", kind="unfinished")


def _best(group: Group, protocol: Protocol) -> str | None:
    rounds, means = group.curve(protocol)
    if not rounds:
        return None
    over = means.mean(0)
    return f"{over.max():.2f} ({rounds[int(over.argmax())]})"


def _new_clients(group: Group, protocol: Protocol) -> str | None:
    lines = group.lines(group.rounds[-1]) if group.rounds else []
    means = [((line.get("new_clients") or {}).get(protocol) or {}).get("mean") for line in lines]
    found = [mean for mean in means if mean is not None]
    return f"{statistics.fmean(found):.2f}" if found else None


def options(groups: Sequence[Group]) -> tuple[Table | None, dict[str, list[str]], dict[str, str]]:
    """Options that differ, by group; of each group those that not all have; and options that all share."""
    shared = set.intersection(*(set(group.setting) for group in groups))
    here = [name for name in groups[0].setting if name in shared]
    apart = [name for name in here if len({repr(group.setting[name]) for group in groups}) > 1]
    own = {
        group.label: [f"{flag(name)} {plain(value)}" for name, value in group.setting.items() if name not in shared]
        for group in groups
    }
    alike = {_named(name): plain(groups[0].setting[name]) for name in here if name not in apart}
    return _apart(groups, apart), {label: words for label, words in own.items() if words}, alike


def _apart(groups: Sequence[Group], names: Sequence[str]) -> Table | None:
    """Groups by options or, where these are more, options by groups."""
    if len(groups) > len(names):
        # The label says the method already.
        names = [name for name in names if name != "method"]
        rows = [[group.label, *(plain(group.setting[name]) for name in names)] for group in groups]
        return _table(["setting", *map(_named, names)], rows) if names else None
    rows = [[Cell(_named(name), kind="code"), *(plain(group.setting[name]) for group in groups)] for name in names]
    return _table(["option", *(group.label for group in groups)], rows)


def _named(name: str) -> str:
    return name if name in ("dataset", "method") else flag(name)


def timings(groups: Sequence[Group]) -> Table:
    """Progress and time of each run."""
    names = ("seed", "state", "time", "s per round", "start", "examples/s", "wasted steps", "device, chunk", "folder")
    return _table(["setting", *names], [_timing(group.label, run) for group in groups for run in group.runs])


def _timing(label: str, run: Run) -> list[Cell | str | None]:
    pace, start = pace_and_start(run)
    speed = (run.summary or (run.lines[-1] if run.lines else {})).get("examples_per_second")
    wasted = (run.summary or {}).get("wasted_step_share")
    return [
        label,
        str(run.seed),
        Cell(run.state, kind="" if run.summary else "unfinished"),
        duration(run.lines[-1]["seconds"]) if run.lines else None,
        None if pace is None else f"{pace:.3g}",
        None if start is None else f"{start:.1f} s",
        None if speed is None else f"{speed:,.0f}",
        None if wasted is None else f"{wasted:.1%}",
        f"{run.config.get('device', NOTHING)}, {run.config.get('chunk', NOTHING)}",
        Cell(str(run.folder), kind="code"),
    ]


def pace_and_start(run: Run) -> tuple[float | None, float | None]:
    """Median seconds of a round after the first evaluation, and the time of start and compilation.

    The log has no clock of its own for compilation: it is what the first evaluation took beyond its rounds at the later
    pace. None with too few evaluations.
    """
    lines = run.lines
    steps = [
        (after["seconds"] - before["seconds"]) / (after["round"] - before["round"])
        for before, after in itertools.pairwise(lines)
        if after["round"] > before["round"]
    ]
    if not steps:
        return None, None
    pace = statistics.median(steps)
    return pace, max(0.0, lines[0]["seconds"] - pace * lines[0]["round"]) if len(steps) > 1 else None


def versions(groups: Sequence[Group]) -> tuple[Table | None, dict[str, Any]]:
    """Versions and devices that differ between runs, with the runs that use them, and those that do not."""
    runs = [(group, run) for group in groups for run in group.runs]
    found: dict[str, dict[str, list[str]]] = {}
    for group, run in runs:
        for name, value in [*run.config.get("versions", {}).items(), ("device", run.config.get("device"))]:
            found.setdefault(name, {}).setdefault(str(value), []).append(f"{group.label}, seed {run.seed}")
    apart = {name: of for name, of in found.items() if len(of) > 1 or sum(map(len, of.values())) < len(runs)}
    rows = [
        [name, value, f"{len(who)} of {len(runs)} runs" if len(who) > 3 else "; ".join(who)]
        for name, of in apart.items()
        for value, who in of.items()
    ]
    alike = {name: next(iter(of)) for name, of in found.items() if name not in apart}
    return _table(["program", "version", "runs"], rows) if rows else None, alike
