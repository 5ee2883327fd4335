"""Accuracy curves of runs as a picture: PNG, SVG or PDF."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments.cli.measures import Protocol
from experiments.folder.stored_runs import Group, group, read
from experiments.show import drawing
from experiments.show.pictures import ROUND, Lines, Picture, Series, over_seeds
from experiments.show.selection import ordered, shown

NAME = "curves.png"
SPREAD = (10, 90)
"""Percentiles over clients that limit the band of a single run."""


def save_curves(folder: Path) -> Path:
    """Draw the curves of a run into curves.png in its folder; InvalidInput if it cannot be written.

    Returns:
      The picture's path.
    """
    groups, _ = group([read(folder)])
    drawing.save_as(picture(groups), folder / NAME)
    return folder / NAME


def picture(groups: Sequence[Group]) -> Picture:
    """Curves of each protocol over the rounds, as in the papers' figures.

    A single run has a band for the spread over clients, and the paper's accuracy if there is one. Several settings have
    a line each, with the range over seeds.

    Args:
      groups: on one kind of data, at least one with an evaluation.
    """
    some = [group for _, group in shown(groups)]
    if len(some) == 1 and len(some[0].counted) == 1:
        return _of_one_run(some[0])
    panels = []
    for protocol in ordered(some):
        curves = [(one.label, *one.curve(protocol)) for one in some]
        series = [over_seeds(label, rounds, table.tolist()) for label, rounds, table in curves if rounds]
        panels.append(Lines(protocol, ROUND, some[0].axis, series))
    caption = "Means over clients; bands are the range over seeds."
    there = sum(bool(one.rounds) for one in groups)
    if len(some) < there:
        caption += f" The best {len(some)} of {there} settings."
    return Picture(some[0].data, caption + _unfinished(some), panels, 2)


def _of_one_run(one: Group) -> Picture:
    run, published = one.counted[0], one.published
    panels = []
    for protocol in ordered([one]):
        series = [_with_spread(one, protocol)]
        if published is not None:
            ends = [one.rounds[0], one.rounds[-1]]
            label = f"{published.source}: {published.accuracy_percent:.2f}"
            series.append(Series(label, ends, [published.accuracy_percent] * 2))
        panels.append(Lines(protocol, ROUND, one.axis, series))
    options = run.request.options
    caption = (
        f"Means over clients; bands are the middle {SPREAD[1] - SPREAD[0]} % of them. {options.num_clients} clients, "
        f"participation {options.participation:g}, seed {options.seed}."
    )
    return Picture(f"{one.method} on {one.data}", caption + _unfinished([one]), panels, 2)


def _with_spread(one: Group, protocol: Protocol) -> Series:
    rounds, table = one.curve(protocol)
    # Runs of very many clients have no scores of each.
    clients = [values for number in rounds for values in one.per_client(number, protocol)]
    bands = [np.percentile(values, SPREAD) for values in clients] if len(clients) == len(rounds) else []
    low, high = np.transpose(bands).tolist() if bands else ([], [])
    return Series(one.method, rounds, table[0].tolist() if rounds else [], low, high, is_main=True)


def _unfinished(groups: Sequence[Group]) -> str:
    """Remark of the caption on unfinished runs."""
    names = [f"{one.label} (round {one.rounds[-1]})" for one in groups if not one.is_finished]
    return f" Unfinished: {', '.join(names)}." if names else ""
