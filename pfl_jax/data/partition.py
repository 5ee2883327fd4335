"""Who holds which examples: partitions of a dataset over clients.

A partition is a function of the labels and a seed. Indices count through the training examples and then through the
test examples, the order of the pool in `pfl_jax.data.federated`.

Sources: FedPAC (Xu, Tong & Huang 2023, "Personalized federated learning with feature alignment and classifier
collaboration"), sections B.2 and C.8; FedAS (Yang, Huang & Ye 2024, "FedAS: bridging inconsistency in personalized
federated learning"), section 4.1 and its released code.
"""

import difflib
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from pfl_jax.data import dirichlet_counts
from pfl_jax.data.sources import Dataset
from pfl_jax.errors import InvalidInput

Sizes: TypeAlias = int | Sequence[int] | np.ndarray
"""One size for all clients, or one for each."""

FEDAS_TRAIN_SHARE = 0.75
FEDAS_BATCH = 10
"""FedAS's code wants a batch of 10 in the smallest client's test quarter: 10 / (1 - 0.75) = 40 examples."""


class Partition(NamedTuple):
    """The examples of each client.

    Attributes:
      train: for each client, int64 [n_i], distinct indices into (training examples, then test examples).
      test: for each client, int64 [t_i], likewise.
    """

    train: list[np.ndarray]
    test: list[np.ndarray]


def dominant_classes(num_classes: int) -> list[np.ndarray]:
    """The groups of dominant classes of FedPAC B.2.

    Ten classes: three consecutive ones from 0, 2, 4, 6 and 8 (the last group is 8, 9, 0). 62 classes (EMNIST):
    digits, upper case, lower case. The paper has no others; for them five groups of consecutive classes that share
    the classes out evenly.
    """
    if num_classes == 10:
        return [(start + np.arange(3)) % 10 for start in range(0, 10, 2)]
    if num_classes == 62:
        return [np.arange(0, 10), np.arange(10, 36), np.arange(36, 62)]
    return np.array_split(np.arange(num_classes), min(5, num_classes))


def grouped(
    train_y: np.ndarray,
    test_y: np.ndarray,
    num_clients: int,
    *,
    s: float = 20.0,
    train_size: Sizes = 600,
    test_size: Sizes | None = None,
    seed: int = 0,
    groups: Sequence[Sequence[int]] | None = None,
) -> Partition:
    """Groups of clients that share dominant classes (FedPAC B.2).

    s % of a client's examples are spread over all classes, the others over the dominant classes of its group; client
    i belongs to group i mod G. What does not divide evenly goes to classes drawn for the client, the same for its
    training and test examples. The examples of a class are dealt from a shuffled queue that starts over when it is
    exhausted, as in the released code: clients share examples only of classes in such demand.

    Args:
      train_y: int [P_train], labels of the training examples.
      test_y: int [P_test], labels of the test examples.
      num_clients: N.
      s: percentage in [0, 100]; 100 is IID.
      train_size: training examples of each client.
      test_size: test examples of each client; by default as many as training examples.
      seed: of the shuffles.
      groups: classes of each group; by default `dominant_classes`.

    Returns:
      The partition; sizes are exact.

    Raises:
      InvalidInput: s outside [0, 100], sizes below 1, or a client that needs more of a class than there is.
    """
    _check_clients(num_clients)
    if not 0 <= s <= 100:
        raise InvalidInput(f"s is a percentage between 0 and 100, not {s:g}")
    num_classes = 1 + int(max(train_y.max(), test_y.max()))
    dominant = [np.unique(group) for group in (dominant_classes(num_classes) if groups is None else groups)]
    if not dominant or any(len(group) == 0 or group[0] < 0 or group[-1] >= num_classes for group in dominant):
        raise InvalidInput(f"groups are non-empty lists of classes between 0 and {num_classes - 1}")
    rng = np.random.default_rng(seed)
    extra_order = [rng.permutation(num_classes) for _ in range(num_clients)]
    dominant_order = [rng.permutation(dominant[client % len(dominant)]) for client in range(num_clients)]
    parts = []
    for name, y, size, offset in (
        ("training", train_y, train_size, 0),
        ("test", test_y, train_size if test_size is None else test_size, len(train_y)),
    ):
        wanted = np.zeros((num_clients, num_classes), np.int64)
        for client, client_size in enumerate(_sizes(size, num_clients, name)):
            uniform = round(client_size * s / 100)
            wanted[client] = _share(uniform, extra_order[client], num_classes)
            wanted[client] += _share(client_size - uniform, dominant_order[client], num_classes)
        parts.append(_deal(y, wanted, rng, name, offset))
    return Partition(*parts)


def dirichlet(
    train_y: np.ndarray,
    test_y: np.ndarray,
    num_clients: int,
    *,
    beta: float,
    protocol: Literal["fedpac", "fedas"] = "fedpac",
    min_size: int | None = None,
    train_size: Sizes | None = None,
    test_size: Sizes | None = None,
    keep_split: bool = False,
    seed: int = 0,
) -> Partition:
    """Each class divided over the clients by proportions p_k ~ Dir_N(beta, ..., beta).

    protocol "fedpac" (FedPAC C.8): the whole training set by p_k, and the test set by the same p_k.

    protocol "fedas" (FedAS 4.1 and its released code): training and test examples merged; a client that already has
    its share P / N gets nothing of further classes; drawn again until the smallest client has `min_size`; each
    client's examples shuffled and divided 75/25 into training and test. With `keep_split` the client's training
    examples are those of its examples that come from the training set, and its test examples the others: for
    datasets whose test set must stay apart, as that of the embedded digits, whose handwriting is different.

    Args:
      train_y: int [P_train], labels of the training examples.
      test_y: int [P_test], labels of the test examples.
      num_clients: N.
      beta: concentration, positive; the smaller, the more the clients differ.
      protocol: "fedpac" or "fedas".
      min_size: smallest number of a client's examples (training ones for "fedpac", all for "fedas"); by default 10
        for "fedpac" and 40 for "fedas".
      train_size: at most so many training examples for a client; by default no bound.
      test_size: at most so many test examples; by default no bound.
      keep_split: see above; "fedpac" never mixes the two sets.
      seed: of proportions and shuffles.

    Returns:
      The partition: disjoint, and complete where sizes are not bounded. Every client has a training and a test
      example.

    Raises:
      InvalidInput: options out of range, or no draw that gives every client its minimum in
        `dirichlet_counts.MAX_TRIES` tries.
    """
    _check_clients(num_clients)
    if not (np.isfinite(beta) and beta > 0):
        raise InvalidInput(f"beta is a positive number, not {beta:g}")
    rng = np.random.default_rng(seed)
    num_classes = 1 + int(max(train_y.max(), test_y.max()))
    totals = np.bincount(train_y, minlength=num_classes), np.bincount(test_y, minlength=num_classes)
    if protocol == "fedpac":
        counts = dirichlet_counts.by_set(rng, *totals, num_clients, beta, 10 if min_size is None else min_size)
    elif protocol == "fedas":
        least = round(FEDAS_BATCH / (1 - FEDAS_TRAIN_SHARE)) if min_size is None else min_size
        counts = dirichlet_counts.merged(rng, *totals, num_clients, beta, least)
    else:
        raise InvalidInput(f'protocol is "fedpac" or "fedas", not "{protocol}"')
    if protocol == "fedpac" or keep_split:
        train = _deal(train_y, counts.train, rng, "training", 0)
        test = _deal(test_y, counts.test, rng, "test", len(train_y))
    else:
        hands = _deal(np.concatenate([train_y, test_y]), counts.train + counts.test, rng, "", 0)
        train, test = _divide(rng, hands)
    return Partition(_cap(rng, train, train_size, "training"), _cap(rng, test, test_size, "test"))


def iid(
    train_y: np.ndarray,
    test_y: np.ndarray,
    num_clients: int,
    *,
    train_size: Sizes | None = None,
    test_size: Sizes | None = None,
    seed: int = 0,
) -> Partition:
    """Examples dealt at random, whatever their class.

    Args:
      train_y: int [P_train], labels of the training examples.
      test_y: int [P_test], labels of the test examples.
      num_clients: N.
      train_size: training examples of each client; by default all are shared out, to within one evenly.
      test_size: test examples of each client, likewise.
      seed: of the shuffles.

    Returns:
      The partition. Clients share examples only where together they ask for more than there are.

    Raises:
      InvalidInput: more clients than examples, or a client that asks for more examples than there are.
    """
    _check_clients(num_clients)
    rng = np.random.default_rng(seed)
    parts = []
    for name, y, size, offset in (("training", train_y, train_size, 0), ("test", test_y, test_size, len(train_y))):
        if size is None:
            if num_clients > len(y):
                raise InvalidInput(f"{num_clients} clients cannot share {len(y)} {name} examples: use fewer clients")
            sizes = np.full(num_clients, len(y) // num_clients)
            sizes[: len(y) % num_clients] += 1
        else:
            sizes = _sizes(size, num_clients, name)
        parts.append(_deal(np.zeros(len(y), np.int64), sizes[:, None], rng, name, offset))
    return Partition(*parts)


PARTITIONS: dict[str, Callable[..., Partition]] = {"grouped": grouped, "dirichlet": dirichlet, "iid": iid}
"""Partitions by name: (train_y, test_y, num_clients, *, seed, ...) -> Partition."""


def make(name: str, dataset: Dataset, num_clients: int, *, seed: int = 0, **options: Any) -> Partition:
    """The named partition of a dataset.

    Args:
      name: a key of PARTITIONS.
      dataset: whose labels are divided; its `keep_split` is honoured.
      num_clients: N.
      seed: of the partition.
      **options: the partition function's own; None stands for its default.

    Returns:
      The partition.

    Raises:
      InvalidInput: an unknown name, or options that the function refuses.
    """
    if name not in PARTITIONS:
        near = difflib.get_close_matches(name, PARTITIONS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InvalidInput(f"unknown partition '{name}' (there are {', '.join(PARTITIONS)}){hint}")
    given = {key: value for key, value in options.items() if value is not None}
    if name == "dirichlet":
        given.setdefault("keep_split", dataset.keep_split)
    return PARTITIONS[name](dataset.train_y, dataset.test_y, num_clients, seed=seed, **given)


def _check_clients(num_clients: int) -> None:
    if num_clients < 1:
        raise InvalidInput(f"the number of clients is at least 1, not {num_clients}")


def _sizes(size: Sizes, num_clients: int, name: str) -> np.ndarray:
    """Sizes as int64 [N], checked."""
    sizes = np.asarray(size)
    if sizes.ndim == 0:
        sizes = np.full(num_clients, sizes)
    if sizes.shape != (num_clients,):
        raise InvalidInput(f"{name} sizes are one number, or one for each of {num_clients} clients, not {sizes.shape}")
    if not np.issubdtype(sizes.dtype, np.integer) or sizes.min() < 1:
        raise InvalidInput(f"every client needs a whole number of {name} examples, at least 1")
    return sizes.astype(np.int64)


def _share(total: int, classes: np.ndarray, num_classes: int) -> np.ndarray:
    """`total` examples over `classes`, evenly; the remainder goes to the first of them. int64 [K]."""
    counts = np.zeros(num_classes, np.int64)
    counts[classes] = total // len(classes)
    counts[classes[: total % len(classes)]] += 1
    return counts


def _deal(y: np.ndarray, wanted: np.ndarray, rng: np.random.Generator, name: str, offset: int) -> list[np.ndarray]:
    """Deals each class's examples, in shuffled order and round and round, to clients that want `wanted` [N, K]."""
    hands: list[list[np.ndarray]] = [[] for _ in wanted]
    for label, demand in enumerate(wanted.T):
        queue = offset + rng.permutation(np.flatnonzero(y == label))
        if demand.max() > len(queue):
            what = f"{name} examples of class {label}" if wanted.shape[1] > 1 else f"{name} examples"
            raise InvalidInput(f"a client needs {demand.max()} {what}, there are {len(queue)}: lower its size")
        starts = np.cumsum(demand) - demand
        for hand, start, count in zip(hands, starts, demand, strict=True):
            # A stretch no longer than the queue never meets the same example twice.
            hand.append(queue[(start + np.arange(count)) % max(len(queue), 1)])
    return [np.concatenate(hand) for hand in hands]


def _divide(rng: np.random.Generator, hands: list[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Each hand shuffled and divided 75/25 into training and test examples, at least one of either."""
    shuffled = [rng.permutation(hand) for hand in hands]
    cuts = [min(max(round(FEDAS_TRAIN_SHARE * len(hand)), 1), len(hand) - 1) for hand in shuffled]
    pairs = list(zip(shuffled, cuts, strict=True))
    return [hand[:cut] for hand, cut in pairs], [hand[cut:] for hand, cut in pairs]


def _cap(rng: np.random.Generator, hands: list[np.ndarray], size: Sizes | None, name: str) -> list[np.ndarray]:
    """At most `size` examples of each hand, drawn at random."""
    if size is None:
        return hands
    limits = _sizes(size, len(hands), name)
    return [
        hand if len(hand) <= limit else rng.permutation(hand)[:limit] for hand, limit in zip(hands, limits, strict=True)
    ]
