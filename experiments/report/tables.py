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
from experiments.report.charts import key, styles
from experiments.report.markup import Content, Markup, join, tag
from experiments.results.gather import Group, Run, mean_and_deviation, plain
from experiments.runtime.progress import duration

NOTHING = "—"
PROTOCOL_TITLES: dict[Protocol, str] = {
    "received": "After aggregation (received)",
    "trained": "After own training (trained)",
    "before_aggregation": "Between the round's training and its aggregation (before_aggregation)",
}
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


class Column(NamedTuple):
    """Heading of a column, and whether it holds numbers."""

    name: str
    numbers: bool = True


def table(columns: Sequence[Column], rows: Sequence[Sequence[Content]], strong: Sequence[int] = ()) -> Markup:
    """Table that a narrow screen shows as cards, one for each row.

    Args:
      columns: the first names the rows.
      rows: a cell for each column; None is an empty one.
      strong: numbers of rows that stand out.
    """
    head = [tag("th", column.name, scope="col", role="columnheader", class_=_class(column)) for column in columns]
    body = []
    for number, row in enumerate(rows):
        first = tag("th", row[0], scope="row", role="rowheader")
        cells = [
            tag("td", tag("span", cell or NOTHING), role="cell", class_=_class(column), data_label=column.name)
            for column, cell in zip(columns[1:], row[1:], strict=True)
        ]
        body.append(tag("tr", first, cells, role="row", class_="strong" if number in strong else None))
    whole = [tag("thead", tag("tr", head, role="row"), role="rowgroup"), tag("tbody", body, role="rowgroup")]
    return tag("div", tag("table", whole, role="table"), class_="table", tabindex="0")


def _class(column: Column) -> str | None:
    return "number" if column.numbers else None


def name_of(group: Group, known: dict[str, int]) -> Markup:
    """Label of a group after its line's key."""
    return join(key(known[group.label]) if group.label in known else None, group.label)


def results(groups: Sequence[Group]) -> list[Markup]:
    """Results of each protocol after the last round, beside the paper's, on one kind of data."""
    parts = []
    for protocol in ordered(groups):
        parts += [tag("h4", PROTOCOL_TITLES[protocol]), _results(groups, protocol)]
    return parts


def _results(groups: Sequence[Group], protocol: Protocol) -> Markup:
    there = [name for name in _FIGURES if any(_values(group, protocol, name) for group in groups)]
    published = [group.published for group in groups]
    new = [_new_clients(group, protocol) for group in groups]
    columns = [Column("setting", numbers=False), Column("mean"), *(Column(_FIGURES[name][0]) for name in there)]
    columns += [Column("best (round)")]
    columns += [Column("new clients")] if any(new) else []
    columns += [Column("paper"), Column("difference")] if any(published) else []
    columns += [Column("seeds"), Column("round")]
    known, rows, means = styles(groups), [], []
    for group, figure, unseen in zip(groups, published, new, strict=True):
        values = _values(group, protocol, "mean")
        mean, deviation = mean_and_deviation(values) if values else (None, None)
        means.append(-1.0 if mean is None else mean)
        row: list[Content] = [name_of(group, known), _spread(mean, deviation)]
        for name in there:
            found = _values(group, protocol, name)
            row.append(f"{statistics.fmean(found):.{_FIGURES[name][1]}f}" if found else None)
        row.append(_best(group, protocol))
        row += [unseen] if any(new) else []
        if any(published):
            row.append(None if figure is None else [f"{figure.accuracy_percent:.2f}", tag("small", figure.source)])
            row.append(None if figure is None else _difference(group, protocol, figure))
        rows.append([*row, str(len(group.counted)), _round(group)])
    best = [number for number, mean in enumerate(means) if mean == max(means) >= 0 and len(means) > 1]
    return table(columns, rows, best)


def _values(group: Group, protocol: Protocol, name: str) -> list[float]:
    return group.values(group.rounds[-1], protocol, name) if group.rounds else []


def _spread(mean: float | None, deviation: float | None) -> str | None:
    if mean is None:
        return None
    return f"{mean:.2f}" if deviation is None else f"{mean:.2f} ± {deviation:.2f}"


def _signed(difference: float) -> str:
    """Number with its sign, and a minus as wide as a plus."""
    return f"{difference:+.2f}".replace("-", "\N{MINUS SIGN}")


def _difference(group: Group, protocol: Protocol, figure: Published) -> Content:
    """Our result minus the paper's: the mean after the last round, or the paper's own measure."""
    measure = settings.MEASURES[figure.paper]
    if measure.score == "last":
        found = _values(group, protocol, FIELD[measure.average])
        return _signed(statistics.fmean(found) - figure.accuracy_percent) if found else None
    _, table = group.curve(protocol, FIELD[measure.average])
    if not table.size:
        return None
    return [_signed(float(table.max(1).mean()) - figure.accuracy_percent), tag("small", "best pooled")]


def _round(group: Group) -> Content:
    wanted = group.runs[0].request.options.rounds
    last = group.rounds[-1] if group.rounds else 0
    return str(last) if group.is_finished else tag("span", f"{last} of {wanted}", class_="unfinished")


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


def differences(groups: Sequence[Group]) -> Markup | None:
    """Differences between the groups: a table of options that differ, and each method's own."""
    shared = set.intersection(*(set(group.setting) for group in groups))
    apart = [name for name in groups[0].setting if name in shared and _differs(name, groups)]
    if not apart:
        return None
    labels = [group.label for group in groups]
    if len(groups) > len(apart):
        columns = [Column("setting", numbers=False), *(Column(_named(name)) for name in apart if name != "method")]
        rows = [[group.label, *(plain(group.setting[n]) for n in apart if n != "method")] for group in groups]
        return table(columns, rows) if len(columns) > 1 else None
    columns = [Column("option", numbers=False), *map(Column, labels)]
    return table(
        columns, [[tag("code", _named(name)), *(plain(group.setting[name]) for group in groups)] for name in apart]
    )


def _differs(name: str, groups: Sequence[Group]) -> bool:
    return len({repr(group.setting[name]) for group in groups}) > 1


def _named(name: str) -> str:
    return name if name in ("dataset", "method") else flag(name)


def own_options(groups: Sequence[Group]) -> Markup | None:
    """Hyper-parameters that only some of the methods have."""
    shared = set.intersection(*(set(group.setting) for group in groups))
    items = []
    for group in groups:
        own = {name: value for name, value in group.setting.items() if name not in shared}
        if own:
            words = [[tag("span", f"{flag(name)} {plain(value)}"), " "] for name, value in own.items()]
            items += [tag("dt", group.label), tag("dd", words)]
    return tag("dl", items, class_="own") if items else None


def common(groups: Sequence[Group]) -> Markup:
    """Options that all groups share."""
    shared = set.intersection(*(set(group.setting) for group in groups))
    alike = [name for name in groups[0].setting if name in shared and not _differs(name, groups)]
    items = [tag("div", tag("dt", _named(name)), tag("dd", plain(groups[0].setting[name]))) for name in alike]
    return tag("dl", items, class_="common")


def commands(groups: Sequence[Group]) -> list[Markup]:
    """Command of each group's first run."""
    made = []
    for group in groups:
        # An option stays on one line with its value.
        first, *options = group.command().split(" --")
        words = [first, *([" ", tag("span", f"--{option}")] for option in options)]
        made.append(tag("pre", tag("code", words), tabindex="0"))
    return made


def timings(groups: Sequence[Group]) -> Markup:
    """Progress and time of each run."""
    names = ("seed", "state", "time", "s per round", "start", "examples/s", "wasted steps", "device, chunk", "folder")
    words = ("state", "device, chunk", "folder")
    columns = [Column("setting", numbers=False), *(Column(name, numbers=name not in words) for name in names)]
    rows: list[list[Content]] = []
    for group in groups:
        for run in group.runs:
            pace, start = pace_and_start(run)
            speed = (run.summary or (run.lines[-1] if run.lines else {})).get("examples_per_second")
            wasted = (run.summary or {}).get("wasted_step_share")
            state = tag("span", run.state, class_=None if run.summary else "unfinished")
            rows.append(
                [
                    group.label,
                    str(run.seed),
                    state,
                    duration(run.lines[-1]["seconds"]) if run.lines else None,
                    None if pace is None else f"{pace:.3g}",
                    None if start is None else f"{start:.1f} s",
                    None if speed is None else f"{speed:,.0f}",
                    None if wasted is None else f"{wasted:.1%}",
                    f"{run.config.get('device', NOTHING)}, {run.config.get('chunk', NOTHING)}",
                    tag("code", str(run.folder)),
                ]
            )
    return table(columns, rows)


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


def versions(groups: Sequence[Group]) -> Markup:
    """Versions and devices: those that differ between runs first, with the runs that use them."""
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
    columns = [Column(name, numbers=False) for name in ("program", "version", "runs")]
    alike = [(name, next(iter(of))) for name, of in found.items() if name not in apart]
    items = [tag("div", tag("dt", name), tag("dd", value)) for name, value in alike]
    return join(table(columns, rows) if rows else None, tag("dl", items, class_="common"))


def distinct(groups: Sequence[Group]) -> list[tuple[str, list[Group]]]:
    """Groups by the data that was used."""
    by_data: dict[str, list[Group]] = {}
    for group in groups:
        by_data.setdefault(group.data, []).append(group)
    return list(by_data.items())


def unfinished(runs: Sequence[Any]) -> int:
    """Number of unfinished runs, in words."""
    return sum(run.summary is None for run in runs)
