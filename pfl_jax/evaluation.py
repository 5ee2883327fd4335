"""Accuracy of each client, and what to say about all of them."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pfl_jax.base import ClientData, Personal
from pfl_jax.training import map_examples


def accuracy(predict: Callable[[Personal, jax.Array], jax.Array], personal: Personal, data: ClientData) -> jax.Array:
    """Share of the real examples of `data` that `predict` labels right, in [0, 1]; NaN without any example."""
    predicted = map_examples(lambda x: jnp.argmax(predict(personal, x), axis=-1), data.x, data.mask)
    correct = jnp.sum((predicted == data.y) & data.mask, dtype=jnp.float32)
    return correct / jnp.sum(data.mask, dtype=jnp.float32)


class Summary(NamedTuple):
    """Accuracies of a federation in percent.

    Attributes:
      mean: over clients, each counting the same.
      std: standard deviation over clients (population).
      worst_decile: mean of the worst tenth of the clients (at least one).
      clients: how many clients have an accuracy.
    """

    mean: float
    std: float
    worst_decile: float
    clients: int


def summarize(per_client: np.ndarray) -> Summary:
    """Summary of per-client accuracies [N] in [0, 1]; NaN marks clients that have none and do not count.

    Example:
      >>> import numpy as np
      >>> from pfl_jax import evaluation
      >>> evaluation.summarize(np.array([0.5, 1.0, np.nan]))
      Summary(mean=75.0, std=25.0, worst_decile=50.0, clients=2)
    """
    values = np.sort(np.asarray(per_client, np.float64))
    values = 100 * values[~np.isnan(values)]
    if not values.size:
        return Summary(float("nan"), float("nan"), float("nan"), 0)
    worst = values[: max(1, round(values.size / 10))]
    return Summary(float(values.mean()), float(values.std()), float(worst.mean()), values.size)
