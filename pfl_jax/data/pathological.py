"""Pathological partition: each client has only a few classes (FedPAC C.7)."""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from pfl_jax.data import allocation, checks
from pfl_jax.data.allocation import Partition, Sizes
from pfl_jax.data.sources import Dataset
from pfl_jax.errors import InvalidInput
from pfl_jax.validation import Count, check_arguments

PATHOLOGICAL_CLASSES = (3, 3, 5, 5, 8)
"""Number of classes per client in each of the five groups of FedPAC C.7."""


@check_arguments
def pathological(
    dataset: Dataset,
    num_clients: Count,
    *,
    protocol: Literal["random", "clustered"] = "random",
    train_size: Sizes = 600,
    test_size: Sizes | None = None,
    seed: int = 0,
    classes_per_group: Sequence[int] = PATHOLOGICAL_CLASSES,
) -> Partition:
    """Clients of exact sizes with few classes, in equal shares; the group gives the number of classes (FedPAC C.7).

    Client i belongs to group i mod G. With protocol "random" a class set is drawn for each client; with "clustered" all
    clients of a group share one class set, and no two groups have the same set. A client's test examples are of the
    same classes. If a client's size is not divisible by its number of classes, random ones of them get one more
    example. Examples are assigned as in `grouped`.

    Args:
      dataset, num_clients, train_size, test_size, seed: see `pfl_jax.data.partition.grouped`.
      protocol: "random" or "clustered".
      classes_per_group: number of classes of a client, for each group.

    Raises:
      InvalidInput: the protocol is unknown; a group has no class or more classes than exist; there are fewer class sets
        than groups; a size is below 1; a client needs more examples of a class than exist; or there are no classes.

    Example:
      >>> import numpy as np
      >>> from pfl_jax import data
      >>> digits = data.load("digits")
      >>> parts = data.partition.pathological(digits, num_clients=5, train_size=60, test_size=20)
      >>> [len(np.unique(digits.train_y[row])) for row in parts.train]
      [3, 3, 5, 5, 8]
    """
    train_y, test_y, num_classes = checks.both_labels(dataset)
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
    else:
        sets = _different_sets(rng, num_classes, classes_per_group)
        chosen = [rng.permutation(sets[client % len(sets)]) for client in owners]
    return allocation.assign_both(
        *(rng, (train_y, test_y), (train_size, test_size), num_clients),
        lambda client, size: allocation.split_evenly(size, chosen[client], num_classes),
    )


def _different_sets(rng: np.random.Generator, num_classes: int, sizes: Sequence[int]) -> list[list[int]]:
    """Random distinct sets of classes, one of each given size."""
    for size in set(sizes):
        if math.comb(num_classes, size) < sizes.count(size):
            raise InvalidInput(
                f"there are not {sizes.count(size)} different sets of {size} of {num_classes} classes: "
                'use the protocol "random"'
            )
    sets: list[list[int]] = []
    while len(sets) < len(sizes):
        drawn = np.sort(rng.choice(num_classes, sizes[len(sets)], replace=False)).tolist()
        if drawn not in sets:
            sets.append(drawn)
    return sets
