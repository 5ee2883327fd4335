"""Words for the trees that methods keep."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pfl_jax.base import ClientData, Method, PyTree
from pfl_jax.methods import make_method
from pfl_jax.networks import models
from pfl_jax.testing.problems import HYPER_PARAMETERS

LETTERS = {13: "K", 17: "d"}
"""Sizes -> their letters; methods use these sizes for nothing else."""

MOST_LEAVES = 3
"""Most leaves of an inner tree that is described leaf by leaf; named tuples always are."""


def state_trees(factory: Callable[..., Method], **hyper_parameters: Any) -> tuple[str, str]:
    """Trees of the server's state and of a client's in words.

    `model` is {"backbone": ..., "head": ...} as `Model.init` makes it, `backbone` and `head` are its parts, and
    2 x head is two of them along a leading axis. The other leaves are numbers, counts and flags, with their axes for K
    classes and d features; of larger trees inside of others only the number of arrays is given. {a, b} is a dict,
    Name(a, b) a named tuple, (a, b) a tuple. {head} stands for {head: head}; empty entries are left out.

    Args:
      factory: (model, training, *, ...) -> Method, such as one of `pfl_jax.METHODS`.
      **hyper_parameters: values in place of the factory's defaults.

    Example:
      >>> from pfl_jax import methods, testing
      >>> testing.state_trees(methods.fedper)
      ('model', 'head')
      >>> testing.state_trees(methods.fedavg)
      ('model', 'nothing')
    """
    (classes, features), inputs = LETTERS, 6
    model = models.mlp((inputs,), classes, hidden=(features,))
    method = make_method(factory, model, **HYPER_PARAMETERS | hyper_parameters)
    one = ClientData(jnp.zeros((8, inputs)), jnp.zeros(8, jnp.int32), jnp.ones(8, bool))

    def states(key):
        server = method.init_server(key)
        return model.init(key), server, method.init_client(key, server, one)

    params, server, client = jax.eval_shape(states, jax.random.key(0))
    return words(server, params), words(client, params)


def words(tree: PyTree, params: PyTree, *, inside: bool = False) -> str:
    """A tree of shapes in words, see `state_trees`.

    Args:
      tree: the tree.
      params: shapes of the model's parameters.
      inside: whether the tree is inside another one.
    """
    leaves = jax.tree.leaves(tree)
    if not leaves:
        return "nothing"
    for name, part in {"model": params, **params}.items():
        if jax.tree.structure(tree) == jax.tree.structure(part):
            shapes = [(leaf.shape, other.shape) for leaf, other in zip(leaves, jax.tree.leaves(part), strict=True)]
            if all(shape == other for shape, other in shapes):
                return name
            # With one more leading axis.
            (count, *_), _ = shapes[0] if shapes[0][0] else ((0,), ())
            if all(shape == (count, *other) for shape, other in shapes):
                return f"{count} x {name}"
    if isinstance(tree, tuple) and hasattr(tree, "_asdict"):
        return f"{type(tree).__name__}({_entries(tree._asdict(), params)})"  # pyright: ignore[reportAttributeAccessIssue]
    if inside and len(leaves) > MOST_LEAVES:
        return f"{len(leaves)} arrays"
    if isinstance(tree, dict):
        return f"{{{_entries(tree, params)}}}"
    if isinstance(tree, tuple | list):
        return f"({', '.join(words(part, params, inside=True) for part in tree)})"
    if not hasattr(tree, "shape"):
        return type(tree).__name__
    kind = "flag" if tree.dtype == jnp.bool_ else "count" if jnp.issubdtype(tree.dtype, jnp.integer) else "number"
    return f"{kind}s [{', '.join(str(LETTERS.get(size, size)) for size in tree.shape)}]" if tree.shape else kind


def _entries(named: dict[str, Any], params: PyTree) -> str:
    said = {str(name): words(part, params, inside=True) for name, part in named.items() if jax.tree.leaves(part)}
    return ", ".join(name if name == text else f"{name}: {text}" for name, text in said.items())
