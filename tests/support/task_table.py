"""The table of docs/tasks.md, from what factories refuse; run by itself, this file writes it anew."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from problems import HYPER_PARAMETERS, tiny_model

from pfl_jax.errors import InvalidInput
from pfl_jax.methods import METHODS, make_method
from pfl_jax.tasks import TASKS

PAGE = Path(__file__).parents[2] / "docs" / "tasks.md"
HEADING = f"| method | {' | '.join(TASKS)} | otherwise |\n|{' --- |' * (len(TASKS) + 2)}\n"


def refusal(name, task):
    """Why a method does not take a task; "" if it does."""
    try:
        make_method(name, tiny_model(task), **HYPER_PARAMETERS)
    except InvalidInput as error:
        return str(error)
    return ""


def table():
    """Rows of all methods, as they stand in the page."""
    lines = []
    for name in METHODS:
        refusals = [refusal(name, task) for task in TASKS.values()]
        reasons = {text.partition(f"{task}: ")[2] for task, text in zip(TASKS, refusals, strict=True) if text}
        cells = ["" if text else "runs" for text in refusals]
        lines.append(f"| {' | '.join([f'`{name}`', *cells, '; '.join(reasons)])} |\n".replace("  ", " "))
    return HEADING + "".join(lines)


def replaced(page):
    """The page's text with the table of this version."""
    before, heading, _ = page.partition(HEADING)
    assert heading
    return before + table()


if __name__ == "__main__":
    PAGE.write_text(replaced(PAGE.read_text()))
