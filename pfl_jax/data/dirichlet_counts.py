"""Numbers of examples per client and class under a Dirichlet partition, before examples are chosen.

Clients that end up too small are dealt with as the papers' code does, by drawing again, but no more than MAX_TRIES
times.
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


def by_set(
    rng: np.random.Generator,
    train_totals: np.ndarray,
    test_totals: np.ndarray,
    num_clients: int,
    beta: float,
    least: int,
) -> Counts:
    """Counts of FedPAC C.8: training set and test set, each complete, by the same proportions p_k ~ Dir_N(beta).

    Args:
      rng: source of the draws.
      train_totals: int [K], training examples of each class.
      test_totals: int [K], test examples of each class.
      num_clients: N.
      beta: concentration.
      least: training examples of the smallest client; it has a test example too.

    Returns:
      Counts that add up to the totals.

    Raises:
      InvalidInput: no draw serves every client.
    """
    least = max(least, 1)
    most_clients = min(int(train_totals.sum()) // least, int(test_totals.sum()))
    for proportions in _draws(rng, num_clients, len(train_totals), beta, most_clients):
        counts = Counts(_cut(proportions, train_totals), _cut(proportions, test_totals))
        if counts.train.sum(axis=1).min() >= least and counts.test.sum(axis=1).min() >= 1:
            return counts
    raise _no_draw(num_clients, beta, f"{least} training examples and a test example")


def merged(
    rng: np.random.Generator,
    train_totals: np.ndarray,
    test_totals: np.ndarray,
    num_clients: int,
    beta: float,
    least: int,
) -> Counts:
    """Counts of FedAS: both sets as one, class by class; a client that has reached P / N examples gets no more.

    Args:
      rng: source of the draws.
      train_totals: int [K], training examples of each class.
      test_totals: int [K], test examples of each class.
      num_clients: N.
      beta: concentration.
      least: training and test examples of the smallest client together.

    Returns:
      Counts that add up to the totals. What a client gets of a class comes from the two sets in the proportion in
      which they hold that class; every client has an example of either.

    Raises:
      InvalidInput: no draw serves every client.
    """
    least = max(least, 2)
    totals = train_totals + test_totals
    from_train = train_totals / np.maximum(totals, 1)
    most_clients = min(int(totals.sum()) // least, int(train_totals.sum()), int(test_totals.sum()))
    for proportions in _draws(rng, num_clients, len(totals), beta, most_clients):
        both = _fill(proportions, totals)
        # Rounding the running sums leaves every difference between 0 and `both`, and the totals exact.
        train = np.diff(np.round(np.cumsum(both * from_train, axis=0)).astype(np.int64), axis=0, prepend=0)
        counts = Counts(train, both - train)
        if both.sum(axis=1).min() >= least and min(part.sum(axis=1).min() for part in counts) >= 1:
            return counts
    raise _no_draw(num_clients, beta, f"{least} examples")


def _fill(proportions: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """Counts int64 [N, K] from proportions [K, N]; clients that already have their share get none of a class."""
    num_clients = proportions.shape[1]
    share = totals.sum() / num_clients
    held = np.zeros(num_clients, np.int64)
    wanted = np.zeros((num_clients, len(totals)), np.int64)
    for label in np.flatnonzero(totals):
        still_open = held < share
        weights = proportions[label] * still_open
        # A draw can lie wholly on full clients; the others then share the class evenly.
        weights = weights / weights.sum() if weights.sum() > 0 else still_open / still_open.sum()
        wanted[:, label] = _cut(weights[None], totals[label : label + 1])[:, 0]
        held += wanted[:, label]
    return wanted


def _cut(proportions: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """Integers int64 [N, K] that follow proportions [K, N] and add up to `totals` [K] over the clients."""
    # The small constant keeps 0.3 + 0.6 + 0.1 from losing an example to rounding.
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
