"""Content of a picture as plain data: all numbers that are drawn."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

ROUND, ACCURACY = "round", "accuracy in %"
"""Labels of the usual axes."""


@dataclass(frozen=True)
class Series:
    """One line.

    Attributes:
      label: text in the legend.
      x, y: points, equally many numbers.
      low, high: minimum and maximum of y over seeds; None with one seed.
      is_main: whether this is the figure's main method.
      mark: x and y of a single point that belongs to the line, such as a published result; None for none.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    is_main: bool = False
    mark: tuple[float, float] | None = None

    def with_mark(self, x: float, y: float) -> "Series":
        """This line with a point at (x, y)."""
        return dataclasses.replace(self, mark=(x, y))


@dataclass(frozen=True)
class Lines:
    """Lines over a common axis.

    Attributes:
      title: above the panel.
      x_label, y_label: what the axes are, with units.
      series: the lines.
      x_ticks: ticks of the x axis, drawn at equal distances; None for ticks chosen by the drawing.
      zero_line: whether a line is drawn at y = 0.
      least: lower end of the y axis; None for one chosen by the drawing.
      x_names: names of `x_ticks`; if empty, their numbers.
    """

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    x_ticks: Sequence[float] | None = None
    zero_line: bool = False
    least: float | None = None
    x_names: Sequence[str] = ()


@dataclass(frozen=True)
class Bars:
    """Bars in groups side by side.

    Attributes:
      title: above the panel.
      x_label, y_label: what the axes are, with units.
      groups: name of each group.
      labels: for each group, the names of its bars.
      values: for each group, their heights.
      level: height of a horizontal line for comparison, with the name level_label; None for no line.
    """

    title: str
    x_label: str
    y_label: str
    groups: Sequence[str]
    labels: Sequence[Sequence[str]]
    values: Sequence[Sequence[float]]
    level: float | None = None
    level_label: str = ""


@dataclass(frozen=True)
class Heat:
    """Matrix of numbers.

    Attributes:
      title: above the panel.
      x_label, y_label: what columns and rows are.
      matrix: [R, C].
      blocks: sizes of the groups of consecutive rows and columns that lines divide; they sum to R, which is C then.
      rows, columns: names of rows and columns; if empty, their numbers.
      totals: [C], bars above the columns; empty for no bars.
      unit: of the numbers.
    """

    title: str
    x_label: str
    y_label: str
    matrix: Sequence[Sequence[float]]
    blocks: Sequence[int] = ()
    rows: Sequence[str] = ()
    columns: Sequence[str] = ()
    totals: Sequence[float] = ()
    unit: str = "weight"


@dataclass(frozen=True)
class Histograms:
    """Histograms one below the other, on one axis.

    Attributes:
      title: above the panel.
      x_label, y_label: the quantity, and what its counts are; heights are relative to each histogram's highest bar.
      labels: [H], names of the histograms.
      edges: [B + 1], edges of the bins.
      counts: [H, B].
      means: [H], drawn as vertical lines.
    """

    title: str
    x_label: str
    y_label: str
    labels: Sequence[str]
    edges: Sequence[float]
    counts: Sequence[Sequence[float]]
    means: Sequence[float]


Panel: TypeAlias = Lines | Bars | Heat | Histograms


@dataclass(frozen=True)
class Picture:
    """Picture of one or more panels.

    Attributes:
      title: title; the data is named here or in the panels' titles.
      caption: settings in sentences, above all those that differ from the paper's.
      panels: in reading order.
      columns: panels side by side.
    """

    title: str
    caption: str
    panels: Sequence[Panel]
    columns: int

    def record(self) -> dict[str, Any]:
        """Picture as JSON data."""
        content = dataclasses.asdict(self)
        for panel, kept in zip(self.panels, content["panels"], strict=True):
            kept["kind"] = type(panel).__name__.lower()
        # NumPy's arrays and numbers as lists and Python's.
        return json.loads(json.dumps(content, default=lambda value: value.tolist()))

    def digest(self) -> str:
        """Digest of all that is drawn, whatever draws it; committed drawings have it in their files."""
        return hashlib.sha256(json.dumps(self.record(), sort_keys=True).encode()).hexdigest()


def over_seeds(
    label: str, x: Sequence[float], runs: Sequence[Sequence[float | None]], *, is_main: bool = False
) -> Series:
    """Line of the mean over seeds, with their range.

    Args:
      label: text in the legend.
      x: [X].
      runs: a row [X] for each seed; a point that is None or NaN in any row is missing in the line.
      is_main: see `Series`.
    """
    values = np.asarray(runs, np.float64)
    edges = (values.min(0).tolist(), values.max(0).tolist()) if len(values) > 1 else (None, None)
    return Series(label, list(x), values.mean(0).tolist(), *edges, is_main=is_main)
