"""Tables of docs/other-tasks.md: the examples of the page beside local training and a centralised model."""

import statistics
from pathlib import Path
from typing import Any

from experiments.lab import other_tasks
from experiments.lab.pages.parts import Made, filled
from experiments.show.tables import markdown


def table(comparison: dict[str, Any]) -> str:
    """Scores of each method, mean and range over seeds, and the rounds.

    Args:
      comparison: one of those in `other_tasks.load`.
    """
    seeds, rounds = comparison["seeds"], comparison["rounds"]
    names = list(next(iter(seeds[0].values())))
    rows = [[f"`{method}`", *(_text([of[method][name] for of in seeds]) for name in names)] for method in seeds[0]]
    return "\n" + markdown([f"{rounds} rounds", *(f"`{name}`" for name in names)], rows) + "\n"


def _text(values: list[float]) -> str:
    return f"{statistics.fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def made(root: Path) -> Made:
    """The page of a checkout with its tables."""
    page, found = root / other_tasks.PAGE, other_tasks.load(root)["comparisons"]
    return Made({page: filled(page, {name: table(of) for name, of in found.items()})}, {})
