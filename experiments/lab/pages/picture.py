"""Accuracy over rounds: our curves, with the papers' final accuracies as marks."""

import dataclasses
from collections.abc import Sequence

from experiments.folder.committed import ResultStore
from experiments.folder.load import Run
from experiments.lab.pages.compared import SECTIONS, published_in, runs
from experiments.papers.published import Published
from experiments.show.panels import ACCURACY, ROUND, Lines, Series, over_seeds
from experiments.show.pictures import Picture

METHODS = ("fedpac", "fedavg_ft", "ditto", "fedbabu", "fedrep", "fedper", "local", "fedavg")
"""Methods of the first section that the figure shows."""

LEAST = 70.0
"""Lower end of the axis of accuracies in percent; averaged models are below it for a few rounds."""

MARKS_AT = 1.03
"""Position of the papers' accuracies, in multiples of the last round."""


def picture(library: ResultStore) -> Picture:
    """Curves of the methods that have a finished run."""
    by_method = {row.method: row for row in published_in(SECTIONS[0])}
    found = [(row, runs(row, library)) for row in map(by_method.get, METHODS) if row is not None]
    series = [_series(row, there) for row, there in found if there]
    seeds = [len(there) for _, there in found if there] or [0]
    numbers = " to ".join(map(str, dict.fromkeys((min(seeds), max(seeds)))))
    words = f"{numbers} {'seed' if numbers == '1' else 'seeds'}"
    # As wide as a page's column, and with letters that are large enough on a telephone.
    panel = Lines("", ROUND, ACCURACY, series, least=LEAST)
    return Picture("", f"Fashion-MNIST, 20 clients, {words}; diamonds: FedPAC's Table 1", [panel])


def _series(row: Published, there: Sequence[Run]) -> Series:
    common = set.intersection(*({line["round"] for line in one.lines} for one in there))
    numbers = sorted(common)
    curves = [[one.at_round(number, "received") for number in numbers] for one in there]
    line = over_seeds(row.method, numbers, curves, is_main=row.method == METHODS[0])  # pyright: ignore
    return dataclasses.replace(line, mark=(MARKS_AT * numbers[-1], row.accuracy_percent))
