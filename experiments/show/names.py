"""Names of lines at their ends, in the margin of a panel, where none covers another."""

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINE = 0.135
"""Inches of a line of text."""

_NAME = 18
"""Characters of a line of a name."""


def name_ends(axes: "Axes", height: float, ends: Sequence[tuple[str, tuple[float, float], Any]]) -> None:
    """Write (name, point, color) beside axes of a panel of some inches, as near to the points as names find room."""
    if not ends:
        return
    low, high = axes.get_ylim()
    names = ["\n".join(textwrap.wrap(name, _NAME, break_on_hyphens=False)) for name, *_ in ends]
    share = LINE / (height - 0.65)
    places = apart([(y - low) / (high - low) for _, (_, y), _ in ends], [share * (n.count("\n") + 1.15) for n in names])
    for name, (_, point, color), place in zip(names, ends, places, strict=True):
        lead = {"arrowstyle": "-", "color": color, "linewidth": 0.5, "relpos": (0, 0.5), "shrinkA": 1, "shrinkB": 3}
        look = {"color": color, "va": "center", "arrowprops": lead, "annotation_clip": False}
        axes.annotate(name, point, (1.04, place), textcoords="axes fraction", fontsize=8, **look)


def apart(wanted: Sequence[float], sizes: Sequence[float]) -> np.ndarray:
    """Centers of intervals as near to the wanted ones as possible, in their order, in [0, 1] if all have room there."""
    # Imported now, as matplotlib.
    from scipy.optimize import isotonic_regression

    order = np.argsort(wanted, kind="stable")
    packed = np.cumsum(np.take(sizes, order)) - np.take(sizes, order) / 2
    # Of the gap below each: neighbours that would overlap share their mean.
    gaps = isotonic_regression(np.take(wanted, order) - packed).x
    found = np.empty(len(order))
    found[order] = packed + np.clip(gaps, 0, max(0.0, 1 - sum(sizes)))
    return found
