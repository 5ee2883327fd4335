"""Charts as SVG inside a page: 400 units wide, coloured by the page's style sheet.

Every chart is a figure with a title and a caption; its marks carry their values as tooltips. Series differ in colour
and dashes, matrices in the opacity of one colour, so that all of it works on light and dark grounds and in print.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from experiments.report.markup import Content, Markup, join, tag

WIDTH = 400
LEVELS = 12
"""Shades of a matrix."""
_LETTER = 6.0
"""Width of a character of an axis, in units."""
_MOST_POINTS = 80
"""Tooltips on a line."""


class Line(NamedTuple):
    """Line of a chart.

    Attributes:
      label: its name.
      style: number of its colour and dashes.
      x, y: equally many, at least one.
      low, high: of a band around it, or None.
      level: something to compare its end with, marked at the right edge, or None.
    """

    label: str
    style: int
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    level: float | None = None


class Row(NamedTuple):
    """A histogram among others.

    Attributes:
      label: its name.
      style: number of its colour.
      counts: [B].
      mean: marked.
    """

    label: str
    style: int
    counts: Sequence[float]
    mean: float


def figure(title: str, *content: Content, caption: str = "", alt: str = "", height: float) -> Markup:
    """Chart with its title above and its caption below."""
    drawing = tag("svg", *content, viewBox=f"0 0 {WIDTH} {height:g}", role="img", aria_label=alt or title)
    below = tag("p", caption, class_="note") if caption else None
    return tag("figure", tag("figcaption", title), drawing, below)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers in an interval, about this many of them."""
    raw = (high - low) / max(about, 1)
    if not raw > 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def lines(title: str, series: Sequence[Line], *, x_label: str, whole: bool = False, caption: str = "") -> Markup:
    """Lines with bands over a common axis.

    Args:
      title: what is drawn, with its unit.
      series: at least one.
      x_label: what the axis is.
      whole: whether x are whole numbers.
      caption: below.
    """
    height, top, bottom = 232, 10, 198
    every_x = [value for line in series for value in line.x]
    bands = [edge for line in series for edge in (line.low, line.high) if edge is not None]
    levels = [line.level for line in series if line.level is not None]
    every_y = [value for values in ([line.y for line in series] + bands + [levels]) for value in values]
    low, high = min(every_y), max(every_y)
    pad = 0.06 * (high - low) or max(abs(high) * 0.01, 0.5)
    low, high = low - pad, high + pad
    y_ticks = ticks(low, high)
    left, right = 10 + _LETTER * max(len(f"{tick:g}") for tick in y_ticks), WIDTH - 14
    first, last = min(every_x), max(every_x)
    # A single evaluation is placed in the middle.
    first, last = (first, last) if last > first else (first - 1, last + 1)

    def across(value: float) -> float:
        return left + (right - left) * (value - first) / (last - first)

    def up(value: float) -> float:
        return bottom - (bottom - top) * (value - low) / (high - low)

    x_ticks = [tick for tick in ticks(first, last, 6) if not whole or tick == round(tick)]
    parts = [_grid(y_ticks, up, left, right), _axis(x_ticks, across, bottom, x_label, (left + right) / 2)]
    for line in series:
        if line.low is not None and line.high is not None:
            there = [(across(x), up(y)) for x, y in zip(line.x, line.high, strict=True)]
            back = [(across(x), up(y)) for x, y in zip(line.x, line.low, strict=True)]
            parts.append(tag("path", d=_path([*there, *reversed(back)]) + "Z", class_=f"band f{line.style}"))
    for line in series:
        points = [(across(x), up(y)) for x, y in zip(line.x, line.y, strict=True)]
        parts.append(tag("path", d=_path(points), class_=f"line s{line.style}"))
        parts.append(tag("circle", cx=points[-1][0], cy=points[-1][1], r=2.6, class_=f"f{line.style}"))
        if line.level is not None:
            at = up(line.level)
            mark = _path([(right + 2, at), (right + 11, at - 4.5), (right + 11, at + 4.5)]) + "Z"
            parts.append(
                tag("path", tag("title", f"{line.label}, paper: {line.level:g}"), d=mark, class_=f"f{line.style}")
            )
    parts += [_tips(line, across, up) for line in series if len(line.x) <= _MOST_POINTS]
    return figure(title, *parts, caption=caption, height=height)


def _tips(line: Line, across: Callable[[float], float], up: Callable[[float], float]) -> Markup:
    """Invisible circles with the values of a line as tooltips."""
    circles = []
    for place, (x, y) in enumerate(zip(line.x, line.y, strict=True)):
        words = f"{line.label}: {y:.2f} at {x:g}"
        if line.low is not None and line.high is not None:
            words += f" ({line.low[place]:.2f} to {line.high[place]:.2f})"
        circles.append(tag("circle", tag("title", words), cx=across(x), cy=up(y), r=7, class_="tip"))
    return join(circles)


def histograms(title: str, rows: Sequence[Row], edges: Sequence[float], *, x_label: str, caption: str = "") -> Markup:
    """Histograms one below the other, on one axis.

    Args:
      title: what is drawn.
      rows: at least one; heights are in shares of the highest bar of each.
      edges: [B + 1] of the bins.
      x_label: what the axis is.
      caption: below.
    """
    left, right, each, bar = 10, WIDTH - 14, 50, 28
    height = len(rows) * each + 40

    def across(value: float) -> float:
        return left + (right - left) * (value - edges[0]) / (edges[-1] - edges[0])

    bottom = len(rows) * each + 6
    parts = [_axis(ticks(edges[0], edges[-1], 6), across, bottom, x_label, (left + right) / 2)]
    for number, row in enumerate(rows):
        base, highest = (number + 1) * each, max(row.counts) or 1
        parts.append(tag("line", x1=left, x2=right, y1=base, y2=base, class_="grid"))
        for start, end, count in zip(edges[:-1], edges[1:], row.counts, strict=True):
            if count:
                tall = bar * count / highest
                box = {"x": across(start) + 0.5, "width": across(end) - across(start) - 1}
                words = tag("title", f"{row.label}: {count:g} clients with {start:g} to {end:g} %")
                parts.append(tag("rect", words, **box, y=base - tall, height=tall, class_=f"bar f{row.style}"))
        at = across(row.mean)
        parts.append(tag("line", x1=at, x2=at, y1=base - bar - 3, y2=base, class_="mean"))
        parts.append(tag("text", row.label, x=left, y=base - bar - 8, class_="name"))
        parts.append(tag("text", f"mean {row.mean:.1f}", x=right, y=base - bar - 8, class_="end"))
    return figure(title, *parts, caption=caption, height=height)


def bars(
    title: str,
    labels: Sequence[str],
    values: Sequence[float],
    *,
    x_label: str,
    level: float | None = None,
    caption: str = "",
) -> Markup:
    """Bar for each client.

    Args:
      title: what is drawn.
      labels: [M] below the bars.
      values: [M], not negative.
      x_label: what the bars are.
      level: marked by a line across, or None.
      caption: below.
    """
    height, top, bottom = 190, 10, 156
    high = max([*values, level or 0.0]) or 1.0
    y_ticks = ticks(0, high * 1.05, 4)
    left, right = 10 + _LETTER * max(len(f"{tick:g}") for tick in y_ticks), WIDTH - 14
    slot = (right - left) / len(values)

    def up(value: float) -> float:
        return bottom - (bottom - top) * value / (high * 1.05)

    parts: list[Markup] = [_grid(y_ticks, up, left, right)]
    for place, (label, value) in enumerate(zip(labels, values, strict=True)):
        box = {"x": left + slot * (place + 0.12), "width": slot * 0.76}
        words = tag("title", f"{x_label} {label}: {value:.4g}")
        parts.append(tag("rect", words, **box, y=up(value), height=bottom - up(value), class_="bar heat"))
    if level is not None:
        parts.append(tag("line", x1=left, x2=right, y1=up(level), y2=up(level), class_="level"))
    parts.append(_names(labels, left, slot, bottom + 15))
    parts.append(tag("text", x_label, x=(left + right) / 2, y=bottom + 31, class_="middle"))
    return figure(title, *parts, caption=caption, height=height)


def heat(
    title: str,
    matrix: np.ndarray,
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    row_label: str,
    column_label: str,
    square: bool = False,
    totals: Sequence[float] | None = None,
    caption: str = "",
) -> Markup:
    """Matrix as shades of one colour.

    Args:
      title: what is drawn.
      matrix: [R, C], not negative.
      rows, columns: their names.
      row_label, column_label: what they are.
      square: whether its cells are.
      totals: [C], bars above the columns; None for none.
      caption: below.
    """
    left, right, head = 26 + _LETTER * max(map(len, rows)), WIDTH - 4, 24 if totals is None else 64
    wide = min((right - left) / len(columns), 36.0)
    tall = wide if square else min(max(260 / len(rows), 2.5), 16.0)
    highest = float(matrix.max()) or 1.0
    bottom, end = head + tall * len(rows), left + wide * len(columns)
    place = f"translate({left:.2f} {head}) scale({wide:.4f} {tall:.4f})"
    shades = np.minimum(np.ceil(LEVELS * (matrix / highest)), LEVELS).astype(int)
    cells = [
        tag("path", d=_cells(shades == shade), fill_opacity=round(shade / LEVELS, 3))
        for shade in range(1, LEVELS + 1)
        if (shades == shade).any()
    ]
    parts = [
        _scale(highest, end),
        tag("rect", x=left, y=head, width=end - left, height=bottom - head, class_="ground"),
        tag("g", cells, transform=place, class_="heat"),
        tag("rect", x=left, y=head, width=end - left, height=bottom - head, class_="frame"),
        _names(columns, left, wide, bottom + 14),
        _names(rows, head, tall, left - 5, down=True),
        tag("text", column_label, x=(left + end) / 2, y=bottom + 30, class_="middle"),
        tag("text", row_label, transform=f"translate(10 {(head + bottom) / 2:.1f}) rotate(-90)", class_="middle"),
    ]
    if totals is not None:
        parts += _totals(totals, left, wide, head, column_label)
    return figure(title, *parts, caption=caption, height=bottom + 36)


def _totals(totals: Sequence[float], left: float, wide: float, head: float, name: str) -> list[Markup]:
    most = max(totals) or 1
    parts = []
    for place, total in enumerate(totals):
        tall = 32 * total / most
        box = {"x": left + wide * (place + 0.06), "width": wide * 0.88, "y": head - 5 - tall, "height": tall}
        parts.append(tag("rect", tag("title", f"{name} {place}: {total:g}"), **box, class_="bar total"))
    return parts


def _scale(highest: float, end: float) -> Markup:
    """Values of the lightest and the darkest shade, above the matrix at its right end."""
    words = f"{highest:.2g}" if highest < 10 else f"{highest:g}"
    start = end - 78 - _LETTER * len(words)
    boxes = [
        tag("rect", x=start + 10 * place, y=4, width=10, height=9, fill_opacity=round((place + 1) / 6, 3))
        for place in range(6)
    ]
    return join(
        tag("text", "0", x=start - 5, y=12, class_="end"),
        tag("g", boxes, class_="heat"),
        tag("text", words, x=start + 65, y=12),
    )


def _cells(chosen: np.ndarray) -> str:
    """Chosen cells [R, C] of a unit grid as one path; neighbours in a row as one rectangle."""
    path = []
    for row, flags in enumerate(chosen):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], flags.astype(np.int8), [0]])))
        path += [
            f"M{start} {row}h{end - start}v1h{start - end}z" for start, end in zip(edges[::2], edges[1::2], strict=True)
        ]
    return "".join(path)


def _names(labels: Sequence[str], start: float, step: float, at: float, *, down: bool = False) -> Markup:
    """Labels along an axis, as many as fit."""
    room = 12.0 if down else _LETTER * max(map(len, labels)) + 6
    every = max(1, math.ceil(room / step))
    parts = []
    for place in range(0, len(labels), every):
        along = start + step * (place + 0.5)
        where = {"x": at, "y": along + 4, "class_": "end"} if down else {"x": along, "y": at, "class_": "middle"}
        parts.append(tag("text", labels[place], **where))
    return join(parts)


def _grid(values: Iterable[float], up: Callable[[float], float], left: float, right: float) -> Markup:
    parts = []
    for value in values:
        parts.append(tag("line", x1=left, x2=right, y1=up(value), y2=up(value), class_="grid"))
        parts.append(tag("text", f"{value:g}", x=left - 6, y=up(value) + 4, class_="end"))
    return join(parts)


def _axis(
    values: Iterable[float], across: Callable[[float], float], bottom: float, label: str, middle: float
) -> Markup:
    parts = []
    for value in values:
        parts.append(tag("line", x1=across(value), x2=across(value), y1=bottom, y2=bottom + 4, class_="tick"))
        parts.append(tag("text", f"{value:g}", x=across(value), y=bottom + 16, class_="middle"))
    return join(parts, tag("text", label, x=middle, y=bottom + 31, class_="middle"))


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
