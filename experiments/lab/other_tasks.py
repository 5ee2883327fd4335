"""Figures of docs/other-tasks.md: the examples of the page, over more rounds and seeds.

    python -m experiments.lab.other_tasks

executes the code of the page, runs its comparisons, and writes results/other_tasks.json, of which
`python -m experiments.lab.pages` makes the tables.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.cli.exit_codes import exit_code, leave
from experiments.cli.parser import parse
from experiments.folder.run_folder import strict_json
from experiments.host.jax_config import prepare_jax
from experiments.run import committed
from pfl_jax.atomic_write import write_text

PAGE, FILE = Path("docs/other-tasks.md"), Path(committed.ROOT.name) / "other_tasks.json"
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
        write_text(root / FILE, strict_json(measured(root / PAGE, ROUNDS, SEEDS)))

    return exit_code(work)


def code(page: Path) -> list[str]:
    """Blocks of code of a page."""
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def digest(page: Path) -> str:
    """Digest of the code of a page: figures of another one are stale."""
    return hashlib.sha256("".join(code(page)).encode()).hexdigest()[:16]


def measured(page: Path, rounds: dict[str, int], seeds: int) -> dict[str, Any]:
    """Digest of the page's code, and of each comparison its rounds and what it gives for each seed.

    Args:
      page: the page.
      rounds: name of a comparison -> its rounds.
      seeds: number of seeds.
    """
    names: dict[str, Any] = {}
    for block in code(page):
        exec(compile(block, str(page), "exec"), names)
    runs = {
        name: {"rounds": count, "seeds": [names[name](rounds=count, seed=seed) for seed in range(seeds)]}
        for name, count in rounds.items()
    }
    return {"code": digest(page), "comparisons": runs}


def load(root: Path) -> dict[str, Any]:
    """Figures of a checkout, see `measured`."""
    return json.loads((root / FILE).read_text())


if __name__ == "__main__":
    leave(main())
