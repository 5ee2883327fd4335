"""Storage of the clients' states between rounds: the device, the host's memory, or a file.

A `ClientStore` reads the rows of the clients that a device trains or evaluates, and writes a cohort's rows. No other
code knows where rows are. On the host and on disk, a process stores only the rows of its own clients, memory holds only
blocks of them while all clients are initialized or evaluated, and evaluation sends no rows between processes.
"""

import dataclasses
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pfl_jax.atomic_write import cannot_write
from pfl_jax.base import PyTree
from pfl_jax.data.federated import FederatedData
from pfl_jax.engine.mapping import AXIS, in_client_order, own_devices, replicate
from pfl_jax.engine.placement import PlacedData
from pfl_jax.primitives.tree import gather, scatter

BLOCK = 256
"""Number of clients whose rows are in memory, or on the device, at once when all are read."""

Federation = FederatedData | PlacedData
"""A federation's data: replicated on every device, or sharded by client."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Places:
    """Assignment of clients to devices, see `pfl_jax.engine.mapping.map_places`.

    Attributes:
      ids: client numbers, int32 [D, W]; at least N in free places.
      is_real: bool [D, W]: whether a place has a client. A NumPy array if this is known while a program is traced.
      size: number of clients, static.
    """

    ids: jax.Array | np.ndarray
    is_real: jax.Array | np.ndarray
    size: int = dataclasses.field(metadata={"static": True})


class Members(NamedTuple):
    """Clients of one network, as a store sees them: rows of their own table.

    Attributes:
      num_clients: number of these clients.
      own_clients: gives the rows of the clients whose states this process stores, ascending.
    """

    num_clients: int
    own_clients: Callable[[], np.ndarray]


class ClientStore:
    """States of the clients on the device: leaves [N, ...] of the program's state. Subclasses keep them elsewhere.

    Attributes:
      is_traced: whether the functions are used while a program is traced that has `clients` as a part.

    Args:
      donate: whether a round may write into the states that it is given; states from outside are therefore copied
        first.
    """

    is_traced: bool = True

    def __init__(self, *, donate: bool = False):
        self._donate = donate

    def blocks(self, places: Places) -> Iterable[Places]:
        """Parts [D, B] of the places [D, W] that are on the device one after another."""
        return [places]

    def create(self, data: Federation | Members, mesh: Mesh | None, blocks: Iterable[tuple[Places, PyTree]]) -> PyTree:
        """States of all clients, from blocks of places [D, B] and rows [D, B, ...]."""
        ((places, rows),) = blocks
        return in_client_order(places.ids, data.num_clients, rows, mesh)

    def read(self, data: Federation | Members, mesh: Mesh | None, clients: PyTree, places: Places) -> PyTree:
        """Rows [D, W, ...] of the clients in these places, row d for device d; arbitrary in free places."""
        return gather(clients, places.ids)

    def write(self, data: Federation | Members, clients: PyTree, ids: jax.Array | None, rows: PyTree) -> PyTree:
        """States of all clients with other rows [M, ...] for the distinct clients `ids` [M]; None for all in order.

        Rows whose id is not a client number are left out.
        """
        return rows if ids is None else scatter(clients, ids, rows)

    def adopt(self, data: Federation | Members, mesh: Mesh | None, clients: PyTree) -> PyTree:
        """States given from outside, of all clients or of this process's own ones, moved into this store.

        The given arrays, which may be of any store, stay unchanged.
        """
        # A disk's rows change in the next round.
        copies = jax.tree.map(lambda leaf: jnp.array(leaf, copy=self._donate or isinstance(leaf, np.memmap)), clients)
        return replicate(copies, mesh)


class OnHost(ClientStore):
    """States in the host's memory: NumPy arrays [n, ...] of the n clients of this process."""

    is_traced: bool = False

    def blocks(self, places: Places) -> Iterator[Places]:
        # All blocks have equal shapes: free places fill the last one.
        devices, length = places.ids.shape
        width = min(length, max(1, BLOCK // devices))
        full = ((0, 0), (0, -length % width))
        ids = np.pad(np.asarray(places.ids), full, constant_values=np.iinfo(np.int32).max)
        is_real = np.pad(np.asarray(places.is_real), full)
        for start in range(0, length, width):
            part = slice(start, start + width)
            yield Places(ids[:, part], is_real[:, part], devices * width)

    def create(self, data: Federation | Members, mesh: Mesh | None, blocks: Iterable[tuple[Places, PyTree]]) -> PyTree:
        own, clients = data.own_clients(), None
        for places, rows in blocks:
            here, positions = _stored(own, places, mesh)
            rows = jax.tree.map(lambda leaf, here=here: _local(leaf)[here], rows)
            if clients is None:
                clients = self._allocate(rows, len(own))
            self._fill(clients, positions, rows)
        return clients

    def read(self, data: Federation | Members, mesh: Mesh | None, clients: PyTree, places: Places) -> PyTree:
        here, positions = _stored(data.own_clients(), places, mesh)
        devices, width = places.ids.shape
        local = (devices if mesh is None else len(own_devices(mesh)), width)

        def placed(leaf):
            full = np.zeros((math.prod(local), *leaf.shape[1:]), leaf.dtype)
            full[here] = leaf
            return full.reshape(*local, *leaf.shape[1:])

        rows = jax.tree.map(placed, gather(clients, positions))
        if mesh is None:
            return rows
        sharding = NamedSharding(mesh, PartitionSpec(AXIS))
        if not mesh.is_multi_process:
            # All leaves in one transfer.
            return jax.device_put(rows, sharding)
        return jax.tree.map(
            lambda leaf: jax.make_array_from_process_local_data(sharding, leaf, (devices, *leaf.shape[1:])), rows
        )

    def write(self, data: Federation | Members, clients: PyTree, ids: jax.Array | None, rows: PyTree) -> PyTree:
        own = data.own_clients()
        cohort = np.arange(data.num_clients) if ids is None else np.asarray(ids)
        positions = np.searchsorted(own, cohort)
        here = np.append(own, -1)[positions] == cohort
        clients = clients if self._donate else jax.tree.map(np.array, clients)
        self._fill(clients, positions[here], jax.tree.map(lambda leaf: np.asarray(leaf)[here], rows))
        return clients

    def adopt(self, data: Federation | Members, mesh: Mesh | None, clients: PyTree) -> PyTree:
        own = data.own_clients()
        copied = self._allocate(clients, len(own))
        for start in range(0, len(own), BLOCK):
            rows = np.arange(start, min(start + BLOCK, len(own)))
            given = jax.tree.map(
                lambda leaf, at=rows: np.asarray(leaf)[at if len(leaf) == len(own) else own[at]], clients
            )
            self._fill(copied, rows, given)
        return copied

    def _allocate(self, like: PyTree, count: int) -> PyTree:
        """Uninitialized states of this number of clients, shaped like some rows."""
        return jax.tree.map(lambda leaf: self._empty((count, *leaf.shape[1:]), np.dtype(leaf.dtype)), like)

    def _empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        return np.empty(shape, dtype)

    def _fill(self, clients: PyTree, positions: np.ndarray, rows: PyTree) -> None:
        """Write rows into the states of these clients."""

        def write(leaf, row):
            leaf[positions] = row

        jax.tree.map(write, clients, rows)


class OnDisk(OnHost):
    """States in files that are mapped into memory; a round overwrites the rows of the previous round.

    The files reserve room for all states at the start, so a full disk is an error at the start and never later. They
    are removed when the process ends; only checkpoints last.

    Args:
      folder: folder of the files; None for the system's folder of temporary files.
    """

    def __init__(self, folder: str | Path | None = None):
        super().__init__(donate=True)
        self._folder = folder

    def _empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Array in a new file without a name, which disappears with the array; CannotWrite if there is no room."""
        if not (size := math.prod(shape) * dtype.itemsize):
            return super()._empty(shape, dtype)
        try:
            with tempfile.TemporaryFile(dir=self._folder) as file:
                # Only Linux reserves room; elsewhere a disk that fills up later ends the process.
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, size)
                return np.memmap(file, dtype, "r+", shape=shape)
        except OSError as error:
            raise cannot_write(Path(self._folder or tempfile.gettempdir()), error) from None


def _stored(own: np.ndarray, places: Places, mesh: Mesh | None) -> tuple[np.ndarray, np.ndarray]:
    """Occupied places of this process's devices, as flat indices, and the positions of their clients in `own`."""
    devices = slice(None) if mesh is None else own_devices(mesh)
    ids, is_real = (np.asarray(leaf)[devices].reshape(-1) for leaf in (places.ids, places.is_real))
    (here,) = np.nonzero(is_real)
    return here, np.searchsorted(own, ids[here])


def _local(leaf: jax.Array) -> np.ndarray:
    """Rows of this process's devices, in their order, of a leaf [D, B, ...] that is sharded by device."""
    shards = sorted(leaf.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    rows = np.concatenate([np.asarray(shard.data) for shard in shards])
    return rows.reshape(len(rows) * leaf.shape[1], *leaf.shape[2:])
