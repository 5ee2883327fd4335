"""Which protocol a picture of many runs puts first, and which settings it has room for."""

from collections.abc import Sequence

import numpy as np

from experiments.plots.palette import COLOURS
from experiments.results.gather import Group
from experiments.results.run_folder import PROTOCOLS, Protocol

MOST_LINES = 8
"""Settings in a chart; the best ones, where there are more."""


def ordered(first: Protocol) -> list[Protocol]:
    """Both protocols, one of them first."""
    return sorted(PROTOCOLS, key=lambda name: name != first)


def headline(groups: Sequence[Group]) -> Protocol:
    """The protocol that most of the runs put first."""
    names = [run.request.options.eval_protocol for group in groups for run in group.runs]
    return max(PROTOCOLS, key=names.count)


def shown(groups: Sequence[Group]) -> list[tuple[int, Group]]:
    """The groups that a chart has room for, each with its style: its place among those, in the order of the page."""
    first = headline(groups)

    def last(group: Group) -> float:
        values = group.values(group.rounds[-1], first, "mean")
        return float(np.mean(values)) if values else -1.0

    there = [group for group in groups if group.rounds]
    best = sorted(there, key=last, reverse=True)[: min(MOST_LINES, len(COLOURS))]
    return list(enumerate(group for group in there if group in best))
