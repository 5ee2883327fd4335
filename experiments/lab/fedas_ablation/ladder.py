"""Steps between FedPer and FedAS as released, and the runs that measure them."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from experiments.cli.cell import Cell
from experiments.cli.request import IN_PLACE

PARTICIPATION = (0.2, 1.0)

COMMON = (
    *("--preset", "fedas", "--num-clients", "20", "--partition", "dirichlet", "--beta", "0.1", "--rounds", "15"),
    *("--train-size", "200", "--test-size", "150", "--lr", "0.05", "--batch-size", "16", "--eval-every", "1"),
)
"""The setting of all runs: shorter than the paper's, with a larger learning rate in return."""

SOURCES = {"cifar100": "embedded", "fashion_mnist": "files"}
"""dataset -> source of its examples."""

EVERY_BATCH = ("--no-drop-last", "--shuffle")
RELEASED_BATCHES = ("--drop-last", "--no-shuffle")


@dataclass(frozen=True)
class Step:
    """Step of the ladder.

    Attributes:
      letter: its name in figures.
      name: its name in file names.
      title: its name in tables; for FedAS, its difference from the step before.
      words: options of the run.
      in_place: whether clients align one shared backbone, see `experiments.fedas_released`.
    """

    letter: str
    name: str
    title: str
    words: tuple[str, ...]
    in_place: bool = False


def _fedas(count: int) -> tuple[str, ...]:
    """FedAS with the first `count` choices of the release."""
    choices = (
        RELEASED_BATCHES,
        ("--target", "class_mean", "--align-loss", "class_sum"),
        ("--reduction", "batch_means"),
        ("--first-alignment",),
    )
    words = choices[:count] if count else (EVERY_BATCH,)
    return ("--method", "fedas", *itertools.chain.from_iterable(words))


LADDER = (
    Step("a", "fedper", "FedPer", ("--method", "fedper", *EVERY_BATCH)),
    Step("b", "fedper-batches", "FedPer, batches as released", ("--method", "fedper", *RELEASED_BATCHES)),
    Step("c", "fedas", "FedAS as printed", _fedas(0)),
    Step("d", "fedas-batches", "+ incomplete batches dropped, fixed order", _fedas(1)),
    Step("e", "fedas-class-sum", "+ alignment with class means, summed over classes", _fedas(2)),
    Step("f", "fedas-batch-traces", "+ traces of batch means", _fedas(3)),
    Step("g", "fedas-first-alignment", "+ first alignment with the initial backbone", _fedas(4)),
    Step("h", "fedas-in-place", "+ alignment in place, client after client (released)", _fedas(4), in_place=True),
)


class Place(NamedTuple):
    """One run of the study.

    Attributes:
      dataset, participation, seed: of the run.
      step: of the ladder.
    """

    dataset: str
    participation: float
    step: Step
    seed: int

    @property
    def name(self) -> str:
        """Name of the folder and file."""
        return f"{self.dataset}-participation{self.participation:g}-{self.step.name}-seed{self.seed}"

    @property
    def cell(self) -> Cell:
        """The run's command line."""
        arguments = (
            *self.step.words,
            *COMMON,
            *("--participation", f"{self.participation:g}", "--source", SOURCES[self.dataset]),
        )
        return Cell(self.dataset, arguments, self.seed, IN_PLACE if self.step.in_place else "")

    def command(self, folder: Path) -> str:
        """Shell command that makes the same run."""
        return self.cell.command(folder)


def places(
    datasets: Sequence[str], participation: Sequence[float], seeds: int, steps: Sequence[Step] = LADDER
) -> list[Place]:
    """All runs in their order: a whole ladder before the next participation, dataset and seed.

    Args:
      datasets: keys of SOURCES.
      participation: shares of the clients in a round.
      seeds: number of seeds, from 0.
      steps: steps of the ladder.
    """
    order = itertools.product(range(seeds), participation, datasets, steps)
    return [Place(dataset, share, step, seed) for seed, share, dataset, step in order]
