"""Pictures: panels drawn with the functions of `show.draw`, in files and on pages."""

import functools
import hashlib
import io
import json
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

from pfl_jax.atomic_write import write_binary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ENDINGS = (".png", ".svg", ".pdf")
"""Kinds of files of pictures."""

STYLE = [Path(__file__).with_name("picture.mplstyle")]
PAPER = [*STYLE, Path(__file__).with_name("paper.mplstyle")]
"""Styles of matplotlib; the second one is for a column of a paper."""

LINE = 0.135
"""Height of a line of text in inches."""
PAGE_WIDTH = 3.7
"""Width of a panel on a page in inches: a telephone of 390 pixels shows it in full size."""

_filled = functools.partial(textwrap.fill, break_on_hyphens=False, break_long_words=False)
_wrapped = functools.partial(textwrap.wrap, break_on_hyphens=False, break_long_words=False)


class Panel(NamedTuple):
    """A frame, the function (axes, frame) that draws it, and width and height in inches."""

    title: str
    draw: functools.partial[None]
    frame: pd.DataFrame
    inches: tuple[float, float] = (4.9, 2.9)


class Picture(NamedTuple):
    """Panels in reading order; the caption names all settings that differ from the paper's."""

    title: str
    caption: str
    panels: Sequence[Panel]
    columns: int = 1

    def record(self) -> dict[str, Any]:
        """Picture as strict JSON data."""
        return {
            "title": self.title,
            "caption": self.caption,
            "columns": self.columns,
            "panels": [
                {"title": panel.title, "kind": panel.draw.func.__name__, **panel.draw.keywords}
                # Missing numbers as null.
                | {"frame": json.loads(str(panel.frame.to_json(orient="split")))}
                for panel in self.panels
            ],
        }

    def digest(self) -> str:
        """Digest of all numbers and words, whatever program draws them; files of drawings contain the digest."""
        return hashlib.sha256(json.dumps(self.record(), sort_keys=True).encode()).hexdigest()


def chart(title: str, caption: str, draw: Callable[..., None], frame: pd.DataFrame, **options: Any) -> Picture:
    """Picture of one panel; `options` are for the drawing function, except `inches`, the panel's size."""
    size = {"inches": options.pop("inches")} if "inches" in options else {}
    return Picture(title, caption, [Panel("", functools.partial(draw, **options), frame, **size)])


def draw(picture: Picture, style: Sequence[Path] = STYLE, *, is_narrow: bool = False) -> "Figure":
    """Draw the picture as a matplotlib figure, without pyplot; legends are beside the panels, or above narrow ones."""
    # Imported only here: it takes seconds.
    from matplotlib import style as styles
    from matplotlib.figure import Figure

    with styles.context(style):
        columns = min(picture.columns, len(picture.panels))
        sizes = [panel.inches for panel in picture.panels]
        widths = [max(width for width, _ in sizes[column::columns]) for column in range(columns)]
        rows, width = -(-len(sizes) // columns), sum(widths)
        title, caption = _wrapped(picture.title, int(width * 11)), _wrapped(picture.caption, int(width * 16))
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
            axes.set_title(_filled(panel.title, int(12 * panel.inches[0])))
            panel.draw(axes, panel.frame)
            _, names = axes.get_legend_handles_labels()
            if names and is_narrow:
                figure.set_figheight(height + 1.2 * LINE * -(-len(names) // 2))
                figure.legend(loc="outside upper center", ncols=3 if max(map(len, names)) < 12 else 2)
            elif names:
                axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
        return figure


def save(picture: Picture, *paths: Path, style: Sequence[Path] = STYLE) -> None:
    """Draw a picture into files, each written atomically; their names end in .png, .svg or .pdf.

    Files leave out the time, so that equal pictures give equal files.
    """
    from matplotlib import style as styles

    figure, about = draw(picture, style, is_narrow=style is PAPER), {"Description": picture.digest()}
    metadata = {".svg": about | {"Date": None}, ".png": about, ".pdf": {"CreationDate": None}}
    with styles.context(style):
        for path in paths:
            kind = path.suffix
            write_binary(path, functools.partial(figure.savefig, format=kind[1:], dpi=200, metadata=metadata[kind]))


def as_svg(panel: Panel) -> str:
    """A panel as an SVG file for a page, without background and as wide as a telephone."""
    from matplotlib import style as styles

    width, height = panel.inches
    panel = panel._replace(inches=(PAGE_WIDTH, max(2.4, min(height * PAGE_WIDTH / width, height))))
    figure, text = draw(Picture("", "", [panel]), is_narrow=True), io.StringIO()
    with styles.context(STYLE):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    return text.getvalue()
