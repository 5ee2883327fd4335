"""Common steps of partitions: client sizes, even shares of classes, and assignment of shuffled examples."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from pfl_jax.errors import InvalidInput
from pfl_jax.validation import Count, check_arguments

Sizes: TypeAlias = int | Sequence[int] | np.ndarray
"""One size for all clients, or a size for each client."""


class Partition(NamedTuple):
    """Examples of each client, as indices into the dataset's training and test examples.

    Clients may share examples, but no client is tested on an example that any client trains on.

    Attributes:
      train: distinct indices of each client's training examples, int64 [n_i].
      test: distinct indices of each client's test examples, int64 [t_i].
      validation: distinct indices of each client's validation examples, int64 [v_i], which may be empty; None for a
        partition without them. They are training examples set apart, see `pfl_jax.data.partition.with_validation`.
      pooled: True if all indices count through the training examples and on through the test examples, which begin at
        P_train, as from the functions in `pfl_jax.data.partition`. False if each table counts within its own set.
      client_names: names of the clients if they come with the data; () otherwise.
    """

    train: Sequence[np.ndarray]
    test: Sequence[np.ndarray]
    validation: Sequence[np.ndarray] | None = None
    pooled: bool = False
    client_names: tuple[str, ...] = ()


@check_arguments
def draw_sizes(choices: Sequence[int], num_clients: Count, seed: int = 0) -> np.ndarray:
    """Size of each client, int64 [N], drawn uniformly from the choices, {300, 600, 1200} in the paper (FedPAC C.6)."""
    sizes = np.asarray(choices)
    if sizes.size == 0 or sizes.min() < 1:
        raise InvalidInput("sizes to choose from are whole numbers of at least 1")
    # A stream that is independent of the partition's.
    return np.random.default_rng((seed, 2)).choice(sizes, num_clients).astype(np.int64)


def check_sizes(size: Sizes, num_clients: int, name: str) -> np.ndarray:
    """Sizes of all clients as int64 [N]; raise InvalidInput if they cannot be used."""
    sizes = np.asarray(size)
    if sizes.ndim == 0:
        sizes = np.full(num_clients, sizes)
    if sizes.shape != (num_clients,):
        raise InvalidInput(f"{name} sizes are one number, or one for each of {num_clients} clients, not {sizes.shape}")
    if not np.issubdtype(sizes.dtype, np.integer) or sizes.min() < 1:
        raise InvalidInput(f"every client needs a whole number of {name} examples, at least 1")
    return sizes.astype(np.int64)


def split_evenly(total: int, classes: np.ndarray, num_classes: int) -> np.ndarray:
    """Numbers of examples int64 [K] that divide `total` evenly over `classes`; the first classes get the remainder."""
    counts = np.zeros(num_classes, np.int64)
    counts[classes] = total // len(classes)
    counts[classes[: total % len(classes)]] += 1
    return counts


def assign(y: np.ndarray, wanted: np.ndarray, rng: np.random.Generator, name: str, offset: int) -> list[np.ndarray]:
    """Assign shuffled examples of each class to clients that need `wanted` [N, K] of them.

    Each class is a queue from which the clients take in turn; it starts over when it is exhausted.
    """
    assigned: list[list[np.ndarray]] = [[] for _ in wanted]
    for label, demand in enumerate(wanted.T):
        queue = offset + rng.permutation(np.flatnonzero(y == label))
        if demand.max() > len(queue):
            what = f"{name} examples of class {label}" if wanted.shape[1] > 1 else f"{name} examples"
            raise InvalidInput(f"a client needs {demand.max()} {what}, there are {len(queue)}: lower its size")
        starts = np.cumsum(demand) - demand
        for examples, start, count in zip(assigned, starts, demand, strict=True):
            # A client takes at most the whole queue, so it never gets the same example twice.
            examples.append(queue[(start + np.arange(count)) % max(len(queue), 1)])
    return [np.concatenate(examples) for examples in assigned]


def assign_both(
    rng: np.random.Generator,
    labels: tuple[np.ndarray, np.ndarray],
    sizes: tuple[Sizes, Sizes | None],
    num_clients: int,
    wanted: Callable[[int, int], np.ndarray],
) -> Partition:
    """Assign training and test examples, by default the same number of both.

    `wanted` maps a client and its size to the number of examples that it needs of each class [K].
    """
    parts, given = [], (sizes[0], sizes[0] if sizes[1] is None else sizes[1])
    for name, y, size, offset in zip(("training", "test"), labels, given, (0, len(labels[0])), strict=True):
        counts = [wanted(*client) for client in enumerate(check_sizes(size, num_clients, name).tolist())]
        parts.append(assign(y, np.stack(counts), rng, name, offset))
    return Partition(*parts, pooled=True)


def by_client(train: np.ndarray, test: np.ndarray, names: Sequence[str] | np.ndarray) -> Partition:
    """Partition of rows by the numbers of their clients, int [P_train] and [P_test]; `names` of clients for errors."""
    parts = []
    for what, own, offset in (("training", train, 0), ("test", test, len(train))):
        counts = np.bincount(own, minlength=len(names))
        if counts.min() == 0:
            raise InvalidInput(f"client {names[int(counts.argmin())]} has no {what} rows")
        order = np.argsort(own, kind="stable")
        parts.append([offset + rows for rows in np.split(order, np.cumsum(counts)[:-1])])
    return Partition(*parts, pooled=True, client_names=tuple(map(str, names)))
