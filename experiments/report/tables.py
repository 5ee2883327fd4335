"""Tables of a report: results beside the papers', configuration, timings and versions."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from experiments.cli.measures import FIELD, Protocol
from experiments.cli.options import flag
from experiments.folder.load import chosen, in_percent, scores
from experiments.folder.run_folder import ATTACKERS, HONEST, VALIDATION, rounded
from experiments.folder.stored_runs import Group, Run, mean_and_deviation, plain
from experiments.host.console import duration
from experiments.papers import settings
from experiments.papers.published import Published
from experiments.show.curves import chosen_on, goodness, ordered
from experiments.show.tables import NOTHING

_FIGURES = {
    "pooled": ("pooled", 2),
    "std": ("std over clients", 2),
    "worst_decile": ("worst decile", 2),
    "jain": ("Jain", 3),
}
"""Name in the metrics log -> heading and decimals; scores other than the primary one come after these."""
_HEADINGS = {"macro_f1": "macro F1", "auc": "AUC"}
"""Score -> heading, where that is not its name."""
_WORDS = {"state", "device, chunk", "folder", "program", "version", "runs"}
"""Headings of columns that hold no numbers."""


class Cell(NamedTuple):
    """Cell of a table.

    Attributes:
      text: content; None or "" is shown as a dash.
      note: small text below.
      kind: "unfinished", "code" or "".
    """

    text: str | None
    note: str = ""
    kind: str = ""


Row: TypeAlias = Mapping[str, Cell | str | None]
"""Heading of a column -> cell; the first names the row."""


class Table:
    """Rows with the same headings; columns without any content are left out.

    Args:
      rows: at least one.
      strong: numbers of rows that stand out.
    """

    def __init__(self, rows: Sequence[Row], strong: Sequence[int] = ()):
        cells = [{name: cell if isinstance(cell, Cell) else Cell(cell) for name, cell in row.items()} for row in rows]
        self.columns = [name for name in rows[0] if any(row[name].text for row in cells)]
        self.rows, self.strong = [[row[name] for name in self.columns] for row in cells], strong

    def is_number(self, column: int) -> bool:
        """Whether a column holds numbers."""
        return column > 0 and self.columns[column] not in _WORDS


def results(groups: Sequence[Group]) -> dict[Protocol, Table]:
    """Results of each protocol after the last round, beside the paper's, on one kind of data; the best stand out."""
    made, on = {}, chosen_on(groups)
    for protocol in ordered(groups):
        scores = [goodness(group, protocol, on) for group in groups]
        known = len(groups) > 1 and max(scores) > -math.inf
        best = [number for number, score in enumerate(scores) if known and score == max(scores)]
        made[protocol] = Table([_result(group, protocol) for group in groups], best)
    return made


def _result(group: Group, protocol: Protocol) -> Row:
    values, figure = _values(group, protocol, "mean"), group.published
    mean, deviation = mean_and_deviation(values) if values else (None, None)
    spread = "" if deviation is None else f" ± {deviation:.2f}"
    row: dict[str, Cell | str | None] = {"setting": group.label}
    row["mean"] = None if mean is None else f"{mean:.2f}{spread}"
    validation = group.validation(group.rounds[-1], protocol) if group.rounds else []
    row[VALIDATION] = f"{statistics.fmean(validation):.2f}" if validation else None
    for name, (heading, decimals) in (_FIGURES | _others(group)).items():
        found = _values(group, protocol, name)
        row[heading] = f"{statistics.fmean(found):.{decimals}f}" if found else None
    row |= {"best (round)": _best(group, protocol)}
    row |= {heading: _subset_mean(group, protocol, entry) for heading, entry in _SUBSETS.items()}
    row["paper"] = None if figure is None else Cell(f"{figure.accuracy_percent:.2f}", figure.source)
    row["difference"] = None if figure is None else _difference(group, protocol, figure)
    return row | {"seeds": str(len(group.counted)), "round": _round(group)}


def units(group: Group) -> str:
    """Which score counts, and which ones are in percent, in a sentence."""
    first, *_ = scores(group.runs[0].config)
    percents = [_HEADINGS.get(name, name) for name in in_percent(group.runs[0].config)]
    return f"Values are of {first}; in percent: {', '.join(percents) or 'none'}."


def _others(group: Group) -> dict[str, tuple[str, int]]:
    """Scores other than the primary one, as `_FIGURES`."""
    config = group.runs[0].config
    percents = in_percent(config)
    return {name: (_HEADINGS.get(name, name), 2 if name in percents else 3) for name in scores(config)[1:]}


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
    """Accuracy and number of the best round, chosen on validation examples if there are any."""
    rounds, means = group.curve(protocol)
    if not rounds:
        return None
    over = means.mean(0).tolist()
    validation = [group.validation(number, protocol) for number in rounds]
    by = [statistics.fmean(values) for values in validation] if all(validation) else over
    # As the terminal does: the first of those that are equal as they are written.
    by = [rounded(mean) for mean in by]
    best = by.index(chosen(group.runs[0].config, by))
    return f"{over[best]:.2f} ({rounds[best]})"


_SUBSETS = {"honest": HONEST, "attackers": ATTACKERS, "new clients": "new_clients"}
"""Column -> entry of an evaluation with some clients by themselves."""


def _subset_mean(group: Group, protocol: Protocol, entry: str) -> str | None:
    """Mean accuracy of the clients of an entry after the last round."""
    lines = group.lines(group.rounds[-1]) if group.rounds else []
    means = [((line.get(entry) or {}).get(protocol) or {}).get("mean") for line in lines]
    found = [mean for mean in means if mean is not None]
    return f"{statistics.fmean(found):.2f}" if found else None


def options(groups: Sequence[Group]) -> tuple[Table | None, dict[str, list[str]], dict[str, str]]:
    """Options that differ, by group; of each group those that not all have; and options that all share."""
    shared = set.intersection(*(set(group.setting) for group in groups))
    here = [name for name in groups[0].setting if name in shared]
    apart = [name for name in here if len({repr(group.setting[name]) for group in groups}) > 1]
    labels = [group.label for group in groups]
    # Labels tell groups on the same data apart.
    names = {g.label if labels.count(g.label) == 1 else f"{g.label}, {g.data}": g.setting for g in groups}
    own = {
        label: [f"{flag(name)} {plain(value)}" for name, value in setting.items() if name not in shared]
        for label, setting in names.items()
    }
    alike = {_named(name): plain(groups[0].setting[name]) for name in here if name not in apart}
    return _differing(names, apart), {label: words for label, words in own.items() if words}, alike


def _differing(settings: dict[str, dict[str, Any]], names: Sequence[str]) -> Table | None:
    """Groups by options or, where these are more, options by groups."""
    rows: list[Row]
    if len(settings) > len(names):
        # The label says the method already.
        names = [name for name in names if name != "method"]
        rows = [
            {"setting": label} | {_named(name): plain(setting[name]) for name in names}
            for label, setting in settings.items()
        ]
        return Table(rows) if names else None
    rows = [
        {"option": Cell(_named(name), kind="code")} | {label: plain(of[name]) for label, of in settings.items()}
        for name in names
    ]
    return Table(rows)


def _named(name: str) -> str:
    return name if name in ("dataset", "method") else flag(name)


def timings(groups: Sequence[Group]) -> Table:
    """Progress and time of each run."""
    return Table([_timing(group.label, run) for group in groups for run in group.runs])


def _timing(label: str, run: Run) -> Row:
    pace, start = pace_and_start(run)
    speed = (run.summary or (run.lines[-1] if run.lines else {})).get("examples_per_second")
    wasted, idle = ((run.summary or {}).get(name) for name in ("wasted_step_share", "idle_device_share"))
    return {
        "setting": label,
        "seed": str(run.seed),
        "state": Cell(run.state, kind="" if run.summary else "unfinished"),
        "time": duration(run.lines[-1]["seconds"]) if run.lines else None,
        "s per round": None if pace is None else f"{pace:.3g}",
        "start": None if start is None else f"{start:.1f} s",
        "examples/s": None if speed is None else f"{speed:,.0f}",
        "wasted steps": None if wasted is None else f"{wasted:.1%}",
        "idle devices": None if idle is None else f"{idle:.1%}",
        "device, chunk": f"{run.config.get('device', NOTHING)}, {run.config.get('chunk', NOTHING)}",
        "folder": Cell(str(run.folder), kind="code"),
    }


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
    """Versions and devices that differ between runs, with their runs, and those that all runs share."""
    runs = [(group, run) for group in groups for run in group.runs]
    found: dict[str, dict[str, list[str]]] = {}
    for group, run in runs:
        for name, value in [*run.config.get("versions", {}).items(), ("device", run.config.get("device"))]:
            found.setdefault(name, {}).setdefault(str(value), []).append(f"{group.label}, seed {run.seed}")
    apart = {name: of for name, of in found.items() if len(of) > 1 or sum(map(len, of.values())) < len(runs)}
    rows: list[Row] = [
        {"program": name, "version": value, "runs": f"{len(who)} of {len(runs)} runs" if who[3:] else "; ".join(who)}
        for name, of in apart.items()
        for value, who in of.items()
    ]
    alike = {name: next(iter(of)) for name, of in found.items() if name not in apart}
    return Table(rows) if rows else None, alike
