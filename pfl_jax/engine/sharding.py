"""Sharding by client: each device holds only the examples of its own clients.

Client i belongs to device i mod D of a mesh, whichever process that device is in. So a process keeps the pixels of its
own clients alone, and the same functions serve one process with several devices and many machines. In a round every
device walks those members of the cohort that are its own; one sum over the devices then makes the results known
replicate, exactly, since each row is zero on all devices but one. What follows (aggregation, the next state) is
computed alike on every device.

The price: how many members of a small cohort fall to one device is left to chance, and the others wait for the device
that has most of them. `pfl_jax.engine.mapping.map_clients`, where every device can read all examples, deals them out
evenly.
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
from pfl_jax.data.federated import PER_CLIENT, FederatedData, OwnClients
from pfl_jax.data.sources import Dataset
from pfl_jax.engine.mapping import add_up
from pfl_jax.primitives.tree import choose, gather

AXIS = "clients"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PlacedData:
    """Federation whose examples lie on the devices that own its clients; made by `place`.

    Attributes:
      own: each device's clients as a federation of their own, stacked: leaves [D, ...], one row on each device.
      train_count, test_count: int32 [N], of all clients, on every device.
      mesh: the devices, with the one axis "clients".
    """

    own: FederatedData
    train_count: jax.Array
    test_count: jax.Array
    mesh: Mesh = dataclasses.field(metadata={"static": True})

    @property
    def num_clients(self) -> int:
        """Number of clients N."""
        return self.train_count.shape[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OwnerRows:
    """Rows of clients known to their owners only: leaves [D, M, ...], zero on every other device.

    Attributes:
      tree: the leaves.
      mesh: the devices.
    """

    tree: PyTree
    mesh: Mesh = dataclasses.field(metadata={"static": True})


def place(data: FederatedData, mesh: Mesh) -> PlacedData:
    """Assign a federation's clients to the devices of a mesh; this process keeps those of its own devices.

    Args:
      data: of all clients; all processes give the same.
      mesh: with the one axis "clients", over devices of one process or many.

    """
    host = jax.tree.map(np.asarray, data)
    devices, num_clients = mesh.size, data.num_clients
    # Every row of the stack has the same shape: that of the device with most clients and most examples.
    used = [_used(host, device, devices) for device in range(devices)]
    pool, rows = max(map(len, used)), -(-num_clients // devices)
    placed = NamedSharding(mesh, PartitionSpec(AXIS))
    parts = {device: _part(host, device, devices, used[device], pool, rows) for device in own_devices(mesh)}
    some = next(iter(parts.values()))
    leaves = {name: _stack({device: part[name] for device, part in parts.items()}, devices, placed) for name in some}
    own = data._replace(**leaves)
    return PlacedData(own, *replicate((host.train_count, host.test_count), mesh), mesh=mesh)


def without_pixels(dataset: Dataset) -> Dataset:
    """The dataset with its shapes, types and labels, but without its inputs."""

    def none(inputs: np.ndarray) -> np.ndarray:
        # Not a view: that would keep all of them.
        return np.empty((0, *inputs.shape[1:]), inputs.dtype)

    return dataset._replace(train_x=none(dataset.train_x), test_x=none(dataset.test_x))


def first_shard(data: FederatedData | PlacedData) -> FederatedData | OwnClients:
    """Input of `client_data` for functions that need only shapes: the first device's part."""
    return OwnClients(gather(data.own, 0), data.mesh.size) if isinstance(data, PlacedData) else data


def own_devices(mesh: Mesh) -> list[int]:
    """Positions on the mesh of this process's devices."""
    return [place for place, device in enumerate(mesh.devices.flat) if device.process_index == jax.process_index()]


def own_clients(mesh: Mesh, num_clients: int) -> np.ndarray:
    """Sorted ids of the clients whose owners are in this process."""
    clients = np.arange(num_clients, dtype=np.int32)
    return clients[np.isin(clients % mesh.size, own_devices(mesh))]


def replicate(tree: PyTree, mesh: Mesh | None) -> PyTree:
    """Tree replicated on all devices of a mesh, given the same in all processes; unchanged without a mesh."""
    if mesh is None:
        return tree
    sharding = NamedSharding(mesh, PartitionSpec())
    if not mesh.is_multi_process:
        return jax.device_put(tree, sharding)
    # Moving goes to devices of one's own process only; a program's inputs are taken to be the same in all of them.
    return jax.jit(lambda tree: tree, out_shardings=sharding)(tree)


def map_owned(
    fn: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
    shared: tuple[Any, ...],
    clients: PyTree,
    *,
    chunk: int | None,
    apart: bool = False,
) -> tuple[PyTree, PyTree]:
    """`pfl_jax.engine.mapping.map_and_sum` with each client on the device that owns it.

    Args:
      fn: written for one client: (shared, client) -> (row, terms); it reads the data through `client_data`.
      shared: the same for all; `PlacedData` first.
      clients: leaves [M, ...], the first of them the clients' numbers; parts of it may be `OwnerRows`.
      chunk: clients under one vmap on a device; 1 maps one after another, None takes even shares of the stack.
      apart: leave the rows with the owners.

    Returns:
      fn's rows, leaves [M, ...] on every device, or `OwnerRows`; and the sum of its terms over all clients.
    """
    data, *rest = shared
    mesh = data.mesh
    (size,) = jax.tree.leaves(clients)[0].shape
    width = -(-size // mesh.size) if chunk is None else min(chunk, size)

    def is_owner_rows(part):
        return isinstance(part, OwnerRows)

    def device_work(own, rest, clients):
        clients = jax.tree.map(lambda c: gather(c.tree, 0) if is_owner_rows(c) else c, clients, is_leaf=is_owner_rows)
        work = partial(fn, (OwnClients(gather(own, 0), mesh.size), *rest))
        mine = jax.tree.leaves(clients)[0] % mesh.size == jax.lax.axis_index(AXIS)
        order, number = jnp.argsort(~mine, stable=True), jnp.sum(mine)

        def step(index, carry):
            results, total = carry
            at = index * width + jnp.arange(width)
            # The last chunk is filled up with the first client, whose copies are dropped.
            places = order[jnp.where(at < number, at, 0)]
            if width == 1:
                rows, terms = jax.tree.map(lambda leaf: leaf[None], work(gather(clients, places[0])))
            else:
                rows, terms = jax.vmap(work)(gather(clients, places))
            targets = jnp.where(at < number, places, size)
            results = jax.tree.map(lambda leaf, row: leaf.at[targets].set(row, mode="drop"), results, rows)
            terms = add_up(choose(at < number, terms, jax.tree.map(jnp.zeros_like, terms)))
            return results, jax.tree.map(jnp.add, total, terms)

        row, terms = jax.eval_shape(work, gather(clients, 0))
        nothing = jax.tree.map(lambda leaf: jnp.zeros((size, *leaf.shape), leaf.dtype), row)
        zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), terms)
        results, total = jax.lax.fori_loop(0, -(-number // width), step, (nothing, zero))
        results = jax.tree.map(lambda leaf: leaf[None] if apart else _sum(leaf), results)
        return results, jax.lax.psum(total, AXIS)

    own_spec, all_spec = PartitionSpec(AXIS), PartitionSpec()
    specs = jax.tree.map(lambda part: own_spec if is_owner_rows(part) else all_spec, clients, is_leaf=is_owner_rows)
    results, total = jax.shard_map(
        device_work,
        mesh=mesh,
        in_specs=(own_spec, all_spec, specs),
        out_specs=(own_spec if apart else all_spec, all_spec),
        # As in `mapping.map_and_sum`: the loops of `fit` carry unsharded values into sharded results.
        check_vma=False,
    )(data.own, tuple(rest), clients)
    if apart:
        return OwnerRows(results, mesh), total
    return jax.lax.with_sharding_constraint(results, NamedSharding(mesh, PartitionSpec())), total


def shard_rows(rows: Callable[[np.ndarray], PyTree], clients: np.ndarray, mesh: Mesh) -> OwnerRows:
    """Rows in the memory of their owners' processes, made available to a program that runs in all processes.

    Args:
      rows: numbers of own clients [B] -> their rows, leaves [B, ...]; also for none of them.
      clients: [M], the same in all processes.
      mesh: the devices.
    """
    sharding = NamedSharding(mesh, PartitionSpec(AXIS))

    def of_device(device):
        mine = clients % mesh.size == device

        def fill(leaf):
            whole = np.zeros((len(clients), *leaf.shape[1:]), leaf.dtype)
            whole[mine] = leaf
            return whole

        return jax.tree.map(fill, rows(clients[mine]))

    parts = {device: of_device(device) for device in own_devices(mesh)}
    first, *_ = parts.values()
    leaves = {device: jax.tree.leaves(part) for device, part in parts.items()}
    stacked = [
        _stack({device: part[index] for device, part in leaves.items()}, mesh.size, sharding)
        for index in range(len(jax.tree.leaves(first)))
    ]
    return OwnerRows(jax.tree.unflatten(jax.tree.structure(first), stacked), mesh)


def gather_rows(rows: OwnerRows) -> PyTree:
    """Rows [M, ...] on every device, from those of their owners; for use inside a program."""
    return jax.shard_map(
        lambda tree: jax.tree.map(lambda leaf: _sum(leaf[0]), tree),
        mesh=rows.mesh,
        in_specs=PartitionSpec(AXIS),
        out_specs=PartitionSpec(),
        check_vma=False,
    )(rows.tree)


def own_rows(rows: OwnerRows, clients: np.ndarray) -> tuple[np.ndarray, PyTree]:
    """This process's clients [B] among `clients` [M] and their rows [B, ...], on the host."""
    owners = clients % rows.mesh.size
    places = {device: np.flatnonzero(owners == device) for device in own_devices(rows.mesh)}

    def of_leaf(leaf):
        shards = {shard.index[0].start or 0: shard.data for shard in leaf.addressable_shards}
        return np.concatenate([np.asarray(shards[device])[0][where] for device, where in places.items()])

    return np.concatenate([clients[where] for where in places.values()]), jax.tree.map(of_leaf, rows.tree)


def _sum(leaf: jax.Array) -> jax.Array:
    """Sum over devices of which only one is nonzero: exact, NaN included."""
    if leaf.dtype == jnp.bool_:
        return jax.lax.psum(leaf.astype(jnp.int32), AXIS).astype(jnp.bool_)
    return jax.lax.psum(leaf, AXIS)


def _stack(parts: dict[int, np.ndarray], devices: int, sharding: NamedSharding) -> jax.Array:
    """Array [D, ...] whose row d is on device d, from the rows of this process."""
    some = next(iter(parts.values()))
    shape = (devices, *some.shape)

    def row(index):
        return parts[index[0].start or 0][None]

    return jax.make_array_from_callback(shape, sharding, row)


def _used(data: FederatedData, device: int, devices: int) -> np.ndarray:
    """Sorted pool indices of the examples that a device's clients hold."""
    found = []
    for index, count in ((data.train_index, data.train_count), (data.test_index, data.test_count)):
        index, count = np.asarray(index)[device::devices], np.asarray(count)[device::devices]
        found.append(index[np.arange(index.shape[1]) < count[:, None]])
    return np.unique(np.concatenate(found))


def _part(
    data: FederatedData, device: int, devices: int, used: np.ndarray, pool: int, rows: int
) -> dict[str, np.ndarray]:
    """Federation of a device's clients, with examples padded to `pool` and tables to `rows`."""

    def fill(leaf, size):
        return np.concatenate([leaf, np.zeros((size - len(leaf), *leaf.shape[1:]), leaf.dtype)])

    part = {"x": fill(np.asarray(data.x)[used], pool), "y": fill(np.asarray(data.y)[used], pool)}
    part |= {name: np.asarray(leaf) for name, leaf in (("mean", data.mean), ("std", data.std)) if leaf is not None}
    for name in PER_CLIENT:
        leaf = getattr(data, name)
        if leaf is None:
            continue
        leaf = np.asarray(leaf)[device::devices]
        if name.endswith("_index"):
            # Padding points at the pool's first example, which may belong to another client.
            count = np.asarray(getattr(data, name.replace("index", "count")))[device::devices]
            real = np.arange(leaf.shape[1]) < count[:, None]
            leaf = np.where(real, np.searchsorted(used, leaf), 0).astype(np.int32)
        part[name] = fill(leaf, rows)
    return part
