"""Max pooling with a gradient that is fast when every client has its own model."""

import functools

import chex
import jax
import jax.numpy as jnp

from pfl_jax.errors import InvalidInput


def _squares(x: jax.Array, window: int) -> jax.Array:
    """x [B, H, W, C] as disjoint squares [B, H // window, window, W // window, window, C], cropped to fit."""
    batch, height, width, channels = x.shape
    rows, columns = height // window, width // window
    x = x[:, : rows * window, : columns * window]
    return x.reshape(batch, rows, window, columns, window, channels)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _max_pool(window: int, x: jax.Array) -> jax.Array:
    return jnp.max(_squares(x, window), axis=(2, 4))


def _max_pool_forward(window, x):
    # The winner's place in its square takes a sixteenth of the memory of x, which the backward pass need not read.
    squares = _squares(x, window)
    best, winner = squares[:, :, 0, :, 0], 0
    for place in range(1, window * window):
        candidate = squares[:, :, place // window, :, place % window]
        winner = jnp.where(candidate > best, jnp.int8(place), winner)
        best = jnp.maximum(best, candidate)
    return _max_pool(window, x), (winner, x.shape)


def _max_pool_backward(window, residuals, g):
    winner, (batch, height, width, channels) = residuals
    rows, columns = height // window, width // window
    shape = (batch, rows, window, columns, window, channels)
    place = window * jax.lax.broadcasted_iota(jnp.int8, shape, 2) + jax.lax.broadcasted_iota(jnp.int8, shape, 4)
    x_gradient = jnp.where(place == winner[:, :, None, :, None], g[:, :, None, :, None], 0)
    x_gradient = x_gradient.reshape(batch, rows * window, columns * window, channels)
    return (jnp.pad(x_gradient, ((0, 0), (0, height - rows * window), (0, width - columns * window), (0, 0))),)


_max_pool.defvjp(_max_pool_forward, _max_pool_backward)


def max_pool(x: jax.Array, window: int = 2) -> jax.Array:
    """Maximum over disjoint window x window squares of x [B, H, W, C]; rows and columns left over are dropped.

    Of equal maxima of a square the first, row by row, gets the whole gradient, as in PyTorch. (`jnp.max` would
    share it.) Gradients of any order work, in reverse mode.

    Args:
      x: [B, H, W, C].
      window: side of the squares, at most 11.

    Returns:
      [B, H // window, W // window, C].

    Example:
      >>> import jax.numpy as jnp
      >>> from pfl_jax.networks import pooling
      >>> picture = jnp.arange(16.0).reshape(1, 4, 4, 1)
      >>> print(pooling.max_pool(picture)[0, :, :, 0])
      [[ 5.  7.]
       [13. 15.]]
    """
    chex.assert_rank(x, 4)
    if not 1 <= window <= 11:  # A place in the square is kept in eight bits.
        raise InvalidInput(f"a pooling window must be between 1 and 11, not {window}")
    return _max_pool(window, x)
