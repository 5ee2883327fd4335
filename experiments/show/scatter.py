"""Points of several groups, such as the features of clients' examples."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKERS = "os^Dvx"
"""Shapes of groups; there are no more groups than these."""


@dataclass(frozen=True)
class Scatter:
    """Points [P, 2] and their classes [P] of each group; groups have shapes, classes colors."""

    title: str
    x_label: str
    y_label: str
    points: Sequence[Sequence[Sequence[float]]]
    classes: Sequence[Sequence[int]]
    names: Sequence[str]

    inches: ClassVar = (4.3, 3.4)

    def draw(self, axes: "Axes") -> None:
        from matplotlib import colormaps
        from matplotlib.lines import Line2D

        there = sorted({one for of_group in self.classes for one in of_group})
        colors = colormaps["tab20" if len(there) > 10 else "tab10"]
        for points, classes, marker in zip(self.points, self.classes, MARKERS, strict=False):
            shades = [colors(there.index(one) % colors.N) for one in classes]
            axes.scatter(*np.transpose(points), c=shades, s=14, marker=marker, linewidths=0.8, alpha=0.75)
        shapes = [
            Line2D([], [], color="#555555", marker=marker, linestyle="", label=name)
            for name, marker in zip(self.names, MARKERS, strict=False)
        ]
        own = [
            Line2D([], [], color=colors(at % colors.N), marker="o", linestyle="", label=f"class {one}")
            for at, one in enumerate(there[:20])
        ]
        axes.legend(handles=[*shapes, *own], loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=7, frameon=False)
