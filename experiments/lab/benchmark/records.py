"""Sections of the benchmark's report as rows of figures, for the terminal, Markdown and JSON."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from rich.table import Table

from experiments.show import tables

Row: TypeAlias = dict[str, Any]
"""Heading -> text, number in the unit that the heading ends with, or None; lists are in the JSON file only."""


class Section(NamedTuple):
    """Figures of a section.

    Attributes:
      title: what was measured.
      rows: where one lacks a heading of the others, nothing was measured.
      note: settings, in words.
    """

    title: str
    rows: Sequence[Row]
    note: str = ""

    @property
    def headings(self) -> list[str]:
        """Columns of the table, in the order in which rows have them."""
        return list(dict.fromkeys(name for row in self.rows for name in row if not isinstance(row[name], list)))

    @property
    def cells(self) -> list[list[str]]:
        """Texts of the table, by row."""
        return [[_text(row.get(heading)) for heading in self.headings] for row in self.rows]

    def terminal(self) -> Table:
        """Table for the terminal."""
        caption = self.note or None
        left = {"title_justify": "left", "caption_justify": "left"}
        return tables.terminal(self.headings, self.cells, title=self.title, caption=caption, **left)


def markdown(sections: Sequence[Section]) -> str:
    """All sections as Markdown."""
    parts = [[f"## {of.title}", tables.markdown(of.headings, of.cells, None).strip(), of.note] for of in sections]
    return "\n\n".join(text for part in parts for text in part if text) + "\n"


def as_json(machine: Row, sections: dict[str, Section]) -> str:
    """The machine, and each section by its name."""
    return json.dumps({"machine": machine} | {name: of._asdict() for name, of in sections.items()}, indent=2) + "\n"


def _text(value: Any) -> str:
    """Number with three digits or, if it is larger, whole; nothing for None."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else value or ""
