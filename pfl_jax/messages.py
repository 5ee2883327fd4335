"""Messages of clients: `Mean`s, which the server gets summed over the cohort, and other parts, which it gets unchanged.

A client's message is split into the terms of its means and its other parts. Terms are added up as clients finish, and
`join` makes means from their sums. `trained_from` gives the received parameters from which a client trained a value.

The type of a part says which changes wrappers may make: the value of a `Mean` may be compressed, falsified by an
attacker, combined by another statistic, or moved if it is late; an `Exact` and all other parts stay unchanged.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pfl_jax.base import Client, Exact, Mean, Message, Method, PyTree, Server
from pfl_jax.errors import InvalidInput
from pfl_jax.primitives.tree import add_trailing_axes


class Unsummed(Mean):
    """`Mean` whose value and weight the server gets from every client, for a statistic other than the weighted mean.

    In `Method.aggregate`, value and weight are stacked along M, with zeros for absent clients.
    """

    __slots__: tuple[str, ...] = ()


class Update(Mean):
    """`Mean` of updates that were clipped for differential privacy, with noise that is for this mean alone."""

    __slots__: tuple[str, ...] = ()


NOT_RECEIVED: Any = None
"""Entry of `Method.trained_from` for a part that was not received: None, typed Any because parts have other types."""

MEAN_OF_UPDATES = "its noise is for a mean of clipped updates"
"""Why updates that were clipped for differential privacy are neither compressed nor combined by another statistic."""


def is_mean(part: PyTree) -> bool:
    """Whether a part of a message is a `Mean`; for the argument `is_leaf` of jax.tree.map."""
    return isinstance(part, Mean)


def is_summed(part: PyTree) -> bool:
    """Whether the server gets only the weighted mean of a part of a message."""
    return is_mean(part) and not isinstance(part, Unsummed)


def may_change(part: PyTree) -> bool:
    """Whether wrappers may change the value of a part of a message: a `Mean` that is not `Exact`."""
    return is_mean(part) and not isinstance(part, Exact)


def map_means(fn: Callable[..., Any], message: Message, *others: PyTree, rest: Callable[..., Any]) -> PyTree:
    """Tree like a message: fn(part, ...) for each `Mean` that `may_change`, rest(part, ...) for all other parts.

    Args:
      fn: function of a `Mean` and of the subtrees at its place in `others`.
      message: message of one client.
      *others: trees of the same structure, down to the `Mean`s.
      rest: function of an array outside of such `Mean`s, or of an `Exact`, and of the entries at its place in `others`.
    """

    def of_part(part, *more):
        return fn(part, *more) if may_change(part) else rest(part, *more)

    return jax.tree.map(of_part, message, *others, is_leaf=is_mean)


def has_means(message: Message) -> bool:
    """Whether any part of a message is a `Mean`."""
    return any(map(is_mean, jax.tree.leaves(message, is_leaf=is_mean)))


def needs_changeable(message: Message, wrapper: str, hint: str = "") -> None:
    """Raise InvalidInput unless a message has a `Mean` that a wrapper may change.

    Args:
      message: message of one client.
      wrapper: name of the wrapper for users.
      hint: text at the end of the error message.
    """
    if not any(map(may_change, jax.tree.leaves(message, is_leaf=is_mean))):
        has = "only exact ones, of shares, probabilities or counts" if has_means(message) else "none"
        raise InvalidInput(f"{wrapper} is for methods that send a Mean, and the messages of this one have {has}{hint}")


def split(message: Message, present: jax.Array) -> tuple[PyTree, PyTree]:
    """Split one client's message into the part that is sent unchanged and the terms that are summed over clients.

    Args:
      message: message of one client.
      present: bool scalar; the message of an absent client becomes zeros.

    Returns:
      The message with () in place of each `Mean`; and the message with Mean(weight * value, weight) in place of each
      `Mean` and () in place of all other parts. An `Unsummed` counts as another part.
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


def downloaded(method: Method, server: Server, client: Client) -> PyTree:
    """Message of the server to a client before local training.

    Args:
      method: the method.
      server: the server's state.
      client: the client's state before its training.
    """
    return server if method.download is None else method.download(server, client)


def bases(method: Method, server: Server, client: Client) -> PyTree:
    """Result of `Method.trained_from`: a tree like the message, None where nothing was received; see `downloaded`."""
    return downloaded(method, server, client) if method.trained_from is None else method.trained_from(server, client)


def trained_from(method: Method, server: Server, client: Client, message: Message) -> tuple[PyTree, PyTree]:
    """Received parameters from which a client trained the values of its `Mean`s, as `Method.trained_from` states.

    Args:
      method: the method.
      server: the server's state when the client received them.
      client: the client's state before its training.
      message: message of the client.

    Returns:
      Two trees like the message, with the value in place of each `Mean`. The first has the received parameters, zeros
      for arrays without any; the second has a Python bool for each array: whether it was received.

    Raises:
      InvalidInput: the result of `Method.trained_from` is not like the message.
    """
    values = map_means(lambda part: part.value, message, rest=lambda leaf: leaf)

    def fill(of_array, of_none):
        def filled(base, value):
            return jax.tree.map(of_none, value) if base is None else of_array(base)

        return jax.tree.map(filled, bases(method, server, client), values, is_leaf=lambda base: base is None)

    known = ()
    try:
        known = fill(lambda base: base, jnp.zeros_like)
        # A single array may stand for several, or have another shape or type.
        fits = _signature(known) == _signature(values)
    except ValueError:  # of other structures
        fits = False
    if not fits:
        raise InvalidInput(
            "received parameters do not match the message: Method.trained_from must give a tree like the message, "
            "with the received parameters in place of each Mean, and None where there are none"
        )
    return known, fill(lambda base: True, lambda value: False)


def _signature(tree: PyTree) -> tuple[Any, ...]:
    leaves, structure = jax.tree.flatten(tree)
    return structure, *((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
