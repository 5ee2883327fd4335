"""Functions of a client's examples, applied in batches."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pfl_jax.base import PyTree
from pfl_jax.primitives.loops import differentiated_by
from pfl_jax.primitives.tree import choose
from pfl_jax.validation import Count, check_value

FORWARD_BATCH = 200
"""Examples per forward pass: large enough for full speed, small enough for a CPU's cache."""


def map_examples(
    fn: Callable[[PyTree], PyTree], x: PyTree, mask: jax.Array, *, batch_size: int = FORWARD_BATCH
) -> PyTree:
    """Apply fn to the rows of x in batches, so that memory does not grow with the number of examples.

    The loop stops after the last real row, so the time depends on a client's own size and not on the padding.

    Args:
      fn: rows [batch, ...] -> rows [batch, ...]; each output row depends only on its input row.
      x: pytree of leaves [n, ...].
      mask: [n], the real rows.
      batch_size: rows in one call of fn, at most n.

    Returns:
      Output rows [n, ...]; rows of batches that contain only padding are zero.

    Raises:
      InvalidInput: batch_size is below 1.

    Example:
      >>> import jax.numpy as jnp
      >>> from pfl_jax.primitives import examples
      >>> mask = jnp.arange(5) < 3
      >>> print(examples.map_examples(lambda x: x + 1.0, jnp.zeros(5), mask, batch_size=2))  # the last batch: padding
      [1. 1. 1. 1. 0.]
    """
    check_value("batch_size", batch_size, Count)
    (n,) = mask.shape
    size = min(batch_size, n)

    def rows(x, start):
        return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, start, size), x)

    shapes = jax.eval_shape(lambda x: fn(rows(x, 0)), x)

    def loop(fn, x, mask, *, is_static=False):
        def body(index, outputs):
            # The last slice is moved back so that it ends at n; its first rows are computed twice with equal results.
            start = jnp.minimum(index * size, n - size)
            following = jax.tree.map(
                lambda output, new: jax.lax.dynamic_update_slice_in_dim(output, new, start, 0),
                outputs,
                fn(rows(x, start)),
            )
            return choose(index < number, following, outputs) if is_static else following

        end = jnp.max(jnp.where(mask, jnp.arange(1, n + 1), 0))
        number = (end + size - 1) // size
        outputs = jax.tree.map(lambda shape: jnp.zeros((n, *shape.shape[1:]), shape.dtype), shapes)
        return jax.lax.fori_loop(0, -(-n // size) if is_static else number, body, outputs)

    example = jax.eval_shape(lambda x: rows(x, 0), x)
    return differentiated_by(loop, functools.partial(loop, is_static=True), fn, (example,))(x, mask)
