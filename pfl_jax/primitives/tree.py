"""Operations on pytrees: splitting and merging models, gathering and scattering clients, sizes and checks."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from pfl_jax.base import STATISTICS, Backbone, Head, Params, PyTree
from pfl_jax.errors import InvalidInput

_Dataclass = TypeVar("_Dataclass", bound=type)


def register_unchecked(kind: _Dataclass) -> _Dataclass:
    """Register a frozen dataclass as a pytree whose operations do not call `__post_init__`.

    Like `jax.tree_util.register_dataclass`, with fields of metadata {"static": True} outside the tree. A tree that JAX
    makes of it may hold values that the checks of `__post_init__` would refuse, such as derivatives.

    Args:
      kind: the dataclass.

    Returns:
      `kind` itself.
    """
    is_static = {field.name: field.metadata.get("static", False) for field in dataclasses.fields(kind)}
    leaves, static = ([name for name, value in is_static.items() if value is which] for which in (False, True))

    def flatten(instance):
        children = [(jax.tree_util.GetAttrKey(name), getattr(instance, name)) for name in leaves]
        return children, tuple(getattr(instance, name) for name in static)

    def unflatten(values, children):
        instance = object.__new__(kind)
        for name, value in zip((*static, *leaves), (*values, *children), strict=True):
            object.__setattr__(instance, name, value)
        return instance

    jax.tree_util.register_pytree_with_keys(kind, flatten, unflatten)
    return kind


def merge(backbone: Backbone, head: Head) -> Params:
    """Whole model from a backbone and a head."""
    return {"backbone": backbone, "head": head}


def split(params: Params) -> tuple[Backbone, Head]:
    """Backbone and head of a whole model's params; the inverse of `merge`.

    Example:
      >>> from pfl_jax.primitives import tree
      >>> backbone, head = tree.split({"backbone": {"kernel": 1.0}, "head": {"kernel": 2.0}})
      >>> backbone, tree.merge(backbone, head)
      ({'kernel': 1.0}, {'backbone': {'kernel': 1.0}, 'head': {'kernel': 2.0}})
    """
    return params["backbone"], params["head"]


def interpolate(share: jax.Array | float, left: PyTree, right: PyTree) -> PyTree:
    """Interpolate share left + (1 - share) right, leaf by leaf: exactly one of the two at shares 1 and 0.

    Example:
      >>> import jax.numpy as jnp
      >>> from pfl_jax.primitives import tree
      >>> print(tree.interpolate(0.25, {"w": jnp.array([4.0])}, {"w": jnp.array([0.0])})["w"])
      [1.]
    """
    return jax.tree.map(lambda a, b: share * a + (1 - share) * b, left, right)


def map_statistics(fn: Callable[..., Any], tree: PyTree, *others: PyTree) -> PyTree:
    """Copy of a tree in which fn has been applied to the running statistics of batch normalization.

    Args:
      fn: (leaf of tree, leaf of each other tree) -> leaf.
      tree: any tree that holds backbones, or a backbone itself.
      others: trees of the same structure.

    Example:
      >>> from pfl_jax.primitives import tree
      >>> tree.map_statistics(lambda leaf: 0.0, {"norm": {"bias": 1.0}, "batch_stats": {"norm": {"mean": 2.0}}})
      {'batch_stats': {'norm': {'mean': 0.0}}, 'norm': {'bias': 1.0}}
    """

    def mapped(path, leaf, *rest):
        return fn(leaf, *rest) if any(getattr(key, "key", None) == STATISTICS for key in path) else leaf

    return jax.tree_util.tree_map_with_path(mapped, tree, *others)


def running_statistics(tree: PyTree) -> list[jax.Array]:
    """Running statistics of batch normalization in a tree, in the order of `jax.tree.leaves`."""
    found: list[jax.Array] = []
    map_statistics(lambda leaf: found.append(leaf) or leaf, tree)
    return found


def with_statistics(tree: PyTree, statistics: PyTree) -> PyTree:
    """Copy of trained parameters with new running statistics of batch normalization.

    Args:
      tree: the parameters. A tree without statistics, such as a head, is returned unchanged.
      statistics: new statistics, which a loss of local training returns beside its value, in the order of
        `running_statistics`.

    Raises:
      InvalidInput: the tree has statistics, but a different number of them.
    """
    count, new = len(running_statistics(tree)), jax.tree.leaves(statistics)
    if count not in (0, len(new)):
        raise InvalidInput(
            f"BatchNorm has {count} arrays of running statistics, and the loss gives {len(new)}: let it return (value, "
            "statistics), see Model.training_features"
        )
    following = iter(new)
    return map_statistics(lambda _: next(following), tree)


def gather(tree: PyTree, indices: jax.Array | np.ndarray | int) -> PyTree:
    """Rows `indices` [M] of every leaf [N, ...] of a tree, in the order of `indices`; an integer drops the axis.

    Example:
      >>> import jax.numpy as jnp
      >>> from pfl_jax.primitives import tree
      >>> print(tree.gather({"w": jnp.array([[0, 1], [2, 3], [4, 5]])}, jnp.array([2, 0]))["w"])
      [[4 5]
       [0 1]]
    """
    return jax.tree.map(lambda leaf: leaf[indices], tree)


def scatter(tree: PyTree, indices: jax.Array, rows: PyTree) -> PyTree:
    """Copy of `tree` [N, ...] with its rows at the distinct `indices` [M] replaced by `rows`.

    Example:
      >>> import jax.numpy as jnp
      >>> from pfl_jax.primitives import tree
      >>> print(tree.scatter({"w": jnp.zeros(4)}, jnp.array([3, 1]), {"w": jnp.array([7.0, 8.0])})["w"])
      [0. 8. 0. 7.]
    """
    return jax.tree.map(lambda leaf, row: leaf.at[indices].set(row, unique_indices=True), tree, rows)


def choose(flags: jax.Array, left: PyTree, right: PyTree) -> PyTree:
    """Select rows i of `left` where flags[i] and of `right` elsewhere, in leaves [M, ...]; a scalar selects a tree."""
    return jax.tree.map(lambda a, b: jnp.where(add_trailing_axes(flags, a), a, b), left, right)


def add_trailing_axes(array: jax.Array, leaf: jax.Array) -> jax.Array:
    """The array with trailing axes of size 1 appended, so that it broadcasts along the leading axes of the leaf."""
    return array.reshape(array.shape + (1,) * (leaf.ndim - array.ndim))


def all_finite(tree: PyTree) -> jax.Array:
    """Whether all real numbers of a tree are finite: a scalar bool."""
    real = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return jnp.all(jnp.array([jnp.isfinite(leaf).all() for leaf in real], bool))


def byte_count(tree: PyTree) -> int:
    """Total bytes of a tree's arrays, computed from their shapes.

    Example:
      >>> import jax.numpy as jnp
      >>> from pfl_jax.primitives import tree
      >>> tree.byte_count({"kernel": jnp.zeros((3, 4)), "bias": jnp.zeros(4)})
      64
    """
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
