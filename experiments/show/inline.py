"""Panels as SVG elements of an HTML page, drawn like the figures but in the page's colors."""

import html
import io
import re
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from experiments.show.drawing import SETTINGS, draw_panel
from experiments.show.palette import COLORS
from experiments.show.pictures import Heat, Histograms, Lines, Panel

_SIZE = (4.2, 2.6)
_ROW = 0.48
"""Inches of a histogram among others."""
_COLORS = {"#000000": "currentColor", "#ffffff": "var(--ground)", "#dddddd": "var(--rule)", "#888888": "var(--soft)"}
_COLORS |= {"#555555": "var(--soft)", "#bbbbbb": "var(--soft)"}
_COLORS |= {color.lower(): f"var(--s{number})" for number, color in enumerate(COLORS)}
"""Color of the drawing -> CSS; the page defines the variables for light and dark backgrounds."""


def inline(panel: Panel, name: str, title: str, description: str) -> str:
    """The panel as an <svg> element, without its title.

    Args:
      panel: the panel; its lines get no legend.
      name: prefix of all ids in it, different for each panel of the page.
      title, description: texts for readers who cannot see it.
    """
    height = 0.6 + _ROW * len(panel.labels) if isinstance(panel, Histograms) else _SIZE[1]
    drawn = io.StringIO()
    settings: dict[Any, Any] = SETTINGS | {"svg.hashsalt": name}
    with mpl.rc_context(settings):
        figure = Figure(figsize=(_SIZE[0], height), layout="constrained")
        axes = figure.subplots()
        grays = _shades(panel.matrix) if isinstance(panel, Heat) else Normalize()
        draw_panel(axes, panel, grays, own_legend=not isinstance(panel, Lines))
        axes.set_title("")
        if isinstance(panel, Heat):
            bar = figure.colorbar(ScalarMappable(grays, "Greys"), ax=axes, shrink=0.8, aspect=25, label=panel.unit)
            # As one image, not as a shape for each of its shades.
            bar.solids.set_rasterized(True)  # pyright: ignore
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
    return _for_page(drawn.getvalue(), name, title, description)


def _shades(matrix: Sequence[Sequence[float]]) -> Normalize:
    """Shades from 0, or from the least number if one is negative, to the greatest."""
    least, greatest = min(0.0, float(np.min(matrix))), max(0.0, float(np.max(matrix)))
    return Normalize(least, greatest if greatest > least else least + 1.0)


def _for_page(drawn: str, name: str, title: str, description: str) -> str:
    """SVG element for a page from matplotlib's file: no metadata, unique ids, labels, and the page's colors."""
    drawn = re.sub(r"<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>", "", drawn, flags=re.DOTALL)
    drawn = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", drawn)
    drawn = re.sub(r"(?<=: )#[0-9a-f]{6}", lambda found: _COLORS.get(found[0], found[0]), drawn)
    opening, _, rest = drawn[drawn.index("<svg") :].partition(">")
    labels = f"<title>{html.escape(title)}</title>\n<desc>{html.escape(description)}</desc>"
    return f'{opening} role="img" aria-label="{html.escape(title)}">{labels}{rest}'
