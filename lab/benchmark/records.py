"""Sections of the benchmark's report as rows of figures, for the terminal and results/benchmark.jsonl."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from lab import committed

Row: TypeAlias = dict[str, Any]
"""Heading -> text, number in the unit that the heading ends with, or None; lists are in the file only."""


class Section(NamedTuple):
    """Figures of a section.

    Attributes:
      title: what was measured.
      rows: where one lacks a heading of the others, nothing was measured.
      note: settings, in words.
      machine: that measured it, see `measure.machine`; None until that is known.
    """

    title: str
    rows: Sequence[Row]
    note: str = ""
    machine: Row | None = None

    @property
    def headings(self) -> list[str]:
        """Columns of the table, in the order in which rows have them."""
        return list(dict.fromkeys(name for row in self.rows for name in row if not isinstance(row[name], list)))

    @property
    def cells(self) -> list[list[str]]:
        """Texts of the table, by row."""
        return [[_text(row.get(heading)) for heading in self.headings] for row in self.rows]


def store(file: Path, name: str, section: Section) -> None:
    """Write a section into a file of measurements, in place of an older one of its name; InvalidInput if it cannot."""
    committed.write(file, name, section._asdict())


def stored(file: Path) -> dict[str, Section]:
    """Sections of a file by their names; InvalidInput if it is damaged."""
    return {name: Section(**record) for name, record in committed.read(file).items()}


def _text(value: Any) -> str:
    """Number with three digits or, if it is larger, whole; nothing for None."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else value or ""
