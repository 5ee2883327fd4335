"""Sharding by client: each device holds only the examples of its own clients.

Each client belongs to one device of a mesh (`pfl_jax.engine.placement.place`), in whichever process that device is. A
process therefore stores only the images of its own clients, and the same functions work for one process with several
devices and for many machines. In a round, each device processes its own clients of the cohort. A sum over the devices
then replicates the results; it is exact because each row is zero on all devices but one. All devices do the rest
(aggregation, the next state) alike.

Disadvantage: with a small cohort the number of clients per device is random, and all devices wait for the one with the
most. `pfl_jax.engine.mapping.map_clients`, in which every device can read all examples, distributes clients evenly.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pfl_jax.base import PyTree
from pfl_jax.data.federated import FederatedData, OwnClients
from pfl_jax.engine.mapping import add_up
from pfl_jax.primitives.tree import choose, gather

AXIS = "clients"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PlacedData:
    """Federation whose examples are on the devices that own the clients; made by `pfl_jax.engine.placement.place`.

    Attributes:
      own: federation of each device's own clients, stacked: leaves [D, ...], with row d on device d.
      owner: int32 [N], position on the mesh of the device that owns each client, on every device.
      row: int32 [N], row of each client in the tables of its owner, on every device.
      train_count, test_count: int32 [N], for all clients, on every device.
      validation_count: the same for validation examples; None for a federation without any.
      num_labels: largest label of all clients, after their shift, and 1 more.
      mesh: mesh with the single axis "clients".
    """

    own: FederatedData
    owner: jax.Array
    row: jax.Array
    train_count: jax.Array
    test_count: jax.Array
    validation_count: jax.Array | None
    num_labels: int = dataclasses.field(metadata={"static": True})
    mesh: Mesh = dataclasses.field(metadata={"static": True})

    @property
    def num_clients(self) -> int:
        """Number of clients N."""
        return self.train_count.shape[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OwnerRows:
    """Rows of clients that only the owning devices have: leaves [D, M, ...], zero on all other devices.

    Attributes:
      tree: pytree of the leaves.
      mesh: mesh of the devices.
    """

    tree: PyTree
    mesh: Mesh = dataclasses.field(metadata={"static": True})


def first_shard(data: FederatedData | PlacedData) -> FederatedData | OwnClients:
    """Input of `client_data` for functions that need only shapes: the first device's part."""
    return OwnClients(gather(data.own, 0), data.row) if isinstance(data, PlacedData) else data


def num_labels(data: FederatedData | PlacedData) -> int:
    """Largest label in the pool of all clients, after their shift, and 1 more."""
    if isinstance(data, PlacedData):
        return data.num_labels
    return 1 + max(int(np.asarray(leaf).max()) for leaf in (data.y, data.label_map) if leaf is not None)


def own_devices(mesh: Mesh) -> list[int]:
    """Positions on the mesh of this process's devices."""
    return [
        position for position, device in enumerate(mesh.devices.flat) if device.process_index == jax.process_index()
    ]


def own_clients(data: PlacedData) -> np.ndarray:
    """Sorted ids of the clients whose owners are in this process."""
    return np.flatnonzero(np.isin(np.asarray(data.owner), own_devices(data.mesh))).astype(np.int32)


def replicate(tree: PyTree, mesh: Mesh | None) -> PyTree:
    """Tree replicated on all devices of a mesh; unchanged without a mesh. All processes give the same tree."""
    if mesh is None:
        return tree
    sharding = NamedSharding(mesh, PartitionSpec())
    if not mesh.is_multi_process:
        return jax.device_put(tree, sharding)
    # device_put reaches only devices of this process; inputs of a program are taken to be equal in all processes.
    return jax.jit(_same, out_shardings=sharding)(tree)


def _same(tree: PyTree) -> PyTree:
    """The tree itself: one function for all calls, so that equal shapes and types are compiled once."""
    return tree


def map_owned(
    fn: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
    shared: tuple[Any, ...],
    clients: PyTree,
    *,
    chunk: int | None,
    keep_sharded: bool = False,
) -> tuple[PyTree, PyTree]:
    """`pfl_jax.engine.mapping.map_and_sum` with each client on the device that owns it.

    Args:
      fn: function of one client: (shared, client) -> (row, terms); it reads the data through `client_data`.
      shared: first argument of all calls; its first element is `PlacedData`.
      clients: leaves [M, ...], of which the first has the client numbers; parts of the tree may be `OwnerRows`.
      chunk: clients under one vmap on a device; 1 maps one after another, None takes ceil(M / D) at a time.
      keep_sharded: leave the rows on the owning devices.

    Returns:
      fn's rows, leaves [M, ...] on every device, or `OwnerRows` with keep_sharded; and the sum of its terms over all
      clients.
    """
    data, *rest = shared
    mesh = data.mesh
    (size,) = jax.tree.leaves(clients)[0].shape
    width = -(-size // mesh.size) if chunk is None else min(chunk, size)

    def is_owner_rows(part):
        return isinstance(part, OwnerRows)

    def device_work(own, places, rest, clients):
        owner, row = places
        clients = jax.tree.map(lambda c: gather(c.tree, 0) if is_owner_rows(c) else c, clients, is_leaf=is_owner_rows)
        map_one = partial(fn, (OwnClients(gather(own, 0), row), *rest))
        owned = owner[jax.tree.leaves(clients)[0]] == jax.lax.axis_index(AXIS)
        order, number = jnp.argsort(~owned, stable=True), jnp.sum(owned)

        def step(index, carry):
            results, total = carry
            ranks = index * width + jnp.arange(width)
            # The last chunk is padded with copies of the first owned client; their results are dropped.
            positions = order[jnp.where(ranks < number, ranks, 0)]
            if width == 1:
                rows, terms = jax.tree.map(lambda leaf: leaf[None], map_one(gather(clients, positions[0])))
            else:
                rows, terms = jax.vmap(map_one)(gather(clients, positions))
            targets = jnp.where(ranks < number, positions, size)
            results = jax.tree.map(lambda leaf, row: leaf.at[targets].set(row, mode="drop"), results, rows)
            terms = add_up(choose(ranks < number, terms, jax.tree.map(jnp.zeros_like, terms)))
            return results, jax.tree.map(jnp.add, total, terms)

        row, terms = jax.eval_shape(map_one, gather(clients, 0))
        zero_rows = jax.tree.map(lambda leaf: jnp.zeros((size, *leaf.shape), leaf.dtype), row)
        zero_terms = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), terms)
        results, total = jax.lax.fori_loop(0, -(-number // width), step, (zero_rows, zero_terms))
        results = jax.tree.map(lambda leaf: leaf[None] if keep_sharded else _sum(leaf), results)
        return results, jax.lax.psum(total, AXIS)

    own_spec, all_spec = PartitionSpec(AXIS), PartitionSpec()
    specs = jax.tree.map(lambda part: own_spec if is_owner_rows(part) else all_spec, clients, is_leaf=is_owner_rows)
    results, total = jax.shard_map(
        device_work,
        mesh=mesh,
        in_specs=(own_spec, all_spec, all_spec, specs),
        out_specs=(own_spec if keep_sharded else all_spec, all_spec),
        # As in `mapping.map_and_sum`: the loops of `fit` carry unsharded values into sharded results.
        check_vma=False,
    )(data.own, (data.owner, data.row), tuple(rest), clients)
    if keep_sharded:
        return OwnerRows(results, mesh), total
    return jax.lax.with_sharding_constraint(results, NamedSharding(mesh, PartitionSpec())), total


def shard_rows(rows: Callable[[np.ndarray], PyTree], clients: np.ndarray, owners: np.ndarray, mesh: Mesh) -> OwnerRows:
    """Rows sharded over the devices, from the memory of the processes that own the clients.

    Args:
      rows: function from ids [B] of clients of this process to their rows, leaves [B, ...]; B may be 0.
      clients: client ids [M], the same in all processes.
      owners: the devices [M] that own these clients.
      mesh: mesh of the devices.
    """
    sharding = NamedSharding(mesh, PartitionSpec(AXIS))

    def device_rows(device):
        owned = owners == device

        def fill(leaf):
            full = np.zeros((len(clients), *leaf.shape[1:]), leaf.dtype)
            full[owned] = leaf
            return full

        return jax.tree.map(fill, rows(clients[owned]))

    parts = {device: device_rows(device) for device in own_devices(mesh)}
    first, *_ = parts.values()
    leaves = {device: jax.tree.leaves(part) for device, part in parts.items()}
    stacked = [
        stack({device: part[index] for device, part in leaves.items()}, mesh.size, sharding)
        for index in range(len(jax.tree.leaves(first)))
    ]
    return OwnerRows(jax.tree.unflatten(jax.tree.structure(first), stacked), mesh)


def gather_rows(rows: OwnerRows) -> PyTree:
    """Rows [M, ...] replicated on every device, from the rows of the owners; for use inside a compiled program."""
    return jax.shard_map(
        lambda tree: jax.tree.map(lambda leaf: _sum(leaf[0]), tree),
        mesh=rows.mesh,
        in_specs=PartitionSpec(AXIS),
        out_specs=PartitionSpec(),
        check_vma=False,
    )(rows.tree)


def own_rows(rows: OwnerRows, clients: np.ndarray, owners: np.ndarray) -> tuple[np.ndarray, PyTree]:
    """Ids [B] of this process's clients among `clients` [M] and their rows [B, ...], on the host.

    Args:
      rows: rows of all `clients`.
      clients, owners: see `shard_rows`.
    """
    positions = {device: np.flatnonzero(owners == device) for device in own_devices(rows.mesh)}

    def own_part(leaf):
        shards = {shard.index[0].start or 0: shard.data for shard in leaf.addressable_shards}
        return np.concatenate([np.asarray(shards[device])[0][owned] for device, owned in positions.items()])

    return np.concatenate([clients[owned] for owned in positions.values()]), jax.tree.map(own_part, rows.tree)


def _sum(leaf: jax.Array) -> jax.Array:
    """Sum over the devices, of which all but one hold zeros; exact, also for NaN."""
    if leaf.dtype == jnp.bool_:
        return jax.lax.psum(leaf.astype(jnp.int32), AXIS).astype(jnp.bool_)
    return jax.lax.psum(leaf, AXIS)


def stack(parts: dict[int, np.ndarray], devices: int, sharding: NamedSharding) -> jax.Array:
    """Array [D, ...] with row d on device d of the mesh, from the rows of this process, by device."""
    shape = (devices, *next(iter(parts.values())).shape)

    def row(index):
        return parts[index[0].start or 0][None]

    return jax.make_array_from_callback(shape, sharding, row)
