"""Pictures of panels, drawn with matplotlib, without pyplot or other global state."""

import dataclasses
import functools
import hashlib
import io
import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.show.panels import Heat, Panel
from pfl_jax.atomic_write import write_binary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ENDINGS = (".png", ".svg", ".pdf")
"""Kinds of files of pictures."""

STYLE: dict[Any, Any] = {
    "font.size": 8.5,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid.axis": "both",
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "lines.linewidth": 1.4,
    "lines.markersize": 3,
    # Searchable text, and the same bytes for the same numbers.
    "svg.fonttype": "none",
    "svg.hashsalt": "pfl_jax",
}

PAPER: dict[Any, Any] = STYLE | {
    "font.family": "serif",
    # Times, as matplotlib brings it.
    "font.serif": ["STIXGeneral"],
    "mathtext.fontset": "stix",
    "font.size": 8,
    "legend.fontsize": 7,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.1,
    "lines.markersize": 2,
    # TrueType, as publishers ask for.
    "pdf.fonttype": 42,
}
"""Style for a column of a paper."""

LINE = 0.135
"""Inches of a line of text."""


@dataclass(frozen=True)
class Picture:
    """Picture of panels in reading order; the caption has all settings that differ from the paper's."""

    title: str
    caption: str
    panels: Sequence[Panel]
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


def draw(picture: Picture, style: Mapping[Any, Any] = STYLE) -> "Figure":
    """Draw the picture as a matplotlib figure; legends stand beside the panels, in the style PAPER above them."""
    # Imported now: it takes seconds.
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({**style}):
        columns = min(picture.columns, len(picture.panels))
        sizes = [panel.inches for panel in picture.panels]
        widths = [max(width for width, _ in sizes[column::columns]) for column in range(columns)]
        rows, width = -(-len(sizes) // columns), sum(widths)
        title = textwrap.wrap(picture.title, int(width * 11))
        caption = textwrap.wrap(picture.caption, int(width * 16), break_on_hyphens=False)
        height = rows * max(size[1] for size in sizes) + 1.3 * LINE * len(title) + LINE * len(caption)
        figure = Figure(figsize=(width, height), layout="constrained")
        if title:
            figure.suptitle("\n".join(title), fontsize=10.5, fontweight="bold")
        if caption:
            figure.supxlabel("\n".join(caption), x=0.01, ha="left", fontsize=7.5, color="#333333")
        grid = figure.subplots(rows, columns, squeeze=False, width_ratios=widths)
        for axes in grid.flat[len(sizes) :]:
            axes.set_axis_off()
        for axes, panel in zip(grid.flat, picture.panels, strict=False):
            axes.set_title(textwrap.fill(panel.title, int(12 * panel.inches[0])))
            axes.set_xlabel(panel.x_label)
            axes.set_ylabel(panel.y_label)
            panel.draw(axes)
            if not any(axes.get_legend_handles_labels()):
                continue
            if style is PAPER:
                figure.legend(loc="outside upper center", ncols=3)
            else:
                axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
        _share_grays(figure, [panel for panel in picture.panels if isinstance(panel, Heat)])
        return figure


def _share_grays(figure: "Figure", heats: Sequence[Heat]) -> None:
    """One scale of grays for all matrices; on a scale up to 1, equal weights of many clients would look white."""
    if not heats:
        return
    images = [image for axes in figure.axes for image in axes.images]
    least, greatest = (float(pick([pick(one.matrix) for one in heats])) for pick in (np.nanmin, np.nanmax))
    for image in images:
        image.set_clim(min(0.0, least), max(0.0, greatest) or 1.0)
    bar = figure.colorbar(images[0], ax=figure.axes, shrink=0.7, aspect=30, label=heats[0].unit)
    # As one image, not as a shape for each of its shades.
    bar.solids.set_rasterized(True)  # pyright: ignore


def save(picture: Picture, *paths: Path, style: Mapping[Any, Any] = STYLE) -> None:
    """Draw a picture into files, each written atomically; their names end in .png, .svg or .pdf.

    Without the time, so that equal pictures give equal files.
    """
    import matplotlib as mpl

    figure, about = draw(picture, style), {"Description": picture.digest()}
    metadata = {".svg": about | {"Date": None}, ".png": about, ".pdf": {"CreationDate": None}}
    with mpl.rc_context({**style}):
        for path in paths:
            kind = path.suffix
            write_binary(path, functools.partial(figure.savefig, format=kind[1:], dpi=200, metadata=metadata[kind]))


def as_svg(picture: Picture) -> str:
    """Panels as an SVG file without background, title and caption, a single one without its title, for a page."""
    import matplotlib as mpl

    first, *others = picture.panels
    panels = picture.panels if others else [dataclasses.replace(first, title="")]
    figure, text = draw(Picture("", "", panels, picture.columns)), io.StringIO()
    with mpl.rc_context(STYLE):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    return text.getvalue()
