"""Fingerprint that tells clients apart independently of their numbers."""

import jax
import jax.numpy as jnp

from pfl_jax.base import ClientData


def fingerprint(data: ClientData) -> jax.Array:
    """Hash of a client's examples and their order: uint32.

    What a method draws or stores by it does not depend on how clients are numbered, on padding or on chunks.

    Args:
      data: x an array [n, ...] of moderate numbers, y [n] integers.
    """
    (n,) = data.mask.shape
    # Integers, whose sum is exact in any order: neither padding nor compilation can change it.
    pixels = jnp.round(16 * data.x).astype(jnp.int32).reshape(n, -1).sum(axis=1).astype(jnp.uint32)
    rows = (pixels * 31 + data.y.astype(jnp.uint32) + 1) * (2 * jnp.arange(n, dtype=jnp.uint32) + 1)
    mixed = jnp.sum(jnp.where(data.mask, rows, 0), dtype=jnp.uint32) * jnp.uint32(2654435761)
    return mixed ^ (mixed >> 15)
