"""Charts of a report: curves, accuracies of the clients, Info of the rounds, and partitions."""

import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.cli.measures import Protocol
from experiments.folder.stored_runs import Group, Run
from experiments.show.pictures import ROUND, Bars, Heat, Histograms, Lines, Panel, Series, over_seeds
from experiments.show.selection import headline, ordered, shown

MOST_PARTITIONS = 4
MOST_CLIENTS = 200
"""Columns of a partition's picture."""
MOST_CELLS = 2000
"""Numbers of a matrix that are listed below it."""
PROTOCOL_TITLES: dict[Protocol, str] = {
    "received": "After aggregation (received)",
    "trained": "After own training (trained)",
    "before_aggregation": "Between the round's training and its aggregation (before_aggregation)",
}
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes"))

MOST_BARS = 100
"""Entries of a vector that are drawn."""
INFO = {
    "head_weights": "Head weights",
    "weights": "Aggregation weights",
    "trace": "Fisher traces",
    "mixture": "Mixture weights",
    "alpha": "Share of the own model",
}
"""Name in Info -> title; other entries have their name as title. Captions are what the method's docstring says."""


class Chart(NamedTuple):
    """Panel with a caption in sentences."""

    panel: Panel
    caption: str = ""

    @property
    def values(self) -> list[str]:
        """Numbers of the chart as text, a line for each series, row or bar."""
        panel = self.panel
        if isinstance(panel, Lines):
            return [f"{series.label}: {'; '.join(_points(series))}" for series in panel.series if series.x]
        if isinstance(panel, Bars):
            bars = zip(panel.labels[0], panel.values[0], strict=True)
            return [f"{panel.x_label} {label}: {value:.4g}" for label, value in bars]
        if isinstance(panel, Histograms):
            unit = " %" if panel.x_label.endswith("%") else ""
            return [
                f"{label}: {start:g} to {end:g}{unit}: {count:g}"
                for label, counts in zip(panel.labels, panel.counts, strict=True)
                for start, end, count in zip(panel.edges, panel.edges[1:], counts, strict=False)
                if count
            ]
        rows = panel.matrix if np.size(panel.matrix) <= MOST_CELLS else ()
        return [
            f"{panel.y_label} {name}: {', '.join(f'{value:.3g}' for value in row)}"
            for name, row in zip(panel.rows, rows, strict=False)
        ]


def _points(series: Series) -> list[str]:
    words = [f"{y:.2f} at {x:g}" for x, y in zip(series.x, series.y, strict=True)]
    if series.low is not None and series.high is not None:
        edges = zip(words, series.low, series.high, strict=True)
        words = [f"{point} ({low:.2f} to {high:.2f})" for point, low, high in edges]
    return words if series.mark is None else [*words, f"paper: {series.mark[1]:.2f}"]


def curves(groups: Sequence[Group]) -> list[Chart]:
    """Mean accuracy of each group: against rounds, and against bytes where runs count them, for each protocol."""
    some = [group for _, group in shown(groups)]
    by_round = []
    for protocol in ordered(groups):
        lines = [_curve(group, protocol, alone=len(some) == 1) for group in some]
        by_round.append(Lines(PROTOCOL_TITLES[protocol], ROUND, groups[0].axis, lines))
    panels = [*by_round, *(_by_bytes(some, panel) for panel in by_round)]
    return [Chart(panel) for panel in panels if panel is not None and any(line.x for line in panel.series)]


def _curve(group: Group, protocol: Protocol, *, alone: bool) -> Series:
    """Line of a group; one without values has no points, so that the others keep their colors."""
    rounds, table = group.curve(protocol)
    if not rounds:
        return Series(group.label, [], [], is_main=alone)
    line = over_seeds(group.label, rounds, table.tolist(), is_main=alone)
    published = group.published
    return line if published is None else line.with_mark(rounds[-1], published.accuracy_percent)


def _by_bytes(groups: Sequence[Group], panel: Lines) -> Lines | None:
    made = []
    for group, line in zip(groups, panel.series, strict=True):
        sent = [[_bytes(one) for one in group.lines(int(number))] for number in line.x]
        known = bool(sent) and all(value is not None for row in sent for value in row)
        x = [float(np.mean([value or 0 for value in row])) for row in sent]
        made.append(dataclasses.replace(line, x=x, mark=None) if known else Series(line.label, [], []))
    most = max((line.x[-1] for line in made if line.x), default=0.0)
    if not most:
        return None
    size, unit = next(pair for pair in _UNITS if most >= pair[0])
    scaled = [dataclasses.replace(line, x=[value / size for value in line.x]) for line in made]
    return Lines(f"{panel.title}, by bytes sent", f"{unit} up and down, all clients together", panel.y_label, scaled)


def _bytes(line: dict[str, Any]) -> float | None:
    up, down = line.get("bytes_up"), line.get("bytes_down")
    return None if up is None or down is None else float(up + down)


def clients(groups: Sequence[Group]) -> list[Chart]:
    """Distribution of the clients' accuracies after the last round: sorted, and as histograms."""
    protocol = headline(groups)
    some = [(group, group.per_client(group.rounds[-1], protocol)) for _, group in shown(groups)]
    if not any(runs for _, runs in some):
        return []
    lines = [_in_order(group, runs, alone=len(some) == 1) for group, runs in some]
    axis = groups[0].axis
    name = axis.removesuffix(" in %")
    in_order = Lines(f"Clients in order of their {name} ({protocol})", "share of the clients in %", axis, lines)
    every = np.concatenate([values for _, runs in some for values in runs])
    edges = np.histogram_bin_edges(every, 20) if name == axis else _edges_in_percent(every.min())
    counts = [np.mean([np.histogram(values, edges)[0] for values in runs or [[]]], axis=0) for _, runs in some]
    means = [float(np.mean([values.mean() for values in runs])) if runs else edges[0] for _, runs in some]
    histograms = Histograms(
        f"How many clients have which {name} ({protocol})",
        axis,
        "",
        [group.label for group, _ in some],
        edges.tolist(),
        [row.tolist() for row in counts],
        means,
    )
    return [Chart(in_order), Chart(histograms)]


def _edges_in_percent(low: float) -> np.ndarray:
    """Edges of bins up to 100 that begin with a multiple of ten below `low`."""
    low = min(90, 10 * int(low // 10))
    step = next(width for width in (1, 2, 2.5, 5) if (100 - low) / width <= 28)
    return np.arange(low, 100 + step / 2, step)


def _in_order(group: Group, runs: Sequence[np.ndarray], *, alone: bool) -> Series:
    """Sorted accuracies, mean and range over runs; at 101 places where clients are many or not equally many."""
    sizes = {len(values) for values in runs}
    if not sizes:
        return Series(group.label, [], [], is_main=alone)
    if len(sizes) == 1 and max(sizes) <= 101:
        count = sizes.pop()
        x, table = 100 * (np.arange(count) + 0.5) / count, np.stack(runs)
    else:
        x = np.linspace(0, 100, 101)
        table = np.stack([np.quantile(values, x / 100) for values in runs])
    return over_seeds(group.label, x.tolist(), table.tolist(), is_main=alone)


def information(groups: Sequence[Group]) -> list[Chart]:
    """Vectors and matrices of Info, such as head weights, the latest of each group."""
    charts = []
    for group in groups:
        found = group.last_info()
        if found is None:
            continue
        run, line = found
        said = run.config.get("info", {})
        # Those of the papers' figures first: a solver's gap says nothing about who works with whom.
        for name, entry in sorted(line["info"].items(), key=lambda item: item[0] not in INFO):
            values = _numbers(entry)
            if values is not None:
                where = f"{INFO.get(name, name)}: {group.label}, round {line['round']}, seed {run.seed}"
                text = said.get(name, "")
                cohort = _cohorts(text, values.shape, line.get("cohort") or [])
                charts.append(Chart(_information(where, name, values, cohort), text))
    return charts


def _cohorts(text: str, shape: tuple[int, ...], cohort: Sequence[int]) -> list[Sequence[int] | None]:
    """Clients along each axis, None where an axis has something else.

    Args:
      text: of the docstring, such as "[M, K], ...". If it has no shape, axes as long as the cohort have its clients.
      shape: of the entry.
      cohort: clients of the round.
    """
    named = re.match(r"\[(.*?)\]", text)
    letters = named[1].split(", ") if named else []
    clients = "cohort" if "cohort" in letters else "M"
    if len(letters) != len(shape):
        letters = [clients] * len(shape)
    return [
        cohort if letter == clients and size == len(cohort) else None
        for letter, size in zip(letters, shape, strict=True)
    ]


def _numbers(entry: Any) -> np.ndarray | None:
    """Vector or matrix of finite numbers; None of anything else."""
    try:
        values = np.asarray(entry, np.float64)
    except (TypeError, ValueError):
        return None
    return values if values.ndim in (1, 2) and values.size and np.isfinite(values).all() else None


def _information(title: str, name: str, values: np.ndarray, cohorts: Sequence[Sequence[int] | None]) -> Panel:
    kinds, names = [], []
    for axis, cohort in enumerate(cohorts):
        numbers = np.asarray(range(values.shape[axis]) if cohort is None else cohort, np.int64)
        # The cohorts of older runs stand in another order.
        values = np.take(values, np.argsort(numbers), axis)
        kinds.append("entry" if cohort is None else "client")
        names.append([str(number) for number in np.sort(numbers)])
    if values.ndim == 1:
        level = float(values.mean()) if name == "weights" else None
        bars = names[0][:MOST_BARS], values[:MOST_BARS].tolist()
        return Bars(title, kinds[0], name, [name], [bars[0]], [bars[1]], level, "if all counted the same")
    return Heat(title, kinds[1], kinds[0], values.tolist(), rows=names[0], columns=names[1], unit=name)


def partitions(groups: Sequence[Group]) -> list[Chart]:
    """Classes by clients, each partition once, and no more than a few."""
    return [_partition(run) for run in _distinct_partitions(groups)[:MOST_PARTITIONS]]


def more_partitions(groups: Sequence[Group]) -> int:
    """Number of partitions without a chart."""
    return max(0, len(_distinct_partitions(groups)) - MOST_PARTITIONS)


def _distinct_partitions(groups: Sequence[Group]) -> list[Run]:
    """One run of each different partition."""
    runs = [run for group in groups for run in group.runs if run.config.get("class_table")]
    found: dict[str, Run] = {}
    for run in runs:
        found.setdefault(json.dumps(run.config["class_table"]), run)
    return list(found.values())


def _partition_words(run: Run) -> str:
    """Partition of the examples, in words."""
    options = run.request.options
    words = {
        "grouped": f"grouped, s = {options.s:g}",
        "pathological": f"pathological ({options.pathological_protocol})",
        "dirichlet": f"Dirichlet {options.beta:g}",
        "iid": "at random",
        "natural": "natural clients",
    }[options.partition]
    return words if options.shift == "none" else f"{words}, shift of {options.shift}"


def _partition(run: Run) -> Chart:
    table = np.asarray(run.config["class_table"], np.int64)
    sizes, some = table.sum(1), table[:MOST_CLIENTS]
    equal = bool(sizes.min() == sizes.max())
    words = f"{len(table)} clients with {sizes.min()}{'' if equal else f' to {sizes.max()}'} training examples, shaded "
    words += "by examples of each class" + ("." if equal else "; bars above: all of a client's examples.")
    if len(some) < len(table):
        words += f" The first {len(some)} clients."
    names, columns = ([str(place) for place in range(size)] for size in some.T.shape)
    totals = () if equal else some.sum(1).tolist()
    title = f"{_partition_words(run)}, seed {run.seed}"
    return Chart(Heat(title, "client", "class", some.T.tolist(), (), names, columns, totals, "examples"), words)
