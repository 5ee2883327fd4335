"""Pathological partition: each client holds a few classes only (FedPAC C.7)."""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from pfl_jax.data import allocation
from pfl_jax.data.allocation import Partition, Sizes
from pfl_jax.errors import InvalidInput

PATHOLOGICAL_CLASSES = (3, 3, 5, 5, 8)
"""Classes of a client in each of the five groups of FedPAC C.7."""


def pathological(
    train_y: np.ndarray,
    test_y: np.ndarray,
    num_clients: int,
    *,
    protocol: Literal["random", "clustered"] = "random",
    train_size: Sizes = 600,
    test_size: Sizes | None = None,
    seed: int = 0,
    classes_per_group: Sequence[int] = PATHOLOGICAL_CLASSES,
) -> Partition:
    """Clients with a few classes only, in equal parts; their group sets how many (FedPAC C.7).

    Client i belongs to group i mod G. With protocol "random" every client has a class set of its own, with "clustered"
    the clients of a group share one, and no two groups have the same. A client's test examples are of its classes too.
    What does not divide evenly goes to classes drawn for the client. Examples are dealt as in `grouped`.

    Args:
      train_y: int [P_train], labels of the training examples.
      test_y: int [P_test], labels of the test examples.
      num_clients: N.
      protocol: "random" or "clustered".
      train_size: training examples of each client.
      test_size: test examples of each client; by default as many as training examples.
      seed: of class sets and shuffles.
      classes_per_group: classes of a client, for each group.

    Returns:
      The partition; sizes are exact.

    Raises:
      InvalidInput: an unknown protocol, groups of more classes than there are or of none, fewer different class sets
        than groups want, sizes below 1, or a client that needs more of a class than there is.

    Example:
      >>> import numpy as np
      >>> from pfl_jax.data import partition
      >>> y = np.repeat(np.arange(10), 100)
      >>> parts = partition.pathological(y, y, num_clients=5, train_size=60)
      >>> [len(np.unique(y[row])) for row in parts.train]
      [3, 3, 5, 5, 8]
    """
    allocation.check_clients(num_clients)
    num_classes = 1 + int(max(train_y.max(), test_y.max()))
    if not classes_per_group or min(classes_per_group) < 1 or max(classes_per_group) > num_classes:
        wanted_classes = "/".join(map(str, classes_per_group))
        raise InvalidInput(f"clients cannot have {wanted_classes} different classes where there are {num_classes}")
    rng = np.random.default_rng(seed)
    owners = range(num_clients)
    if protocol == "random":
        chosen = [
            rng.choice(num_classes, classes_per_group[client % len(classes_per_group)], replace=False)
            for client in owners
        ]
    elif protocol == "clustered":
        sets = _different_sets(rng, num_classes, classes_per_group)
        chosen = [rng.permutation(sets[client % len(sets)]) for client in owners]
    else:
        raise InvalidInput(f'protocol is "random" or "clustered", not "{protocol}"')
    parts = []
    for name, y, size, offset in (
        ("training", train_y, train_size, 0),
        ("test", test_y, train_size if test_size is None else test_size, len(train_y)),
    ):
        sizes = allocation.check_sizes(size, num_clients, name)
        wanted = [
            allocation.share_out(int(client_size), classes, num_classes)
            for client_size, classes in zip(sizes, chosen, strict=True)
        ]
        parts.append(allocation.deal(y, np.stack(wanted), rng, name, offset))
    return Partition(*parts)


def _different_sets(rng: np.random.Generator, num_classes: int, sizes: Sequence[int]) -> list[np.ndarray]:
    """Random distinct sets of classes, one of each given size."""
    for size in set(sizes):
        if math.comb(num_classes, size) < sizes.count(size):
            raise InvalidInput(
                f"there are not {sizes.count(size)} different sets of {size} of {num_classes} classes: "
                'use the protocol "random"'
            )
    sets: list[np.ndarray] = []
    for size in sizes:
        drawn = np.sort(rng.choice(num_classes, size, replace=False))
        while any(np.array_equal(drawn, other) for other in sets):
            drawn = np.sort(rng.choice(num_classes, size, replace=False))
        sets.append(drawn)
    return sets
