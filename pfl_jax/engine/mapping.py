"""One function for every client of a stack: in chunks, on one device or spread over the devices of a mesh."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pfl_jax.base import PyTree
from pfl_jax.primitives.tree import gather


def client_mesh(devices: list[Any] | None = None) -> Mesh:
    """A mesh with the one axis "clients" over the given devices, by default all local ones.

    Example:
      >>> import jax
      >>> from pfl_jax import client_mesh
      >>> client_mesh(jax.devices()[:1]).axis_names
      ('clients',)
    """
    devices = jax.local_devices() if devices is None else devices
    return jax.make_mesh((len(devices),), ("clients",), axis_types=(AxisType.Auto,), devices=devices)


def map_clients(
    fn: Callable[[PyTree, PyTree], PyTree], shared: PyTree, clients: PyTree, *, chunk: int | None, mesh: Mesh | None
) -> PyTree:
    """fn(shared, client) for every client of a stack, in chunks, spread over the devices of a mesh.

    Args:
      fn: written for one client.
      shared: the same for all.
      clients: leaves [M, ...]. With a mesh, client p goes to device p mod D, so that clients sorted by size
        are spread evenly; a stack that D does not divide is filled up with its first client, and that work dropped.
      chunk: clients under one vmap on a device; 1 maps one after another, None takes all at once.
      mesh: with the one axis "clients"; None stays on the default device.

    Returns:
      fn's results, leaves [M, ...], in the order of `clients`.
    """

    def chunked(shared, clients):
        size = jax.tree.leaves(clients)[0].shape[0]
        if chunk is None or chunk >= size:
            return jax.vmap(fn, in_axes=(None, 0))(shared, clients)
        return jax.lax.map(partial(fn, shared), clients, batch_size=None if chunk == 1 else chunk)

    if mesh is None or mesh.size == 1:
        return chunked(shared, clients)

    size = jax.tree.leaves(clients)[0].shape[0]
    per_device = -(-size // mesh.size)
    order = np.arange(per_device * mesh.size).reshape(per_device, mesh.size).T.reshape(-1)
    spread = gather(clients, np.where(order < size, order, 0))
    results = jax.shard_map(
        chunked,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec("clients")),
        out_specs=PartitionSpec("clients"),
        # The loops of `fit` carry unsharded initial values into sharded results, which the checker refuses.
        check_vma=False,
    )(shared, spread)
    # Every device gets all results at once. Left to itself the partitioner spreads what follows over the devices too,
    # collectives inside its loops included, and on CPUs with few threads those can wait for each other for ever.
    results = jax.lax.with_sharding_constraint(results, NamedSharding(mesh, PartitionSpec()))
    return gather(results, np.argsort(order)[:size])
