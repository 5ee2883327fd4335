"""Mini-batches of a client's masked examples: their number and their order."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from pfl_jax.base import ClientData, PRNGKey, PyTree
from pfl_jax.primitives.loops import differentiated_by
from pfl_jax.primitives.tree import choose
from pfl_jax.streams import AUGMENTATION, DROPOUT

Carry = TypeVar("Carry")

Step = Callable[[Carry, ClientData, PRNGKey], Carry]
"""Step on a mini-batch: (carry, mini-batch, key of its loss) -> the next carry."""


Augment = Callable[[PRNGKey, PyTree], PyTree]
"""Random changes to the inputs of a mini-batch: (key, x [B, ...]) -> x of the same shape; hashable."""

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


MIN_SAVED = 0.2
"""The last batch gets a separate size if this saves at least this share of the largest client's rows in an epoch.

The step is then compiled for two sizes."""

FIXED_ORDER = 0
"""Seed of the fixed order of the examples without shuffling."""


def epoch_order(key: PRNGKey, mask: jax.Array, length: int) -> jax.Array:
    """Row numbers [length] that start with the real rows of mask [n] in random order.

    Then come the other rows, and row 0 again where length is above n; the caller's masks exclude all of these.

    Args:
      key: key of the order.
      mask: [n], the real rows.
      length: at least n.
    """
    # The 32 random bits of a row do not depend on the number of rows, so the order does not depend on the amount of
    # padding. Sorting by (padding, bits) puts the real rows first.
    (n,) = mask.shape
    bits = jax.random.bits(key, (n,), jnp.uint32)
    _, _, order = jax.lax.sort((~mask, bits, jnp.arange(n, dtype=jnp.int32)), num_keys=2)
    return jnp.pad(order, (0, length - n))


def first_in_fixed_order(mask: jax.Array, length: int | jax.Array) -> jax.Array:
    """Real rows among the first `length` in the order of an epoch without shuffling: bool [n].

    Args:
      mask: [n], the real rows.
      length: number of rows of the order.
    """
    (n,) = mask.shape
    order = epoch_order(jax.random.key(FIXED_ORDER), mask, n)
    return jnp.zeros(n, bool).at[order].set(jnp.arange(n) < length) & mask


def fold_batches(
    key: PRNGKey,
    carry: Carry,
    data: ClientData,
    step: Step[Carry],
    *,
    batch_size: int,
    epochs: int | jax.Array,
    local_steps: int | jax.Array | None,
    drop_last: bool,
    shuffle: bool,
    augment: Augment | None,
) -> Carry:
    """Fold carry = step(carry, batch, key) over mini-batches, see `pfl_jax.LocalTraining.fold`.

    Args:
      key, carry, data, step: see there.
      batch_size, epochs, local_steps, drop_last, shuffle, augment: fields of `pfl_jax.LocalTraining`.
    """
    (n,) = data.mask.shape
    # Batch normalization needs two rows.
    batch_size = min(batch_size, max(n, 2))
    whole, rest = divmod(n, batch_size)
    padded_length = -(-n // batch_size) * batch_size
    last = max(rest, 2) if rest and not drop_last and batch_size - rest >= MIN_SAVED * padded_length else batch_size

    def parts(key, data):
        count = jnp.sum(data.mask, dtype=jnp.int32)
        fixed = None if shuffle else epoch_order(jax.random.key(FIXED_ORDER), data.mask, padded_length)

        def order_of(epoch_index):
            if fixed is not None:
                return fixed
            return epoch_order(jax.random.fold_in(key, epoch_index), data.mask, padded_length)

        def inputs_of_step(order, epoch_index, index, size=batch_size):
            rows = jax.lax.dynamic_slice(order, (index * batch_size,), (size,))
            batch = jax.tree.map(lambda leaf: leaf.at[rows].get(mode="promise_in_bounds"), data)

            def step_key(stream):
                return jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, stream), epoch_index), index)

            if augment is not None:
                batch = batch._replace(x=augment(step_key(AUGMENTATION), batch.x))
            mask = index * batch_size + jnp.arange(size) < count
            return batch._replace(mask=mask), step_key(DROPOUT)

        return count, num_steps(count, batch_size, drop_last=drop_last), order_of, inputs_of_step

    def loops(step, key, carry, data):
        count, steps, order_of, inputs_of_step = parts(key, data)
        # Epochs that have begun; the last one may be incomplete.
        begun = epochs if local_steps is None else -(-local_steps * (count > 0) // jnp.maximum(steps, 1))

        def epoch(epoch_index, carry):
            order = order_of(epoch_index)
            left = steps if local_steps is None else jnp.minimum(steps, local_steps - epoch_index * steps)

            def steps_of(size, first, end, carry):
                def one(index, carry):
                    return step(carry, *inputs_of_step(order, epoch_index, index, size))

                return jax.lax.fori_loop(first, end, one, carry)

            if last == batch_size:
                return steps_of(batch_size, 0, left, carry)
            # After the whole batches no client has more rows left than `rest`.
            end = jnp.minimum(left, whole)
            return steps_of(last, end, left, steps_of(batch_size, 0, end, carry))

        return jax.lax.fori_loop(0, begun, epoch, carry)

    most: Any = local_steps
    if local_steps is None:
        most = epochs * int(num_steps(np.asarray(n), batch_size, drop_last=drop_last))
    if not isinstance(most, int):
        return loops(step, key, carry, data)

    def scan(step, key, carry, data):
        count, steps, order_of, inputs_of_step = parts(key, data)
        total = epochs * steps if local_steps is None else local_steps * (count > 0)

        def one(carry, number):
            epoch_index, index = jnp.divmod(number, jnp.maximum(steps, 1))
            following = step(carry, *inputs_of_step(order_of(epoch_index), epoch_index, index))
            return choose(number < total, following, carry), None

        return jax.lax.scan(one, carry, jnp.arange(most))[0]

    def example(size):
        return carry, *jax.eval_shape(lambda: parts(key, data)[3](jnp.arange(padded_length), 0, 0, size))

    return differentiated_by(loops, scan, step, *map(example, {batch_size, last}))(key, carry, data)
