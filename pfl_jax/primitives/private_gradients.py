"""Gradients with differential privacy for single examples: clipped one by one, summed, and noised.

A loss is the mean over a mini-batch of a term of each example, plus terms that depend on no example (proximal terms,
regularizers). Only the first part depends on the data: only it is clipped and noised, and the gradient of the second
part is added as it is.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from pfl_jax.base import ClientData, Loss, PRNGKey, PyTree
from pfl_jax.primitives.per_example import NORMS, OPERATIONS, add_norms, is_tapped, rows_agree, weigh_gradient

MICROBATCH = 64
"""Examples whose gradients are clipped at once: it bounds the memory, not the result. Batches of 50 took two thirds of
the time that they take in parts of 16 (the papers' network on one CPU core)."""

FEW = 3
"""Rows of a mini-batch on which a loss is examined."""


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
    how many examples are real, so that an example that is left out changes the sum and nothing else.

    Args:
      key: key of the noise.
      loss: (params, ClientData of any number of rows) -> scalar; the mean over the rows of a term of each, plus terms
        without examples. For other losses the result is not private.
      params: any pytree of float arrays; sums and noise are in float32 at least.
      batch: examples [B, ...]; padding contributes nothing.
      clip: C, the largest norm of an example's gradient.
      noise: standard deviation of the noise of each entry, in units of C.
      size: expected number of examples.

    Returns:
      As params.

    Reference:
      Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang. Deep Learning with Differential Privacy. CCS 2016.
      Algorithm 1. The fixed divisor is that of Ponomareva et al. How to DP-fy ML. JAIR 2023. Section 4.1.
    """
    total, free = clipped_sum(loss, params, batch, clip)
    if not (isinstance(noise, int | float) and noise == 0):
        leaves, structure = jax.tree.flatten(total)
        keys = jax.random.split(key, len(leaves))
        draws = [jax.random.normal(one, leaf.shape, leaf.dtype) for one, leaf in zip(keys, leaves, strict=True)]
        total = jax.tree.unflatten(
            structure, [leaf + noise * clip * draw for leaf, draw in zip(leaves, draws, strict=True)]
        )
    return jax.tree.map(lambda leaf, data, own: (data / size + own).astype(leaf.dtype), params, total, free)


def clipped_sum(loss: Loss, params: PyTree, batch: ClientData, clip: float | jax.Array) -> tuple[PyTree, PyTree]:
    """Sum over the real examples of their clipped gradients, and the gradient of the terms without examples.

    Both are in float32 at least. The norms of the gradients have a closed form, see `pfl_jax.primitives.per_example`,
    if every parameter is of that precision and used once, in a `pfl_jax.networks.layers.Layer`, or in terms without
    examples; otherwise each example's gradient is computed.

    Args:
      loss, params, batch, clip: see `private_gradient`.

    Example:
      >>> import jax.numpy as jnp
      >>> from pfl_jax import ClientData
      >>> from pfl_jax.primitives import losses, private_gradients
      >>> batch = ClientData(x=jnp.array([3.0, 0.5, 9.0]), y=jnp.zeros(3), mask=jnp.array([True, True, False]))
      >>> def loss(w, batch):
      ...     return losses.masked_mean(w * batch.x, batch.mask) + 0.25 * w**2
      >>> total, free = private_gradients.clipped_sum(loss, jnp.array(1.0), batch, 1.0)
      >>> print(total, free)  # min(3, 1) + 0.5, and the derivative of w^2 / 4
      1.5 0.5
    """
    loss, params = _with_single_precision(loss, params)
    examples = batch.mask.shape[0]
    few = jax.tree.map(lambda leaf: jnp.repeat(leaf[:1], FEW, axis=0), batch)
    closed_form = _has_closed_form(loss, params, few, min(examples, MICROBATCH))
    one_part = _sum_by_taps if closed_form else _sum_one_by_one
    free = _data_free(loss, params, few) if closed_form else _without_examples(loss, params, few)
    if examples <= MICROBATCH:
        return one_part(loss, params, batch, clip, free), free
    rows = -(-examples // MICROBATCH) * MICROBATCH
    # Copies of the first example that are not real.
    padded = jax.tree.map(lambda leaf: jnp.concatenate([leaf, jnp.repeat(leaf[:1], rows - examples, 0)]), batch)
    padded = padded._replace(mask=jnp.pad(batch.mask, (0, rows - examples)))
    parts = jax.tree.map(lambda leaf: leaf.reshape(-1, MICROBATCH, *leaf.shape[1:]), padded)

    def add(total, part):
        return jax.tree.map(jnp.add, total, one_part(loss, params, part, clip, free)), None

    total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)
    return total, free


def _with_single_precision(loss: Loss, params: PyTree) -> tuple[Loss, PyTree]:
    """The loss as a function of parameters in float32 at least, and these parameters."""
    types = jax.tree.map(lambda leaf: leaf.dtype, params)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)), params)
    if jax.tree.map(lambda leaf: leaf.dtype, wide) == types:
        # The arrays themselves, which the closed form tells apart.
        return loss, params
    return lambda wide, batch: loss(jax.tree.map(lambda leaf, kind: leaf.astype(kind), wide, types), batch), wide


def _factors(squares: jax.Array, mask: jax.Array, clip: float | jax.Array) -> jax.Array:
    """Factors [B] of the examples' gradients with these squared norms: at most 1, and 0 for padding."""
    return jnp.where(mask, clip / jnp.maximum(jnp.sqrt(squares), clip), 0.0)


def _sum_one_by_one(loss: Loss, params: PyTree, batch: ClientData, clip: float | jax.Array, free: PyTree) -> PyTree:
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


def _without_examples(loss: Loss, params: PyTree, part: ClientData) -> PyTree:
    """Gradient on a mini-batch without a real example, where the mean over examples is 0."""
    return jax.grad(loss)(params, part._replace(mask=jnp.zeros_like(part.mask)))


def _sum_by_taps(loss: Loss, params: PyTree, batch: ClientData, clip: float | jax.Array, free: PyTree) -> PyTree:
    leaves, structure = jax.tree.flatten(params)
    # The loss is a mean.
    count = jnp.maximum(jnp.sum(batch.mask), 1).astype(jnp.float32)

    def tapped(tap: Callable[[str, int, jax.Array, jax.Array, tuple[Any, ...]], jax.Array]) -> jax.Array:
        # New arrays, which no other argument of the loss can be identical with.
        own = [jnp.copy(leaf) for leaf in leaves]
        places = {id(leaf): index for index, leaf in enumerate(own)}

        def attach(call, args, kwargs, context):
            y = call(*args, **kwargs)
            tapped = is_tapped(context) and rows_agree(context, args[0], batch.mask.shape[0])
            if not tapped or id(args[1]) not in places:
                return y
            x, parameter, *further = args
            return tap(context.method_name, places[id(parameter)], x, y, (parameter, *further))

        with nn.intercept_methods(attach):
            return loss(jax.tree.unflatten(structure, own), batch)

    def with_norms(probe):
        return tapped(
            lambda name, _, x, y, further: add_norms(lambda x, delta: NORMS[name](x, delta, *further), x, y, probe)
        )

    def with_weights(copies):
        def tap(name, place, x, y, further):
            return weigh_gradient(
                lambda x, parameter: OPERATIONS[name](x, parameter, *further[1:]), weights, x, y, copies[place]
            )

        return tapped(tap)

    squares = jnp.square(count) * jax.grad(with_norms)(jnp.zeros(batch.mask.shape))
    weights = count * _factors(squares, batch.mask, clip)
    return jax.tree.unflatten(structure, jax.grad(with_weights)(leaves))


def _data_free(loss: Loss, params: PyTree, batch: ClientData, used: list[int] | None = None) -> PyTree:
    """Gradient of the parameters' uses outside of layers; collects the numbers of the leaves that layers use."""

    def outside(params):
        places = {id(leaf): index for index, leaf in enumerate(jax.tree.leaves(params))}

        def attach(call, args, kwargs, context):
            tapped = is_tapped(context) and rows_agree(context, args[0], batch.mask.shape[0])
            if not tapped or id(args[1]) not in places:
                return call(*args, **kwargs)
            if used is not None:
                used.append(places[id(args[1])])
            x, parameter, *further = args
            return call(x, jax.lax.stop_gradient(parameter), *further, **kwargs)

        with nn.intercept_methods(attach):
            return loss(params, batch)

    return jax.grad(outside)(params)


def _has_closed_form(loss: Loss, params: PyTree, batch: ClientData, examples: int) -> bool:
    """Whether each leaf is used in at most one layer's operation, and its other uses do not depend on the examples.

    Both for the rows of `batch` and for `examples` rows, the number with which the gradients are computed: an operation
    could have as many rows by chance.
    """
    found = [_operations(loss, params, batch, rows) for rows in (batch.mask.shape[0], examples)]
    return found[0] is not None and found[0] == found[1] and len(set(found[0])) == len(found[0])


def _operations(loss: Loss, params: PyTree, batch: ClientData, rows: int) -> list[int] | None:
    """Numbers of the leaves that layers use; None if other uses depend on the examples."""
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype), batch)
    used: list[int] = []
    jaxpr = jax.make_jaxpr(lambda params, batch: _data_free(loss, params, batch, used))(params, shapes).jaxpr
    depends = {*jaxpr.invars[len(jax.tree.leaves(params)) :]}

    def any_depends(variables: list[Any]) -> bool:
        # Literals, which cannot be hashed, have a value.
        return any(one in depends for one in variables if not hasattr(one, "val"))

    for equation in jaxpr.eqns:
        if any_depends(equation.invars):
            depends.update(equation.outvars)
    return None if any_depends(jaxpr.outvars) else used
