"""Dirichlet partition: each class is divided over the clients in random proportions (FedPAC C.8, FedAS 4.1).

Counts and totals have a leading axis of two: the training and the test set.
"""

import warnings
from collections.abc import Callable
from typing import Literal, TypeAlias

import numpy as np

from pfl_jax.data import allocation, checks
from pfl_jax.data.allocation import Partition, Sizes
from pfl_jax.data.sources import Dataset
from pfl_jax.errors import InvalidInput
from pfl_jax.validation import Count, Positive, check_arguments

Protocol: TypeAlias = Literal["fedpac", "fedas"]
"""Variant of a paper, see `dirichlet`."""

MAX_TRIES = 1_000
FIRST_TRIES = 20
HOPELESS = 14
"""Mean number of too small clients in the first draws, above which no other draws follow. If sizes were independent,
a draw would have no such client with probability exp(-14), and one of a thousand draws with probability 1/1000."""

FEDAS_MIN_SIZE = 40
"""Minimum number of a client's examples in FedAS's code: a batch of 10 test examples / (1 - 0.75)."""

FEDAS_TRAIN_SHARE = 0.75
"""Share of a client's examples that FedAS uses for training (its released code)."""


@check_arguments
def dirichlet(
    dataset: Dataset,
    num_clients: Count,
    *,
    beta: Positive,
    protocol: Protocol = "fedpac",
    min_size: int | None = None,
    train_size: Sizes | None = None,
    test_size: Sizes | None = None,
    seed: int = 0,
) -> Partition:
    """Division of each class over the clients in proportions p_k ~ Dir_N(beta, ..., beta).

    Protocol "fedpac" (FedPAC C.8): training set and test set are both divided by the same p_k.

    Protocol "fedas" (FedAS 4.1 and its released code): training and test set are merged. A client that already has
    P / N examples gets none of the remaining classes. The proportions are drawn again until the smallest client has
    `min_size` examples. Each client's examples are shuffled and divided 75/25 into training and test examples. If a
    dataset has `keep_split`, such as the embedded digits, which are split by writer, a client's examples from the
    training set are its training examples and the others its test examples.

    Clients share no examples, and have at least one for training and one for testing. All examples are used unless
    sizes are limited. If none of MAX_TRIES draws gives every client its minimum, or the first FIRST_TRIES draws show
    that none will, examples of the last draw are moved from the largest clients to the clients that are too small; a
    warning says how many.

    Args:
      dataset, num_clients, seed: see `pfl_jax.data.partition.grouped`.
      beta: concentration, positive; clients differ more for smaller values.
      protocol: "fedpac" or "fedas".
      min_size: minimum number of a client's examples (training examples for "fedpac", all for "fedas"); by default 10
        for "fedpac" and 40 for "fedas".
      train_size: maximum number of a client's training examples; by default unlimited.
      test_size: maximum number of a client's test examples; by default unlimited.

    Raises:
      InvalidInput: an option is out of range, or there are too few examples for this number of clients of minimum size.

    Example:
      >>> from pfl_jax import data
      >>> digits = data.load("digits")
      >>> parts = data.partition.dirichlet(digits, num_clients=5, beta=0.1)
      >>> sum(len(row) for row in parts.train) == len(digits.train_y)  # each example belongs to one client
      True
    """
    train_y, test_y, num_classes = checks.both_labels(dataset)
    rng = np.random.default_rng(seed)
    totals = np.stack([np.bincount(y, minlength=num_classes) for y in (train_y, test_y)])
    if protocol == "fedpac":
        divide, needs = _separate_sets, (max(10 if min_size is None else min_size, 1), 1, 0)
    else:
        divide, needs = _merged_sets, (1, 1, max(FEDAS_MIN_SIZE if min_size is None else min_size, 2))
    counts = _draw(rng, totals, divide, num_clients, beta, needs)
    if protocol == "fedpac" or dataset.keep_split:
        train = allocation.assign(train_y, counts[0], rng, "training", 0)
        test = allocation.assign(test_y, counts[1], rng, "test", len(train_y))
    else:
        assigned = allocation.assign(np.concatenate([train_y, test_y]), counts.sum(axis=0), rng, "", 0)
        cuts = [min(max(round(FEDAS_TRAIN_SHARE * len(rows)), 1), len(rows) - 1) for rows in assigned]
        halves = [np.split(rng.permutation(rows), [cut]) for rows, cut in zip(assigned, cuts, strict=True)]
        train, test = ([both[half] for both in halves] for half in (0, 1))
    return Partition(
        _limited(rng, train, train_size, "training"),
        _limited(rng, test, test_size, "test"),
        pooled=True,
    )


def _draw(
    rng: np.random.Generator,
    totals: np.ndarray,
    divide: Callable[[np.ndarray, np.ndarray], np.ndarray],
    num_clients: int,
    beta: float,
    needs: tuple[int, int, int],
) -> np.ndarray:
    """Counts int64 [2, N, K] of the first draw of proportions p_k ~ Dir_N(beta) that serves all clients.

    All proportions are drawn again if a client is too small, as in the papers' code. If no draw serves all, the
    last one is completed, with a warning; InvalidInput if there are too few examples. `totals` int [2, K] are
    the examples of each class, `divide` is `_separate_sets` or `_merged_sets`, and `needs` has the least number of a
    client's training examples, of its test examples, and of both together.
    """
    available = np.array([*totals.sum(axis=1), totals.sum()])
    if (num_clients * np.array(needs) > available).any():
        kinds = zip(needs, available, ("training examples", "test examples", "examples"), strict=True)
        few = " and ".join(f"{need} of the {all_} {kind}" for need, all_, kind in kinds if need)
        raise InvalidInput(f"{num_clients} clients cannot each have {few}: use fewer clients or a smaller min_size")
    counts, too_small = np.zeros((2, num_clients, totals.shape[1]), np.int64), list[int]()
    # With a thousand clients a thousand draws take a minute.
    while len(too_small) < MAX_TRIES and not (len(too_small) == FIRST_TRIES and np.mean(too_small) > HOPELESS):
        counts = divide(rng.dirichlet(np.full(num_clients, beta), totals.shape[1]), totals)
        train, test = counts.sum(axis=2)
        too_small.append(int((np.stack([train, test, train + test], axis=1) < needs).any(axis=1).sum()))
        if not too_small[-1]:
            return counts
    moved = _complete(counts, needs)
    warnings.warn(
        f"none of {len(too_small)} Dirichlet draws with beta = {beta:g} serves each of {num_clients} clients: "
        f"{moved} of the {available[2]} were moved from the largest clients to those that were too small",
        stacklevel=2,
    )
    return counts


def _complete(counts: np.ndarray, needs: tuple[int, int, int]) -> int:
    """Move examples one at a time from the largest to the smallest client until all have enough; number of moves."""
    moved = 0
    for which, need in (([0], needs[0]), ([1], needs[1]), ([0, 1], needs[2])):
        sizes = counts[which].sum(axis=(0, 2))
        while sizes.min() < need:
            giver, taker = int(sizes.argmax()), int(sizes.argmin())
            # From a set in which the giver has more than it needs, and from its largest class in this set.
            of_set = max(which, key=lambda index: counts[index, giver].sum() - needs[index])
            label = counts[of_set, giver].argmax()
            counts[of_set, [giver, taker], label] += [-1, 1]
            sizes[[giver, taker]] += [-1, 1]
            moved += 1
    return moved


def _separate_sets(proportions: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """Counts of FedPAC C.8 from proportions [K, N]: both sets are divided completely, by the same proportions."""
    return np.stack([_cut(proportions, of_set) for of_set in totals])


def _merged_sets(proportions: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """Counts of FedAS from proportions [K, N]: both sets merged, class by class; full clients get no more.

    A client's examples of a class come from the two sets in the proportion of their sizes in this class.
    """
    every = totals.sum(axis=0)
    both = _fill(proportions, every)
    # Rounding cumulative sums keeps the totals exact and every count between 0 and `both`.
    from_train = np.cumsum(both * (totals[0] / np.maximum(every, 1)), axis=0)
    train = np.diff(np.round(from_train).astype(np.int64), axis=0, prepend=0)
    return np.stack([train, both - train])


def _fill(proportions: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """Counts int64 [N, K] from proportions [K, N], class by class; clients with P / N examples or more get no more."""
    num_clients = proportions.shape[1]
    share = totals.sum() / num_clients
    held = np.zeros(num_clients, np.int64)
    wanted = np.zeros((num_clients, len(totals)), np.int64)
    for label in np.flatnonzero(totals):
        still_open = held < share
        weights = proportions[label] * still_open
        # If all of the proportions fall to full clients, the other clients share the class evenly.
        weights = weights / weights.sum() if weights.sum() > 0 else still_open / still_open.sum()
        wanted[:, label] = _cut(weights[None], totals[label : label + 1])[:, 0]
        held += wanted[:, label]
    return wanted


def _cut(proportions: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """Integers int64 [N, K] in the proportions [K, N] that add up to `totals` [K] over the clients."""
    # The small constant prevents rounding in 0.7 + 0.1 + 0.2 from losing one example of ten.
    ends = np.floor(np.cumsum(proportions, axis=1) * totals[:, None] + 1e-9).astype(np.int64)
    ends = np.minimum(ends, totals[:, None])
    # The remainder of the rounding goes to the last client with a positive proportion.
    last = proportions.shape[1] - 1 - np.argmax(proportions[:, ::-1] > 0, axis=1)
    ends = np.where(np.arange(proportions.shape[1]) >= last[:, None], totals[:, None], ends)
    return np.diff(ends, axis=1, prepend=0).T


def _limited(rng: np.random.Generator, assigned: list[np.ndarray], size: Sizes | None, name: str) -> list[np.ndarray]:
    """At most `size` random examples of each client."""
    if size is None:
        return assigned
    limits = allocation.check_sizes(size, len(assigned), name)
    pairs = zip(assigned, limits, strict=True)
    return [rows if len(rows) <= limit else rng.permutation(rows)[:limit] for rows, limit in pairs]
