"""Records of the benchmark: every section is a list of rows, which one function prints and one writes."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from rich.table import Table

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


def table(section: Section) -> Table:
    """Table for the terminal."""
    made = Table(title=section.title, caption=section.note or None, title_justify="left", caption_justify="left")
    for place, heading in enumerate(section.headings):
        made.add_column(heading, justify="right" if place else "left")
    for row in section.rows:
        made.add_row(*(_words(row.get(heading)) for heading in section.headings))
    return made


def markdown(sections: Sequence[Section]) -> str:
    """All sections as Markdown."""
    parts = []
    for section in sections:
        head = [section.headings, ["---"] * len(section.headings)]
        rows = [[_words(row.get(heading)) for heading in section.headings] for row in section.rows]
        lines = [f"| {' | '.join(cells)} |" for cells in head + rows]
        parts.append("\n".join([f"## {section.title}", "", *lines, *(["", section.note] if section.note else [])]))
    return "\n\n".join(parts) + "\n"


def as_json(machine: Row, sections: dict[str, Section]) -> str:
    """The machine, and each section by its name."""
    return json.dumps({"machine": machine} | {name: of._asdict() for name, of in sections.items()}, indent=2) + "\n"


def _words(value: Any) -> str:
    """Number with three digits or, if it is larger, whole; nothing for None."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else value or ""
