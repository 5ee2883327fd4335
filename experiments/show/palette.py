"""Colors and dashes of lines, the same in pictures and on pages."""

COLORS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666", "#8B4513", "#4B0082")
"""Okabe and Ito's colors for color-blind readers, without yellow, which is too pale on paper; and three more."""

DASHES: tuple[tuple[float, ...], ...] = (
    *((3.7, 1.6), (6.4, 1.6, 1, 1.6), (1, 1.65), (6, 1.5), (4, 1, 1, 1, 1, 1), (1, 1), (8, 2, 2, 2), (), (3, 3)),
)
"""Lengths of strokes and gaps in widths of the line, for each color; none is a solid line."""


def on_dark(color: str) -> str:
    """Color for a dark background: a third of the way to white."""
    parts = (int(color[start : start + 2], 16) for start in (1, 3, 5))
    return "#" + "".join(f"{round(part + 0.36 * (255 - part)):02X}" for part in parts)
