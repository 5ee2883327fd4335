"""Workload of the benchmark: sizes, the federation, the network and its operations."""

import functools
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax

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
    """All take part."""
    examples: int = 600
    """Training and as many test examples of a client."""
    repetitions: tuple[int, int] = (5, 3)
    """Of what is compared, interleaved: of short work, and of whole rounds."""
    matmul: int = 2048
    """Rows of the square matrices whose product gives the machine's peak."""
    epochs: int = 5
    batch_size: int = 50
    lr: float = 0.01
    head_lr: float = 0.1
    lam: float = 1.0
    momentum: float = 0.5
    weight_decay: float = 5e-4
    cohorts: tuple[int, ...] = (5, 20, 50, 100, 300)
    """Numbers of clients for whom head weights are computed."""


FULL = Scale()
QUICK = Scale(clients=4, examples=30, epochs=1, repetitions=(2, 1), matmul=128, cohorts=(2, 3))
"""For tests: every measurement in seconds, its figures mean nothing."""


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


def network() -> Model:
    """FedPAC's CNN for Fashion-MNIST."""
    return models.fedpac_cnn(dataset().input_shape, dataset().num_classes)


class Linen(nn.Module):
    """The same as users write it in flax.linen, with activations before pooling."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.max_pool(nn.leaky_relu(nn.Conv(16, (5, 5), padding="VALID")(x)), (2, 2), (2, 2))
        x = nn.max_pool(nn.leaky_relu(nn.Conv(32, (5, 5), padding=((1, 1), (1, 1)))(x)), (2, 2), (2, 2))
        x = nn.leaky_relu(nn.Dense(128)(x.reshape(len(x), -1)))
        return nn.Dense(10, name="head")(x)


def method(name: str, scale: Scale, epochs: int | None = None) -> Method:
    """A method over the network with the scale's hyper-parameters; FedAS's own are their defaults."""
    own: dict[str, Any] = {"head_lr": scale.head_lr, "lam": scale.lam} if name == "fedpac" else {}
    rates = {"lr": scale.lr, "momentum": scale.momentum, "weight_decay": scale.weight_decay}
    epochs = scale.epochs if epochs is None else epochs
    return make_method(name, network(), batch_size=scale.batch_size, epochs=epochs, **rates, **own)
