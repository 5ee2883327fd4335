"""Drawing of pictures with matplotlib, readable in print, on screens, and without colors.

Lines differ in color, dashes and markers, bars in hatching; the line of a figure's main method is black, solid and
thick. Neither pyplot nor any other global state of matplotlib is used.
"""

import functools
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments.show.palette import COLORS, DASHES
from experiments.show.pictures import Bars, Heat, Histograms, Lines, Panel, Picture, Series
from pfl_jax.atomic_write import write_binary

MAIN = {"color": "black", "linestyle": "-", "marker": "o", "linewidth": 2.0, "zorder": 5}

_MARKERS = ("s", "^", "D", "v", "P", "X", "<", ">", "*")
_HATCHES = ("", "///", "...", "xxx")
_GRAYS = ("#555555", "#ffffff", "#bbbbbb", "#ffffff")

SETTINGS: dict[Any, Any] = {
    "font.size": 8.5,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.fontsize": 8,
    "legend.frameon": False,
    # Searchable text, and the same bytes for the same numbers.
    "svg.fonttype": "none",
    "svg.hashsalt": "pfl_jax",
}
_PANEL = {Lines: (4.0, 2.9), Bars: (4.8, 2.9), Heat: (2.3, 2.35), Histograms: (4.0, 2.9)}
_LINE = 0.16
"""Inches of a line of text."""


def draw(picture: Picture) -> Figure:
    """Draw the picture as a matplotlib figure."""
    with mpl.rc_context(SETTINGS):
        columns = min(picture.columns, len(picture.panels))
        rows = -(-len(picture.panels) // columns)
        sizes = [_PANEL[type(panel)] for panel in picture.panels]
        widths = [max(size[0] for size in sizes[column::columns]) for column in range(columns)]
        heats = [panel for panel in picture.panels if isinstance(panel, Heat)]
        with_bar = len(heats) == len(sizes)
        width = sum(widths) + (0.7 if with_bar else 0.0)
        title = textwrap.wrap(picture.title, int(width * 11))
        caption = textwrap.wrap(picture.caption, int(width * 17), break_on_hyphens=False)
        shared, legend_columns = _shared_legend(picture), max(1, int(width / 1.5))
        legend = _LINE * 1.25 * -(-len(shared) // legend_columns)
        above, below = 0.15 + 1.35 * _LINE * len(title), 0.15 + legend + _LINE * len(caption)
        height = above + below + rows * max(size[1] for size in sizes)
        figure = Figure(figsize=(width, height), layout="constrained")
        figure.get_layout_engine().set(rect=(0, below / height, 1, 1 - (above + below) / height))  # pyright: ignore
        figure.text(0.5, 1 - 0.1 / height, "\n".join(title), ha="center", va="top", fontsize=10.5, fontweight="bold")
        place = {"x": 0.1 / width, "y": 0.06 / height, "ha": "left", "va": "bottom"}
        figure.text(s="\n".join(caption), fontsize=7.5, color="#333333", **place)
        grid = figure.subplots(rows, columns, squeeze=False, width_ratios=widths)
        # One scale of grays for all matrices; on a scale up to 1, equal weights of many clients would look white.
        grays = Normalize(0, max((np.max(panel.matrix) for panel in heats), default=1))
        for position, axes in enumerate(grid.flat):
            if position < len(picture.panels):
                draw_panel(axes, picture.panels[position], grays, own_legend=not shared)
            else:
                axes.set_axis_off()
        if with_bar:
            shades = ScalarMappable(grays, "Greys")
            figure.colorbar(shades, ax=grid, shrink=0.6, aspect=30, label=heats[0].unit)
        if shared:
            handles, labels = grid[0, 0].get_legend_handles_labels()
            place = (0.5, (0.1 + _LINE * len(caption)) / height)
            figure.legend(handles, labels, loc="lower center", bbox_to_anchor=place, ncols=legend_columns)
        return figure


def save(picture: Picture, folder: Path, name: str) -> list[Path]:
    """Draw a picture into folder/name.png and folder/name.svg.

    Raises:
      CannotWrite: the folder cannot be written.
    """
    paths = [folder / f"{name}.{kind}" for kind in ("png", "svg")]
    save_as(picture, *paths)
    return paths


def save_as(picture: Picture, *paths: Path, description: str | None = None) -> None:
    """Draw a picture into files, each written atomically; their names end in .png, .svg or .pdf.

    Args:
      picture: the picture.
      *paths: paths of the files.
      description: text stored in .png and .svg files.

    Raises:
      CannotWrite: one of them cannot be written.
    """
    figure = draw(picture)
    for path in paths:
        kind = path.suffix[1:]
        with mpl.rc_context(SETTINGS):
            save_to = functools.partial(figure.savefig, format=kind, dpi=200, metadata=_metadata(kind, description))
            write_binary(path, save_to)


def _metadata(kind: str, description: str | None) -> dict[str, str | None]:
    """Metadata of a file without the time, so that equal pictures give equal files."""
    metadata: dict[str, str | None] = {"Date": None} if kind == "svg" else {}
    if description is not None and kind != "pdf":
        metadata["Description"] = description
    return metadata


def _shared_legend(picture: Picture) -> list[str]:
    """Labels of a common legend of all panels; none if their lines differ."""
    if not all(isinstance(panel, Lines) for panel in picture.panels):
        return []
    labels = [[series.label for series in panel.series] for panel in picture.panels if isinstance(panel, Lines)]
    same = all(panel == labels[0] for panel in labels)
    return labels[0] if same and len(labels[0]) > 1 and (len(labels) > 1 or len(labels[0]) > 4) else []


def draw_panel(axes: Axes, panel: Panel, grays: Normalize, *, own_legend: bool) -> None:
    """Draw a panel.

    Args:
      axes: empty axes.
      panel: the panel.
      grays: scale of grays of a matrix.
      own_legend: whether several lines or bars get a legend in the panel.
    """
    axes.set_title("\n".join(textwrap.wrap(panel.title, 30 if isinstance(panel, Heat) else 52)))
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    if isinstance(panel, Lines):
        _draw_lines(axes, panel)
    elif isinstance(panel, Bars):
        _draw_bars(axes, panel)
    elif isinstance(panel, Heat):
        _draw_heat(axes, panel, grays)
    else:
        _draw_histograms(axes, panel)
    if own_legend and axes.get_legend_handles_labels()[1][1:]:
        axes.legend(handlelength=3.2)


def _draw_lines(axes: Axes, panel: Lines) -> None:
    axes.grid(color="#dddddd", linewidth=0.6)
    if panel.zero_line:
        axes.axhline(0, color="#888888", linewidth=1)
    others = 0
    for series in panel.series:
        if series.is_main:
            look = dict(MAIN)
        else:
            turn = others % len(COLORS)
            dashes = (0, DASHES[turn]) if DASHES[turn] else "-"
            look = {"color": COLORS[turn], "linestyle": dashes, "marker": _MARKERS[turn], "linewidth": 1.4}
            others += 1
        _draw_series(axes, series, _places(series.x, panel.x_ticks), look)
    if panel.x_ticks is None:
        whole = all(float(x).is_integer() for series in panel.series for x in series.x)
        axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=whole, min_n_ticks=1))
    else:
        names = panel.x_names or [f"{tick:g}" for tick in panel.x_ticks]
        axes.set_xticks(range(len(names)), names)
    axes.margins(x=0.04, y=0.08)
    if panel.least is not None and panel.series:
        axes.set_ylim(bottom=panel.least)


def _draw_series(axes: Axes, series: Series, x: Sequence[float], look: dict[str, Any]) -> None:
    # About eight markers on a line.
    every = max(1, len(x) // 8)
    y = [np.nan if value is None else value for value in series.y]
    size = 4.5 if look["marker"] != "*" else 6.5
    axes.plot(x, y, label=series.label, markevery=(0, every), markersize=size, markerfacecolor="white", **look)
    if series.mark is not None:
        point = {name: look[name] for name in ("color", "marker")}
        axes.plot(*([value] for value in series.mark), markersize=size + 1.5, clip_on=False, zorder=6, **point)
    if series.low is not None and series.high is not None:
        axes.fill_between(x, series.low, series.high, color=look["color"], alpha=0.13, linewidth=0)


def _places(x: Sequence[float], ticks: Sequence[float] | None) -> Sequence[float]:
    """Positions of values on the axis: the numbers of their ticks, if there are ticks."""
    return x if ticks is None else [list(ticks).index(value) for value in x]


def _draw_bars(axes: Axes, panel: Bars) -> None:
    start, places, names = 0.0, [], []
    for number, (group, labels, values) in enumerate(zip(panel.groups, panel.labels, panel.values, strict=True)):
        at = start + np.arange(len(values))
        look: dict[str, Any] = {"hatch": _HATCHES[number % 4], "facecolor": _GRAYS[number % 4], "edgecolor": "black"}
        axes.bar(at, values, width=0.8, label=group, linewidth=0.8, **look)
        start += len(values) + 1.0
        places += at.tolist()
        names += labels
    highest = max(value for values in panel.values for value in values)
    if panel.level is not None:
        axes.axhline(panel.level, color="#D55E00", linestyle="--", linewidth=1.3, label=panel.level_label)
        # Room for the legend above the bars.
        axes.set_ylim(0, 1.35 * max(panel.level, highest))
    every = -(-len(names) // 24)
    axes.set_xticks(places[::every], names[::every], fontsize=7)
    axes.margins(x=0.02)


def _draw_heat(axes: Axes, panel: Heat, grays: Normalize) -> None:
    matrix = np.asarray(panel.matrix)
    rows, columns = matrix.shape
    axes.imshow(matrix, "Greys", norm=grays, interpolation="none", aspect="equal" if rows == columns else "auto")
    for side in axes.spines.values():
        side.set_visible(True)
    for border in np.cumsum(panel.blocks)[:-1] - 0.5:
        axes.axhline(border, color="#D55E00", linewidth=0.6)
        axes.axvline(border, color="#D55E00", linewidth=0.6)
    for count, names, set_ticks in ((columns, panel.columns, axes.set_xticks), (rows, panel.rows, axes.set_yticks)):
        ticks = range(0, count, -(-count // 12) if names else max(1, count // 4))
        set_ticks(ticks, [names[tick] if names else str(tick) for tick in ticks])
    axes.tick_params(labelsize=7)
    if panel.totals:
        above = axes.inset_axes((0, 1.03, 1, 0.22), sharex=axes)
        above.bar(range(columns), panel.totals, color="#bbbbbb")
        above.set_axis_off()


def _draw_histograms(axes: Axes, panel: Histograms) -> None:
    for place, label in enumerate(panel.labels):
        base, counts = len(panel.labels) - place, np.asarray(panel.counts[place])
        color = COLORS[place % len(COLORS)] if panel.labels[1:] else "#888888"
        axes.stairs(base + 0.55 * counts / (counts.max() or 1), panel.edges, baseline=base, fill=True, color=color)
        axes.plot([panel.means[place]] * 2, [base, base + 0.62], color="black", linewidth=1.3)
        name = textwrap.shorten(label, 40, placeholder=" ...")
        axes.text(panel.edges[0], base + 0.62, name, va="bottom")
        axes.text(panel.edges[-1], base + 0.62, f"mean {panel.means[place]:.1f}", va="bottom", ha="right")
    axes.set_ylim(0.9, len(panel.labels) + 1.05)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
