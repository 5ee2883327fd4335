"""Pictures: their content as plain data, and its drawing with matplotlib, without pyplot or other global state."""

import dataclasses
import functools
import hashlib
import io
import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np

from experiments.show.names import LINE, name_ends
from experiments.show.scatter import Scatter
from pfl_jax.atomic_write import write_binary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROUND, ACCURACY = "round", "accuracy in %"
"""Labels of the usual axes."""

COLORS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#B07800", "#3A8FC7", "#666666", "#8B4513", "#4B0082")
"""Okabe and Ito's colors for color-blind readers, the pale ones darker, since names are written in them; three more."""

DASHES = tuple((0, dashes) for dashes in ((4, 1.5), (6, 1.5, 1, 1.5), (1, 1.5), (8, 2), (4, 1, 1, 1, 1, 1), (2, 1)))
DASHES += ((0, (8, 2, 2, 2)), (0, (6, 1, 6, 1, 1, 1)), (0, (3, 3)))
"""Strokes and gaps in widths of the line, for each color; none is the solid line of a main method."""

STYLE: dict[Any, Any] = {
    "font.size": 8.5,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid.axis": "both",
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.4,
    "lines.markersize": 3,
    # Searchable text, and the same bytes for the same numbers.
    "svg.fonttype": "none",
    "svg.hashsalt": "pfl_jax",
}


ENDINGS = (".png", ".svg", ".pdf")
"""Kinds of files of pictures."""


@dataclass(frozen=True)
class Series:
    """One line, with its minimum and maximum over seeds; `mark` is a point that belongs to it, such as a published
    result."""

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
      x_ticks: ticks of the x axis, drawn at equal distances, with `x_names`; None for ticks chosen by the drawing.
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
    x_names: Sequence[str] = ()
    inches: tuple[float, float] = (4.3, 2.9)

    def draw(self, axes: "Axes") -> None:
        from matplotlib.ticker import MaxNLocator

        axes.grid()
        axes.set_prop_cycle(color=COLORS, linestyle=DASHES)
        ends = []
        for series in self.series:
            x = series.x if self.x_ticks is None else [list(self.x_ticks).index(value) for value in series.x]
            main = {"color": "black", "linestyle": "-", "linewidth": 2.2, "zorder": 5} if series.is_main else {}
            y = np.asarray(series.y, np.float64)
            (line,) = axes.plot(x, y, marker="o", markevery=max(1, len(x) // 8), **main)
            color = line.get_color()
            if series.low is not None and series.high is not None:
                axes.fill_between(x, series.low, series.high, color=color, alpha=0.13, linewidth=0)
            if series.mark is not None:
                axes.plot(*([value] for value in series.mark), color=color, marker="D", markersize=5, clip_on=False)
            there = np.flatnonzero(np.isfinite(y))
            if there.size:
                ends.append((series.label, (x[there[-1]], y[there[-1]]), color))
        if self.zero_line:
            axes.axhline(0, color="#888888", linewidth=1)
        if self.x_ticks is not None:
            names = self.x_names or [f"{tick:g}" for tick in self.x_ticks]
            axes.set_xticks(range(len(names)), names)
        else:
            whole = all(float(x).is_integer() for series in self.series for x in series.x)
            axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=whole, min_n_ticks=1))
        if self.least is not None and ends:
            axes.set_ylim(bottom=self.least)
        name_ends(axes, self.inches[1], ends)


@dataclass(frozen=True)
class Bars:
    """Bars in groups side by side: names of each group's bars and their heights; `level` is a named line for
    comparison."""

    title: str
    x_label: str
    y_label: str
    groups: Sequence[str]
    labels: Sequence[Sequence[str]]
    values: Sequence[Sequence[float]]
    level: float | None = None
    level_label: str = ""

    inches: ClassVar = (4.8, 2.9)

    def draw(self, axes: "Axes") -> None:
        start, places, names = 0, [], []
        for group, labels, values in zip(self.groups, self.labels, self.values, strict=True):
            at = range(start, start + len(values))
            axes.bar(at, values, color="#777777")
            if len(self.groups) > 1:
                axes.text(start + (len(values) - 1) / 2, 1.02, group, transform=axes.get_xaxis_transform(), ha="center")
            start, places, names = at.stop + 1, [*places, *at], [*names, *labels]
        if len(self.groups) > 1:
            axes.set_title(axes.get_title(), pad=18)
        every = -(-len(names) // 24)
        axes.set_xticks(places[::every], names[::every], fontsize=7)
        axes.margins(x=0.02)
        if self.level is not None:
            axes.axhline(self.level, color=COLORS[0], linestyle="--", linewidth=1.3)
            name_ends(axes, self.inches[1], [(self.level_label, (places[-1], self.level), COLORS[0])])


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

    @property
    def inches(self) -> tuple[float, float]:
        return (2.5 if self.has_square_cells() else 4.3, 2.5)

    def has_square_cells(self) -> bool:
        """Whether its cells are drawn as squares."""
        rows, columns = np.shape(self.matrix)
        return rows == columns

    def draw(self, axes: "Axes") -> None:
        rows, columns = np.shape(self.matrix)
        aspect = "equal" if self.has_square_cells() else "auto"
        axes.imshow(self.matrix, "Greys", interpolation="none", aspect=aspect)  # pyright: ignore
        axes.spines[:].set_visible(True)
        for border in np.cumsum(self.blocks)[:-1] - 0.5:
            axes.axhline(border, color=COLORS[0], linewidth=0.6)
            axes.axvline(border, color=COLORS[0], linewidth=0.6)
        for count, names, set_ticks in ((columns, self.columns, axes.set_xticks), (rows, self.rows, axes.set_yticks)):
            ticks = range(0, count, -(-count // 12) if names else max(1, count // 4))
            set_ticks(ticks, [names[tick] if names else str(tick) for tick in ticks], fontsize=7)
        if self.totals:
            above = axes.inset_axes((0, 1.03, 1, 0.22), sharex=axes)
            above.bar(range(columns), self.totals, color="#bbbbbb")
            above.set_axis_off()


@dataclass(frozen=True)
class OverRounds(Heat):
    """Matrix whose columns are rounds."""

    def has_square_cells(self) -> bool:
        return False


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


Panel: TypeAlias = Lines | Bars | Heat | Scatter


@dataclass(frozen=True)
class Picture:
    """Picture of panels in reading order; the caption has all settings that differ from the paper's."""

    title: str
    caption: str
    panels: Sequence[Panel | Ranks]
    columns: int = 1

    def record(self) -> dict[str, Any]:
        """Picture as JSON data."""
        content = dataclasses.asdict(self)
        for panel, kept in zip(self.panels, content["panels"], strict=True):
            kept["kind"] = type(panel).__name__.lower()
        # NumPy's arrays and numbers as lists and Python's.
        return json.loads(json.dumps(content, default=lambda value: value.tolist()))

    def digest(self) -> str:
        """Digest of all that is drawn, whatever draws it; drawings have it in their files."""
        return hashlib.sha256(json.dumps(self.record(), sort_keys=True).encode()).hexdigest()


def over_seeds(
    label: str, x: Sequence[float], runs: Sequence[Sequence[float | None]], *, is_main: bool = False
) -> Series:
    """Line of the mean over seeds, with their range, from a row [X] for each; a point missing in any row is missing."""
    values = np.asarray(runs, np.float64)
    edges = (values.min(0).tolist(), values.max(0).tolist()) if len(values) > 1 else (None, None)
    return Series(label, list(x), values.mean(0).tolist(), *edges, is_main=is_main)


def draw(picture: Picture) -> "Figure":
    """Draw the picture as a matplotlib figure."""
    # Imported now: it takes seconds.
    import matplotlib as mpl
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        columns = min(picture.columns, len(picture.panels))
        rows = -(-len(picture.panels) // columns)
        sizes = [panel.inches for panel in picture.panels]
        widths = [max(size[0] for size in sizes[column::columns]) for column in range(columns)]
        title = textwrap.wrap(picture.title, int(sum(widths) * 11))
        caption = textwrap.wrap(picture.caption, int(sum(widths) * 16), break_on_hyphens=False)
        height = rows * max(size[1] for size in sizes) + 1.3 * LINE * len(title) + LINE * len(caption)
        figure = Figure(figsize=(sum(widths), height), layout="constrained")
        if title:
            figure.suptitle("\n".join(title), fontsize=10.5, fontweight="bold")
        if caption:
            figure.supxlabel("\n".join(caption), x=0.01, ha="left", fontsize=7.5, color="#333333")
        grid = figure.subplots(rows, columns, squeeze=False, width_ratios=widths)
        for axes in grid.flat[len(picture.panels) :]:
            axes.set_axis_off()
        for axes, panel in zip(grid.flat, picture.panels, strict=False):
            axes.set_title("\n".join(textwrap.wrap(panel.title, int(12 * panel.inches[0]))))
            axes.set_xlabel(panel.x_label)
            axes.set_ylabel(panel.y_label)
            panel.draw(axes)
        # One scale of grays for all matrices; on a scale up to 1, equal weights of many clients would look white.
        heats = [panel for panel in picture.panels if isinstance(panel, Heat)]
        images = [image for axes in grid.flat for image in axes.images]
        if heats:
            least, greatest = (float(pick([pick(one.matrix) for one in heats])) for pick in (np.nanmin, np.nanmax))
            grays = Normalize(min(0.0, least), max(0.0, greatest) or 1.0)
            for image in images:
                image.set_norm(grays)
            bar = figure.colorbar(images[0], ax=grid, shrink=0.7, aspect=30, label=heats[0].unit)
            # As one image, not as a shape for each of its shades.
            bar.solids.set_rasterized(True)  # pyright: ignore
        return figure


def save(picture: Picture, *paths: Path) -> None:
    """Draw a picture into files, each written atomically; their names end in .png, .svg or .pdf."""
    figure, about = draw(picture), {"Description": picture.digest()}
    for path in paths:
        save_figure(figure, path, {"svg": about, "png": about}.get(path.suffix[1:], {}))


def save_figure(figure: "Figure", path: Path, about: Mapping[str, str] = {}, style: Mapping[Any, Any] = STYLE) -> None:
    """Write a figure into a file atomically, without the time, so that equal pictures give equal files."""
    import matplotlib as mpl

    kind = path.suffix[1:]
    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    metadata = {**dates.get(kind, {}), **about}
    with mpl.rc_context({**style}):
        write_binary(path, functools.partial(figure.savefig, format=kind, dpi=200, metadata=metadata or None))


def as_svg(panels: Sequence[Panel], columns: int = 1) -> str:
    """Panels as an SVG file without a background, a single one without its title, for a page."""
    import matplotlib as mpl

    some = [dataclasses.replace(panels[0], title="")] if len(panels) == 1 else panels
    figure, text = draw(Picture("", "", some, columns)), io.StringIO()
    with mpl.rc_context(STYLE):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    return text.getvalue()
