"""Layout of a comparison: for the terminal, and as Markdown, CSV and JSON."""

import csv
import io
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from experiments.results.run_folder import rounded, strict_json
from experiments.tables.comparison import NOTHING, Column, Comparison, Figure, notes
from pfl_jax.atomic_write import write_whole

MARKDOWN, CSV, JSON = "table.md", "table.csv", "table.json"

WIDTH = 21
"""Characters of a column on the terminal: mean, deviation, and how many seeds there are."""


def show(comparison: Comparison, console: Console) -> None:
    """Print the table, in blocks of as many columns as fit on the console."""
    columns = comparison.columns
    first = max(map(len, (*comparison.methods, "method"))) + 4
    most = max(1, (console.width - first) // (WIDTH + 3))
    blocks = []
    for start in range(0, len(columns), most):
        table = Table(show_lines=True)
        table.add_column("method", no_wrap=True)
        for column in columns[start : start + most]:
            table.add_column(Text(_heading(comparison, column, "\n")), justify="right", max_width=WIDTH)
        for method in comparison.methods:
            places = (comparison.at(column, method) for column in columns[start : start + most])
            table.add_row(method, *(_place(place, comparison.seeds, "\n") for place in places))
        blocks.append(table)
    text = [Text(line) for line in notes(comparison)]
    console.print(Group(Text(comparison.title, style="bold"), *blocks, *text), highlight=False)


def save(comparison: Comparison, folder: Path) -> None:
    """Write table.md, table.csv and table.json, each atomically.

    Raises:
      InvalidInput: the folder cannot be written.
    """
    write_whole(folder / MARKDOWN, _markdown(comparison))
    write_whole(folder / CSV, _csv(comparison))
    write_whole(folder / JSON, strict_json(_record(comparison)))


def _heading(comparison: Comparison, column: Column, line: str) -> str:
    """Setting, and the substitute of the dataset if there is one; the source of the dataset is in the title."""
    figures = [figure for figure in comparison.figures if figure.column == column and figure.is_real is False]
    data = next((figure.description for figure in figures if figure.description), column.dataset)
    return line.join((data, f"{column.clients} clients", column.setting))


def _place(figure: Figure | None, seeds: int, line: str) -> str:
    """Our accuracy, the paper's and the difference."""
    if figure is None:
        return ""
    ours = NOTHING if figure.mean is None else f"{figure.mean:.2f}"
    if figure.std is not None:
        ours += f" ± {figure.std:.2f}"
    if 0 < len(figure.accuracies) < seeds:
        ours += f" ({len(figure.accuracies)} of {seeds})"
    paper = NOTHING if figure.published is None else f"{figure.published:.2f}"
    return f"{ours}{line}{paper} / {NOTHING if figure.difference is None else f'{figure.difference:+.2f}'}"


def _markdown(comparison: Comparison) -> str:
    columns = comparison.columns
    rows = [["method", *(_heading(comparison, column, ", ") for column in columns)], ["---"] + ["---:"] * len(columns)]
    for method in comparison.methods:
        places = (_place(comparison.at(column, method), comparison.seeds, " / ") for column in columns)
        rows.append([f"`{method}`", *places])
    lines = [f"**{comparison.title}**", "", *(f"| {' | '.join(row)} |" for row in rows), ""]
    return "\n".join([*lines, *(f"- {note}" for note in notes(comparison))]) + "\n"


def _records(comparison: Comparison) -> list[dict[str, Any]]:
    """Entries one by one."""
    return [
        {
            "dataset": figure.row.dataset,
            "clients": figure.row.clients,
            "setting": figure.row.setting,
            "method": figure.row.method,
            "data": figure.description,
            "seeds": len(figure.accuracies),
            "mean": _rounded(figure.mean),
            "std": _rounded(figure.std),
            "paper": figure.published,
            "difference": _rounded(figure.difference),
        }
        for figure in comparison.figures
    ]


def _csv(comparison: Comparison) -> str:
    text = io.StringIO()
    records = _records(comparison)
    extra = comparison.measure._asdict()
    writer = csv.DictWriter(text, [*records[0], *extra], lineterminator="\n")
    writer.writeheader()
    writer.writerows(record | extra for record in records)
    return text.getvalue()


def _record(comparison: Comparison) -> dict[str, Any]:
    places = [
        record
        | {
            "accuracies": {str(seed): rounded(value) for seed, value in figure.accuracies.items()},
            "deviations": {name: {"here": had, "paper": paper} for name, (had, paper) in figure.deviations.items()},
            "arguments": figure.row.arguments,
        }
        for record, figure in zip(_records(comparison), comparison.figures, strict=True)
    ]
    return {
        "paper": comparison.paper,
        "table": comparison.number,
        "title": comparison.title,
        **comparison.measure._asdict(),
        "seeds": comparison.seeds,
        "notes": notes(comparison),
        "places": places,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else rounded(value)
