"""Mapping of a function over clients: in chunks on one device, on the devices of a mesh, or with turns before it."""

import functools
import logging
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pfl_jax.backends import cpu_cores
from pfl_jax.base import PyTree
from pfl_jax.errors import InvalidInput
from pfl_jax.primitives.tree import choose, gather
from pfl_jax.validation import Check

logger = logging.getLogger(__name__)

AXIS = "clients"
"""Axis of a mesh over which clients are spread."""

BLOCK = 32
"""Smallest number of clients whose turns precede their training: enough to keep several devices busy."""


def client_mesh(devices: list[Any] | None = None) -> Mesh:
    """Mesh with the one axis "clients" over the given devices, by default all local ones.

    Example:
      >>> import jax
      >>> from pfl_jax import client_mesh
      >>> client_mesh(jax.devices()[:1]).axis_names
      ('clients',)
    """
    devices = jax.local_devices() if devices is None else devices
    return jax.make_mesh((len(devices),), (AXIS,), axis_types=(AxisType.Auto,), devices=devices)


@functools.cache
def note_idle_cores() -> None:
    """Log a warning, once in a process, where a run on one CPU device leaves cores idle."""
    cores = cpu_cores()
    if cores > 1 and jax.default_backend() == "cpu":
        logger.warning(
            "pfl_jax.run uses one CPU device, and there are %d cores: for all of them set JAX_NUM_CPU_DEVICES=%d "
            "before the program starts, and give mesh=pfl_jax.client_mesh()",
            *(cores, cores),
        )


def _check_mesh(name: str, mesh: Mesh | None) -> None:
    if mesh is not None and (mesh.axis_names, mesh.axis_types) != ((AXIS,), (AxisType.Auto,)):
        raise InvalidInput(f"{name} must have one axis {AXIS} (Auto), as client_mesh() makes it, not {mesh}")


ClientMesh: TypeAlias = Annotated[Mesh, Check(_check_mesh)]
"""A mesh as `client_mesh` makes it."""


def own_devices(mesh: Mesh) -> list[int]:
    """Positions on the mesh of this process's devices."""
    process = jax.process_index()
    return [position for position, device in enumerate(mesh.devices.flat) if device.process_index == process]


def replicate(tree: PyTree, mesh: Mesh | None) -> PyTree:
    """Tree replicated on all devices of a mesh; unchanged without a mesh. All processes give the same tree."""
    if mesh is None:
        return tree
    if not mesh.is_multi_process:
        return jax.device_put(tree, replicated(mesh))
    # device_put reaches only devices of this process; inputs of a program are assumed to be equal in all processes.
    return jax.jit(_same, out_shardings=replicated(mesh))(tree)


def replicated(mesh: Mesh | None) -> NamedSharding | None:
    """Sharding of arrays that all devices have; None without a mesh."""
    return None if mesh is None else NamedSharding(mesh, PartitionSpec())


def _same(tree: PyTree) -> PyTree:
    """The tree itself: one function for all calls, so that equal shapes and types are compiled once."""
    return tree


def map_places(
    fn: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
    shared: PyTree,
    clients: PyTree,
    is_real: jax.Array | np.ndarray,
    *,
    chunk: int | None,
    mesh: Mesh | None,
    specs: PyTree = PartitionSpec(),  # noqa: B008, immutable
) -> tuple[PyTree, PyTree]:
    """Apply fn(shared, client) to the clients in each device's places, in chunks; sum the terms over all of them.

    Args:
      fn: function of one client: (shared, client) -> (row, terms). Terms are summed chunk by chunk, so they take the
        memory of one chunk, and devices exchange only their sums.
      shared: first argument of all calls.
      clients: leaves [D, W, ...]: row d is for device d.
      is_real: [D, W], bool: False for free places, which are the last ones of a device. If it is a NumPy array, its
        values are known while the program is traced, and free places cost nothing.
      chunk: clients under one vmap on a device; 1 maps one after another, None all at once.
      mesh: mesh with the single axis "clients"; None uses the default device, and D is 1.
      specs: sharding of `shared`, a prefix of its tree.

    Returns:
      fn's rows, leaves [D, W, ...], arbitrary in free places; and the sum of its terms, replicated.
    """

    def on_device(shared, places):
        clients, is_real = places
        number = int(is_real.sum()) if isinstance(is_real, np.ndarray) else jnp.sum(is_real)
        return map_chunks(fn, shared, clients, number, chunk)

    return on_each_device(on_device, mesh, specs)(shared, (clients, is_real))


def on_each_device(fn: Callable[..., tuple[PyTree, PyTree]], mesh: Mesh | None, specs: PyTree) -> Callable[..., Any]:
    """Function of all devices from a function of one device, fn(shared, places [W, ...]) -> (rows [W, ...], sums).

    It takes places [D, W, ...], and gives rows [D, W, ...], row d on device d, and the sums over all devices.
    """
    is_one = mesh is None or mesh.size == 1

    def on_device(shared, places):
        rows, sums = fn(shared, jax.tree.map(lambda leaf: leaf[0], places))
        return jax.tree.map(lambda leaf: leaf[None], rows), sums if is_one else jax.lax.psum(sums, AXIS)

    if is_one:
        return on_device
    by_device = PartitionSpec(AXIS)
    # The loops of `fit` carry unsharded initial values into sharded results, which the checker of vma rejects.
    return jax.shard_map(
        on_device, mesh=mesh, in_specs=(specs, by_device), out_specs=(by_device, PartitionSpec()), check_vma=False
    )


def in_client_order(places: jax.Array | np.ndarray, size: int, rows: PyTree, mesh: Mesh | None) -> PyTree:
    """Rows [M, ...] on every device, in the order of the clients, from rows [D, W, ...] in the devices' places.

    Args:
      places: [D, W], position of each place's client in [0, M); M in free places.
      size: M.
      rows: leaves [D, W, ...].
      mesh: mesh of the D devices; None for one device.
    """
    rows = on_every_device(rows, mesh)
    order = jnp.zeros(size, jnp.int32).at[places.reshape(-1)].set(jnp.arange(places.size, dtype=jnp.int32), mode="drop")
    return jax.tree.map(lambda leaf: leaf.reshape(places.size, *leaf.shape[2:])[order], rows)


def on_every_device(tree: PyTree, mesh: Mesh | None) -> PyTree:
    """Tree that is replicated on all devices of a mesh from here on, inside a traced program.

    The partitioner could otherwise shard the computations that follow, with collectives inside loops, which can
    deadlock on CPUs with few threads.
    """
    return tree if mesh is None else jax.lax.with_sharding_constraint(tree, replicated(mesh))


def map_chunks(
    fn: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
    shared: PyTree,
    clients: PyTree,
    number: int | jax.Array,
    chunk: int | None,
) -> tuple[PyTree, PyTree]:
    """`map_places` on one device: clients [W, ...], of which the first `number` are real."""
    (size, *_) = jax.tree.leaves(clients)[0].shape
    width = size if chunk is None else min(chunk, size)

    def map_chunk(index):
        if width == 1:
            # Without vmap, a loop keeps the client's own trip count; vmap would run it as often as the largest count.
            return jax.tree.map(lambda leaf: leaf[None], fn(shared, gather(clients, index)))
        ranks = index * width + jnp.arange(width)
        # Copies of the last real client fill the last chunk: clients are sorted, so they cost no further steps.
        part = gather(clients, jnp.clip(ranks, 0, number - 1))
        rows, terms = jax.vmap(fn, in_axes=(None, 0))(shared, part)
        return rows, choose(ranks < number, terms, jax.tree.map(jnp.zeros_like, terms))

    def step(index, carry):
        results, total = carry
        rows, terms = map_chunk(index)
        results = jax.tree.map(
            lambda leaf, row: jax.lax.dynamic_update_slice_in_dim(leaf, row, index * width, 0), results, rows
        )
        return results, jax.tree.map(jnp.add, total, add_up(terms))

    if width == size > 1:
        rows, terms = map_chunk(0)
        return rows, add_up(terms)
    row, terms = jax.eval_shape(fn, shared, gather(clients, 0))
    room = -(-size // width) * width
    results = jax.tree.map(lambda leaf: jnp.zeros((room, *leaf.shape), leaf.dtype), row)
    total = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), terms)
    results, total = jax.lax.fori_loop(0, -(-number // width), step, (results, total))
    return jax.tree.map(lambda leaf: leaf[:size], results), total


def add_up(terms: PyTree) -> PyTree:
    """Sum over the leading axis of every leaf."""
    return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), terms)


class Turns(NamedTuple):
    """Turns of clients that pass a state on.

    Attributes:
      pass_on: (shared, client, state that it gets) -> (state that it keeps, state for the next client).
      numbers: int32 [D, W], consecutive numbers of the clients' turns, from a multiple of `chain`; arbitrary in free
        places.
      chain: number of clients after which a new chain begins.
    """

    pass_on: Callable[..., tuple[PyTree, PyTree]]
    numbers: jax.Array
    chain: int


def map_in_turn(
    fn: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]],
    turns: Turns,
    shared: PyTree,
    first: PyTree,
    places: PyTree,
    is_real: jax.Array | np.ndarray,
    *,
    size: int,
    chunk: int,
    mesh: Mesh | None,
    specs: PyTree,
) -> tuple[PyTree, PyTree]:
    """Like `map_places`, for clients that pass a state on.

    Clients are handled in blocks. First all clients of a block take their turns, one after another, each on its own
    device; then fn is applied to them in chunks. So no more than a block's states are in memory.

    Args:
      fn: (shared, client, state after the client's turn) -> (row, terms).
      first: state that the first client of a chain gets.
      size: largest number of clients in these places.
      turns, shared, places, is_real, chunk, mesh, specs: see `Turns` and `map_places`.
    """
    devices = 1 if mesh is None else mesh.size
    block = min(size, max(BLOCK, devices * chunk))
    numbers = jnp.where(is_real, turns.numbers, np.iinfo(np.int32).max)

    def on_device(arguments, places):
        (shared, first, start, number), (clients, numbers) = arguments, places
        (width,) = numbers.shape

        def map_block(index, carry):
            carried, results, total = carry
            begin = start + index * block
            is_here = (begin <= numbers) & (numbers < begin + block)
            # Stable: on a device clients stay in their order, the largest first.
            slots = jnp.argsort(~is_here, stable=True)[: min(block, width)]
            here, own_numbers, own = jnp.sum(is_here), numbers[slots], gather(clients, slots)

            def take_turn(turn, carry):
                carried, handed = carry
                carried = choose(turn % turns.chain == 0, first, carried)
                is_own = own_numbers == turn
                slot = jnp.argmax(is_own)
                if devices > 1:
                    had, after = jax.lax.cond(
                        is_own.any(),
                        lambda: turns.pass_on(shared, gather(own, slot), carried),
                        lambda: (carried, jax.tree.map(jnp.zeros_like, carried)),
                    )
                    after = jax.tree.map(_of_its_device, after)
                    # Beyond the last place if the client belongs to another device.
                    slot = jnp.where(is_own.any(), slot, len(slots))
                else:
                    had, after = turns.pass_on(shared, gather(own, slot), carried)
                return after, _with_rows(handed, slot, had)

            end = jnp.minimum(begin + block, start + number)
            carried, handed = jax.lax.fori_loop(begin, end, take_turn, (carried, _no_rows(first, len(slots))))
            rows, terms = map_chunks(lambda shared, client: fn(shared, *client), shared, (own, handed), here, chunk)
            slots = jnp.where(jnp.arange(len(slots)) < here, slots, width)
            return carried, _with_rows(results, slots, rows), jax.tree.map(jnp.add, total, terms)

        row, terms = jax.eval_shape(fn, shared, gather(clients, 0), first)
        carry = first, _no_rows(row, width), jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), terms)
        carry = map_block(0, carry) if size == block else jax.lax.fori_loop(0, -(-number // block), map_block, carry)
        return carry[1:]

    arguments = shared, first, jnp.min(numbers), jnp.sum(is_real)
    everywhere = PartitionSpec()
    mapped = on_each_device(on_device, mesh, (specs, everywhere, everywhere, everywhere))
    return mapped(arguments, (places, numbers))


def _no_rows(like: PyTree, size: int) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.zeros((size, *leaf.shape), leaf.dtype), like)


def _with_rows(table: PyTree, places: jax.Array, rows: PyTree) -> PyTree:
    """The table with these rows in these places; places beyond its end are left out."""
    return jax.tree.map(lambda leaf, row: leaf.at[places].set(row, mode="drop"), table, rows)


def _of_its_device(leaf: jax.Array) -> jax.Array:
    """The array from the only device on which it is not zero."""
    number = leaf.astype(jnp.int32) if leaf.dtype == jnp.bool_ else leaf
    return jax.lax.psum(number, AXIS).astype(leaf.dtype)
