"""Coverage of the 95 % interval of `pfl_jax.compare.difference` on constructed scores.

    python -m experiments.lab.coverage

writes results/coverage.jsonl, of which `python -m experiments.lab.pages` makes the table in docs/evaluation.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.cli.exit_codes import exit_code, leave
from experiments.cli.parser import parse
from experiments.lab.pages.parts import Made, filled
from experiments.run import committed
from experiments.show.tables import markdown
from pfl_jax.compare import difference

PAGE, FILE = Path("docs/evaluation.md"), Path(committed.ROOT.name) / "coverage.jsonl"
"""The page and its figures in a checkout."""

REPEATS, CLIENTS, EFFECT = 5000, 20, 2.0
"""Repetitions of a comparison, clients of a run, and the difference that an interval should find."""


class Scores(NamedTuple):
    """Normal differences of two methods, independent between seeds and, around a seed's own mean, between clients.

    Attributes:
      seeds: number of runs.
      between_seeds, between_clients: standard deviations.
    """

    seeds: int
    between_seeds: float
    between_clients: float


SCORES = (
    *(Scores(seeds, 1, 1) for seeds in (1, 2, 3, 4, 5, 10)),
    *(Scores(seeds, 0.3, 3) for seeds in (1, 2, 3, 4, 5, 10)),
)


@dataclass(frozen=True)
class Options:
    """Command line: there are no options."""


def main(arguments: Sequence[str] | None = None, root: Path = committed.ROOT.parent) -> int:
    """Measure the figures of the checkout at root; return the exit code."""

    def work() -> None:
        parse(Options, "experiments.lab.coverage", __doc__, arguments)
        for scores in SCORES:
            committed.write(root / FILE, _name(scores), measured(scores))

    return exit_code(work)


def measured(scores: Scores) -> dict[str, Any]:
    """Share of the intervals that contain the true difference, and of those that leave out 0 if it is EFFECT."""
    rng, size, ends = np.random.default_rng(0), (scores.seeds, CLIENTS), []
    for _ in range(REPEATS):
        of_seeds = scores.between_seeds * rng.normal(size=(scores.seeds, 1))
        found = difference([*(of_seeds + scores.between_clients * rng.normal(size=size))], [*np.zeros(size)])
        ends.append((found.low, found.high))
    low, high = np.transpose(ends)
    contains, finds = (low <= 0) & (high >= 0), (low > -EFFECT) | (high < -EFFECT)
    about = {"repeats": REPEATS, "clients": CLIENTS, "effect": EFFECT}
    return scores._asdict() | about | {"contains": float(contains.mean()), "finds": float(finds.mean())}


def _name(scores: Scores) -> str:
    return f"seeds={scores.seeds} between={scores.between_seeds:g},{scores.between_clients:g}"


def made(root: Path) -> Made:
    """The page of a checkout with its table."""
    found = committed.read(root / FILE)
    heads = ["seeds", "deviation between seeds", "between clients", "contains the truth"]
    heads.append(f"finds a difference of {EFFECT:g}")
    rows = []
    for scores in SCORES:
        one = found[_name(scores)]
        shares = [f"{100 * one[name]:.1f} %" for name in ("contains", "finds")]
        rows.append([*(f"{value:g}" for value in scores), *shares])
    text = f"{markdown(heads, rows, ())}\n{REPEATS:,} comparisons a row, {CLIENTS} clients, normal scores.\n"
    return Made({root / PAGE: filled(root / PAGE, {"coverage": f"\n{text}"})}, {})


if __name__ == "__main__":
    leave(main())
