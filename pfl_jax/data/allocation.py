"""Shared steps of all partitions: client sizes, even class shares, and dealing of shuffled examples."""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from pfl_jax.errors import InvalidInput

Sizes: TypeAlias = int | Sequence[int] | np.ndarray
"""One size for all clients, or one for each."""

FEDAS_TRAIN_SHARE = 0.75
"""Share of a client's examples that FedAS trains on (its released code)."""


class Partition(NamedTuple):
    """Examples of each client.

    Attributes:
      train: for each client, int64 [n_i], distinct indices into (training examples, then test examples).
      test: for each client, int64 [t_i], likewise.
    """

    train: list[np.ndarray]
    test: list[np.ndarray]


def draw_sizes(choices: Sequence[int], num_clients: int, seed: int = 0) -> np.ndarray:
    """Size of each client, drawn uniformly from the choices (FedPAC C.6).

    Args:
      choices: sizes, {300, 600, 1200} in the paper.
      num_clients: N.
      seed: of the draw, whose stream is apart from the partition's.

    Returns:
      int64 [N].

    Raises:
      InvalidInput: no choice, or one below 1.
    """
    check_clients(num_clients)
    sizes = np.asarray(choices)
    if sizes.size == 0 or sizes.min() < 1:
        raise InvalidInput("sizes to choose from are whole numbers of at least 1")
    return np.random.default_rng((seed, 2)).choice(sizes, num_clients).astype(np.int64)


def check_clients(num_clients: int) -> None:
    """Raise InvalidInput unless there is at least one client."""
    if num_clients < 1:
        raise InvalidInput(f"the number of clients is at least 1, not {num_clients}")


def check_sizes(size: Sizes, num_clients: int, name: str) -> np.ndarray:
    """Checked sizes as int64 [N]."""
    sizes = np.asarray(size)
    if sizes.ndim == 0:
        sizes = np.full(num_clients, sizes)
    if sizes.shape != (num_clients,):
        raise InvalidInput(f"{name} sizes are one number, or one for each of {num_clients} clients, not {sizes.shape}")
    if not np.issubdtype(sizes.dtype, np.integer) or sizes.min() < 1:
        raise InvalidInput(f"every client needs a whole number of {name} examples, at least 1")
    return sizes.astype(np.int64)


def share_out(total: int, classes: np.ndarray, num_classes: int) -> np.ndarray:
    """Divide `total` examples evenly over `classes`; the first classes get the remainder. int64 [K]."""
    counts = np.zeros(num_classes, np.int64)
    counts[classes] = total // len(classes)
    counts[classes[: total % len(classes)]] += 1
    return counts


def deal(y: np.ndarray, wanted: np.ndarray, rng: np.random.Generator, name: str, offset: int) -> list[np.ndarray]:
    """Deal each class's shuffled examples, in turn and cyclically, to clients that want `wanted` [N, K]."""
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


def divide(rng: np.random.Generator, hands: list[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Shuffle each client's examples and split them 75/25 into training and test, at least one of each."""
    shuffled = [rng.permutation(hand) for hand in hands]
    cuts = [min(max(round(FEDAS_TRAIN_SHARE * len(hand)), 1), len(hand) - 1) for hand in shuffled]
    pairs = list(zip(shuffled, cuts, strict=True))
    return [hand[:cut] for hand, cut in pairs], [hand[cut:] for hand, cut in pairs]


def cap(rng: np.random.Generator, hands: list[np.ndarray], size: Sizes | None, name: str) -> list[np.ndarray]:
    """Keep at most `size` random examples of each client."""
    if size is None:
        return hands
    limits = check_sizes(size, len(hands), name)
    return [
        hand if len(hand) <= limit else rng.permutation(hand)[:limit] for hand, limit in zip(hands, limits, strict=True)
    ]
