"""Pytrees of clients: split, merge and mix models, gather and scatter along the client axis, count and check them."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from pfl_jax.base import Backbone, Head, Params, PyTree


def merge(backbone: Backbone, head: Head) -> Params:
    """The whole model of a backbone and a head."""
    return {"backbone": backbone, "head": head}


def split(params: Params) -> tuple[Backbone, Head]:
    """The backbone and the head of a whole model; the inverse of `merge`."""
    return params["backbone"], params["head"]


def interpolate(share: jax.Array | float, left: PyTree, right: PyTree) -> PyTree:
    """share left + (1 - share) right, leaf by leaf: exactly one of the two at shares 1 and 0."""
    return jax.tree.map(lambda a, b: share * a + (1 - share) * b, left, right)


def gather(tree: PyTree, indices: jax.Array | np.ndarray | int) -> PyTree:
    """Rows `indices` [M] of every leaf [N, ...], in their order; a single number drops the axis."""
    return jax.tree.map(lambda leaf: leaf[indices], tree)


def scatter(tree: PyTree, indices: jax.Array, rows: PyTree) -> PyTree:
    """`tree` with rows `indices` [M], which must be distinct, of every leaf [N, ...] replaced by those of `rows`."""
    return jax.tree.map(lambda leaf, row: leaf.at[indices].set(row, unique_indices=True), tree, rows)


def choose(flags: jax.Array, left: PyTree, right: PyTree) -> PyTree:
    """Row i of `left` where flags[i], of `right` elsewhere, for every leaf [M, ...]."""
    return jax.tree.map(lambda a, b: jnp.where(flags.reshape(-1, *[1] * (a.ndim - 1)), a, b), left, right)


def all_finite(tree: PyTree) -> jax.Array:
    """Whether no real number of a tree is NaN or infinite: a scalar bool."""
    real = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return jnp.all(jnp.array([jnp.isfinite(leaf).all() for leaf in real], bool))


def byte_count(tree: PyTree) -> int:
    """Bytes that the arrays of a tree hold, which is what sending it costs. Reads shapes only."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
