"""A federation's data: one pool of examples on the device, and for each client the rows that are its own."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pfl_jax.base import ClientData
from pfl_jax.data.partition import Partition
from pfl_jax.data.sources import Dataset
from pfl_jax.errors import InvalidInput

Split = Literal["train", "test"]


class FederatedData(NamedTuple):
    """Examples as one pool, clients as rows of index tables; a pytree of arrays.

    Clients differ in size: row i of a table holds `count[i]` indices into the pool, then zeros.

    Attributes:
      x: uint8 [P, H, W, C], the pool: training examples, then test examples.
      y: int32 [P].
      train_index: int32 [N, n_max].
      train_count: int32 [N].
      test_index: int32 [N, t_max].
      test_count: int32 [N].
      mean: float32 [C], of pixels in [0, 1].
      std: float32 [C].
    """

    x: jax.Array
    y: jax.Array
    train_index: jax.Array
    train_count: jax.Array
    test_index: jax.Array
    test_count: jax.Array
    mean: jax.Array
    std: jax.Array

    @property
    def num_clients(self) -> int:
        """N."""
        return self.train_index.shape[0]


def federate(dataset: Dataset, partition: Partition) -> FederatedData:
    """Puts a dataset and its partition onto the device.

    Examples that no client holds are left out of the pool (a few thousand of EMNIST's 814,255 are typical), so the
    tables number the examples in use, in the pool's order.

    Args:
      dataset: the examples.
      partition: for each client, indices into (training examples, then test examples).

    Returns:
      The federation's data.

    Raises:
      InvalidInput: an index outside the pool, or a client without training or test examples.
    """
    size = len(dataset.train_y) + len(dataset.test_y)
    for name, rows in (("training", partition.train), ("test", partition.test)):
        for client, row in enumerate(rows):
            if len(row) == 0:
                raise InvalidInput(f"client {client} has no {name} examples: use fewer clients")
            if row.min() < 0 or row.max() >= size:
                raise InvalidInput(f"client {client} has {name} examples outside the pool of {size}")
    used = np.unique(np.concatenate([*partition.train, *partition.test]))
    from_train, from_test = np.split(used, [np.searchsorted(used, len(dataset.train_y))])
    from_test = from_test - len(dataset.train_y)
    train_index, train_count = _table(partition.train, used)
    test_index, test_count = _table(partition.test, used)
    return FederatedData(
        x=jnp.asarray(np.concatenate([dataset.train_x[from_train], dataset.test_x[from_test]])),
        y=jnp.asarray(np.concatenate([dataset.train_y[from_train], dataset.test_y[from_test]]), jnp.int32),
        train_index=train_index,
        train_count=train_count,
        test_index=test_index,
        test_count=test_count,
        mean=jnp.asarray(dataset.mean, jnp.float32),
        std=jnp.asarray(dataset.std, jnp.float32),
    )


def _table(rows: Sequence[np.ndarray], used: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Index table [N, n_max], padded with zeros, and counts [N]; `used` [P] lists the pool's examples, sorted."""
    counts = np.array([len(row) for row in rows], np.int32)
    table = np.zeros((len(rows), counts.max()), np.int32)
    for client, row in enumerate(rows):
        table[client, : len(row)] = np.searchsorted(used, row)
    return jnp.asarray(table), jnp.asarray(counts)


def client_data(data: FederatedData, client: int | jax.Array, split: Split) -> ClientData:
    """The examples of one client, normalised: x = (pixel / 255 - mean) / std.

    Args:
      data: the federation's data.
      client: int, may be traced; under vmap it gathers several clients.
      split: "train" or "test".

    Returns:
      ClientData with x float32 [n_max, H, W, C], y int32 [n_max] and mask [n_max]. Rows past the client's count
      repeat the pool's first example.
    """
    if split == "train":
        index, count = data.train_index[client], data.train_count[client]
    elif split == "test":
        index, count = data.test_index[client], data.test_count[client]
    else:
        raise InvalidInput(f'split is "train" or "test", not "{split}"')
    x = (data.x[index].astype(jnp.float32) / 255 - data.mean) / data.std
    return ClientData(x=x, y=data.y[index], mask=jnp.arange(index.shape[-1]) < count)


def class_table(data: FederatedData, split: Split = "train", num_classes: int | None = None) -> np.ndarray:
    """How many examples of each class each client holds, for reports and pictures.

    Args:
      data: the federation's data.
      split: "train" or "test".
      num_classes: K; by default the classes up to the largest label in the pool.

    Returns:
      int64 [N, K].
    """
    y = np.asarray(data.y)
    tables = {"train": (data.train_index, data.train_count), "test": (data.test_index, data.test_count)}
    index, count = map(np.asarray, tables[split])
    width = int(y.max()) + 1 if num_classes is None else num_classes
    return np.stack([np.bincount(y[row[:size]], minlength=width) for row, size in zip(index, count, strict=True)])
