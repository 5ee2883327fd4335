"""`Mean` messages: the weighted terms of each client, and the means that the server receives."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pfl_jax.base import Mean, Message, PyTree
from pfl_jax.errors import InvalidInput
from pfl_jax.primitives.tree import add_trailing_axes
from pfl_jax.primitives.updates import has_means, is_mean


def split(message: Message, present: jax.Array, *, single: bool = False) -> tuple[PyTree, PyTree]:
    """Split one client's message into the part that is sent as it is and the terms that are summed over clients.

    Args:
      message: message of one client.
      present: bool scalar; the message of an absent client becomes zeros.
      single: whether each `Mean` is sent as it is too, for `Method.server_mean`; then nothing is summed.

    Returns:
      The message with () in place of each `Mean`; and the message with Mean(weight * value, weight) in place of each
      `Mean` and () in place of all other parts.

    Raises:
      InvalidInput: `single`, and there is no `Mean` in the message.
    """
    if single and not has_means(message):
        raise InvalidInput("server_mean is for methods that send a Mean, and the messages of this one have none")

    def clear(leaf):
        # A client that diverged sends NaN, and zero times NaN would still be NaN.
        return jnp.where(present, leaf, jnp.zeros_like(leaf))

    def unsummed(part):
        if is_mean(part):
            return jax.tree.map(clear, part) if single else ()
        return clear(part)

    def term(part):
        if single or not is_mean(part):
            return ()
        weight = jnp.where(present, part.weight, 0.0)
        return Mean(jax.tree.map(lambda leaf: add_trailing_axes(weight, leaf) * clear(leaf), part.value), weight)

    return jax.tree.map(unsummed, message, is_leaf=is_mean), jax.tree.map(term, message, is_leaf=is_mean)


def join(rows: PyTree, sums: PyTree, server_mean: Callable[[PyTree, jax.Array], Mean] | None = None) -> PyTree:
    """Messages for `Method.aggregate`, from stacked parts and sums.

    Args:
      rows: stacked first results of `split`, leaves [M, ...]; () for each `Mean`, or the stacked `Mean`s.
      sums: second results of `split`, summed over all clients.
      server_mean: see `Method.server_mean`.
    """
    if server_mean is not None:
        return jax.tree.map(lambda part: server_mean(*part) if is_mean(part) else part, rows, is_leaf=is_mean)

    def mean_or_row(total, row):
        if not is_mean(total):
            return row
        divisor = jnp.where(total.weight > 0, total.weight, 1.0)
        return Mean(jax.tree.map(lambda leaf: leaf / add_trailing_axes(divisor, leaf), total.value), total.weight)

    return jax.tree.map(mean_or_row, sums, rows, is_leaf=lambda part: is_mean(part) or part == ())
