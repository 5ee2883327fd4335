"""The tables of docs/tasks.md and docs/privacy.md, from what methods say; run by itself, this file writes them anew."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from problems import HYPER_PARAMETERS, tiny_model

from pfl_jax import InvalidInput
from pfl_jax.methods import METHODS, make_method
from pfl_jax.methods.factories import on_linear_model
from pfl_jax.tasks import TASKS


def refusal(name, task):
    """Why a method does not take a task; "" if it does."""
    try:
        make_method(name, tiny_model(task), **HYPER_PARAMETERS)
    except InvalidInput as error:
        return str(error)
    return ""


def _tasks(name):
    refusals = [refusal(name, task) for task in TASKS.values()]
    reasons = {text.partition(f"{task}: ")[2] for task, text in zip(TASKS, refusals, strict=True) if text}
    return [*("" if text else "runs" for text in refusals), "; ".join(reasons)]


def _privacy(name):
    privacy = on_linear_model(METHODS[name], {}).privacy
    examples = f"refused: {privacy.refused}" if privacy.refused else "; ".join(privacy.examples) or "nothing"
    return [examples, "no such option" if privacy.clients is None else "; ".join(privacy.clients) or "nothing"]


TABLES = {
    "tasks": ([*TASKS, "otherwise"], _tasks),
    "privacy": (["examples: not covered", "clients: not covered"], _privacy),
}
"""Page -> headings after the method's, and the cells of a method."""


def page(name):
    """The page's file."""
    return Path(__file__).parents[2] / "docs" / f"{name}.md"


def renewed(name):
    """The page's text with the table of this version."""
    columns, cells = TABLES[name]
    heading = f"| method | {' | '.join(columns)} |\n|{' --- |' * (len(columns) + 1)}\n"
    before, found, rest = page(name).read_text().partition(heading)
    assert found
    lines = rest.splitlines(keepends=True)
    after = next((index for index, line in enumerate(lines) if not line.startswith("|")), len(lines))
    rows = [f"| {' | '.join([f'`{method}`', *cells(method)])} |\n".replace("  ", " ") for method in METHODS]
    return before + heading + "".join([*rows, *lines[after:]])


if __name__ == "__main__":
    for table in TABLES:
        page(table).write_text(renewed(table))
