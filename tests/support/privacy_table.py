"""The table of docs/privacy.md, from `Method.privacy`; run by itself, this file writes it anew."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2])]

from pfl_jax.methods import METHODS
from pfl_jax.methods.factories import on_linear_model

PAGE = Path(__file__).parents[2] / "docs" / "privacy.md"
HEADING = "| method | examples: not covered | clients: not covered |\n| --- | --- | --- |\n"


def table():
    """Rows of all methods, as they stand in the page."""
    lines = []
    for name, factory in METHODS.items():
        privacy = on_linear_model(factory, {}).privacy
        examples = f"refused: {privacy.refused}" if privacy.refused else "; ".join(privacy.examples) or "nothing"
        clients = "no such option" if privacy.clients is None else "; ".join(privacy.clients) or "nothing"
        lines.append(f"| `{name}` | {examples} | {clients} |\n")
    return HEADING + "".join(lines)


def replaced(page):
    """The page's text with the table of this version."""
    before, heading, rest = page.partition(HEADING)
    assert heading
    lines = rest.splitlines(keepends=True)
    rows = next((index for index, line in enumerate(lines) if not line.startswith("|")), len(lines))
    return before + table() + "".join(lines[rows:])


if __name__ == "__main__":
    PAGE.write_text(replaced(PAGE.read_text()))
