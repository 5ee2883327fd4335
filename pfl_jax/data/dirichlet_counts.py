"""Numbers of examples per client and class under a Dirichlet partition, before examples are chosen.

If a client is too small, all proportions are drawn again, as in the papers' code, at most MAX_TRIES times.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from pfl_jax.errors import InvalidInput

MAX_TRIES = 1_000


class Counts(NamedTuple):
    """Examples of each client and class.

    Attributes:
      train: int64 [N, K], from the training set.
      test: int64 [N, K], from the test set.
    """

    train: np.ndarray
    test: np.ndarray


def separate_sets(
    rng: np.random.Generator,
    train_totals: np.ndarray,
    test_totals: np.ndarray,
    num_clients: int,
    beta: float,
    min_size: int,
) -> Counts:
    """Counts of FedPAC C.8: both sets are divided completely, by the same proportions p_k ~ Dir_N(beta).

    Args:
      rng: random number generator.
      train_totals: int [K], training examples of each class.
      test_totals: int [K], test examples of each class.
      num_clients: N.
      beta: concentration.
      min_size: minimum number of a client's training examples; the minimum of test examples is 1.

    Returns:
      Counts that add up to the totals.

    Raises:
      InvalidInput: no draw gives every client its minimum.
    """
    min_size = max(min_size, 1)
    most_clients = min(int(train_totals.sum()) // min_size, int(test_totals.sum()))
    for proportions in _draws(rng, num_clients, len(train_totals), beta, most_clients):
        counts = Counts(_cut(proportions, train_totals), _cut(proportions, test_totals))
        if counts.train.sum(axis=1).min() >= min_size and counts.test.sum(axis=1).min() >= 1:
            return counts
    raise _no_draw(num_clients, beta, f"{min_size} training examples and a test example")


def merged_sets(
    rng: np.random.Generator,
    train_totals: np.ndarray,
    test_totals: np.ndarray,
    num_clients: int,
    beta: float,
    min_size: int,
) -> Counts:
    """Counts of FedAS: both sets merged, class by class; a client that has P / N examples or more gets no more.

    Args:
      rng: random number generator.
      train_totals: int [K], training examples of each class.
      test_totals: int [K], test examples of each class.
      num_clients: N.
      beta: concentration.
      min_size: minimum number of a client's examples, training and test together.

    Returns:
      Counts that add up to the totals. A client's examples of a class come from the two sets in the proportion of their
      sizes in this class; every client has at least one example of each set.

    Raises:
      InvalidInput: no draw gives every client its minimum.
    """
    min_size = max(min_size, 2)
    totals = train_totals + test_totals
    from_train = train_totals / np.maximum(totals, 1)
    most_clients = min(int(totals.sum()) // min_size, int(train_totals.sum()), int(test_totals.sum()))
    for proportions in _draws(rng, num_clients, len(totals), beta, most_clients):
        both = _fill(proportions, totals)
        # Rounding cumulative sums keeps the totals exact and every count between 0 and `both`.
        train = np.diff(np.round(np.cumsum(both * from_train, axis=0)).astype(np.int64), axis=0, prepend=0)
        counts = Counts(train, both - train)
        if both.sum(axis=1).min() >= min_size and min(part.sum(axis=1).min() for part in counts) >= 1:
            return counts
    raise _no_draw(num_clients, beta, f"{min_size} examples")


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
    # The small constant prevents that rounding in 0.7 + 0.1 + 0.2 loses an example of ten.
    ends = np.floor(np.cumsum(proportions, axis=1) * totals[:, None] + 1e-9).astype(np.int64)
    ends = np.minimum(ends, totals[:, None])
    # The remainder of the rounding goes to the last client with a positive proportion, which may not be the last.
    last = proportions.shape[1] - 1 - np.argmax(proportions[:, ::-1] > 0, axis=1)
    ends = np.where(np.arange(proportions.shape[1]) >= last[:, None], totals[:, None], ends)
    return np.diff(ends, axis=1, prepend=0).T


def _draws(
    rng: np.random.Generator, num_clients: int, num_classes: int, beta: float, most_clients: int
) -> Iterator[np.ndarray]:
    """Up to MAX_TRIES finite draws of proportions [K, N]."""
    if num_clients > most_clients:
        raise InvalidInput(
            f"{num_clients} clients are more than the data can serve: at most {most_clients}, or a smaller min_size"
        )
    for _ in range(MAX_TRIES):
        proportions = rng.dirichlet(np.full(num_clients, beta), num_classes)
        if np.isfinite(proportions).all():
            yield proportions


def _no_draw(num_clients: int, beta: float, need: str) -> InvalidInput:
    return InvalidInput(
        f"no Dirichlet draw with beta = {beta:g} in {MAX_TRIES} gave each of {num_clients} clients {need}: "
        "use fewer clients, a larger beta or a smaller min_size"
    )
