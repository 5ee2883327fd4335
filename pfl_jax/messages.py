"""Messages of clients: `Mean`s, which the server gets summed over the cohort, and other parts, which it gets as sent.

A client's message is split into the terms of its means and its other parts. Terms are added up as clients finish, and
`join` makes the means of their sums. What client and server both know before the round is `reference`.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pfl_jax.base import Client, Mean, Message, Method, PyTree, Server
from pfl_jax.primitives.tree import add_trailing_axes


class Unsummed(Mean):
    """`Mean` whose value and weight the server gets from every client, for a statistic other than the weighted mean.

    In `Method.aggregate`, value and weight are stacked along M, and zeros for absent clients.
    """

    __slots__: tuple[str, ...] = ()


class Update(Mean):
    """`Mean` whose value is what is added to received parameters, not such parameters themselves."""

    __slots__: tuple[str, ...] = ()


MEAN_OF_UPDATES = "its noise is for a mean of clipped updates"
"""Why updates that were clipped for differential privacy are neither compressed nor combined by another statistic."""


def is_mean(part: PyTree) -> bool:
    """Whether a part of a message is a `Mean`; for the argument `is_leaf` of jax.tree.map."""
    return isinstance(part, Mean)


def is_summed(part: PyTree) -> bool:
    """Whether of a part of a message the server gets only the weighted mean."""
    return is_mean(part) and not isinstance(part, Unsummed)


def map_means(fn: Callable[..., Any], message: Message, *others: PyTree, rest: Callable[..., Any]) -> PyTree:
    """Tree of a message's structure: fn(part, ...) for each `Mean`, rest(part, ...) for every other array.

    Args:
      fn: function of a `Mean` and of what stands in its place in `others`.
      message: message of one client.
      *others: trees of the same structure, down to the `Mean`s.
      rest: function of another array and of what stands in its place in `others`.
    """

    def of_part(part, *more):
        return fn(part, *more) if is_mean(part) else rest(part, *more)

    return jax.tree.map(of_part, message, *others, is_leaf=is_mean)


def has_means(message: Message) -> bool:
    """Whether any part of a message is a `Mean`."""
    return any(map(is_mean, jax.tree.leaves(message, is_leaf=is_mean)))


def split(message: Message, present: jax.Array) -> tuple[PyTree, PyTree]:
    """Split one client's message into the part that is sent as it is and the terms that are summed over clients.

    Args:
      message: message of one client.
      present: bool scalar; the message of an absent client becomes zeros.

    Returns:
      The message with () in place of each `Mean`; and the message with Mean(weight * value, weight) in place of each
      `Mean` and () in place of all other parts. An `Unsummed` is another part.
    """

    def clear(leaf):
        # A client that diverged sends NaN, and zero times NaN would still be NaN.
        return jnp.where(present, leaf, jnp.zeros_like(leaf))

    def row(part):
        return () if is_summed(part) else jax.tree.map(clear, part)

    def term(part):
        if not is_summed(part):
            return ()
        weight = jnp.where(present, part.weight, 0.0)
        return Mean(jax.tree.map(lambda leaf: add_trailing_axes(weight, leaf) * clear(leaf), part.value), weight)

    return jax.tree.map(row, message, is_leaf=is_mean), jax.tree.map(term, message, is_leaf=is_mean)


def join(rows: PyTree, sums: PyTree) -> PyTree:
    """Messages for `Method.aggregate`, from stacked parts and sums.

    Args:
      rows: stacked first results of `split`, leaves [M, ...].
      sums: second results of `split`, summed over all clients.
    """

    def mean_or_row(total, row):
        if not is_mean(total):
            return row
        divisor = jnp.where(total.weight > 0, total.weight, 1.0)
        return Mean(jax.tree.map(lambda leaf: leaf / add_trailing_axes(divisor, leaf), total.value), total.weight)

    return jax.tree.map(mean_or_row, sums, rows, is_leaf=lambda part: is_mean(part) or part == ())


def received(method: Method, server: Server, client: Client) -> PyTree:
    """What a client gets from the server before its local training.

    Args:
      method: the method.
      server: the server's state.
      client: the client's state before its training.
    """
    return server if method.download is None else method.download(server, client)


def reference(value: PyTree, known: PyTree) -> tuple[PyTree, PyTree]:
    """Received parameters that a client trained to the value of a `Mean`, as far as they can be told.

    They are the only subtree of `known` with the structure, the shapes and the types of the value; if there are
    several, the only one of the same name. Where there is none, each part of the value is looked up by itself. Single
    arrays, such as class means, have no received parameters: their shape alone says too little.

    Args:
      value: value of one client's `Mean`.
      known: what the client received, see `received`.

    Returns:
      Tree of the value's structure with the received parameters, zeros for parts without any; and one with a Python
      bool for each array: whether it was received.

    Example:
      >>> import jax.numpy as jnp
      >>> from pfl_jax.messages import reference
      >>> server = {"params": {"w": jnp.ones(2)}, "round": jnp.zeros(())}
      >>> reference({"w": jnp.zeros(2)}, server)[1], reference(jnp.zeros(2), server)[1]
      ({'w': True}, False)
    """
    candidates = [(name, tree, _signature(tree)) for name, tree in _subtrees(known, "")]

    def find(part, name):
        if not jax.tree.leaves(part):
            return part, part
        here = _signature(part)
        same = [(other, tree) for other, tree, signature in candidates if signature == here]
        if len(same) > 1:
            same = [(other, tree) for other, tree in same if other == name]
        if len(same) == 1:
            return same[0][1], jax.tree.map(lambda _: True, part)
        if _is_array(part):
            return jnp.zeros_like(part), False
        children = _children(part)
        found = [find(child, own) for own, child in children]
        outer = jax.tree.structure(part, is_leaf=lambda node: node is not part)
        return tuple(jax.tree.unflatten(outer, list(column)) for column in zip(*found, strict=True))

    return find(value, "")


def references(message: Message, known: PyTree) -> tuple[PyTree, PyTree]:
    """`reference` of every `Mean` of a message, which is looked up as a whole first.

    Of several `Mean`s of one shape, such as adapters of equal layers, the place in the message tells which is which.

    Args:
      message: message of one client.
      known: what the client received, see `received`.

    Returns:
      The two trees of `reference`, of the message's structure with the value in place of each `Mean`.
    """
    return reference(map_means(lambda part: part.value, message, rest=lambda leaf: leaf), known)


def _is_array(tree: PyTree) -> bool:
    return jax.tree_util.treedef_is_leaf(jax.tree.structure(tree))


def _children(tree: PyTree) -> list[tuple[str, PyTree]]:
    """Direct children of a tree with their names."""
    paths = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: node is not tree)
    return [(jax.tree_util.keystr(path, simple=True), child) for path, child in paths]


def _subtrees(tree: PyTree, name: str) -> Iterator[tuple[str, PyTree]]:
    """A tree and all below it with their names, except single arrays and trees without any."""
    if _is_array(tree) or not jax.tree.leaves(tree):
        return
    yield name, tree
    for own, child in _children(tree):
        yield from _subtrees(child, own)


def _signature(tree: PyTree) -> tuple[Any, ...]:
    leaves, structure = jax.tree.flatten(tree)
    return structure, *((leaf.shape, jnp.dtype(leaf.dtype)) for leaf in leaves)
