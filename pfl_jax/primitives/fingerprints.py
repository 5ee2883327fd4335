"""Fingerprint that identifies a client by its data, independently of its number."""

import jax
import jax.numpy as jnp

from pfl_jax.base import ClientData, PRNGKey

WORDS = 2
"""Number of uint32 words of a fingerprint."""

ROUNDED_BITS = 12
"""Number of last bits of a float's 23-bit significand that a fingerprint leaves out: programs that are compiled
differently normalize the same inputs to values that differ in the last bits."""


def fingerprint(data: ClientData) -> jax.Array:
    """Hash of a client's examples, whatever their order: uint32 [WORDS].

    Random numbers and records that use it do not depend on how clients are numbered, on padding or on chunks. Floats
    count to about 1 in 4,000, integers exactly. Two clients with different examples have the same fingerprint with a
    probability of 2^-64.

    Args:
      data: examples whose x and y are arrays [n, ...], or trees of them.
    """
    # A sum of integers is exact in any order, so neither padding nor compilation changes it.
    return jnp.sum(jnp.where(data.mask[:, None], example_fingerprints(data), 0), axis=0, dtype=jnp.uint32)


def example_fingerprints(data: ClientData) -> jax.Array:
    """Hash of each example, whatever its position: uint32 [n, WORDS], uniform over all numbers. See `fingerprint`.

    Args:
      data: examples whose x and y are arrays [n, ...], or trees of them.
    """
    (n,) = data.mask.shape
    rows, first = jnp.zeros((n, WORDS), jnp.uint32), 1
    for leaf in jax.tree.leaves((data.x, data.y)):
        words = _words(leaf).reshape(n, 1, -1)
        count = WORDS * words.shape[-1]
        places = _mixed(jnp.arange(first, first + count, dtype=jnp.uint32)).reshape(WORDS, -1)
        rows, first = rows + jnp.sum(_mixed(words ^ places), axis=-1, dtype=jnp.uint32), first + count
    return _mixed(rows)


def _words(leaf: jax.Array) -> jax.Array:
    """Elements as uint32: floats by their rounded bits, zeros of both signs as 0."""
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf.astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(leaf.astype(jnp.float32), jnp.uint32)
    return jnp.where(leaf == 0, 0, (bits + (1 << (ROUNDED_BITS - 1))) >> ROUNDED_BITS)


def _mixed(words: jax.Array) -> jax.Array:
    """The finalizer of MurmurHash3: a bijection of uint32 in which every bit of the input reaches all of the output."""
    words = (words ^ (words >> 16)) * jnp.uint32(0x85EBCA6B)
    words = (words ^ (words >> 13)) * jnp.uint32(0xC2B2AE35)
    return words ^ (words >> 16)


def fingerprint_key(key: PRNGKey, identity: jax.Array) -> PRNGKey:
    """Key of a client's own random numbers.

    Args:
      key: key of the random numbers of all clients.
      identity: [WORDS], fingerprint of the client's data.
    """
    return jax.random.fold_in(jax.random.fold_in(key, identity[0]), identity[1])


def same_fingerprint(identities: jax.Array, others: jax.Array) -> jax.Array:
    """Whether fingerprints are equal: bool [...].

    Args:
      identities, others: [..., WORDS]; their leading axes broadcast.
    """
    return jnp.all(identities == others, axis=-1)


def order_by_fingerprint(identities: jax.Array, present: jax.Array) -> jax.Array:
    """Positions [M] of a cohort's clients in the order of their data, in which absent clients come last.

    A server that visits clients one after another in this order does not depend on how they are numbered.

    Args:
      identities: fingerprint of each client's data [M, WORDS]; arbitrary for absent clients.
      present: [M], bool.
    """
    return jnp.lexsort((*identities.T, ~present))
