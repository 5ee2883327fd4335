"""Tables of text in Markdown, CSV and for the terminal, and pages from templates with such tables."""

import csv
import io
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

NOTHING = "—"
"""Text in place of a missing number."""


def number(value: float | None, form: str = ".2f") -> str:
    """Number as text; a dash for None."""
    return NOTHING if value is None else f"{value:{form}}"


def with_deviation(mean: float | None, deviation: float | None) -> str:
    """Mean over seeds as text, followed by "± standard deviation" if there is one."""
    return number(mean) + ("" if deviation is None else f" ± {deviation:.2f}")


def mean_text(values: Sequence[float]) -> str:
    """Mean over seeds as text, followed by "± standard deviation (number of seeds)" if there are several."""
    several = len(values) > 1
    text = with_deviation(statistics.fmean(values) if values else None, statistics.stdev(values) if several else None)
    return f"{text} ({len(values)})" if several else text


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]], words: Sequence[int] | None = (0,)) -> str:
    """Table in Markdown, with numbers in all columns but those numbered in `words`, None for all."""
    under = ["---" if words is None or index in words else "---:" for index in range(len(heads))]
    return "".join(f"| {' | '.join(row)} |\n" for row in [heads, under, *rows])


def comma_separated(records: Sequence[Mapping[str, Any]]) -> str:
    """Records of the same fields as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def terminal(heads: Sequence[Any], rows: Iterable[Sequence[str]], **options: Any) -> Table:
    """Table for rich: the first column has words, the others numbers; `options` are those of `rich.table.Table`."""
    table = Table(**options)
    for index, head in enumerate(heads):
        table.add_column(head, justify="right" if index else "left", no_wrap=not index)
    for row in rows:
        table.add_row(*row)
    return table


def page(template: Path, *, is_html: bool = False, **values: Any) -> str:
    """Text of a jinja2 template, which can call `table(heads, rows, words)` and `number(value, form)`.

    Blanks at the ends of lines and repeated blank lines are removed.
    """
    # Imported now: the table at the end of a run does without it.
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template.parent),
        autoescape=is_html,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=is_html,
    )
    text = environment.get_template(template.name).render(table=markdown, number=number, **values)
    return re.sub(r"\n{3,}", "\n\n", re.sub(r" +$", "", text, flags=re.MULTILINE)).strip() + "\n"
