"""Gradients with differential privacy for single examples: clipped one by one, summed, and noised.

A loss is the mean over a mini-batch of a term of each example, plus terms that depend on no example (proximal terms,
regularizers). Only the first part depends on the data: only it is clipped and noised, and the gradient of the second
part is added unchanged.
"""

import functools

import jax
import jax.numpy as jnp

from pfl_jax.base import ClientData, KeylessLoss, Loss, PRNGKey, PyTree
from pfl_jax.primitives.per_example import (
    FEW,
    add_norms,
    free_gradient,
    have_closed_form,
    replace_operations,
    weigh_gradient,
)
from pfl_jax.streams import DROPOUT

MICROBATCH = 64
"""Examples whose gradients are clipped at once: it bounds the memory, not the result. Batches of 50 took two thirds of
the time that they take in parts of 16 (the papers' network on one CPU core)."""


def private_gradient(
    key: PRNGKey,
    loss: Loss,
    params: PyTree,
    batch: ClientData,
    *,
    clip: float | jax.Array,
    noise: float | jax.Array,
    size: int,
) -> PyTree:
    r"""Gradient of a step of DP-SGD.

        ( sum_b g_b min(1, C / ||g_b||)  +  C noise N(0, I) ) / size   +   gradient of the terms without examples

    where g_b is the gradient of the term of example b, and its norm is over all leaves. The divisor does not depend on
    how many examples are real, so that leaving out an example changes only the sum.

    Args:
      key: key of the noise; folded with `pfl_jax.streams.DROPOUT`, the key of the losses.
      loss: (params, ClientData of any number of rows, key) -> scalar; the mean of a term of each row, plus terms
        without examples. For other losses the result is not private.
      params: any pytree of float arrays; sums and noise are in float32 at least.
      batch: examples [B, ...]; padding contributes nothing.
      clip: C, the largest norm of an example's gradient.
      noise: standard deviation of the noise of each entry, in units of C.
      size: expected number of examples.

    Returns:
      A tree like params.

    Reference:
      Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang. Deep Learning with Differential Privacy. CCS 2016.
      Algorithm 1. The fixed divisor is from Ponomareva et al. How to DP-fy ML. JAIR 2023. Section 4.1.
    """
    total, free = clipped_gradient_sum(jax.random.fold_in(key, DROPOUT), loss, params, batch, clip)
    if not (isinstance(noise, int | float) and noise == 0):
        leaves, structure = jax.tree.flatten(total)
        keys = jax.random.split(key, len(leaves))
        draws = [jax.random.normal(one, leaf.shape, leaf.dtype) for one, leaf in zip(keys, leaves, strict=True)]
        total = jax.tree.unflatten(
            structure, [leaf + noise * clip * draw for leaf, draw in zip(leaves, draws, strict=True)]
        )
    return jax.tree.map(lambda leaf, data, own: (data / size + own).astype(leaf.dtype), params, total, free)


def clipped_gradient_sum(
    key: PRNGKey, loss: Loss, params: PyTree, batch: ClientData, clip: float | jax.Array
) -> tuple[PyTree, PyTree]:
    """Sum over the real examples of their clipped gradients, and the gradient of the terms without examples.

    Both are in float32 at least. The norms of the gradients have a closed form, see `pfl_jax.primitives.per_example`,
    if every parameter is of that precision and used once as `squared_gradient_norms` requires, or in terms without
    examples; otherwise each example's gradient is computed.

    Args:
      key: key of the losses. Each example has its own, folded with its row. Examples whose gradients have a closed form
        share the key of the first row of their `MICROBATCH`; the loss draws one array for all of their rows.
      loss, params, batch, clip: see `private_gradient`.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from pfl_jax import ClientData
      >>> from pfl_jax.primitives import losses, private_gradients
      >>> batch = ClientData(x=jnp.array([3.0, 0.5, 9.0]), y=jnp.zeros(3), mask=jnp.array([True, True, False]))
      >>> def loss(w, batch, key):
      ...     return losses.masked_mean(w * batch.x, batch.mask) + 0.25 * w**2
      >>> total, free = private_gradients.clipped_gradient_sum(jax.random.key(0), loss, jnp.array(1.0), batch, 1.0)
      >>> print(total, free)  # min(3, 1) + 0.5, and the derivative of w^2 / 4
      1.5 0.5
    """
    examples = batch.mask.shape[0]
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(examples))
    batch = batch._replace(y=(batch.y, keys))
    keyless, params = _with_single_precision(functools.partial(_with_key_of_row, loss), params)
    few = jax.tree.map(lambda leaf: jnp.repeat(leaf[:1], FEW, axis=0), batch)
    if have_closed_form(keyless, params, few, min(examples, MICROBATCH), free_terms=True):
        one_part, free = _sum_by_taps, free_gradient(keyless, params, few)
    else:
        one_part, free = _sum_one_by_one, _without_examples(keyless, params, few)
    if examples <= MICROBATCH:
        return one_part(keyless, params, batch, clip, free), free
    rows = -(-examples // MICROBATCH) * MICROBATCH
    # Padding: copies of the first example that are not real.
    padded = jax.tree.map(lambda leaf: jnp.concatenate([leaf, jnp.repeat(leaf[:1], rows - examples, 0)]), batch)
    padded = padded._replace(mask=jnp.pad(batch.mask, (0, rows - examples)))
    parts = jax.tree.map(lambda leaf: leaf.reshape(-1, MICROBATCH, *leaf.shape[1:]), padded)

    def add(total, part):
        return jax.tree.map(jnp.add, total, one_part(keyless, params, part, clip, free)), None

    total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)
    return total, free


def _with_key_of_row(loss: Loss, params: PyTree, batch: ClientData) -> jax.Array:
    """Loss on rows with y = (labels, keys); only the first key is used."""
    y, keys = batch.y
    return loss(params, batch._replace(y=y), keys[0])


def _with_single_precision(loss: KeylessLoss, params: PyTree) -> tuple[KeylessLoss, PyTree]:
    """The loss as a function of parameters in float32 at least, and these parameters."""
    types = jax.tree.map(lambda leaf: leaf.dtype, params)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)), params)
    if jax.tree.map(lambda leaf: leaf.dtype, wide) == types:
        return loss, params
    return lambda wide, batch: loss(jax.tree.map(lambda leaf, kind: leaf.astype(kind), wide, types), batch), wide


def _factors(squares: jax.Array, mask: jax.Array, clip: float | jax.Array) -> jax.Array:
    """Factors [B] of the examples' gradients with these squared norms: at most 1, and 0 for padding."""
    return jnp.where(mask, clip / jnp.maximum(jnp.sqrt(squares), clip), 0.0)


def _sum_one_by_one(
    loss: KeylessLoss, params: PyTree, batch: ClientData, clip: float | jax.Array, free: PyTree
) -> PyTree:
    def gradient(example):
        row = jax.tree.map(lambda leaf: leaf[None], example)
        row = row._replace(mask=jnp.ones_like(row.mask))
        return jax.tree.map(jnp.subtract, jax.grad(loss)(params, row), free)

    gradients = jax.vmap(gradient)(batch)
    examples = batch.mask.shape[0]
    squares = jnp.zeros(examples)
    for leaf in jax.tree.leaves(gradients):
        squares += jnp.sum(jnp.square(leaf.reshape(examples, -1)), axis=1)
    factors = _factors(squares, batch.mask, clip)
    return jax.tree.map(lambda leaf: jnp.tensordot(factors, leaf, 1), gradients)


def _without_examples(loss: KeylessLoss, params: PyTree, part: ClientData) -> PyTree:
    """Gradient on a mini-batch without a real example, where the mean over examples is 0."""
    return jax.grad(loss)(params, part._replace(mask=jnp.zeros_like(part.mask)))


def _sum_by_taps(loss: KeylessLoss, params: PyTree, batch: ClientData, clip: float | jax.Array, _: PyTree) -> PyTree:
    """Sum without individual gradients, for a loss that `have_closed_form` accepts."""
    (examples,) = batch.mask.shape
    # The loss is a mean.
    count = jnp.maximum(jnp.sum(batch.mask), 1).astype(jnp.float32)

    def with_norms(probe: jax.Array) -> jax.Array:
        return replace_operations(loss, params, batch, lambda operation: add_norms(operation, probe))

    def with_weights(copies: list[jax.Array]) -> jax.Array:
        return replace_operations(
            loss, params, batch, lambda operation: weigh_gradient(operation, weights, copies[operation.leaf])
        )

    squares = jnp.square(count) * jax.grad(with_norms)(jnp.zeros(examples))
    weights = count * _factors(squares, batch.mask, clip)
    copies, structure = jax.tree.flatten(params)
    return jax.tree.unflatten(structure, jax.grad(with_weights)(copies))
