"""Drawings: functions (axes, frame) -> None over plain matplotlib.

A frame names the axes: for `lines` by its columns, for the others by the names of its index and columns.
"""

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import pandas as pd

from pfl_jax.compare import margin

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Band: TypeAlias = Literal["deviation", "interval", "range"]
"""Over runs: the sample standard deviation on both sides of the mean, its 95 % interval (Student's t), or the range."""

ROUND, ACCURACY = "round", "accuracy in %"
"""Labels of the usual axes."""

COLORS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#B07800", "#3A8FC7", "#666666", "#8B4513", "#4B0082")
"""Okabe and Ito's colors for color-blind readers, with darker shades of the pale ones, and three more colors."""

DASHES = tuple((0, dashes) for dashes in ((4, 1.5), (6, 1.5, 1, 1.5), (1, 1.5), (8, 2), (4, 1, 1, 1, 1, 1), (2, 1)))
DASHES += ((0, (8, 2, 2, 2)), (0, (6, 1, 6, 1, 1, 1)), (0, (3, 3)))
"""Strokes and gaps, in widths of the line, for each color; only the main method's line is solid."""

MARKERS = "os^Dvx"
"""Shapes of the points of clients, which also limit the number of clients."""


def rows_of(line: str, x: Sequence[float], runs: Any, *, x_label: str = ROUND, y_label: str = ACCURACY) -> pd.DataFrame:
    """Rows for `over_runs` of one line: values of y [R, X] in its runs, at x [X]."""
    values = np.asarray(runs, np.float64).reshape(len(runs), len(x))
    number, place = np.indices(values.shape).reshape(2, -1)
    return pd.DataFrame({"line": line, "run": number, x_label: np.asarray(x)[place], y_label: values.ravel()})


def over_runs(rows: pd.DataFrame, band: Band = "range") -> pd.DataFrame:
    """Frame for `lines`: means over runs with a band where there are several.

    Args:
      rows: columns line, run, x and y, in this order; a point that is NaN in any run is NaN.
      band: see `Band`.

    Returns:
      Columns line, x, y, "low" and "high"; the last two are NaN for a single run.
    """
    line, _, x, y = rows.columns
    values = rows.groupby([line, x], sort=False, observed=True)[y]
    mean, runs = values.agg(lambda of: of.mean(skipna=False)), values.size()
    if band == "range":
        low, high = (values.agg(lambda of, name=name: getattr(of, name)(skipna=False)) for name in ("min", "max"))
    else:
        half = values.agg(lambda of: of.std(skipna=False))
        if band == "interval":
            half *= [margin(1.0, many) * ((many - 1) / many) ** 0.5 for many in runs]
        low, high = mean - half, mean + half
    found = pd.DataFrame({y: mean, "low": low.where(runs > 1), "high": high.where(runs > 1)}).reset_index()
    return found.astype({line: rows[line].dtype})


def lines(
    axes: "Axes",
    frame: pd.DataFrame,
    *,
    main: str = "",
    points: Mapping[str, tuple[float, float]] | None = None,
    is_spaced: bool = False,
    has_zero: bool = False,
    least: float | None = None,
) -> None:
    """Lines over a common axis, each with a band where there is one.

    Args:
      frame: columns line, x, y, and perhaps "low" and "high"; categories of the first column, if any, are all lines in
        order, and a line without rows keeps its color.
      main: line that stands out.
      points: line -> single point that belongs to it, such as a published result.
      is_spaced: draw the values of x at equal distances.
      has_zero: draw a line at 0.
      least: lower end of the y axis; None for one chosen by matplotlib.
    """
    from matplotlib.ticker import MaxNLocator

    line, x, y = frame.columns[:3]
    ticks, points = sorted(frame[x].unique()), points or {}
    names = frame[line].cat.categories if isinstance(frame[line].dtype, pd.CategoricalDtype) else frame[line].unique()
    axes.grid()
    axes.set(xlabel=x, ylabel=y)
    axes.set_prop_cycle(color=COLORS, linestyle=DASHES)
    for name in names:
        rows = frame[frame[line] == name]
        at = [ticks.index(value) for value in rows[x]] if is_spaced else rows[x].tolist()
        look: dict[str, Any] = (
            {"color": "black", "linestyle": "-", "linewidth": 2.2, "zorder": 5} if name == main else {}
        )
        label = textwrap.fill(str(name), 22, break_on_hyphens=False, break_long_words=False) if at else ""
        look |= {"marker": "o", "markevery": max(1, len(at) // 8), "label": label}
        (drawn,) = axes.plot(at, np.asarray(rows[y], np.float64), **look)
        if "low" in rows and rows.low.notna().any():
            axes.fill_between(at, rows.low, rows.high, color=drawn.get_color(), alpha=0.15, linewidth=0)
        if name in points:
            point = [[value] for value in points[name]]
            axes.plot(*point, color=drawn.get_color(), marker="D", markersize=5, clip_on=False)
    if has_zero:
        axes.axhline(0, color="#888888", linewidth=1)
    if is_spaced:
        axes.set_xticks(range(len(ticks)), [f"{tick:g}" for tick in ticks])
    else:
        whole = all(float(tick).is_integer() for tick in ticks)
        axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=whole, min_n_ticks=1))
    if least is not None and ticks:
        axes.set_ylim(bottom=least)


def bars(axes: "Axes", frame: pd.DataFrame, *, level: float | None = None, level_label: str = "") -> None:
    """Bars side by side, in one color for each column, without bars for NaN; `level` is a line for comparison."""
    axes.set(xlabel=frame.index.name, ylabel=frame.columns.name)
    axes.set_prop_cycle(color=("#777777", *COLORS))
    for name in frame:
        heights = frame[name].dropna()
        axes.bar([str(place) for place in heights.index], heights, label=name)
    axes.set_xticks(range(0, len(frame), -(-len(frame) // 12)))
    axes.margins(x=0.02)
    if level is not None:
        axes.axhline(level, color=COLORS[0], linestyle="--", linewidth=1.3, label=level_label)


def matrix(
    axes: "Axes",
    frame: pd.DataFrame,
    *,
    unit: str,
    limits: tuple[float, float],
    blocks: Sequence[int] = (),
    totals: Sequence[float] = (),
    is_square: bool = False,
) -> None:
    """Map of numbers in shades of gray, white where NaN.

    Args:
      frame: numbers, with the names of rows and columns.
      unit: unit of the numbers, for the bar beside the map.
      limits: numbers that are drawn in white and in black.
      blocks: numbers of rows, and of columns, between dividing lines.
      totals: heights of bars above the columns.
      is_square: whether cells are squares.
    """
    image = axes.imshow(frame.to_numpy(float), "Greys", interpolation="none", aspect="equal" if is_square else "auto")
    image.set_clim(*limits)
    axes.set(xlabel=frame.columns.name, ylabel=frame.index.name)
    axes.spines[:].set_visible(True)
    for border in np.cumsum(blocks)[:-1] - 0.5:
        axes.axhline(border, color=COLORS[0], linewidth=0.6)
        axes.axvline(border, color=COLORS[0], linewidth=0.6)
    for names, set_ticks in ((frame.columns, axes.set_xticks), (frame.index, axes.set_yticks)):
        ticks = range(0, len(names), -(-len(names) // 12))
        set_ticks(ticks, [str(names[tick]) for tick in ticks], fontsize=7)
    bar = axes.figure.colorbar(image, ax=axes, aspect=30, label=unit)
    # Store the bar as one image, not as a shape for each shade.
    bar.solids.set_rasterized(True)  # pyright: ignore
    if totals:
        above = axes.inset_axes((0, 1.03, 1, 0.22), sharex=axes)
        above.bar(range(len(totals)), totals, color="#bbbbbb")
        above.set_axis_off()


def grays(frames: Sequence[pd.DataFrame]) -> tuple[float, float]:
    """Common `limits` of some maps, since equal weights of many clients would look white on a scale up to 1."""
    low, high = (float(pick([pick(frame.to_numpy(float)) for frame in frames])) for pick in (np.nanmin, np.nanmax))
    return min(0.0, low), max(0.0, high) or 1.0


def ranks(axes: "Axes", frame: pd.DataFrame, *, least: float) -> None:
    """Mean ranks by method, one column, the best first; bars reach to methods that are less than `least` away."""
    values = frame.iloc[:, 0].to_numpy(float)
    axes.grid(axis="x")
    axes.set(xlabel=frame.columns[0])
    for place, rank in enumerate(values):
        axes.plot([rank, values[values < rank + least].max()], [place, place], color="#bbbbbb", linewidth=5)
        axes.plot([rank], [place], color=COLORS[1], marker="o", markersize=5)
    axes.set_yticks(range(len(frame)), frame.index)
    axes.invert_yaxis()


def scatter(axes: "Axes", frame: pd.DataFrame) -> None:
    """Points, such as features: columns x, y, "client" and "class"; clients have shapes, classes colors."""
    from matplotlib import colormaps

    x, y = frame.columns[:2]
    axes.set(xlabel=x, ylabel=y)
    classes = sorted(frame["class"].unique())
    colors = {number: colormaps["tab20"](place % 20) for place, number in enumerate(classes)}
    for marker, (client, rows) in zip(MARKERS, frame.groupby("client", sort=False), strict=False):
        shades = [colors[number] for number in rows["class"]]
        axes.scatter(rows[x], rows[y], c=shades, s=14, marker=marker, linewidths=0.8, alpha=0.75)
        axes.plot([], [], color="#555555", marker=marker, linestyle="", label=f"client {client}")
    for number in classes[:20]:
        axes.plot([], [], color=colors[number], marker="o", linestyle="", label=f"class {number}")
