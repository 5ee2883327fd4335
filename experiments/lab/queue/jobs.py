"""Long runs as plain data, in the order in which they are run.

All are on Fashion-MNIST, which has no download to wait for. A run that several tables share is run once.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.cli.cell import Cell
from experiments.cli.effects import relevant_options
from experiments.cli.parser import slug
from experiments.lab import causes
from experiments.papers import published, settings
from experiments.papers.published import Published
from experiments.tables.comparison import place as place_of

DATASET = "fashion_mnist"

SEEDS = (0, 1, 2)
"""Seeds of what is run several times."""

ORDER = (
    *("fedpac", "fedavg", "fedavg_ft", "local", "fedper", "fedrep", "lg_fedavg", "fedbabu"),
    *("fedpac_proto (modified)", "ditto"),
)
"""First methods of the first block; the others follow in the paper's order."""

SEVERAL_SEEDS = (
    *("fedpac", "fedpac -collaboration", "fedpac -alignment", "fedpac -alignment -collaboration"),
    *("fedavg_ft", "fedper", "fedrep", "ditto", "local"),
    *("fedpac_proto (modified)", "fedavg", "fedbabu", "lg_fedavg"),
)
"""Methods that are also run with seeds 1 and 2."""

FEDAS_METHODS = ("fedas", "fedper", "fedala", "fedavg")
FEDAS_BETAS = (0.1, 0.5, 1.0)
FEDAS_PARTICIPATIONS = (0.2, 1.0, 0.4, 0.6)
FEDAS_CLIENTS = 20

ROBUST_METHODS = ("fedavg", "fedper", "fedpac", "fedas", "ditto")
COMPRESSIONS = ("none", "quantize:8", "quantize:4", "topk:0.01", "sign")
SERVER_MEANS = ("mean", "median", "geometric_median", "krum")
ATTACK = "--attack signs --attackers 0.2"
PRIVACY_METHODS = ("fedavg", "fedper", "fedpac", "fedas", "ditto")
PRIVACY_NOISE = {8: {1: 3.32, 2: 4.69}, 4: {1: 5.98, 2: 8.45}, 1: {1: 20.66, 2: 29.22}}
"""Epsilon -> passes over a client's examples in a round -> noise multiplier for 30 rounds, 20 clients of 600 examples,
at the default delta."""


BLOCKS = {
    "table-1": "FedPAC's Table 1 and its replication's, 20 clients, seed 0",
    "causes": "the same without a supposed cause of a large difference, seed 0",
    "tables-2-3": "FedPAC's Tables 2 (ablation) and 3 (concept shift), seed 0",
    "tables-4-10": "FedPAC's Tables 4 (global models), 5 (FedProto), 6 (clients of different sizes) and 10 (rotated "
    "images), 20 clients, seed 0",
    "seeds": "seeds 1 and 2 of what is compared most, 20 clients",
    "fedas": "FedAS's Dirichlet partitions and participations, which its tables have for CIFAR only",
    "100-clients": "FedPAC's Tables 1, 4 and 8 (Dirichlet partition) and its replication's, 100 clients, seed 0",
    "field-digits": "all methods on the digits with tuned learning rates; the best ten with seeds 1 and 2",
    "field-letters": "the same on a table, UCI's letters, from letters.csv",
    "field": "the same on Fashion-MNIST, 50 rounds",
    "privacy": "five methods with differential privacy of single examples, 30 rounds of one epoch, seed 0",
    "compression": "five methods with compressed messages, 30 rounds of one epoch, seed 0",
    "attacks": "the same with a fifth of the clients flipping signs, and four means of the server",
}
"""Block -> its content."""


class Job(NamedTuple):
    """One run.

    Attributes:
      block: a key of BLOCKS.
      cell: the run's command line.
      method: name in the tables, with the options that are switched off.
      place: path of its folder, or of its file in results/, below their roots: COLUMN/METHOD/seed-N.
    """

    block: str
    cell: Cell
    method: str
    place: Path

    @property
    def names(self) -> tuple[str, ...]:
        """Names by which a job can be chosen: its block, its method, both, and both without the learning rate."""
        method, _, _ = self.method.partition(" lr=")
        return self.block, self.method, f"{self.block}/{self.method}", f"{self.block}/{method}"

    @property
    def label(self) -> str:
        """Name for people."""
        return f"{self.place.parts[0]} {self.method} seed {self.cell.seed}"


def jobs() -> list[Job]:
    """All jobs except those of `field.comparisons`, by priority."""
    found: dict[tuple[str, int, str], Job] = {}
    for job in _all():
        request = job.cell.request()
        found.setdefault((job.cell.dataset, job.cell.seed, json.dumps(relevant_options(request), sort_keys=True)), job)
    return list(found.values())


def _all() -> Iterator[Job]:
    main = [("fedpac", 1), ("fedpac_replication", 1)]
    yield from _of("table-1", sorted(_rows(main, 20), key=_turn), 0)
    yield from cause_jobs()
    yield from _of("tables-2-3", _rows([("fedpac", 2), ("fedpac", 3)], 20), 0)
    yield from _of("tables-4-10", _rows([("fedpac", table) for table in (4, 5, 6, 10)], 20), 0)
    repeated = _rows([*main, ("fedpac", 2)], 20)
    repeated = [next(row for row in repeated if row.method == method) for method in SEVERAL_SEEDS]
    for seed in SEEDS[1:]:
        yield from _of("seeds", repeated, seed)
    yield from fedas_jobs()
    yield from _of("100-clients", sorted(_rows([*main, ("fedpac", 4), ("fedpac", 8)], 100), key=_turn), 0)
    yield from privacy_jobs()
    yield from robust_jobs()


def cause_jobs() -> Iterator[Job]:
    """Runs without the supposed causes of large differences."""
    for cause in causes.load(DATASET):
        if cause.options:
            own, where = " ".join(cause.options), place_of(cause.row)
            place = where.with_name(f"{where.name}-{slug(own.removeprefix('--'))}") / "seed-0"
            yield Job("causes", cause.cell, f"{cause.row.method} {own}", place)


def fedas_jobs() -> Iterator[Job]:
    """FedAS's settings on Fashion-MNIST, evaluated in every round because the best round counts."""
    for participation in FEDAS_PARTICIPATIONS:
        for beta in FEDAS_BETAS:
            for method in FEDAS_METHODS:
                yield Job(
                    "fedas", fedas_cell(beta, participation, method), method, _fedas_place(beta, participation, method)
                )


def fedas_cell(beta: float, participation: float, method: str) -> Cell:
    """Run of a method in one of FedAS's settings, as in its tables by default."""
    words = f"--preset fedas --method {method} --num-clients {FEDAS_CLIENTS} --eval-every 1"
    words = (*words.split(), *settings.fedas_setting(beta, participation).split(), *settings.RELEASE.words(method))
    return Cell(DATASET, words, procedure=settings.RELEASE.rounds(method))


def robust_jobs() -> Iterator[Job]:
    """Methods with each compression, and with attackers and each mean of the server."""
    for block, choices in (("compression", COMPRESSIONS), ("attacks", SERVER_MEANS)):
        for setting in choices:
            for method in ROBUST_METHODS:
                place = Path(slug(f"{DATASET} 20 clients {block} {setting}"), method, "seed-0")
                yield Job(block, robust_cell(method, block, setting), f"{method} {setting}", place)


def robust_cell(method: str, block: str, setting: str) -> Cell:
    """Run of a method with a compression, or with attackers and a mean of the server."""
    own = f"{ATTACK} --server-mean {setting}" if block == "attacks" else f"--compress {setting}"
    return _short_cell(method, own)


def privacy_jobs() -> Iterator[Job]:
    """Methods without differential privacy and with several epsilons, the largest first."""
    for epsilon in (None, *PRIVACY_NOISE):
        for method in PRIVACY_METHODS:
            setting = "none" if epsilon is None else f"epsilon={epsilon}"
            place = Path(slug(f"{DATASET} 20 clients privacy {setting}"), method, "seed-0")
            yield Job("privacy", privacy_cell(method, epsilon), f"{method} {setting}", place)


def privacy_cell(method: str, epsilon: int | None) -> Cell:
    """Run of a method with an epsilon for single examples; None for no privacy."""
    if epsilon is None:
        return _short_cell(method)
    passes = 1 if method in ("fedavg", "fedper") else 2
    return _short_cell(method, f"--dp-clip 1 --dp-noise {PRIVACY_NOISE[epsilon][passes]}")


def _short_cell(method: str, own: str = "") -> Cell:
    """Run of 30 rounds in which each phase of a client's training takes one epoch."""
    words = f"--preset fedpac --method {method} --rounds 30 --eval-every 10 --epochs 1"
    words += " --personal-epochs 1" if method == "ditto" else ""
    words += f" {own}"
    return Cell(DATASET, tuple(words.split()))


def _fedas_place(beta: float, participation: float, method: str) -> Path:
    setting = f"dirichlet beta={beta} participation={participation}"
    return Path(slug(f"{DATASET} {FEDAS_CLIENTS} clients {setting}"), method, "seed-0")


def _rows(tables: Sequence[tuple[str, int]], clients: int) -> list[Published]:
    """Places of some tables, table after table."""
    rows = [row for row in published.load() if (row.dataset, row.clients) == (DATASET, clients)]
    return [row for table in tables for row in rows if (row.paper, row.table) == table]


def _turn(row: Published) -> int:
    return ORDER.index(row.method) if row.method in ORDER else len(ORDER)


def _of(block: str, rows: Sequence[Published], seed: int) -> Iterator[Job]:
    for row in rows:
        yield Job(block, row.cell(seed), row.method, place_of(row) / f"seed-{seed}")
