"""Charts of a report: curves, accuracies of the clients, Info of the rounds, and partitions."""

import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.cli.own_code import label
from experiments.folder.run_folder import VIRTUAL
from experiments.folder.stored_runs import Group, Run
from experiments.show import curves as by_round
from experiments.show.curves import headline, shown
from experiments.show.pictures import Bars, Heat, Lines, Panel, Series, over_seeds

MOST_PARTITIONS = 4
MOST_CLIENTS = 500
"""Columns of a partition's picture."""
PROTOCOL_TITLES: dict[str, str] = {
    "received": "After aggregation (received)",
    "trained": "After own training (trained)",
    "before_aggregation": "Between the round's training and its aggregation (before_aggregation)",
}
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


def curves(groups: Sequence[Group]) -> list[Chart]:
    """Mean accuracy of each group: against rounds, and against bytes and virtual time where runs have them, for each
    protocol."""
    panels = [dataclasses.replace(one, title=PROTOCOL_TITLES[one.title]) for one in by_round.curves(groups)]
    others = [_against(shown(groups), panel, *axis) for axis in _AXES for panel in panels]
    return [Chart(panel) for panel in [*panels, *others] if panel is not None]


_AXES = (
    ("bytes sent", "MB up and down, all clients together", ("bytes_up", "bytes_down"), 1e6),
    ("virtual time", "hours of virtual time", (VIRTUAL,), 3600.0),
)
"""What curves are drawn against besides rounds: title, label, entries of an evaluation to add up, and their unit."""


def _against(
    groups: Sequence[Group], panel: Lines, by: str, x_label: str, names: Sequence[str], unit: float
) -> Lines | None:
    made = []
    for group, line in zip(groups, panel.series, strict=True):
        lines = [group.lines(int(number)) for number in line.x]
        known = lines and all(names[0] in one for row in lines for one in row)
        x = [float(np.mean([sum(one[name] for name in names) for one in row])) / unit for row in lines if known]
        made.append(dataclasses.replace(line, x=x, mark=None) if known else Series(line.label, [], []))
    if not any(line.x and line.x[-1] for line in made):
        return None
    return Lines(f"{panel.title}, by {by}", x_label, panel.y_label, made)


def clients(groups: Sequence[Group]) -> list[Chart]:
    """Distribution of the clients' accuracies after the last round: sorted, and their numbers in intervals."""
    protocol, axis = headline(groups), groups[0].axis
    name = axis.removesuffix(" in %")
    some = [(group, runs) for group in shown(groups) if (runs := group.per_client(group.rounds[-1], protocol))]
    if not some:
        return []
    lines = [_in_order(group, runs, is_alone=len(some) == 1) for group, runs in some]
    edges = np.histogram_bin_edges(np.concatenate([values for _, runs in some for values in runs]), 10)
    middles, counts = ((edges[1:] + edges[:-1]) / 2).tolist(), []
    for line, (_, runs) in zip(lines, some, strict=True):
        mean = np.mean([np.histogram(values, edges)[0] for values in runs], axis=0)
        counts.append(Series(line.label, middles, mean.tolist(), is_main=line.is_main))
    return [
        Chart(Lines(f"Clients in order of their {name} ({protocol})", "share of the clients in %", axis, lines)),
        Chart(Lines(f"How many clients have which {name} ({protocol})", axis, "clients", counts, least=0.0)),
    ]


def _in_order(group: Group, runs: Sequence[np.ndarray], *, is_alone: bool) -> Series:
    """Sorted accuracies, mean and range over runs; at 101 places where clients are many or not equally many."""
    sizes = {len(values) for values in runs}
    if len(sizes) == 1 and max(sizes) <= 101:
        count = sizes.pop()
        x, table = 100 * (np.arange(count) + 0.5) / count, np.stack(runs)
    else:
        x = np.linspace(0, 100, 101)
        table = np.stack([np.quantile(values, x / 100) for values in runs])
    return over_seeds(group.label, x.tolist(), table.tolist(), is_main=is_alone)


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
    """Clients along each axis, None where an axis has something else, as a text such as "[M, K], ..." says.

    Without a shape in the text, axes as long as the cohort have its clients.
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
    runs = [run for group in groups for run in group.runs if run.config.get("class_table")]
    different = {json.dumps(run.config["class_table"]): run for run in reversed(runs)}
    some = [run for run in runs if run in different.values()]
    charts = [_partition(run) for run in some[:MOST_PARTITIONS]]
    if len(some) > MOST_PARTITIONS:
        more = f"{charts[-1].caption} {len(some) - MOST_PARTITIONS} more partitions are not shown."
        charts[-1] = charts[-1]._replace(caption=more)
    return charts


def _partition_words(run: Run) -> str:
    """Partition of the examples, in words."""
    options = run.request.options
    own = {"grouped": f", s = {options.s:g}", "pathological": f" ({options.pathological_protocol})"}
    words = label(options.partition) + (own | {"dirichlet": f", beta = {options.beta:g}"}).get(options.partition, "")
    return words if options.shift == "none" else f"{words}, shift of {options.shift}"


def _partition(run: Run) -> Chart:
    return classes_by_clients(run.config["class_table"], f"{_partition_words(run)}, seed {run.seed}")


def classes_by_clients(table: Any, title: str, names: Sequence[str] = ()) -> Chart:
    """Numbers of training examples by client and class [N, K], the clients from left to right.

    Args:
      table: the numbers.
      title: of the panel.
      names: of the classes; without them their numbers.
    """
    table = np.asarray(table, np.int64)
    sizes, some = table.sum(1), table[:MOST_CLIENTS]
    equal = bool(sizes.min() == sizes.max())
    words = f"{len(table)} clients with {sizes.min()}{'' if equal else f' to {sizes.max()}'} training examples, shaded "
    words += "by examples of each class" + ("." if equal else "; bars above: all of a client's examples.")
    if len(some) < len(table):
        words += f" The first {len(some)} clients."
    rows, columns = ([str(place) for place in range(size)] for size in some.T.shape)
    totals = () if equal else some.sum(1).tolist()
    return Chart(Heat(title, "client", "class", some.T.tolist(), (), names or rows, columns, totals, "examples"), words)
