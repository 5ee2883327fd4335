"""Figures of docs/other-tasks.md: the examples of the page, over more rounds and seeds.

    python -m experiments.lab.other_tasks

executes the code of the page, runs its comparisons, and writes results/other_tasks.jsonl, of which
`python -m experiments.lab.pages` makes the tables.
"""

import hashlib
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.cli.exit_codes import exit_code, leave
from experiments.cli.parser import parse
from experiments.host.jax_config import prepare_jax
from experiments.lab.pages.parts import Made, filled
from experiments.run import committed
from experiments.show.tables import markdown

PAGE, FILE = Path("docs/other-tasks.md"), Path(committed.ROOT.name) / "other_tasks.jsonl"
"""The page and its figures in a checkout."""

ROUNDS = {"numbers": 40, "characters": 30, "labels": 60, "own_loss": 40, "dropout": 30}
"""Name of a comparison on the page -> its rounds."""

SEEDS = 3


@dataclass(frozen=True)
class Options:
    """Command line: there are no options."""


def main(arguments: Sequence[str] | None = None, root: Path = committed.ROOT.parent) -> int:
    """Measure the figures of the checkout at root; return the exit code."""

    def work() -> None:
        parse(Options, "experiments.lab.other_tasks", __doc__, arguments)
        # Every seed runs the same programs.
        prepare_jax(devices=1)
        for name, comparison in measured(root / PAGE, ROUNDS, SEEDS).items():
            committed.write(root / FILE, name, comparison)

    return exit_code(work)


def code(page: Path) -> list[str]:
    """Blocks of code of a page."""
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def digest(page: Path) -> str:
    """Digest of the code of a page: figures of another one are stale."""
    return hashlib.sha256("".join(code(page)).encode()).hexdigest()[:16]


def measured(page: Path, rounds: dict[str, int], seeds: int) -> dict[str, Any]:
    """Name of a comparison -> digest of the page's code, rounds, and what it gives for each seed."""
    names: dict[str, Any] = {}
    for block in code(page):
        exec(compile(block, str(page), "exec"), names)
    return {
        name: {
            "code": digest(page),
            "rounds": count,
            "seeds": [names[name](rounds=count, seed=seed) for seed in range(seeds)],
        }
        for name, count in rounds.items()
    }


def made(root: Path) -> Made:
    """The page of a checkout with its tables."""
    tables = {name: table(comparison) for name, comparison in committed.read(root / FILE).items()}
    return Made({root / PAGE: filled(root / PAGE, tables)}, {})


def table(comparison: dict[str, Any]) -> str:
    """Scores of each method in a comparison of `measured`, mean and range over seeds, and the rounds."""
    seeds, rounds = comparison["seeds"], comparison["rounds"]
    names = list(next(iter(seeds[0].values())))
    rows = [[f"`{method}`", *(_text([of[method][name] for of in seeds]) for name in names)] for method in seeds[0]]
    return "\n" + markdown([f"{rounds} rounds", *(f"`{name}`" for name in names)], rows) + "\n"


def _text(values: list[float]) -> str:
    return f"{statistics.fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    leave(main())
