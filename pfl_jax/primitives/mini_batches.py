"""Mini-batches of a client's masked examples: how many there are, and in which order."""

from collections.abc import Callable
from typing import TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from pfl_jax.base import ClientData, PRNGKey

Carry = TypeVar("Carry")

Step = Callable[[Carry, ClientData, PRNGKey], Carry]
"""Step on a mini-batch: (carry, mini-batch, key of its loss) -> the next carry."""

Counts = TypeVar("Counts", jax.Array, np.ndarray)


def num_steps(count: Counts, batch_size: int, epochs: int | jax.Array = 1, *, drop_last: bool = False) -> Counts:
    """Number of gradient steps that `LocalTraining.fit` takes on `count` examples.

    The last batch of an epoch may be incomplete; with drop_last it is left out, unless it is the only one.

    Example:
      >>> import jax.numpy as jnp
      >>> from pfl_jax.primitives import mini_batches
      >>> print(mini_batches.num_steps(jnp.array([50, 51]), batch_size=50, epochs=2))
      [2 4]
      >>> print(mini_batches.num_steps(jnp.array([49, 99]), batch_size=50, drop_last=True))
      [1 1]
    """
    steps = count // batch_size
    # One more step for the remaining examples; with drop_last only if there is no complete batch.
    return cast(Counts, epochs * (steps + ((count % batch_size > 0) & (not drop_last or steps == 0))))


FIXED_ORDER = 0
"""Seed of the fixed order of the examples without shuffling."""


def epoch_order(key: PRNGKey, mask: jax.Array, length: int) -> jax.Array:
    """Row numbers [length] that start with the real rows of mask [n] in random order.

    Then come the other rows, and row 0 again where length is above n; the caller's masks exclude all of these.

    Args:
      key: of the order.
      mask: [n], the real rows.
      length: at least n.
    """
    # The 32 random bits of a row do not depend on the number of rows, so the order does not depend on the amount of
    # padding. Sorting by (padding, bits) puts the real rows first.
    (n,) = mask.shape
    bits = jax.random.bits(key, (n,), jnp.uint32)
    _, _, order = jax.lax.sort((~mask, bits, jnp.arange(n, dtype=jnp.int32)), num_keys=2)
    return jnp.pad(order, (0, length - n))
