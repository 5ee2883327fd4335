"""Mapping of a function over stacked clients, in chunks, on one device or on the devices of a mesh."""

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
    """Apply fn(shared, client) to every client of a stack, in chunks and over the devices of a mesh; sum the terms.

    Args:
      fn: function of one client: (shared, client) -> (row, terms). Terms are summed chunk by chunk, so they take the
        memory of one chunk, and devices exchange only their sums.
      shared: first argument of all calls.
      clients: leaves [M, ...]. With a mesh of D devices, client p goes to device p mod D, so that clients sorted by
        size are spread evenly. If D does not divide M, the stack is padded with copies of its first client, whose
        results are discarded.
      chunk: clients under one vmap on a device; 1 maps one after another, None all at once.
      mesh: mesh with the single axis "clients"; None uses the default device.

    Returns:
      fn's rows, leaves [M, ...], in the order of `clients`, and the sum of its terms over all clients.
    """
    size = jax.tree.leaves(clients)[0].shape[0]
    if mesh is None or mesh.size == 1:
        return _map_chunks(fn, shared, clients, chunk)

    per_device = -(-size // mesh.size)
    order = np.arange(per_device * mesh.size).reshape(per_device, mesh.size).T.reshape(-1)
    is_real = order < size
    padded = gather(clients, np.where(is_real, order, 0)), is_real

    def without_padding(shared, client):
        client, is_real = client
        row, terms = fn(shared, client)
        return row, jax.tree.map(lambda leaf: jnp.where(is_real, leaf, 0), terms)

    def map_on_device(shared, clients):
        rows, terms = _map_chunks(without_padding, shared, clients, chunk)
        return rows, jax.lax.psum(terms, "clients")

    rows, terms = jax.shard_map(
        map_on_device,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec("clients")),
        out_specs=(PartitionSpec("clients"), PartitionSpec()),
        # The loops of `fit` carry unsharded initial values into sharded results, which the checker rejects.
        check_vma=False,
    )(shared, padded)
    # Replicate the rows explicitly. The partitioner could otherwise shard the computations that follow, with
    # collectives inside loops, which can deadlock on CPUs with few threads.
    rows = jax.lax.with_sharding_constraint(rows, NamedSharding(mesh, PartitionSpec()))
    return gather(rows, np.argsort(order)[:size]), terms


def _map_chunks(
    fn: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]], shared: PyTree, clients: PyTree, chunk: int | None
) -> tuple[PyTree, PyTree]:
    """`map_and_sum` on one device."""
    size = jax.tree.leaves(clients)[0].shape[0]
    width = size if chunk is None else min(chunk, size)

    def map_chunk(chunk):
        rows, terms = jax.vmap(fn, in_axes=(None, 0))(shared, chunk)
        return rows, add_up(terms)

    if width == size and width > 1:
        return map_chunk(clients)

    def map_one(chunk):
        # Without vmap, a loop keeps the client's own trip count; vmap would run it as often as the largest one.
        rows, terms = fn(shared, gather(chunk, 0))
        return jax.tree.map(lambda leaf: leaf[None], rows), terms

    def step(total, chunk):
        rows, terms = map_one(chunk) if width == 1 else map_chunk(chunk)
        return jax.tree.map(jnp.add, total, terms), rows

    even = size // width * width  # clients in complete chunks
    chunks = jax.tree.map(lambda leaf: leaf[:even].reshape(even // width, width, *leaf.shape[1:]), clients)
    _, terms = jax.eval_shape(fn, shared, gather(clients, 0))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), terms)
    total, rows = jax.lax.scan(step, zeros, chunks)
    rows = jax.tree.map(lambda leaf: leaf.reshape(even, *leaf.shape[2:]), rows)
    if even < size:
        last, terms = map_chunk(jax.tree.map(lambda leaf: leaf[even:], clients))
        rows = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), rows, last)
        total = jax.tree.map(jnp.add, total, terms)
    return rows, total


def add_up(terms: PyTree) -> PyTree:
    """Sum over the leading axis of every leaf."""
    return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), terms)
