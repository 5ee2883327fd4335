"""Charts of a report: curves, accuracies of the clients, and partitions."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.folder import load
from experiments.folder.load import Run
from experiments.folder.run_folder import VIRTUAL
from experiments.folder.stored_runs import Group
from experiments.show import curves as by_round
from experiments.show.curves import headline, shown
from experiments.show.panels import Heat, Lines, Panel, Series, over_seeds
from experiments.show.pictures import Picture
from experiments.spec.option_notes import label

MOST_PARTITIONS = 4
MOST_CLIENTS = 500
"""Columns of a partition's picture."""
PROTOCOL_TITLES: dict[str, str] = {
    "received": "After aggregation (received)",
    "trained": "After own training (trained)",
    "before_aggregation": "Between the round's training and its aggregation (before_aggregation)",
}
_AXES = (
    ("bytes sent", "MB up and down, all clients together", ("bytes_up", "bytes_down"), 1e6),
    ("virtual time", "hours of virtual time", (VIRTUAL,), 3600.0),
)
"""What curves are drawn against besides rounds: title, label, entries of an evaluation to add up, and their unit."""


def alone(panel: Panel, caption: str = "") -> Picture:
    """Picture of one panel, named as it."""
    return Picture(panel.title, caption, [panel])


def curves(groups: Sequence[Group]) -> list[Picture]:
    """Mean accuracy of each group: against rounds, and against bytes and virtual time where runs have them, for each
    protocol."""
    everyone, charts = load.number_of_clients(groups[0].runs[0].config), []
    by_protocol = by_round.curves(groups)
    for panel in by_protocol:
        lines = [line for one in shown(groups) for run in one.counted for line in run.lines if panel.title in line]
        over = load.over([line[panel.title] for line in lines], everyone)
        caption = f"Means over {over}." if over else ""
        charts.append(alone(dataclasses.replace(panel, title=PROTOCOL_TITLES[panel.title]), caption))
    further = [_against(shown(groups), panel, *axis) for axis in _AXES for panel in by_protocol]
    return [*charts, *(alone(panel) for panel in further if panel is not None)]


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
    return Lines(f"{PROTOCOL_TITLES[panel.title]}, by {by}", x_label, panel.y_label, made)


def clients(groups: Sequence[Group]) -> list[Picture]:
    """Accuracies of the clients after the last round, sorted: mean and range over runs, at 101 quantiles."""
    protocol, axis, shares = headline(groups), groups[0].axis, np.linspace(0, 100, 101)
    some = [(group, runs) for group in shown(groups) if (runs := group.per_client(group.rounds[-1], protocol))]
    lines = [
        over_seeds(
            group.label, shares.tolist(), [np.percentile(row, shares).tolist() for row in runs], is_main=len(some) == 1
        )
        for group, runs in some
    ]
    title = f"Clients in order of their {axis.removesuffix(' in %')} ({protocol})"
    return [alone(Lines(title, "share of the clients in %", axis, lines))] if lines else []


def partitions(groups: Sequence[Group]) -> list[Picture]:
    """Classes by clients, each partition once, and no more than a few."""
    runs = [run for group in groups for run in group.runs if run.config.get("class_table")]
    different = {json.dumps(run.config["class_table"]): run for run in reversed(runs)}
    some = [run for run in runs if run in different.values()]
    charts = [_partition(run) for run in some[:MOST_PARTITIONS]]
    if len(some) > MOST_PARTITIONS:
        more = f"{charts[-1].caption} {len(some) - MOST_PARTITIONS} more partitions are not shown."
        charts[-1] = dataclasses.replace(charts[-1], caption=more)
    return charts


def _partition(run: Run) -> Picture:
    spec = run.spec
    details = {
        "grouped": f", s = {spec.s:g}",
        "pathological": f" ({spec.pathological_protocol})",
        "dirichlet": f", beta = {spec.beta:g}",
    }
    shift = "" if spec.shift == "none" else f", shift of {spec.shift}"
    words = f"{label(spec.partition)}{details.get(spec.partition, '')}{shift}, seed {run.seed}"
    return classes_by_clients(run.config["class_table"], words)


def classes_by_clients(table: Any, title: str, names: Sequence[str] = ()) -> Picture:
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
    heat = Heat(title, "client", "class", some.T.tolist(), (), names or rows, columns, totals, "examples")
    return alone(heat, words)
