"""`Mean` messages: a client's weighted terms, and the means for the server."""

import jax
import jax.numpy as jnp

from pfl_jax.base import Mean, Message, PyTree
from pfl_jax.primitives.tree import along


def is_mean(part: PyTree) -> bool:
    """Whether a part of a message is a `Mean`; an `is_leaf` for jax.tree.map."""
    return isinstance(part, Mean)


def split(message: Message, present: jax.Array) -> tuple[PyTree, PyTree]:
    """Split one client's message into its own part and the terms that are summed.

    Args:
      message: of one client.
      present: bool scalar; the message of an absent client is zeros.

    Returns:
      The message with () for each `Mean`, and the message with the `Mean` of weight * value and weight for each, ()
      for all else.
    """

    def clear(leaf):
        # The value of a client that diverged is NaN, which a weight of zero would not remove.
        return jnp.where(present, leaf, jnp.zeros_like(leaf))

    def own(part):
        return () if is_mean(part) else clear(part)

    def term(part):
        if not is_mean(part):
            return ()
        weight = jnp.where(present, part.weight, 0.0)
        return Mean(jax.tree.map(lambda leaf: along(weight, leaf) * clear(leaf), part.value), weight)

    return jax.tree.map(own, message, is_leaf=is_mean), jax.tree.map(term, message, is_leaf=is_mean)


def join(rows: PyTree, sums: PyTree) -> PyTree:
    """Messages for `Method.aggregate`, from stacked parts and sums.

    Args:
      rows: of all clients, leaves [M, ...]; () for each `Mean`.
      sums: the terms of `split`, added up over all clients.
    """

    def one(total, row):
        if not is_mean(total):
            return row
        divisor = jnp.where(total.weight > 0, total.weight, 1.0)
        return Mean(jax.tree.map(lambda leaf: leaf / along(divisor, leaf), total.value), total.weight)

    return jax.tree.map(one, sums, rows, is_leaf=lambda part: is_mean(part) or part == ())
