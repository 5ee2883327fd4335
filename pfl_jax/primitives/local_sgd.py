"""Local stochastic gradient descent on one client's masked examples."""

from collections.abc import Callable
from typing import TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pfl_jax.base import ALL_BATCHES, ClientData, PRNGKey, PyTree
from pfl_jax.streams import AUGMENTATION

Loss = Callable[[PyTree, ClientData], jax.Array]
"""(params, batch of B examples) -> scalar, a mean over the examples that batch.mask marks."""


FORWARD_BATCH = 200
"""Examples of one forward pass: enough for full speed, few enough for the cache of a CPU."""


def _is_static_zero(value: float | jax.Array) -> bool:
    return isinstance(value, int | float) and value == 0


def sgd(
    lr: float | jax.Array, momentum: float | jax.Array = 0.0, weight_decay: float | jax.Array = 0.0
) -> optax.GradientTransformation:
    """Stochastic gradient descent as PyTorch's SGD applies it, which the papers used.

        g = gradient + weight_decay * params;  v = momentum * v + g;  params = params - lr * v

    Args:
      lr: learning rate, a number or a traced scalar; so are the others.
      momentum: factor of the velocity v, which starts at zero.
      weight_decay: added to the gradient before the velocity.

    Example:
      >>> import jax.numpy as jnp
      >>> from pfl_jax.primitives import local_sgd
      >>> optimizer = local_sgd.sgd(lr=0.1, momentum=0.5)
      >>> params, state = jnp.array(1.0), optimizer.init(jnp.array(1.0))
      >>> for _ in range(2):
      ...     params, state = local_sgd.descend(optimizer, jnp.array(1.0), params, state)
      ...     print(f"{params:.2f}")
      0.90
      0.75
    """
    return optax.chain(
        # A number that is exactly zero costs nothing; a traced one cannot be known to be zero.
        optax.identity() if _is_static_zero(weight_decay) else optax.add_decayed_weights(weight_decay),
        optax.identity() if _is_static_zero(momentum) else optax.trace(decay=momentum),
        optax.scale_by_learning_rate(lr),
    )


Count = TypeVar("Count", jax.Array, np.ndarray)


def num_steps(count: Count, batch_size: int, epochs: int | jax.Array = 1, *, drop_last: bool = False) -> Count:
    """Number of gradient steps that `fit` takes on `count` examples.

    The last batch of an epoch may be incomplete; with drop_last it is left out, unless it is the only one.

    Example:
      >>> import jax.numpy as jnp
      >>> from pfl_jax.primitives import local_sgd
      >>> print(local_sgd.num_steps(jnp.array([50, 51]), batch_size=50, epochs=2))
      [2 4]
      >>> print(local_sgd.num_steps(jnp.array([49, 99]), batch_size=50, drop_last=True))
      [1 1]
    """
    steps = count // batch_size
    # One more where examples are left, or with drop_last where they are all there is.
    return cast(Count, epochs * (steps + ((count % batch_size > 0) & (not drop_last or steps == 0))))


FIXED_ORDER = 0
"""Seed of the order that epochs take without shuffling."""


def _epoch_order(key: PRNGKey, mask: jax.Array, length: int) -> jax.Array:
    """Random order of the real rows of mask [n], the first of all [length] entries; the others point at padding."""
    # One draw of 32 bits per row, whose value does not depend on how many rows follow it: so an epoch's
    # order does not depend on how far the client is padded. Sorting by (padding, bits) puts the real rows first.
    (n,) = mask.shape
    bits = jax.random.bits(key, (n,), jnp.uint32)
    _, _, order = jax.lax.sort((~mask, bits, jnp.arange(n, dtype=jnp.int32)), num_keys=2)
    return jnp.pad(order, (0, length - n))


def descend(
    optimizer: optax.GradientTransformation, gradient: PyTree, params: PyTree, opt_state: PyTree
) -> tuple[PyTree, PyTree]:
    """One step of the optimizer along a gradient: the next params and opt_state, the optimizer's state."""
    updates, opt_state = optimizer.update(gradient, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


Carry = TypeVar("Carry")


def fold_batches(
    key: PRNGKey,
    carry: Carry,
    data: ClientData,
    step: Callable[[Carry, ClientData], Carry],
    *,
    epochs: int | jax.Array,
    batch_size: int,
) -> Carry:
    """Fold carry = step(carry, batch) over the mini-batches of some epochs.

    The real examples are reshuffled every epoch; an epoch of a client with m of them takes ceil(m / batch_size)
    steps, the last on the rest, so a small client does not pay for a large one unless both run under one vmap.
    `ClientData.batches` can leave out that last batch, and take one order for all epochs.
    Trip counts are dynamic, so the result cannot be differentiated in reverse mode. Where the data has an `augment`,
    the inputs of every mini-batch go through it with a key of their own; the order of the examples is the same.

    Args:
      key: orders the examples and augments them.
      carry: any pytree of arrays.
      data: examples [n, ...] with their mask [n].
      step: (carry, ClientData of batch_size rows) -> the next carry, of the same structure, shapes and types.
      epochs: passes over the data; 0 returns carry unchanged. May be traced.
      batch_size: examples of a full step.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from pfl_jax.primitives import local_sgd
      >>> from pfl_jax.base import ClientData
      >>> data = ClientData(x=jnp.arange(5.0), y=jnp.zeros(5), mask=jnp.array([True, True, True, False, False]))
      >>> def step(carry, batch):
      ...     return carry[0] + 1, carry[1] + jnp.sum(batch.x * batch.mask)
      >>> steps, total = local_sgd.fold_batches(jax.random.key(0), (0, 0.0), data, step, epochs=2, batch_size=2)
      >>> print(steps, total)  # two steps an epoch; each real example once an epoch
      4 6.0
    """
    (n,) = data.mask.shape
    count = jnp.sum(data.mask, dtype=jnp.int32)
    padded_length = -(-n // batch_size) * batch_size
    augment, batches, data = data.augment, data.batches, data._replace(augment=None, batches=ALL_BATCHES)
    steps = num_steps(count, batch_size, drop_last=batches.drop_last)
    fixed = None if batches.shuffle else _epoch_order(jax.random.key(FIXED_ORDER), data.mask, padded_length)

    def one(epoch_index, index, carry, order):
        rows = jax.lax.dynamic_slice(order, (index * batch_size,), (batch_size,))
        batch = jax.tree.map(lambda leaf: leaf.at[rows].get(mode="promise_in_bounds"), data)
        if augment is not None:
            epoch_key = jax.random.fold_in(jax.random.fold_in(key, AUGMENTATION), epoch_index)
            batch = batch._replace(x=augment(jax.random.fold_in(epoch_key, index), batch.x))
        return step(carry, batch._replace(mask=index * batch_size + jnp.arange(batch_size) < count))

    def epoch(index, carry):
        order = fixed
        if order is None:
            order = _epoch_order(jax.random.fold_in(key, index), data.mask, padded_length)
        return jax.lax.fori_loop(0, steps, lambda i, c: one(index, i, c, order), carry)

    return jax.lax.fori_loop(0, epochs, epoch, carry)


def always_visited(data: ClientData, batch_size: int) -> jax.Array:
    """Real examples that every epoch visits: bool [n]; `ClientData.batches` may leave some out.

    Args:
      data: examples [n, ...] with their mask [n].
      batch_size: examples of a full step.

    Example:
      >>> import jax.numpy as jnp
      >>> from pfl_jax.primitives import local_sgd
      >>> from pfl_jax.base import ALL_BATCHES, Batches, ClientData
      >>> data = ClientData(x=jnp.zeros(5), y=jnp.zeros(5), mask=jnp.ones(5, bool))
      >>> print(jnp.sum(local_sgd.always_visited(data, batch_size=2)))
      5
      >>> fixed = data._replace(batches=Batches(drop_last=True, shuffle=False))
      >>> print(jnp.sum(local_sgd.always_visited(fixed, batch_size=2)))
      4
    """
    if data.batches.shuffle or not data.batches.drop_last:
        return data.mask
    (n,) = data.mask.shape
    count = jnp.sum(data.mask, dtype=jnp.int32)
    order = _epoch_order(jax.random.key(FIXED_ORDER), data.mask, n)
    taken = jnp.arange(n) < batch_size * num_steps(count, batch_size, drop_last=True)
    return jnp.zeros(n, bool).at[order].set(taken) & data.mask


def fit(
    key: PRNGKey,
    params: PyTree,
    data: ClientData,
    loss: Loss,
    *,
    optimizer: optax.GradientTransformation,
    epochs: int | jax.Array,
    batch_size: int,
) -> PyTree:
    """Train params for some epochs of mini-batch descent.

    The batches are those of `fold_batches`; the optimizer starts afresh. Freezing a part of a model is closing over
    it:

        fit(key, head, data, lambda head, batch: loss(merge(backbone, head), batch), ...)

    Args:
      key: orders the examples.
      params: any pytree of float arrays.
      data: examples [n, ...] with their mask [n].
      loss: (params, ClientData of batch_size rows) -> scalar mean over the batch's mask.
      optimizer: an optax transformation, `sgd` for example.
      epochs: passes over the data; 0 returns params unchanged. May be traced.
      batch_size: examples of a full step.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from pfl_jax.primitives import local_sgd, losses
      >>> from pfl_jax.base import ClientData
      >>> x = jnp.array([1.0, 2.0, 3.0, 0.0])
      >>> data = ClientData(x=x, y=2 * x, mask=jnp.array([True, True, True, False]))
      >>> def loss(w, batch):
      ...     return losses.masked_mean(jnp.square(w * batch.x - batch.y), batch.mask)
      >>> w = local_sgd.fit(
      ...     jax.random.key(0), jnp.array(0.0), data, loss, optimizer=local_sgd.sgd(0.05), epochs=20, batch_size=2
      ... )
      >>> print(f"{w:.2f}")
      2.00
    """

    def step(carry, batch):
        params, opt_state = carry
        return descend(optimizer, jax.grad(loss)(params, batch), params, opt_state)

    start = (params, optimizer.init(params))
    params, _ = fold_batches(key, start, data, step, epochs=epochs, batch_size=batch_size)
    return params


def map_examples(
    fn: Callable[[PyTree], PyTree], x: PyTree, mask: jax.Array, *, batch_size: int = FORWARD_BATCH
) -> PyTree:
    """Apply fn to the rows of x in batches, so that memory does not grow with the client.

    Stops after the last real row, so a client pays for its own size, not for the padding.

    Args:
      fn: rows [batch, ...] -> rows [batch, ...], each output row a function of its input row alone.
      x: pytree of leaves [n, ...].
      mask: [n], the real rows.
      batch_size: rows of one call of fn, fewer if n is smaller.

    Returns:
      fn's rows [n, ...]; those of batches with padding only are zero.

    Example:
      >>> import jax.numpy as jnp
      >>> from pfl_jax.primitives import local_sgd
      >>> mask = jnp.arange(5) < 3
      >>> print(local_sgd.map_examples(lambda x: x + 1.0, jnp.zeros(5), mask, batch_size=2))  # the last batch: padding
      [1. 1. 1. 1. 0.]
    """
    (n,) = mask.shape
    size = min(batch_size, n)

    def rows(start):
        return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, start, size), x)

    shapes = jax.eval_shape(lambda: fn(rows(0)))
    outputs = jax.tree.map(lambda shape: jnp.zeros((n, *shape.shape[1:]), shape.dtype), shapes)

    def body(index, outputs):
        # The last slice moves back to end at n; its first rows are then computed twice, to the same values.
        start = jnp.minimum(index * size, n - size)
        return jax.tree.map(
            lambda output, new: jax.lax.dynamic_update_slice_in_dim(output, new, start, 0), outputs, fn(rows(start))
        )

    end = jnp.max(jnp.where(mask, jnp.arange(1, n + 1), 0))
    return jax.lax.fori_loop(0, (end + size - 1) // size, body, outputs)
