"""Order of protocols, and choice of settings, in pictures of many runs."""

from collections.abc import Sequence

import numpy as np

from experiments.cli.measures import ALWAYS, PROTOCOLS, Protocol
from experiments.folder.stored_runs import Group

MOST_LINES = 8
"""Maximum number of settings in a chart, the best ones."""


def ordered(groups: Sequence[Group]) -> list[Protocol]:
    """Protocols of some groups, the main one first; received and trained are always among them."""
    first = headline(groups)
    lines = [line for group in groups for run in group.counted for line in run.lines]
    there: list[Protocol] = [name for name in PROTOCOLS if name in ALWAYS or any(name in line for line in lines)]
    return sorted(there, key=lambda name: name != first)


def headline(groups: Sequence[Group]) -> Protocol:
    """Main protocol of most runs."""
    names = [run.headline for group in groups for run in group.runs]
    return max(PROTOCOLS, key=names.count)


def shown(groups: Sequence[Group]) -> list[tuple[int, Group]]:
    """Groups that a chart shows, in their order, each with the number of its style."""
    first = headline(groups)

    def last(group: Group) -> float:
        values = group.values(group.rounds[-1], first, "mean")
        return float(np.mean(values)) if values else -1.0

    there = [group for group in groups if group.rounds]
    best = sorted(there, key=last, reverse=True)[:MOST_LINES]
    return list(enumerate(group for group in there if group in best))
