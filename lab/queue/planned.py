"""Long runs as plain data, in the order in which they are run.

Most are on Fashion-MNIST, which has no download to wait for. A run that several tables share is run once.
"""

import functools
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.commands.batch import spec_in_batch
from experiments.commands.paper_table import folder_of
from experiments.folder.run_folder import slug
from experiments.papers import published, settings
from experiments.papers.published import Published
from experiments.spec.identity import relevant_options
from experiments.spec.option_notes import option_words
from experiments.spec.spec import Spec
from lab import causes, later_readings, readings

DATASET, CIFAR10 = "fashion_mnist", "cifar10"

SEEDS = (0, 1, 2)
"""Seeds of what is run several times."""

SEVERAL_SEEDS = (
    *("fedpac", "fedpac -collaboration", "fedpac -alignment", "fedpac -alignment -collaboration"),
    *("fedavg_ft", "fedper", "fedrep", "ditto", "local"),
    *("fedpac_proto (modified)", "fedavg", "fedbabu", "lg_fedavg"),
)
"""Methods that are also run with seeds 1 and 2."""

CIFAR10_METHODS = (
    *SEVERAL_SEEDS[:4],
    *("fedavg", "fedavg_ft", "local", "fedper", "fedrep", "ditto", "fedrod", "lg_fedavg", "fedbabu", "apfl", "pfedme"),
    *("knn_per", "fedfomo", "pfedhn", "fedpac_proto (modified)"),
)
"""Methods of FedPAC's Tables 1 and 2 and of its replication on CIFAR-10, in the order of the runs."""
CIFAR10_OF_FEDAS = ("fedas", "fedper", "fedala", "fedavg_ft", "fedproto")
"""Methods of FedAS's Table 3, likewise; `fedas` is also run as printed."""
CIFAR10_PARTS_OF_FEDAS = ("fedas -synchronization", "fedas -alignment")
"""Rows of its Table 4 (alignment alone, synchronization alone)."""

FEDAS_METHODS = ("fedas", "fedper", "fedala", "fedavg")
ALL_PROTOCOLS = {"eval_protocol": "before_aggregation"}
"""FedAS's tables measure their methods by three protocols."""
FEDAS_BETAS = (0.1, 0.3, 0.5)
FEDAS_PARTICIPATIONS = (0.2, 1.0, 0.4, 0.6)
FEDAS_CLIENTS = 20

READINGS = readings.READINGS | later_readings.READINGS
"""Reading of the replication's equations -> the same in words."""

BLOCKS = {
    "table-1": "FedPAC's Table 1 and its replication's, 20 clients, seed 0",
    "causes": "the same without a supposed cause of a large difference, seed 0",
    "readings": "the replication's prototype weights by other readings of its equations, seed 0",
    "cifar10": "FedPAC's Tables 1 and 2 and its replication's on CIFAR-10, 20 clients, seed 0",
    "cifar10-fedas": "FedAS's Tables 3 and 4 on CIFAR-10, beta 0.1, participation 0.2, 1 and 0.4, "
    "FedAS by either procedure",
    "tables-2-3": "FedPAC's Tables 2 (ablation) and 3 (concept shift), seed 0",
    "tables-4-10": "FedPAC's Tables 4 (global models), 5 (FedProto), 6 (clients of different sizes) and 10 (rotated "
    "images), 20 clients, seed 0",
    "seeds": "seeds 1 and 2 of what is compared most, 20 clients",
    "fedas": "FedAS's Dirichlet partitions and participations, which its tables have for CIFAR only",
    "100-clients": "FedPAC's Tables 1, 4 and 8 (Dirichlet partition) and its replication's, 100 clients, seed 0",
    "field-digits": "all methods on the digits with tuned learning rates; the best ten, and local, with seeds 1 and 2",
    "field-letters": "the same on a table, UCI's letters, from letters.csv",
    "field": "the same on Fashion-MNIST, 50 rounds",
    "field-texts": "methods with low-rank adapters on all-MiniLM-L6-v2, short texts, 10 rounds, three seeds",
    "field-images": "the same on a small vision transformer, rotated images",
    "field-heart": "all methods on the hospitals of `heart` with tuned learning rates, three seeds",
    "field-watch": "the same on the people of `watch`, a perceptron",
    "field-graphs-digits": "methods without a server on several graphs, and three others, on the digits, three seeds",
    "field-graphs-watch": "the same on the people of `watch`",
    "field-networks": "methods for clients with different networks on Fashion-MNIST, tuned learning rates, three seeds",
}
"""Block -> its content."""


@dataclass(frozen=True)
class PlannedRun:
    """One run.

    Attributes:
      block: a key of BLOCKS.
      dataset, options, seed: of the run, which is checked when it is asked for: there are thousands.
      method: name in the tables, with the options that are switched off.
      name: of its folder, and in results/: COLUMN/METHOD/seed-N.
    """

    block: str
    dataset: str
    options: dict[str, Any]
    method: str
    name: str
    seed: int = 0

    @property
    def spec(self) -> Spec:
        """The run."""
        return spec_in_batch(self.dataset, self.options, self.seed)

    @property
    def chosen_by(self) -> tuple[str, ...]:
        """Words that choose it: its block, its method, both, and both without the learning rate."""
        method, _, _ = self.method.partition(" lr=")
        return self.block, self.method, f"{self.block}/{self.method}", f"{self.block}/{method}"

    @property
    def title(self) -> str:
        """Name in messages."""
        return f"{self.name.split('/')[0]} {self.method} seed {self.seed}"


@functools.cache
def planned_runs() -> tuple[PlannedRun, ...]:
    """All runs except those of `field.comparisons`, by priority."""
    found: dict[tuple[int, str], PlannedRun] = {}
    for run in _all():
        options = json.dumps(relevant_options(run.spec), sort_keys=True)
        found.setdefault((run.seed, options), run)
    return tuple(found.values())


def _all() -> Iterator[PlannedRun]:
    main = [("fedpac", 1), ("fedpac_replication", 1)]
    yield from _of("table-1", _rows(main, 20), 0)
    yield from _without_causes()
    yield from map(reading_run, READINGS)
    yield from _of("cifar10", _chosen(_rows([*main, ("fedpac", 2)], 20, CIFAR10), CIFAR10_METHODS), 0)
    for row in cifar10_of_fedas():
        name = row.method if row.procedure == "release" else f"{row.method} printed"
        where = f"{folder_of(row).parent.as_posix()}/{slug(name)}/seed-0"
        yield PlannedRun("cifar10-fedas", row.dataset, row.options | ALL_PROTOCOLS, name, where)
    yield from _of("tables-2-3", _rows([("fedpac", 2), ("fedpac", 3)], 20), 0)
    yield from _of("tables-4-10", _rows([("fedpac", table) for table in (4, 5, 6, 10)], 20), 0)
    repeated = _chosen(_rows([*main, ("fedpac", 2)], 20), SEVERAL_SEEDS)
    for seed in SEEDS[1:]:
        yield from _of("seeds", repeated, seed)
    for participation, beta, method in itertools.product(FEDAS_PARTICIPATIONS, FEDAS_BETAS, FEDAS_METHODS):
        yield fedas_run(beta, participation, method)
    yield from _of("100-clients", _rows([*main, ("fedpac", 4), ("fedpac", 8)], 100), 0)


def _without_causes() -> Iterator[PlannedRun]:
    """Runs without the supposed causes of large differences."""
    for cause in causes.load(DATASET):
        if cause.options:
            own, options = " ".join(option_words(cause.options)), cause.row.options | cause.options
            name = f"{folder_of(cause.row).as_posix()}-{slug(own.removeprefix('--'))}/seed-0"
            yield PlannedRun("causes", cause.row.dataset, options, f"{cause.row.method} {own}", name)


def reading_run(reading: str) -> PlannedRun:
    """Run of the replication's prototype weights by another reading of its equations, beside its Table 1."""
    (row,) = [row for row in _rows([("fedpac_replication", 1)], 20) if row.method.startswith("fedpac_proto")]
    file = readings.__file__ if reading in readings.READINGS else later_readings.__file__
    own = {"method": f"{file}:fedpac_proto_reading", "reading": reading}
    name = f"{folder_of(row).parent.as_posix()}/fedpac_proto-{slug(reading)}/seed-0"
    return PlannedRun("readings", row.dataset, row.options | own, f"fedpac_proto {reading}", name)


def fedas_run(beta: float, participation: float, method: str) -> PlannedRun:
    """Run in one of FedAS's settings, as in its tables; evaluated in every round because the best round counts."""
    options = {"preset": "fedas", "method": method, "num_clients": FEDAS_CLIENTS, "procedure": "release"}
    options |= settings.fedas_setting(beta, participation)
    # FedAS itself is measured as trained, and its first run has the usual protocols only.
    options |= {} if method == "fedas" else ALL_PROTOCOLS
    column = slug(f"{DATASET} {FEDAS_CLIENTS} clients dirichlet beta={beta} participation={participation}")
    return PlannedRun("fedas", DATASET, options, method, f"{column}/{method}/seed-0")


def _rows(tables: Sequence[tuple[str, int]], clients: int, dataset: str = DATASET) -> list[Published]:
    """Places of some tables, table after table."""
    rows = [row for row in published.load() if (row.dataset, row.clients) == (dataset, clients)]
    return [row for table in tables for row in rows if (row.paper, row.table) == table]


def _chosen(rows: Sequence[Published], methods: Sequence[str]) -> list[Published]:
    """The first place of each of some methods, in their order."""
    return [next(row for row in rows if row.method == method) for method in methods]


def cifar10_of_fedas() -> list[Published]:
    """Places of FedAS's Tables 3 and 4 that are run, FedAS itself by either procedure."""
    found = []
    for participation, methods, parts in (
        (0.2, CIFAR10_OF_FEDAS, CIFAR10_PARTS_OF_FEDAS),
        (1.0, ("fedas", "fedper"), ()),
        (0.4, CIFAR10_OF_FEDAS, ()),
    ):
        setting = f"dirichlet beta=0.1 participation={participation}"
        there = [row for row in _rows([("fedas", 3), ("fedas", 4)], FEDAS_CLIENTS, CIFAR10) if row.setting == setting]
        own, *others = _chosen(there, methods)
        found += [own, own._replace(procedure="print"), *others, *_chosen(there, parts)]
    return found


def _of(block: str, rows: Sequence[Published], seed: int) -> Iterator[PlannedRun]:
    for row in rows:
        name = f"{folder_of(row).as_posix()}/seed-{seed}"
        yield PlannedRun(block, row.dataset, row.options, row.method, name, seed)
