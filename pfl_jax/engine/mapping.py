"""Map of a function over stacked clients: in chunks, on one device or over the devices of a mesh."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pfl_jax.base import PyTree
from pfl_jax.primitives.tree import gather


def client_mesh(devices: list[Any] | None = None) -> Mesh:
    """Mesh with the one axis "clients" over the given devices, by default all local ones.

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
    """Apply fn(shared, client) to every client of a stack: `map_and_sum` without the sum."""
    rows, _ = map_and_sum(lambda *arguments: (fn(*arguments), ()), shared, clients, chunk=chunk, mesh=mesh)
    return rows


def map_and_sum(
    fn: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
    shared: PyTree,
    clients: PyTree,
    *,
    chunk: int | None,
    mesh: Mesh | None,
) -> tuple[PyTree, PyTree]:
    """Apply fn(shared, client) to every client of a stack, in chunks, over the devices of a mesh; sum the terms.

    Args:
      fn: written for one client: (shared, client) -> (row, terms). Terms are added up as clients finish: they take the
        memory of one chunk, and devices exchange their sum alone.
      shared: the same for all.
      clients: leaves [M, ...]. With a mesh, client p goes to device p mod D, so that clients sorted by size
        are spread evenly; a stack that D does not divide is filled up with its first client, and that work dropped.
      chunk: clients under one vmap on a device; 1 maps one after another, None takes all at once.
      mesh: with the one axis "clients"; None stays on the default device.

    Returns:
      fn's rows, leaves [M, ...], in the order of `clients`, and the sum of its terms over all clients.
    """
    size = jax.tree.leaves(clients)[0].shape[0]
    if mesh is None or mesh.size == 1:
        return _chunked(fn, shared, clients, chunk)

    per_device = -(-size // mesh.size)
    order = np.arange(per_device * mesh.size).reshape(per_device, mesh.size).T.reshape(-1)
    shares = gather(clients, np.where(order < size, order, 0)), order < size

    def counted(shared, client):
        client, counts = client
        row, terms = fn(shared, client)
        return row, jax.tree.map(lambda leaf: jnp.where(counts, leaf, 0), terms)

    def of_device(shared, clients):
        rows, terms = _chunked(counted, shared, clients, chunk)
        return rows, jax.lax.psum(terms, "clients")

    rows, terms = jax.shard_map(
        of_device,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec("clients")),
        out_specs=(PartitionSpec("clients"), PartitionSpec()),
        # The loops of `fit` carry unsharded initial values into sharded results, which the checker refuses.
        check_vma=False,
    )(shared, shares)
    # Every device gets all rows at once. Left to itself the partitioner spreads what follows over the devices too,
    # collectives inside its loops included, and on CPUs with few threads those can wait for each other for ever.
    rows = jax.lax.with_sharding_constraint(rows, NamedSharding(mesh, PartitionSpec()))
    return gather(rows, np.argsort(order)[:size]), terms


def _chunked(
    fn: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]], shared: PyTree, clients: PyTree, chunk: int | None
) -> tuple[PyTree, PyTree]:
    """`map_and_sum` on one device."""
    size = jax.tree.leaves(clients)[0].shape[0]
    width = size if chunk is None else min(chunk, size)

    def work(part):
        rows, terms = jax.vmap(fn, in_axes=(None, 0))(shared, part)
        return rows, add_up(terms)

    if width == size and width > 1:
        return work(clients)

    def one(part):
        # Without vmap: a loop with a client's own trip count must not become one with the largest of all.
        rows, terms = fn(shared, gather(part, 0))
        return jax.tree.map(lambda leaf: leaf[None], rows), terms

    def step(total, part):
        rows, terms = one(part) if width == 1 else work(part)
        return jax.tree.map(jnp.add, total, terms), rows

    whole = size // width * width
    parts = jax.tree.map(lambda leaf: leaf[:whole].reshape(whole // width, width, *leaf.shape[1:]), clients)
    _, terms = jax.eval_shape(fn, shared, gather(clients, 0))
    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), terms)
    total, rows = jax.lax.scan(step, nothing, parts)
    rows = jax.tree.map(lambda leaf: leaf.reshape(whole, *leaf.shape[2:]), rows)
    if whole < size:
        last, terms = work(jax.tree.map(lambda leaf: leaf[whole:], clients))
        rows = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), rows, last)
        total = jax.tree.map(jnp.add, total, terms)
    return rows, total


def add_up(terms: PyTree) -> PyTree:
    """Sum over the leading axis of every leaf."""
    return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), terms)
