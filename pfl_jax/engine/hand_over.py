"""Mapping of a function over clients that take turns: each begins with the state that the previous client passed on."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from pfl_jax.base import PyTree
from pfl_jax.engine.mapping import AXIS, map_chunks
from pfl_jax.primitives.tree import choose, gather

BLOCK = 32
"""Smallest number of clients whose turns precede their training: enough to keep several devices busy."""


class Turns(NamedTuple):
    """Turns of clients that pass a state on, see `pfl_jax.engine.hand_over`.

    Attributes:
      pass_on: function of one client, (method, data, shared, client, *rows of the client).
      numbers: [D, W], number of each client's turn.
      chain: number of clients after which a new chain begins.
    """

    pass_on: Callable[..., tuple[PyTree, PyTree]]
    numbers: jax.Array
    chain: int


def map_in_turn(
    fn: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]],
    pass_on: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]],
    shared: PyTree,
    first: PyTree,
    clients: PyTree,
    turns: jax.Array,
    is_real: jax.Array | np.ndarray,
    *,
    chain: int,
    size: int,
    chunk: int,
    mesh: Mesh | None,
    specs: PyTree,
) -> tuple[PyTree, PyTree]:
    """Like `pfl_jax.engine.mapping.map_places`, for clients that pass a state on.

    Clients are handled in blocks. First all clients of a block take their turns, one after another, each on its own
    device; then fn is applied to them in chunks. So no more than a block's states are in memory.

    Args:
      fn: (shared, client, state after the client's turn) -> (row, terms).
      pass_on: (shared, state the client gets, client) -> (state it keeps, state for the next), trees like `first`.
      shared: first argument of all calls.
      first: state that the first client of a chain gets.
      clients: leaves [D, W, ...]: row d is for device d.
      turns: int32 [D, W]: consecutive numbers of the clients in these places, from a multiple of `chain`; arbitrary in
        free places.
      is_real: bool [D, W]: False for free places.
      chain: number of clients after which a new chain begins.
      size: largest number of clients in these places.
      chunk, mesh, specs: see `map_places`.

    Returns:
      fn's rows, leaves [D, W, ...], arbitrary in free places; and the sum of its terms, replicated.
    """
    devices = 1 if mesh is None else mesh.size
    block = min(size, max(BLOCK, devices * chunk))
    number = jnp.sum(is_real)
    turns = jnp.where(is_real, turns, np.iinfo(np.int32).max)
    start = jnp.min(turns)

    def on_device(shared, first, clients, turns, start, number):
        clients, turns = gather((clients, turns), 0)
        (width,) = turns.shape

        def map_block(index, carry):
            carried, results, total = carry
            begin = start + index * block
            is_here = (begin <= turns) & (turns < begin + block)
            # Stable: on a device clients stay in their order, the largest first.
            slots = jnp.argsort(~is_here, stable=True)[: min(block, width)]
            here, own_turns, own = jnp.sum(is_here), turns[slots], gather(clients, slots)
            places = jax.tree.map(lambda leaf: jnp.zeros((len(slots), *leaf.shape), leaf.dtype), first)

            def take_turn(turn, carry):
                carried, handed = carry
                carried = choose(turn % chain == 0, first, carried)
                is_own = own_turns == turn
                slot = jnp.argmax(is_own)
                if mesh is None:
                    had, after = pass_on(shared, carried, gather(own, slot))
                else:
                    had, after = lax.cond(
                        is_own.any(),
                        lambda: pass_on(shared, carried, gather(own, slot)),
                        lambda: (carried, jax.tree.map(jnp.zeros_like, carried)),
                    )
                    after = jax.tree.map(_of_its_device, after)
                # Beyond the last place if the client belongs to another device.
                slot = jnp.where(is_own.any(), slot, len(slots))
                return after, jax.tree.map(lambda leaf, row: leaf.at[slot].set(row, mode="drop"), handed, had)

            end = jnp.minimum(begin + block, start + number)
            carried, handed = lax.fori_loop(begin, end, take_turn, (carried, places))

            def with_handed(shared, client):
                return fn(shared, *client)

            rows, terms = map_chunks(with_handed, shared, (own, handed), here, chunk)
            slots = jnp.where(jnp.arange(len(slots)) < here, slots, width)
            results = jax.tree.map(lambda leaf, row: leaf.at[slots].set(row, mode="drop"), results, rows)
            return carried, results, jax.tree.map(jnp.add, total, terms)

        row, terms = jax.eval_shape(fn, shared, gather(clients, 0), first)
        results = jax.tree.map(lambda leaf: jnp.zeros((width, *leaf.shape), leaf.dtype), row)
        total = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), terms)
        carry = (first, results, total)
        carry = map_block(0, carry) if size == block else lax.fori_loop(0, -(-number // block), map_block, carry)
        _, results, total = carry
        results = jax.tree.map(lambda leaf: leaf[None], results)
        return results, total if mesh is None else lax.psum(total, AXIS)

    if mesh is None:
        return on_device(shared, first, clients, turns, start, number)
    by_device, replicated = PartitionSpec(AXIS), PartitionSpec()
    return jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(specs, replicated, by_device, by_device, replicated, replicated),
        out_specs=(by_device, replicated),
        # As in `map_places`.
        check_vma=False,
    )(shared, first, clients, turns, start, number)


def _of_its_device(leaf: jax.Array) -> jax.Array:
    """The array from the only device on which it is not zero."""
    number = leaf.astype(jnp.int32) if leaf.dtype == jnp.bool_ else leaf
    return lax.psum(number, AXIS).astype(leaf.dtype)
