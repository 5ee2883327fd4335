"""Comparison of states for `pfl_jax.testing.conformance`."""

from typing import Any

import chex
import jax
import numpy as np

from pfl_jax.base import PyTree, State

TOLERANCE: dict[str, Any] = {"rtol": 2e-4, "atol": 2e-5}
"""Tolerance for states that differ in the order of sums alone."""

LOOSE: dict[str, Any] = {"rtol": 2e-3, "atol": 2e-4}
"""Tolerance for states after clients in another order, whose means are added up in another order too."""


def rows(tree: PyTree, indices: Any) -> PyTree:
    """Rows of a tree's leaves at these indices, in NumPy, which compiles nothing."""
    return jax.tree.map(lambda leaf: np.asarray(leaf)[indices], tree)


def assert_close(left: State, right: State) -> None:
    """Raise AssertionError unless the states left and right agree up to rounding, except for their keys."""
    chex.assert_trees_all_close(left._replace(key=()), right._replace(key=()), **TOLERANCE)


def kinds(state: State) -> dict[str, Any]:
    """Shape and type of every leaf, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(state._replace(key=()))
    # Keys have no weak types.
    return {
        jax.tree_util.keystr(path): (leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)) for path, leaf in leaves
    }


def like(fewer: PyTree, tree: PyTree, places: Any = slice(3)) -> PyTree:
    """Rows at these places of the cohort, along all axes along which a leaf is shorter in `fewer`."""

    def taken(leaf, less):
        for axis in np.flatnonzero(np.not_equal(leaf.shape, less.shape)):
            leaf = np.moveaxis(np.moveaxis(leaf, axis, 0)[places], 0, axis)
        return leaf

    return jax.tree.map(taken, tree, fewer)
