"""Fingerprint that identifies a client by its data, independently of its number."""

import jax
import jax.numpy as jnp

from pfl_jax.base import ClientData


def fingerprint(data: ClientData) -> jax.Array:
    """Hash of a client's examples and their order: uint32.

    Random numbers and records that use it do not depend on how clients are numbered, on padding or on chunks.

    Args:
      data: examples whose x is an array [n, ...] with values far below 1e8, and y [n] integers.
    """
    (n,) = data.mask.shape
    # A sum of integers is exact in any order, so neither padding nor compilation changes it.
    pixels = jnp.round(16 * data.x).astype(jnp.int32).reshape(n, -1).sum(axis=1).astype(jnp.uint32)
    rows = (pixels * 31 + data.y.astype(jnp.uint32) + 1) * (2 * jnp.arange(n, dtype=jnp.uint32) + 1)
    mixed = jnp.sum(jnp.where(data.mask, rows, 0), dtype=jnp.uint32) * jnp.uint32(2654435761)
    return mixed ^ (mixed >> 15)


def order_by_data(identities: jax.Array, present: jax.Array) -> jax.Array:
    """Positions [M] of a cohort's clients in the order of their data, in which absent clients come last.

    A server that visits clients one after another in this order does not depend on how they are numbered.

    Args:
      identities: fingerprint of each client's data [M]; those of absent clients do not matter.
      present: [M], bool.
    """
    return jnp.lexsort((identities, ~present))
