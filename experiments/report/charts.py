"""Charts of a report: curves, accuracies of the clients, and partitions."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.folder import load
from experiments.folder.run_folder import VIRTUAL
from experiments.folder.stored_runs import Group, Run
from experiments.own_code import label
from experiments.show import curves as by_round
from experiments.show.curves import headline, shown
from experiments.show.pictures import Heat, Lines, Panel, Series, over_seeds

MOST_PARTITIONS = 4
MOST_CLIENTS = 500
"""Columns of a partition's picture."""
PROTOCOL_TITLES: dict[str, str] = {
    "received": "After aggregation (received)",
    "trained": "After own training (trained)",
    "before_aggregation": "Between the round's training and its aggregation (before_aggregation)",
}


class Chart(NamedTuple):
    """Panels in reading order under one title, with a caption in sentences."""

    title: str
    panels: Sequence[Panel]
    caption: str = ""
    columns: int = 1

    @property
    def panel(self) -> Panel:
        """The first panel."""
        return self.panels[0]


def alone(panel: Panel, caption: str = "") -> Chart:
    """Chart of one panel."""
    return Chart(panel.title, [panel], caption)


def curves(groups: Sequence[Group]) -> list[Chart]:
    """Mean accuracy of each group: against rounds, and against bytes and virtual time where runs have them, for each
    protocol."""
    panels = [dataclasses.replace(one, title=PROTOCOL_TITLES[one.title]) for one in by_round.curves(groups)]
    others = [_against(shown(groups), panel, *axis) for axis in _AXES for panel in panels]
    some = {name: _fewer(groups, protocol) for protocol, name in PROTOCOL_TITLES.items()}
    return [alone(one, some.get(one.title.partition(", by")[0], "")) for one in [*panels, *others] if one is not None]


def _fewer(groups: Sequence[Group], protocol: str) -> str:
    """Over how many clients the means of a curve are, in a sentence; "" where over all."""
    everyone = load.number_of_clients(groups[0].runs[0].config)
    lines = [line for one in shown(groups) for run in one.counted for line in run.lines if protocol in line]
    over = load.over([line[protocol] for line in lines], everyone)
    return f"Means over {over}." if over else ""


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
        alone(Lines(f"Clients in order of their {name} ({protocol})", "share of the clients in %", axis, lines)),
        alone(Lines(f"How many clients have which {name} ({protocol})", axis, "clients", counts, least=0.0)),
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
    spec = run.spec
    own = {"grouped": f", s = {spec.s:g}", "pathological": f" ({spec.pathological_protocol})"}
    words = label(spec.partition) + (own | {"dirichlet": f", beta = {spec.beta:g}"}).get(spec.partition, "")
    return words if spec.shift == "none" else f"{words}, shift of {spec.shift}"


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
    heat = Heat(title, "client", "class", some.T.tolist(), (), names or rows, columns, totals, "examples")
    return alone(heat, words)
