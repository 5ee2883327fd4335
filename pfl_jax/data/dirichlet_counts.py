"""Numbers of examples per client and class under a Dirichlet partition, before examples are chosen.

If a client is too small, all proportions are drawn again, as in the papers' code, at most MAX_TRIES times.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pfl_jax.errors import InvalidInput

MAX_TRIES = 1_000

ADVICE_TRIES = 100
"""Draws that each piece of advice is tried with before it is given."""

KINDS = ("training examples", "test examples", "examples")
"""What a client needs some of."""


class Counts(NamedTuple):
    """Examples of each client and class.

    Attributes:
      train: int64 [N, K], from the training set.
      test: int64 [N, K], from the test set.
    """

    train: np.ndarray
    test: np.ndarray


class _Rule(NamedTuple):
    """What a division of a data set is.

    Attributes:
      totals: training and test examples of each class.
      divide: proportions [K, N] -> counts of the clients.
      needs: min_size -> least number of a client's training examples, test examples, and both together.
    """

    totals: Counts
    divide: Callable[[np.ndarray], Counts]
    needs: Callable[[int], tuple[int, int, int]]


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

    def divide(proportions):
        return Counts(_cut(proportions, train_totals), _cut(proportions, test_totals))

    rule = _Rule(Counts(train_totals, test_totals), divide, lambda size: (size, 1, 0))
    return _drawn(rng, rule, num_clients, beta, max(min_size, 1))


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
      rng, train_totals, test_totals, num_clients, beta: see `separate_sets`.
      min_size: minimum number of a client's examples, training and test together.

    Returns:
      Counts that add up to the totals. A client's examples of a class come from the two sets in the proportion of their
      sizes in this class; every client has at least one example of each set.

    Raises:
      InvalidInput: no draw gives every client its minimum.
    """
    totals = train_totals + test_totals
    from_train = train_totals / np.maximum(totals, 1)

    def divide(proportions):
        both = _fill(proportions, totals)
        # Rounding cumulative sums keeps the totals exact and every count between 0 and `both`.
        train = np.diff(np.round(np.cumsum(both * from_train, axis=0)).astype(np.int64), axis=0, prepend=0)
        return Counts(train, both - train)

    rule = _Rule(Counts(train_totals, test_totals), divide, lambda size: (1, 1, size))
    return _drawn(rng, rule, num_clients, beta, max(min_size, 2))


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


def _drawn(rng: np.random.Generator, rule: _Rule, num_clients: int, beta: float, min_size: int) -> Counts:
    """Counts of the first of MAX_TRIES draws that serves all clients; InvalidInput says what they lack, what helps."""
    found, most = _search(rng, rule, num_clients, beta, min_size, MAX_TRIES)
    if found is not None:
        return found
    needs, there = np.array(rule.needs(min_size)), _sums(*rule.totals)
    lacking = next(filter(np.any, (num_clients * needs > there, most < needs, needs > 0)))
    few = " and ".join(f"{needs[kind]} of the {there[kind]} {KINDS[kind]}" for kind in np.flatnonzero(lacking))

    def helps(clients: int, beta: float, size: int) -> bool:
        return _search(rng, rule, clients, beta, size, ADVICE_TRIES)[0] is not None

    larger = (one for one in (0.5, 1.0) if one > beta)
    advice = (
        next((f"{fewer} clients" for fewer in _halves(num_clients) if helps(fewer, beta, min_size)), ""),
        next((f"beta = {one:g}" for one in larger if helps(num_clients, one, min_size)), ""),
        next((f"min_size = {less}" for less in _halves(min_size) if helps(num_clients, beta, less)), ""),
    )
    raise InvalidInput(
        f"no Dirichlet draw with beta = {beta:g} gives each of {num_clients} clients {few}: use "
        f"{' or '.join(filter(None, advice)) or 'fewer clients and a smaller min_size'}"
    )


def _search(
    rng: np.random.Generator, rule: _Rule, num_clients: int, beta: float, min_size: int, tries: int
) -> tuple[Counts | None, np.ndarray]:
    """Counts of the first finite draw that serves all clients, and the most that every client got in a draw before."""
    needs, most = np.array(rule.needs(min_size)), np.zeros(len(KINDS), np.int64)
    if (num_clients * needs > _sums(*rule.totals)).any():
        return None, most
    for _ in range(tries):
        proportions = rng.dirichlet(np.full(num_clients, beta), len(rule.totals.train))
        if not np.isfinite(proportions).all():
            continue
        counts = rule.divide(proportions)
        least = _sums(*counts).min(axis=1)
        if (least >= needs).all():
            return counts, most
        most = np.maximum(most, least)
    return None, most


def _sums(train: np.ndarray, test: np.ndarray) -> np.ndarray:
    """Sums over the classes [K] or [N, K] of training examples, test examples, and both: [3] or [3, N]."""
    return np.stack([train, test, train + test]).sum(axis=-1)


def _halves(number: int) -> list[int]:
    """Half of a number, a quarter, and so on to 1."""
    return [number >> by for by in range(1, number.bit_length())]
