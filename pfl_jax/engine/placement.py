"""Placement of a federation: each device holds only the examples of its own clients, in one process or many.

Clients are dealt to the devices of a mesh by size, and no device gets more than ceil(N / D) clients. A process keeps
only the examples of its own devices' clients. In a round, each device trains its own clients of the cohort. Their rows
are then replicated, and all devices do the rest (aggregation, the next state) alike.

Disadvantage: with a small cohort the number of clients per device is random, and all devices wait for the one with most
clients. Without placement every device can read all examples, and devices share the cohort evenly.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pfl_jax.data.federated import FederatedData, spread
from pfl_jax.data.sources import Dataset
from pfl_jax.engine.mapping import AXIS, own_devices, replicate
from pfl_jax.frozen import Frozen
from pfl_jax.primitives.tree import gather


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PlacedData:
    """Federation whose examples are on the devices that own the clients; made by `place`.

    Attributes:
      own: each device's federation of its own clients, stacked: leaves [D, ...], with row d on device d.
      owner: int32 [N], position on the mesh of the device that owns each client, on every device.
      row: int32 [N], row of each client in the tables of its owner, on every device.
      train_count, test_count: int32 [N], for all clients, on every device.
      validation_count: the same for validation examples; None for a federation without validation examples.
      mesh: mesh with the single axis "clients".
      frozen: frozen parameters of the model that is trained, on every device; None for a model without them.
    """

    own: FederatedData
    owner: jax.Array
    row: jax.Array
    train_count: jax.Array
    test_count: jax.Array
    validation_count: jax.Array | None
    mesh: Mesh = dataclasses.field(metadata={"static": True})
    frozen: Frozen | None = None

    @property
    def num_clients(self) -> int:
        """Number of clients N."""
        return self.train_count.shape[0]

    @property
    def active(self) -> None:
        """None: all clients have examples."""
        return None

    @property
    def specs(self) -> "PlacedData":
        """Sharding of the fields over the mesh."""
        replicated = jax.tree.map(lambda _: PartitionSpec(), self)
        return dataclasses.replace(replicated, own=PartitionSpec(AXIS))

    def on_device(self) -> FederatedData:
        """The part of the federation that a device reads with `client_data`: its own clients."""
        return gather(self.own, 0)._replace(row=self.row, frozen=self.frozen)

    def with_frozen(self, frozen: Frozen | None) -> "PlacedData":
        """Federation that passes a model's frozen parameters, `Model.frozen`, to compiled programs."""
        return dataclasses.replace(self, frozen=replicate(frozen, self.mesh))

    def assign_devices(self, clients: jax.Array, devices: int) -> jax.Array:
        """Positions in `clients` [M], with N in free places, of each device's own clients, in order: int32 [D, W].

        A device's last places are free and have M. W is the largest number of clients that a device can own.
        """
        owned = jnp.append(self.owner, -1)[clients] == jnp.arange(devices)[:, None]
        width = min(len(clients), self.own.train_index.shape[1])
        own = jnp.argsort(~owned, axis=1, stable=True)[:, :width].astype(jnp.int32)
        return jnp.where(jnp.arange(width) < jnp.sum(owned, axis=1, keepdims=True), own, len(clients))

    def own_clients(self) -> np.ndarray:
        """Sorted numbers of the clients whose states this process stores, because its devices own them."""
        return np.flatnonzero(np.isin(np.asarray(self.owner), own_devices(self.mesh))).astype(np.int32)


def place(data: FederatedData, mesh: Mesh) -> PlacedData:
    """Assign a federation's clients to the devices of a mesh; this process stores the clients of its own devices.

    The data is the same in all processes, over whose devices the mesh with the single axis "clients" may reach.
    """
    devices, num_clients = mesh.size, data.num_clients
    # NumPy arrays, so that nothing below copies a table to a device.
    host = data._replace(
        **{name: np.asarray(leaf) for name, leaf in data._asdict().items() if isinstance(leaf, jax.Array)}
    )
    # Balanced by size, with N in free places.
    order = np.append(np.argsort(-np.asarray(host.train_count), kind="stable"), num_clients)
    clients = [np.sort(own[own < num_clients]) for own in order[spread(num_clients, devices)]]
    used = [_used(host, own) for own in clients]
    # All rows of the stack are padded to the largest number of clients and of examples of a device.
    pool, rows = max(map(len, used)), max(map(len, clients))
    parts = {device: _part(host, clients[device], used[device], pool, rows) for device in own_devices(mesh)}
    own = jax.tree.map(lambda *leaves: _stacked(dict(zip(parts, leaves, strict=True)), mesh), *parts.values())
    owner, row = np.zeros(num_clients, np.int32), np.zeros(num_clients, np.int32)
    for device, dealt in enumerate(clients):
        owner[dealt], row[dealt] = device, np.arange(len(dealt))
    counts = replicate((owner, row, host.train_count, host.test_count, host.validation_count), mesh)
    return PlacedData(own, *counts, mesh=mesh)


def without_inputs(dataset: Dataset) -> Dataset:
    """Dataset without inputs, but with the same labels and the same shape and type of inputs."""
    # New arrays: slices would keep all inputs in memory.
    train_x, test_x = (np.empty((0, *x.shape[1:]), x.dtype) for x in (dataset.train_x, dataset.test_x))
    return dataset._replace(train_x=train_x, test_x=test_x)


def _used(data: FederatedData, clients: np.ndarray) -> np.ndarray:
    """Sorted pool indices of the examples that some clients use."""
    used = []
    for split in ("train", "test", "validation"):
        index, count = getattr(data, f"{split}_index"), getattr(data, f"{split}_count")
        if index is not None:
            own = index[clients]
            used.append(own[np.arange(own.shape[1]) < count[clients, None]])
    return np.unique(np.concatenate(used))


def _part(data: FederatedData, clients: np.ndarray, used: np.ndarray, pool: int, rows: int) -> FederatedData:
    """Federation of a device's clients, as NumPy arrays padded to `pool` examples and tables of `rows` clients."""

    def fill(leaf, size):
        full = np.zeros((size, *leaf.shape[1:]), leaf.dtype)
        full[: len(leaf)] = leaf
        return full

    part: dict[str, Any] = {"x": fill(data.x[used], pool), "y": fill(data.y[used], pool)}
    for name, leaf in data.per_client.items():
        own = np.asarray(leaf)[clients]
        if name.endswith("_index"):
            # Padding points to the pool's first example, which may be another client's.
            count = getattr(data, name.replace("index", "count"))[clients]
            is_real = np.arange(own.shape[1]) < count[:, None]
            own = np.where(is_real, np.searchsorted(used, own), 0).astype(np.int32)
        part[name] = fill(own, rows)
    return data._replace(**part)


def _stacked(rows: dict[int, np.ndarray], mesh: Mesh) -> jax.Array:
    """Array [D, ...] with row d on device d of the mesh, from the rows of this process, by device."""
    shape = (mesh.size, *next(iter(rows.values())).shape)
    sharding = NamedSharding(mesh, PartitionSpec(AXIS))

    def row(index):
        return rows[index[0].start or 0][None]

    return jax.make_array_from_callback(shape, sharding, row)
