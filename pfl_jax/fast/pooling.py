"""Pooling with a gradient that is fast even if every client has its own model."""

import functools
import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pfl_jax.errors import InvalidInput

LARGEST = 127
"""Largest number of elements in a window of max pooling: positions are stored as int8."""


def _windows(x: jax.Array, window: Sequence[int]) -> jax.Array:
    """View of x as disjoint windows: each axis of size n becomes two, [n // w, w], cropped to fit."""
    x = x[tuple(slice(size // side * side) for size, side in zip(x.shape, window, strict=True))]
    sides = [(size // side, side) for size, side in zip(x.shape, window, strict=True)]
    return x.reshape(*itertools.chain.from_iterable(sides))


def _inner(window: Sequence[int]) -> tuple[int, ...]:
    """Axes of `_windows` that run inside the windows."""
    return tuple(range(1, 2 * len(window), 2))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _max_pool(window: tuple[int, ...], x: jax.Array) -> jax.Array:
    return jnp.max(_windows(x, window), axis=_inner(window))


@_max_pool.defjvp
def _change_of_max_pool(window, primals, tangents):
    (x,), (change,) = primals, tangents
    windows, winner = _windows(x, window), jnp.int8(0)
    places = list(itertools.product(*map(range, window)))
    indices = [tuple(itertools.chain.from_iterable((slice(None), i) for i in place)) for place in places]
    best = windows[indices[0]]
    for number, index in enumerate(indices[1:], start=1):
        candidate = windows[index]
        winner = jnp.where(candidate > best, jnp.int8(number), winner)
        best = jnp.maximum(best, candidate)
    # The backward pass needs only the position of the maximum in its window, a sixteenth of the memory of x.
    position = jnp.zeros((), jnp.int8)
    for axis, side in zip(_inner(window), window, strict=True):
        if side > 1:
            position = side * position + jax.lax.broadcasted_iota(jnp.int8, windows.shape, axis)
    won = position == jnp.expand_dims(winner, _inner(window))
    return _max_pool(window, x), jnp.sum(jnp.where(won, _windows(change, window), 0), axis=_inner(window))


def max_pool(x: jax.Array, window: int | Sequence[int] = 2) -> jax.Array:
    """Maximum over disjoint windows, by default 2 x 2 squares of x [B, H, W, C]; incomplete windows are dropped.

    If a window has several equal maxima, the first in row-major order gets the whole gradient, as in PyTorch (`jnp.max`
    would divide it). Derivatives of any order are supported.

    Args:
      x: [B, H, W, C]; or any shape, if `window` has a side for each axis.
      window: side length of the squares, at most 11; or a side for each axis of x, at most 127 elements in all.

    Returns:
      [B, H // window, W // window, C].

    Example:
      >>> import jax.numpy as jnp
      >>> from pfl_jax.fast import pooling
      >>> image = jnp.arange(16.0).reshape(1, 4, 4, 1)
      >>> print(pooling.max_pool(image)[0, :, :, 0])
      [[ 5.  7.]
       [13. 15.]]
    """
    sides = (1, window, window, 1) if isinstance(window, int) else tuple(window)
    if min(sides) < 1 or math.prod(sides) > LARGEST:
        raise InvalidInput(f"a pooling window must have between 1 and {LARGEST} elements, not {window}")
    return x if math.prod(sides) == 1 else _max_pool(sides, x)


def sum_pool(x: jax.Array, window: Sequence[int]) -> jax.Array:
    """Sum over disjoint windows; incomplete windows are dropped.

    Args:
      x: array of any shape.
      window: a side for each axis of x.
    """
    return jnp.sum(_windows(x, window), axis=_inner(window))
