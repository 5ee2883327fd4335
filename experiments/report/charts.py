"""Charts of a page: curves, clients, Info of rounds, partitions."""

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.config.measures import Protocol
from experiments.plots.selection import headline, ordered, shown
from experiments.report import svg
from experiments.report.markup import Markup, tag
from experiments.results.gather import Group, Run

MOST_PARTITIONS = 4
MOST_CLIENTS = 200
"""Columns of a partition's picture."""
_AFTER: dict[Protocol, str] = {
    "received": "after aggregation (received)",
    "trained": "after own training (trained)",
    "before_aggregation": "before the round's aggregation (before_aggregation)",
}
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes"))


class _Kind(NamedTuple):
    """Description of an entry of a method's Info."""

    title: str
    words: str


INFO = {
    "head_weights": _Kind("Head weights", "What each client's new head (row) takes of every client's head (column)."),
    "weights": _Kind("Aggregation weights", "What each client's model counts; the line: if all counted the same."),
    "trace": _Kind("Fisher traces", "Of each client's trained model on its own examples."),
    "mixture": _Kind("Mixture weights", "What each client (row) takes of every model (column)."),
    "alpha": _Kind("Share of the own model", "In each client's mixture of its own model with the common one."),
}
"""Name in Info -> how it is shown. Other entries are in the metrics log only."""


def styles(groups: Sequence[Group]) -> dict[str, int]:
    """Label -> style, for the groups that charts show."""
    return {group.label: style for style, group in shown(groups)}


def legend(groups: Sequence[Group]) -> Markup:
    """Names of the lines; shared by all charts on the same data."""
    items = [tag("li", key(style), group.label) for style, group in shown(groups)]
    return tag("ul", items, class_="legend")


def key(style: int) -> Markup:
    """Short sample of a line."""
    piece = tag("line", x1=1, x2=27, y1=5, y2=5, class_=f"line s{style}")
    return tag("svg", piece, viewBox="0 0 28 10", class_="key", aria_hidden="true")


def curves(groups: Sequence[Group]) -> list[Markup]:
    """Mean accuracy of each group: against rounds, and against bytes where runs count them, for each protocol."""
    some = shown(groups)
    charts = []
    for protocol in ordered(groups):
        made = [_curve(group, style, protocol) for style, group in some]
        kept = [line for line in made if line is not None]
        if kept:
            charts.append(svg.lines(f"Accuracy in % {_AFTER[protocol]}", kept, x_label="round", whole=True))
    for protocol in ordered(groups):
        chart = _by_bytes(some, protocol)
        if chart is not None:
            charts.append(chart)
    return charts


def _curve(group: Group, style: int, protocol: Protocol) -> svg.Line | None:
    rounds, table = group.curve(protocol)
    if not rounds:
        return None
    line = svg.Line(group.label, style, rounds, table.mean(0).tolist())
    if len(table) > 1:
        line = line._replace(low=table.min(0).tolist(), high=table.max(0).tolist())
    published = group.published
    return line if published is None else line._replace(level=published.accuracy_percent)


def _by_bytes(some: Iterable[tuple[int, Group]], protocol: Protocol) -> Markup | None:
    made = []
    for style, group in some:
        line = _curve(group, style, protocol)
        if line is None:
            continue
        sent = [[_bytes(one) for one in group.lines(int(number))] for number in line.x]
        if all(value is not None for row in sent for value in row):
            made.append(line._replace(x=[float(np.mean([value or 0 for value in row])) for row in sent], level=None))
    most = max((line.x[-1] for line in made), default=0.0)
    if not most:
        return None
    size, unit = next(pair for pair in _UNITS if most >= pair[0])
    scaled = [line._replace(x=[value / size for value in line.x]) for line in made]
    title = f"Accuracy in % {_AFTER[protocol]}, by bytes sent"
    return svg.lines(title, scaled, x_label=f"{unit} up and down, all clients together")


def _bytes(line: dict[str, Any]) -> float | None:
    up, down = line.get("bytes_up"), line.get("bytes_down")
    return None if up is None or down is None else float(up + down)


def clients(groups: Sequence[Group]) -> list[Markup]:
    """Distribution of the clients' accuracies after the last round: sorted, and as histograms."""
    protocol = headline(groups)
    rows = [(style, group, group.per_client(group.rounds[-1], protocol)) for style, group in shown(groups)]
    rows = [row for row in rows if row[2]]
    if not rows:
        return []
    title = f"Clients in order of their accuracy in %, {_AFTER[protocol]}"
    in_order = svg.lines(title, [_in_order(*row) for row in rows], x_label="share of the clients in %")
    least = min(values[0] for _, _, runs in rows for values in runs)
    low = min(90, 10 * int(least // 10))
    step = next(width for width in (1, 2, 2.5, 5) if (100 - low) / width <= 28)
    edges = np.arange(low, 100 + step / 2, step)
    histograms = []
    for style, group, runs in rows:
        counts = np.mean([np.histogram(values, edges)[0] for values in runs], axis=0)
        mean = float(np.mean([values.mean() for values in runs]))
        histograms.append(svg.Row(group.label, style, counts.tolist(), mean))
    title = f"How many clients have which accuracy, {_AFTER[protocol]}"
    return [in_order, svg.histograms(title, histograms, edges.tolist(), x_label="accuracy in %")]


def _in_order(style: int, group: Group, runs: Sequence[np.ndarray]) -> svg.Line:
    """Sorted accuracies, mean and range over runs; at 101 places where clients are many or not equally many."""
    sizes = {len(values) for values in runs}
    if len(sizes) == 1 and max(sizes) <= 101:
        count = sizes.pop()
        x, table = 100 * (np.arange(count) + 0.5) / count, np.stack(runs)
    else:
        x = np.linspace(0, 100, 101)
        table = np.stack([np.quantile(values, x / 100) for values in runs])
    line = svg.Line(group.label, style, x.tolist(), table.mean(0).tolist())
    return line if len(runs) == 1 else line._replace(low=table.min(0).tolist(), high=table.max(0).tolist())


def information(groups: Sequence[Group]) -> list[Markup]:
    """Head weights, aggregation weights and the like, the latest of each group."""
    charts = []
    for group in groups:
        found = group.last_info()
        if found is None:
            continue
        run, line = found
        for name, kind in INFO.items():
            values = np.asarray(line["info"].get(name, 0.0), np.float64)
            if values.ndim in (1, 2) and values.size and np.isfinite(values).all():
                where = f"{group.label}, round {line['round']}, seed {run.seed}"
                charts.append(_information(f"{kind.title}: {where}", name, kind, values, line))
    return charts


def _information(title: str, name: str, kind: _Kind, values: np.ndarray, line: dict[str, Any]) -> Markup:
    cohort = line.get("cohort") or []
    known = np.asarray(cohort if len(cohort) == len(values) else range(len(values)), np.int64)
    order, square = np.argsort(known), values.ndim == 2 and values.shape[0] == values.shape[1]
    values = values[order][:, order] if square else values[order]
    rows = [str(client) for client in known[order]]
    if values.ndim == 1:
        level = float(values.sum() / len(values)) if name == "weights" else None
        return svg.bars(title, rows, values.tolist(), x_label="client", level=level, caption=kind.words)
    columns = rows if square else [str(place) for place in range(values.shape[1])]
    other = "client" if square else "model"
    return svg.heat(
        title, values, rows, columns, row_label="client", column_label=other, square=square, caption=kind.words
    )


def partitions(groups: Sequence[Group]) -> tuple[list[Markup], int]:
    """Classes by clients, each partition once: the pictures, and the number of those not shown."""
    found: dict[str, Run] = {}
    for group in groups:
        for run in group.runs:
            table = run.config.get("class_table")
            if table:
                found.setdefault(json.dumps(table), run)
    pictures = [_partition(run) for run in list(found.values())[:MOST_PARTITIONS]]
    return pictures, max(0, len(found) - MOST_PARTITIONS)


def _division(run: Run) -> str:
    """Partition of the examples, in words."""
    options = run.request.options
    words = {
        "grouped": f"grouped, s = {options.s:g}",
        "pathological": f"pathological ({options.pathological_protocol})",
        "dirichlet": f"Dirichlet {options.beta:g}",
        "iid": "at random",
    }[options.partition]
    return words if options.shift == "none" else f"{words}, shift of {options.shift}"


def _partition(run: Run) -> Markup:
    table = np.asarray(run.config["class_table"], np.float64)
    sizes, some = table.sum(1), table[:MOST_CLIENTS]
    names, columns = [str(label) for label in range(table.shape[1])], [str(client) for client in range(len(some))]
    sizes_words = f"{sizes.min():g}" if sizes.min() == sizes.max() else f"{sizes.min():g} to {sizes.max():g}"
    words = f"{len(table)} clients with {sizes_words} training examples, shaded by examples of each class"
    words += "." if sizes.min() == sizes.max() else "; bars above: all of a client's examples."
    if len(some) < len(table):
        words += f" The first {len(some)} clients."
    title = f"{_division(run)}, seed {run.seed}"
    totals = None if sizes.min() == sizes.max() else some.sum(1).tolist()
    return svg.heat(
        title, some.T, names, columns, row_label="class", column_label="client", totals=totals, caption=words
    )
