"""Partitions of a dataset over clients.

A partition is a function of a seed and of the labels or clients of a data set. Its indices count through the
training examples and on through the test examples, the order of the pool in `pfl_jax.data.federated`.

Sources: FedPAC (Xu, Tong & Huang 2023, "Personalized federated learning with feature alignment and classifier
collaboration"), sections B.2, C.7 and C.8; FedAS (Yang, Huang & Ye 2024, "FedAS: bridging inconsistency in personalized
federated learning"), section 4.1 and its released code.
"""

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import numpy as np

from pfl_jax.data import allocation, checks
from pfl_jax.data.allocation import Partition, Sizes
from pfl_jax.data.dirichlet import dirichlet
from pfl_jax.data.sources import Dataset
from pfl_jax.errors import InvalidInput
from pfl_jax.validation import Count, Range, check_arguments, unknown

PATHOLOGICAL_CLASSES = (3, 3, 5, 5, 8)
"""Number of classes per client in each of the five groups of FedPAC C.7."""


def dominant_classes(num_classes: int) -> list[np.ndarray]:
    """Groups of dominant classes of FedPAC B.2, for num_classes classes.

    10 classes: three consecutive classes from 0, 2, 4, 6 and 8 (the last group is 8, 9, 0). 62 classes (EMNIST):
    digits, upper case, lower case. Other numbers, which the paper does not have: five groups of consecutive classes of
    sizes as equal as possible.
    """
    if num_classes == 10:
        return [(start + np.arange(3)) % 10 for start in range(0, 10, 2)]
    if num_classes == 62:
        return [np.arange(0, 10), np.arange(10, 36), np.arange(36, 62)]
    return np.array_split(np.arange(num_classes), min(5, num_classes))


@check_arguments
def grouped(
    dataset: Dataset,
    num_clients: Count,
    *,
    s: Annotated[float, Range(0, 100)] = 20.0,
    train_size: Sizes = 600,
    test_size: Sizes | None = None,
    seed: int = 0,
    groups: Sequence[Sequence[int]] | None = None,
) -> Partition:
    """Partition in groups of clients that share dominant classes (FedPAC B.2); sizes are exact.

    s % of a client's examples are spread over all classes, the others over the dominant classes of its group. Client i
    belongs to group i mod G. Remainders go to classes drawn for the client, the same for its training and test
    examples. The examples of a class are assigned from a shuffled queue that starts over when it is exhausted, as in
    the released code: clients share examples only of classes that are exhausted.

    Args:
      dataset: the dataset, whose labels are classes.
      num_clients: N.
      s: percentage of examples spread over all classes, in [0, 100]; 100 is IID.
      train_size: training examples of each client.
      test_size: test examples of each client; by default as many as training examples.
      seed: seed of the shuffles.
      groups: classes of each group; by default `dominant_classes`.

    Raises:
      InvalidInput: a size below 1, or a client that needs more examples of a class than exist.

    Example:
      >>> import numpy as np
      >>> from pfl_jax import data
      >>> digits = data.load("digits")
      >>> parts = data.partition.grouped(digits, num_clients=5, s=20, train_size=100, test_size=50)
      >>> np.bincount(digits.train_y[parts.train[0]]).tolist()  # dominant classes 0, 1, 2, and two of each besides
      [29, 29, 28, 2, 2, 2, 2, 2, 2, 2]
    """
    train_y, test_y, num_classes = checks.both_labels(dataset)
    dominant = [np.unique(group) for group in (dominant_classes(num_classes) if groups is None else groups)]
    if not dominant or any(len(group) == 0 or group[0] < 0 or group[-1] >= num_classes for group in dominant):
        raise InvalidInput(f"groups are non-empty lists of classes between 0 and {num_classes - 1}")
    rng = np.random.default_rng(seed)
    extra_order = [rng.permutation(num_classes) for _ in range(num_clients)]
    dominant_order = [rng.permutation(dominant[client % len(dominant)]) for client in range(num_clients)]

    def wanted(client, size):
        uniform = round(size * s / 100)
        spread = allocation.split_evenly(uniform, extra_order[client], num_classes)
        return spread + allocation.split_evenly(size - uniform, dominant_order[client], num_classes)

    return allocation.assign_both(rng, (train_y, test_y), (train_size, test_size), num_clients, wanted)


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
    clients of a group share one class set, and no two groups have the same set. A client's test examples have the same
    classes. If a client's size is not divisible by its number of classes, random classes get one more example.
    Examples are assigned as in `grouped`.

    Args:
      dataset, num_clients, train_size, test_size, seed: see `grouped`.
      protocol: "random" or "clustered".
      classes_per_group: number of classes of a client, for each group.

    Raises:
      InvalidInput: see `grouped`; or a group has more classes than exist, or there are fewer class sets than groups.

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


@check_arguments
def iid(
    dataset: Dataset,
    num_clients: Count,
    *,
    train_size: Sizes | None = None,
    test_size: Sizes | None = None,
    seed: int = 0,
) -> Partition:
    """Random assignment of examples, independent of their class; clients share examples only if there are too few.

    Args:
      dataset, num_clients, seed: see `grouped`; the targets need not be classes.
      train_size: training examples of each client; by default all examples are divided evenly, up to one example.
      test_size: test examples of each client, likewise.

    Raises:
      InvalidInput: more clients than examples, or a client that needs more examples than exist.

    Example:
      >>> from pfl_jax import data
      >>> [len(row) for row in data.partition.iid(data.load("digits"), num_clients=4).train]
      [322, 322, 322, 321]
    """
    # All examples count as one class.
    labels = np.zeros(len(dataset.train_y), np.int32), np.zeros(len(dataset.test_y), np.int32)
    sizes = []
    for name, y, size in zip(("training", "test"), labels, (train_size, test_size), strict=True):
        if size is None and num_clients > len(y):
            raise InvalidInput(f"{num_clients} clients cannot share {len(y)} {name} examples: use fewer clients")
        sizes.append([len(part) for part in np.array_split(y, num_clients)] if size is None else size)
    rng = np.random.default_rng(seed)
    return allocation.assign_both(rng, labels, tuple(sizes), num_clients, lambda _, size: np.array([size]))


@check_arguments
def natural(dataset: Dataset) -> Partition:
    """Natural clients: each client has exactly its own rows, and the same number as in the data set.

    Args:
      dataset: data set with `train_client` and `test_client`, from `from_arrays` with clients or from `from_clients`.

    Raises:
      InvalidInput: the data set has no clients, or a client has no training or test rows.

    Example:
      >>> import numpy as np
      >>> from pfl_jax import data
      >>> dataset = data.from_arrays(np.eye(8), [0, 1] * 4, client=["x", "y", "x", "y", "x", "y", "x", "y"])
      >>> [len(rows) for rows in data.partition.natural(dataset).train]
      [3, 3]
    """
    train, test = dataset.train_client, dataset.test_client
    if train is None or test is None:
        raise InvalidInput(
            f"{dataset.description} has no clients of its own for the partition natural: name the client of each row, "
            "in from_arrays by client=, or take another partition, such as iid"
        )
    names = dataset.client_names or np.arange(1 + max(np.max(train), np.max(test)))
    return allocation.by_client(train, test, names)


PARTITIONS: dict[str, Callable[..., Partition]] = {
    "grouped": grouped,
    "pathological": pathological,
    "dirichlet": dirichlet,
    "iid": iid,
}
"""Partitions by name: (Dataset, num_clients, *, seed, ...) -> Partition."""


def make(name: str, dataset: Dataset, num_clients: int, *, seed: int = 0, **options: Any) -> Partition:
    """Partition of a dataset by name.

    Args:
      name: a key of PARTITIONS, or "natural" for the dataset's own clients.
      dataset, num_clients, seed: see `grouped`.
      **options: options of the partition function; None for the default.

    Raises:
      InvalidInput: the name is unknown, or the function rejects the options.
      TypeError: the function lacks one of the options, or needs another one.
    """
    if name not in (names := [*PARTITIONS, "natural"]):
        raise InvalidInput(unknown("partition", name, names))
    given = {key: value for key, value in options.items() if value is not None}
    if name == "natural":
        parts = natural(dataset, **given)
        if num_clients != len(dataset.client_names):
            raise InvalidInput(f"{dataset.description} has {len(dataset.client_names)} clients, not {num_clients}")
        return parts
    return PARTITIONS[name](dataset, num_clients, seed=seed, **given)


@check_arguments
def with_validation(
    parts: Partition, fraction: Annotated[float, Range(0, 1, above=True, below=True)], *, seed: int = 0
) -> Partition:
    """Set validation examples apart from the training examples of each client; test examples stay.

    Of n training examples, round(fraction n) are set apart, but at least one and at most n - 1: a client with a single
    training example keeps it and has no validation examples. One random order of all examples decides which ones. An
    example that several clients share (see `grouped`) becomes a validation example of all of them, so no client trains
    on another one's validation examples. The only exception are clients that would have no training example left: they
    keep one.

    Args:
      parts: a partition without validation examples.
      fraction: share of the training examples, above 0 and below 1.
      seed: seed of the random order.

    Raises:
      InvalidInput: there are validation examples already, or no client has two training examples.

    Example:
      >>> from pfl_jax import data
      >>> parts = data.partition.iid(data.load("digits"), num_clients=3, train_size=[34, 33, 33])
      >>> parts = data.partition.with_validation(parts, 0.1)
      >>> [len(row) for row in parts.train], [len(row) for row in parts.validation]
      ([31, 30, 30], [3, 3, 3])
    """
    if parts.validation is not None:
        raise InvalidInput("the partition has validation examples already")
    rows = [np.asarray(row) for row in parts.train]
    order = np.random.default_rng((seed, 3)).permutation(1 + max(int(row.max()) for row in rows))
    sizes = [min(max(round(fraction * len(row)), 1), len(row) - 1) for row in rows]
    if not any(sizes):
        raise InvalidInput("no client has two training examples, so none can be set apart for validation")
    lowest = [row[np.argsort(order[row])[:size]] for row, size in zip(rows, sizes, strict=True)]
    chosen = np.unique(np.concatenate(lowest))
    train, validation = [], []
    for row in rows:
        apart = np.isin(row, chosen)
        if apart.all():
            apart[np.argmax(order[row])] = False
        train.append(row[~apart])
        validation.append(row[apart])
    return parts._replace(train=train, validation=validation)


def num_groups(name: str, num_classes: int) -> int:
    """Number of groups G, where client i is in group i mod G; partitions without groups use the number of `grouped`.

    Args:
      name: a key of PARTITIONS.
      num_classes: K.
    """
    return len(PATHOLOGICAL_CLASSES) if name == "pathological" else len(dominant_classes(num_classes))
