"""Placement of a federation: which device owns which client, and each device's part of the examples.

Clients are dealt to the devices of a mesh by size, the largest first, each to the device with the fewest training
examples so far, and no device gets more than ceil(N / D) clients. A process reads only the examples of its own devices'
clients; with `pfl_jax.data.rows.Rows` as inputs these alone ever are in its memory.
"""

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pfl_jax.data.federated import PER_CLIENT, FederatedData
from pfl_jax.data.rows import Rows
from pfl_jax.data.sources import Dataset
from pfl_jax.engine.mapping import assign_on_host
from pfl_jax.engine.sharding import AXIS, PlacedData, num_labels, own_devices, replicate, stack


def place(data: FederatedData, mesh: Mesh) -> PlacedData:
    """Assign a federation's clients to the devices of a mesh; this process stores those of its own devices.

    Args:
      data: data of all clients, the same in all processes; x may be `pfl_jax.data.rows.Rows`.
      mesh: mesh with the single axis "clients", over devices of one or more processes.
    """
    devices, num_clients = mesh.size, data.num_clients
    # NumPy arrays, so that nothing below copies a table to a device.
    host = data._replace(**{name: np.asarray(leaf) for name, leaf in data._asdict().items() if _is_array(leaf)})
    clients = deal(np.asarray(host.train_count), devices)
    used = [_used(host, own) for own in clients]
    # All rows of the stack are padded to the largest number of clients and of examples of a device.
    pool, rows = max(map(len, used)), max(map(len, clients))
    parts = {device: _part(host, clients[device], used[device], pool, rows) for device in own_devices(mesh)}
    sharding = NamedSharding(mesh, PartitionSpec(AXIS))
    names = next(iter(parts.values())).keys()
    leaves = {name: stack({device: part[name] for device, part in parts.items()}, devices, sharding) for name in names}
    own = data._replace(**leaves)
    owner, row = np.zeros(num_clients, np.int32), np.zeros(num_clients, np.int32)
    for device, dealt in enumerate(clients):
        owner[dealt], row[dealt] = device, np.arange(len(dealt))
    counts = replicate((owner, row, host.train_count, host.test_count, host.validation_count), mesh)
    # Of all clients: a process has only the labels of its own ones later.
    return PlacedData(own, *counts, num_labels=num_labels(host), mesh=mesh)


def deal(counts: np.ndarray, devices: int) -> list[np.ndarray]:
    """Clients of each device, ascending: the largest are dealt first, see `pfl_jax.engine.mapping.assign_devices`.

    Args:
      counts: training examples [N] of all clients.
      devices: D.

    Example:
      >>> import numpy as np
      >>> from pfl_jax.engine import placement
      >>> [own.tolist() for own in placement.deal(np.array([2, 9, 3, 4]), 2)]
      [[0, 1], [2, 3]]
    """
    return [np.sort(own[own < len(counts)]) for own in assign_on_host(counts, devices)]


def without_inputs(dataset: Dataset) -> Dataset:
    """Dataset with the same labels and the same shape and type of inputs, but without inputs."""

    def no_rows(inputs: np.ndarray) -> np.ndarray:
        # A new array: a slice would keep all inputs in memory.
        return np.empty((0, *inputs.shape[1:]), inputs.dtype)

    return dataset._replace(train_x=no_rows(dataset.train_x), test_x=no_rows(dataset.test_x))


def _is_array(leaf: object) -> bool:
    return leaf is not None and not isinstance(leaf, Rows)


def _used(data: FederatedData, clients: np.ndarray) -> np.ndarray:
    """Sorted pool indices of the examples that some clients use."""
    used = []
    for split in ("train", "test", "validation"):
        index, count = getattr(data, f"{split}_index"), getattr(data, f"{split}_count")
        if index is not None:
            own = index[clients]
            used.append(own[np.arange(own.shape[1]) < count[clients, None]])
    return np.unique(np.concatenate(used))


def _part(data: FederatedData, clients: np.ndarray, used: np.ndarray, pool: int, rows: int) -> dict[str, np.ndarray]:
    """Fields of the federation of a device's clients, padded to `pool` examples and tables of `rows` clients."""

    def fill(leaf, size):
        full = np.zeros((size, *leaf.shape[1:]), leaf.dtype)
        full[: len(leaf)] = leaf
        return full

    x = np.zeros((pool, *data.x.shape[1:]), data.x.dtype)
    x[: len(used)] = data.x[used]
    part = {"x": x, "y": fill(data.y[used], pool)}
    part |= {name: leaf for name, leaf in (("mean", data.mean), ("std", data.std)) if leaf is not None}
    for name in PER_CLIENT:
        leaf = getattr(data, name)
        if leaf is None:
            continue
        own = leaf[clients]
        if name.endswith("_index"):
            # Padding points to the pool's first example, which may be another client's.
            count = getattr(data, name.replace("index", "count"))[clients]
            is_real = np.arange(own.shape[1]) < count[:, None]
            own = np.where(is_real, np.searchsorted(used, own), 0).astype(np.int32)
        part[name] = fill(own, rows)
    return part
