"""Workload of the benchmark: sizes, the federation, the network and its operations."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from pfl_jax import models
from pfl_jax.backends import choices
from pfl_jax.base import Method, Model
from pfl_jax.data import federated, partition, sources
from pfl_jax.data.federated import FederatedData
from pfl_jax.data.sources import Dataset
from pfl_jax.methods import make_method


@dataclass(frozen=True)
class Scale:
    """Sizes of the measurements; the defaults are FedPAC's setting on Fashion-MNIST."""

    clients: int = 20
    """Where everyone takes part."""
    populations: tuple[tuple[int, float], ...] = ((20, 1.0), (100, 0.1))
    """Clients and participation of the methods' rounds."""
    examples: int = 600
    """Training and as many test examples of a client."""
    repetitions: tuple[int, int] = (5, 3)
    """Of what is compared, interleaved: of short work, and of whole rounds."""
    growth: tuple[tuple[int, float], ...] = ((10, 1.0), (1000, 0.03), (1000, 0.1))
    """Clients and participation of the runs that show how time and memory grow."""
    growth_examples: int = 50
    memory_growth: tuple[int, int] = (200, 20)
    """Rounds over which memory must not grow, and the round it is first measured after."""
    client_counts: tuple[tuple[int, ...], int, int, int] = ((1000, 10_000, 100_000), 20, 1000, 40)
    """Numbers of clients, clients of a cohort and of an evaluation, and rounds of runs that differ in size alone."""
    sweep: tuple[int, int, int, int] = (8, 10, 200, 5)
    """Runs, clients of each, examples of a client, and rounds."""
    processes: tuple[int, tuple[int, ...]] = (2500, (1, 2, 4))
    """Clients, and the numbers of processes that share them."""
    matmul: int = 2048
    """Rows of the square matrices whose product gives the machine's peak."""
    epochs: int = 5
    batch_size: int = 50
    lr: float = 0.01
    head_lr: float = 0.1
    lam: float = 1.0
    momentum: float = 0.5
    weight_decay: float = 5e-4


FULL = Scale()
QUICK = Scale(
    clients=4,
    populations=((4, 1.0), (6, 0.5)),
    examples=30,
    epochs=1,
    repetitions=(2, 1),
    growth=((4, 1.0), (12, 0.5)),
    growth_examples=10,
    memory_growth=(6, 2),
    client_counts=((40, 80), 5, 20, 6),
    sweep=(2, 2, 20, 2),
    processes=(50, (1, 2)),
    matmul=128,
)
"""For tests: every measurement in seconds, its figures mean nothing."""


class Setup(NamedTuple):
    """Data shared by all sections.

    Attributes:
      scale: how large everything is.
      mesh: of all devices.
      peak: see `measure.matmul_peak`.
      notify: called with what is measured next.
      pfllib: folder of PFLlib; None without it.
      pythons: interpreters, see `__main__.Options`.
    """

    scale: Scale
    mesh: Mesh
    peak: dict[str, float]
    notify: Callable[[str], None]
    pfllib: Path | None
    pythons: Sequence[Path]


def usual_chunk() -> int | None:
    """Clients under one vmap on this backend; None for all at once."""
    return choices().chunk


@functools.cache
def dataset(name: str = "fashion_mnist") -> Dataset:
    """Synthetic images in the shape of a dataset, by default Fashion-MNIST."""
    return sources.load(name, "embedded", None, notify=lambda message: None)


def federation(clients: int, examples: int, name: str = "fashion_mnist") -> FederatedData:
    """Clients of equal size in FedPAC's groups."""
    data = dataset(name)
    parts = partition.grouped(data, clients, s=20, train_size=examples, test_size=examples, seed=0)
    return federated.federate(data, parts)


def dirichlet_sizes(clients: int) -> np.ndarray:
    """Training examples [N] of clients under FedPAC's Dirichlet partition with concentration 0.1."""
    parts = partition.make("dirichlet", dataset(), clients, seed=0, beta=0.1, protocol="fedpac", min_size=1)
    return np.array([len(rows) for rows in parts.train])


def network() -> Model:
    """FedPAC's CNN for Fashion-MNIST."""
    return models.fedpac_cnn(dataset().input_shape, dataset().num_classes)


def method(name: str, scale: Scale, epochs: int | None = None, **own: Any) -> Method:
    """A method over the network with the scale's hyper-parameters, and its own; FedAS's own are their defaults."""
    if name == "fedpac":
        own = {"head_lr": scale.head_lr, "lam": scale.lam} | own
    rates = {"lr": scale.lr, "momentum": scale.momentum, "weight_decay": scale.weight_decay}
    epochs = scale.epochs if epochs is None else epochs
    return make_method(name, network(), batch_size=scale.batch_size, epochs=epochs, **rates, **own)
