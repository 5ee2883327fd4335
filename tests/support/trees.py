"""Comparisons of pytrees, in NumPy, which compiles nothing."""

import jax
import numpy as np


def row(tree, index):
    """A pytree's rows at an index of the leading axes."""
    return jax.tree.map(lambda leaf: np.asarray(leaf)[index], tree)


def assert_same(left, right, rtol=1e-4, atol=1e-5):
    """Two pytrees of one structure agree but for rounding."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), left, right)


def flatten(tree):
    """Leaves of a tree as a flat dict of float64 arrays, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.float64(leaf) for path, leaf in leaves}


def assert_flat(got, want, rtol=1e-3, atol=1e-4):
    """A tree agrees with a flat dict as `flatten` gives, but for rounding."""
    got = flatten(got)
    assert got.keys() == want.keys()
    for name, value in got.items():
        np.testing.assert_allclose(value, want[name], rtol=rtol, atol=atol, err_msg=name)


def distance(left, right):
    """Squared Euclidean distance of two pytrees."""
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return sum(float(np.sum((np.asarray(a, np.float64) - b) ** 2)) for a, b in pairs)


def average(trees, weights):
    """The weighted mean of pytrees, in float64."""
    return jax.tree.map(lambda *leaves: np.average(np.asarray(leaves, np.float64), 0, weights), *trees)
