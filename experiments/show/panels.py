"""Panels of pictures: what is drawn, as plain data, and how."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

import numpy as np

from pfl_jax.compare import margin

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Band: TypeAlias = Literal["deviation", "interval", "range"]
"""Over runs: the sample standard deviation on both sides of the mean, its 95 % interval (Student's t), or the range."""

ROUND, ACCURACY = "round", "accuracy in %"
"""Labels of the usual axes."""

COLORS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#B07800", "#3A8FC7", "#666666", "#8B4513", "#4B0082")
"""Okabe and Ito's colors for color-blind readers, the pale ones darker; three more."""

DASHES = tuple((0, dashes) for dashes in ((4, 1.5), (6, 1.5, 1, 1.5), (1, 1.5), (8, 2), (4, 1, 1, 1, 1, 1), (2, 1)))
DASHES += ((0, (8, 2, 2, 2)), (0, (6, 1, 6, 1, 1, 1)), (0, (3, 3)))
"""Strokes and gaps in widths of the line, for each color; none is the solid line of a main method."""

MARKERS = "os^Dvx"
"""Shapes of the points of groups; there are no more groups than these."""


@dataclass(frozen=True)
class Series:
    """One line, with a band; `mark` is a point that belongs to it, such as a published result."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    is_main: bool = False
    mark: tuple[float, float] | None = None


@dataclass(frozen=True)
class Lines:
    """Lines over a common axis.

    Attributes:
      x_ticks: ticks of the x axis, drawn at equal distances; None for ticks chosen by the drawing.
      least: lower end of the y axis; None for one chosen by the drawing.
      inches: width and height.
    """

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    x_ticks: Sequence[float] | None = None
    zero_line: bool = False
    least: float | None = None
    inches: tuple[float, float] = (4.9, 2.9)

    def draw(self, axes: "Axes") -> None:
        from matplotlib.ticker import MaxNLocator

        axes.grid()
        axes.set_prop_cycle(color=COLORS, linestyle=DASHES)
        for series in self.series:
            x = series.x if self.x_ticks is None else [list(self.x_ticks).index(value) for value in series.x]
            main = {"color": "black", "linestyle": "-", "linewidth": 2.2, "zorder": 5} if series.is_main else {}
            # One without points keeps its color for itself, and has no name.
            name = textwrap.fill(series.label, 22, break_on_hyphens=False) if len(x) else ""
            (line,) = axes.plot(
                x, np.asarray(series.y, np.float64), marker="o", markevery=max(1, len(x) // 8), label=name, **main
            )
            if series.low is not None and series.high is not None:
                axes.fill_between(x, series.low, series.high, color=line.get_color(), alpha=0.15, linewidth=0)
            if series.mark is not None:
                point = [[value] for value in series.mark]
                axes.plot(*point, color=line.get_color(), marker="D", markersize=5, clip_on=False)
        if self.zero_line:
            axes.axhline(0, color="#888888", linewidth=1)
        if self.x_ticks is not None:
            axes.set_xticks(range(len(self.x_ticks)), [f"{tick:g}" for tick in self.x_ticks])
        else:
            whole = all(float(x).is_integer() for series in self.series for x in series.x)
            axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=whole, min_n_ticks=1))
        if self.least is not None and any(series.x for series in self.series):
            axes.set_ylim(bottom=self.least)


@dataclass(frozen=True)
class Bars:
    """Bars of groups side by side: group -> name of a bar -> its height; `level` is a named line for comparison."""

    title: str
    x_label: str
    y_label: str
    groups: Mapping[str, Mapping[str, float]]
    level: float | None = None
    level_label: str = ""

    inches: ClassVar = (4.8, 2.9)

    def draw(self, axes: "Axes") -> None:
        axes.set_prop_cycle(color=("#777777", *COLORS))
        for name, bars in self.groups.items():
            axes.bar(list(bars), list(bars.values()), label=name)
        count = sum(map(len, self.groups.values()))
        axes.set_xticks(range(0, count, -(-count // 24)))
        axes.margins(x=0.02)
        if self.level is not None:
            axes.axhline(self.level, color=COLORS[0], linestyle="--", linewidth=1.3, label=self.level_label)


@dataclass(frozen=True)
class Heat:
    """Matrix [R, C] of numbers, white where NaN; lines divide `blocks` of rows and columns, bars above the columns are
    their `totals` [C]."""

    title: str
    x_label: str
    y_label: str
    matrix: Sequence[Sequence[float]]
    blocks: Sequence[int] = ()
    rows: Sequence[str] = ()
    columns: Sequence[str] = ()
    totals: Sequence[float] = ()
    unit: str = "weight"
    has_square_cells: bool = False

    @property
    def inches(self) -> tuple[float, float]:
        return (2.5 if self.has_square_cells else 4.3, 2.5)

    def draw(self, axes: "Axes") -> None:
        aspect = "equal" if self.has_square_cells else "auto"
        axes.imshow(self.matrix, "Greys", interpolation="none", aspect=aspect)  # pyright: ignore
        axes.spines[:].set_visible(True)
        for border in np.cumsum(self.blocks)[:-1] - 0.5:
            axes.axhline(border, color=COLORS[0], linewidth=0.6)
            axes.axvline(border, color=COLORS[0], linewidth=0.6)
        rows, columns = np.shape(self.matrix)
        for count, names, set_ticks in ((columns, self.columns, axes.set_xticks), (rows, self.rows, axes.set_yticks)):
            ticks = range(0, count, -(-count // 12) if names else max(1, count // 4))
            set_ticks(ticks, [names[tick] if names else str(tick) for tick in ticks], fontsize=7)
        if self.totals:
            above = axes.inset_axes((0, 1.03, 1, 0.22), sharex=axes)
            above.bar(range(columns), self.totals, color="#bbbbbb")
            above.set_axis_off()


@dataclass(frozen=True)
class Ranks:
    """Mean ranks of methods, the best first; bars reach to those that are less than `least` away."""

    title: str
    x_label: str
    names: Sequence[str]
    ranks: Sequence[float]
    least: float
    y_label: str = ""

    @property
    def inches(self) -> tuple[float, float]:
        return 5.2, 0.9 + 0.22 * len(self.names)

    def draw(self, axes: "Axes") -> None:
        axes.grid(axis="x")
        for place, rank in enumerate(self.ranks):
            reach = max(other for other in self.ranks if other < rank + self.least)
            axes.plot([rank, reach], [place, place], color="#bbbbbb", linewidth=5)
            axes.plot([rank], [place], color=COLORS[1], marker="o", markersize=5)
        axes.set_yticks(range(len(self.names)), self.names)
        axes.invert_yaxis()


@dataclass(frozen=True)
class Scatter:
    """Points [P, 2] and their classes [P] of each group, such as features; groups have shapes, classes colors."""

    title: str
    x_label: str
    y_label: str
    points: Sequence[Sequence[Sequence[float]]]
    classes: Sequence[Sequence[int]]
    names: Sequence[str]

    inches: ClassVar = (4.3, 3.4)

    def draw(self, axes: "Axes") -> None:
        from matplotlib import colormaps

        there = sorted({number for of_group in self.classes for number in of_group})
        colors = {number: colormaps["tab20"](place % 20) for place, number in enumerate(there)}
        for points, classes, marker, name in zip(self.points, self.classes, MARKERS, self.names, strict=False):
            shades = [colors[number] for number in classes]
            axes.scatter(*np.transpose(points), c=shades, s=14, marker=marker, linewidths=0.8, alpha=0.75)
            axes.plot([], [], color="#555555", marker=marker, linestyle="", label=name)
        for number in there[:20]:
            axes.plot([], [], color=colors[number], marker="o", linestyle="", label=f"class {number}")


Panel: TypeAlias = Lines | Bars | Heat | Ranks | Scatter


def over_seeds(
    label: str,
    x: Sequence[float],
    runs: Sequence[Sequence[float | None]] | np.ndarray,
    *,
    is_main: bool = False,
    band: Band = "range",
) -> Series:
    """Line of the mean over runs, with a band if there are several, from a row [X] for each; a point missing in any row
    is missing."""
    values = np.asarray(runs, np.float64)
    mean, low, high = values.mean(0), None, None
    if len(values) > 1 and band == "range":
        low, high = values.min(0).tolist(), values.max(0).tolist()
    elif len(values) > 1:
        spread = values.std(0)
        half = spread * (margin(1.0, len(values)) if band == "interval" else (len(values) / (len(values) - 1)) ** 0.5)
        low, high = (mean - half).tolist(), (mean + half).tolist()
    return Series(label, list(x), mean.tolist(), low, high, is_main)
