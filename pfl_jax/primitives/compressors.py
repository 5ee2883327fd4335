"""Lossy encodings of a tree of float32 arrays with fewer bytes: the decoded tree, and the arrays that are sent.

Each is a pair: (key, tree) -> decoded tree of the same shapes, and tree -> the arrays that are sent, used only for
their shapes and types.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from pfl_jax.base import PRNGKey, PyTree


class Compressor(NamedTuple):
    """Lossy encoding of trees.

    Attributes:
      decoded: (key, tree) -> tree after encoding and decoding.
      encoded: tree -> arrays that are sent for it; only their shapes and types are used, to count bytes.
    """

    decoded: Callable[[PRNGKey, PyTree], PyTree]
    encoded: Callable[[PyTree], PyTree]


def top_k_compressor(share: float) -> Compressor:
    """Keep the entries with the largest magnitudes, over all arrays together; all others become zero.

    The message has the kept entries and their positions, 32 bits each.

    Args:
      share: share of the entries that is kept, above 0 and at most 1; at least one entry is kept.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from pfl_jax.primitives import compressors
      >>> print(compressors.top_k_compressor(0.5).decoded(jax.random.key(0), jnp.array([1.0, -3.0, 2.0, 0.5])))
      [ 0. -3.  2.  0.]
    """

    def number(tree: PyTree) -> int:
        return max(1, round(share * sum(leaf.size for leaf in jax.tree.leaves(tree))))

    def decoded(key, tree):
        flat, unravel = ravel_pytree(tree)
        _, kept = jax.lax.top_k(jnp.abs(flat), number(tree))
        return unravel(jnp.zeros_like(flat).at[kept].set(flat[kept]))

    def encoded(tree):
        return jnp.zeros(number(tree), jnp.float32), jnp.zeros(number(tree), jnp.int32)

    return Compressor(decoded, encoded)


def quantizing_compressor(bits: int) -> Compressor:
    """Round every entry at random to one of evenly spaced levels, without bias (QSGD; Alistarh et al. 2017).

        Q(x) = scale / s (floor(s |x| / scale) + a bit) sign(x),   s = 2^(bits - 1) - 1,   scale = max |x|

    The bit is 1 with a probability equal to the part that the floor cut off, so the expectation of Q(x) is x. Each
    array has its own scale, its largest magnitude, as in the paper's experiments. The message has `bits` bits for each
    entry, one of them for the sign, and the scales as float32.

    Args:
      bits: bits of an entry, at least 2.
    """
    levels = 2 ** (bits - 1) - 1

    def one(key, leaf):
        scale = jnp.max(jnp.abs(leaf), initial=0.0)
        steps = jnp.where(scale > 0, levels * jnp.abs(leaf) / jnp.where(scale > 0, scale, 1.0), 0.0)
        whole = jnp.floor(steps + jax.random.uniform(key, leaf.shape, leaf.dtype))
        return scale / levels * jnp.minimum(whole, levels) * jnp.sign(leaf)

    def decoded(key, tree):
        leaves, structure = jax.tree.flatten(tree)
        return jax.tree.unflatten(structure, list(map(one, jax.random.split(key, max(1, len(leaves))), leaves)))

    return Compressor(decoded, partial(_packed, bits))


def sign_compressor() -> Compressor:
    """Signs of the entries, times the mean magnitude of their array (Karimireddy et al. 2019, scaled sign).

    The message has one bit for each entry, and the mean magnitudes as float32. A zero is sent as positive.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from pfl_jax.primitives import compressors
      >>> print(compressors.sign_compressor().decoded(jax.random.key(0), jnp.array([1.0, -4.0, 1.0])))
      [ 2. -2.  2.]
    """

    def decoded(key, tree):
        return jax.tree.map(lambda leaf: jnp.where(leaf < 0, -1.0, 1.0) * _mean_magnitude(leaf), tree)

    return Compressor(decoded, partial(_packed, 1))


def _mean_magnitude(leaf: jax.Array) -> jax.Array:
    return jnp.sum(jnp.abs(leaf)) / max(1, leaf.size)


def _packed(bits: int, tree: PyTree) -> PyTree:
    """Entries of a few bits each, in whole bytes for each array, with its scale."""
    return jax.tree.map(
        lambda leaf: (jnp.zeros(math.ceil(bits * leaf.size / 8), jnp.uint8), jnp.zeros((), jnp.float32)), tree
    )
