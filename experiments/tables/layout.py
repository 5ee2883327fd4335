"""Layout of a comparison: for the terminal, and as Markdown, CSV and JSON."""

from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.text import Text

from experiments.folder.run_folder import rounded, strict_json
from experiments.show.tables import comma_separated, markdown, number, terminal
from experiments.tables.comparison import Column, Comparison, Entry, notes
from pfl_jax.atomic_write import write_text

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
        part = columns[start : start + most]
        heads = ["method", *(Text(_heading(comparison, column, "\n")) for column in part)]
        table = terminal(heads, _rows(comparison, part, "\n"), show_lines=True)
        for column in table.columns[1:]:
            column.max_width = WIDTH
        blocks.append(table)
    text = [Text(line) for line in notes(comparison)]
    console.print(Group(Text(comparison.title, style="bold"), *blocks, *text), highlight=False)


def save(comparison: Comparison, folder: Path) -> None:
    """Write table.md, table.csv and table.json, each atomically."""
    columns, extra = comparison.columns, comparison.measure._asdict()
    heads = ["method", *(_heading(comparison, column, ", ") for column in columns)]
    rows = [[f"`{method}`", *places] for method, *places in _rows(comparison, columns, " / ")]
    lines = "\n".join(f"- {note}" for note in notes(comparison))
    write_text(folder / MARKDOWN, f"**{comparison.title}**\n\n{markdown(heads, rows)}\n{lines}\n")
    records = [_entry(entry) for entry in comparison.entries]
    write_text(folder / CSV, comma_separated([record | extra for record in records]))
    places = [
        record
        | {"accuracies": {str(seed): rounded(value) for seed, value in entry.accuracies.items()}}
        | {"deviations": {name: {"here": had, "paper": paper} for name, (had, paper) in entry.deviations.items()}}
        | {"arguments": entry.row.arguments}
        for record, entry in zip(records, comparison.entries, strict=True)
    ]
    record = {"paper": comparison.paper, "table": comparison.number, "title": comparison.title, **extra}
    record |= {"procedure": comparison.entries[0].row.procedure} if comparison.entries[0].row.procedure else {}
    record |= {"seeds": comparison.seeds, "notes": notes(comparison), "places": places}
    write_text(folder / JSON, strict_json(record))


def _rows(comparison: Comparison, columns: list[Column], line: str) -> list[list[str]]:
    """Each method and its places."""
    return [
        [method, *(_place(comparison.at(column, method), comparison.seeds, line) for column in columns)]
        for method in comparison.methods
    ]


def _heading(comparison: Comparison, column: Column, line: str) -> str:
    """Setting, and the substitute of the dataset if there is one; the source of the dataset is in the title."""
    entries = [entry for entry in comparison.entries if entry.column == column and entry.is_real is False]
    data = next((entry.description for entry in entries if entry.description), column.dataset)
    return line.join((data, f"{column.clients} clients", column.setting))


def _place(entry: Entry | None, seeds: int, line: str) -> str:
    """Our accuracy, the paper's, and the difference with the interval of ours."""
    if entry is None:
        return ""
    ours = number(entry.mean) + ("" if entry.std is None else f" ± {entry.std:.2f}")
    if 0 < len(entry.accuracies) < seeds:
        ours += f" ({len(entry.accuracies)} of {seeds})"
    return f"{ours}{line}{number(entry.published)} / {difference_text(entry)}"


def difference_text(entry: Entry) -> str:
    """Difference to the published accuracy, with half of the 95 % interval of ours where there is one."""
    text = number(entry.difference, "+.2f")
    return text if entry.difference is None or entry.error is None else f"{text} ± {entry.error:.2f}"


def _entry(entry: Entry) -> dict[str, Any]:
    """Record of one place."""
    values = {"mean": entry.mean, "std": entry.std, "paper": entry.published, "difference": entry.difference}
    values["error"] = entry.error
    return {
        **{name: getattr(entry.row, name) for name in ("dataset", "clients", "setting", "method")},
        "data": entry.description,
        "seeds": len(entry.accuracies),
        **{name: None if value is None else rounded(value) for name, value in values.items()},
    }
