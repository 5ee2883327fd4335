"""Federated data: one pool of examples on the device, and index tables with each client's rows of it."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pfl_jax.base import ClientData
from pfl_jax.data import shift as shifts
from pfl_jax.data.partition import Partition
from pfl_jax.data.sources import Dataset
from pfl_jax.errors import InvalidInput

Split = Literal["train", "test"]


class FederatedData(NamedTuple):
    """Examples as one pool, clients as rows of index tables; a pytree of arrays.

    Clients differ in size: row i of a table holds `count[i]` indices into the pool, then zeros.

    Attributes:
      x: [P, ...], the pool: training examples, then test examples. uint8 [P, H, W, C] for images; float32 or integers
        otherwise.
      y: int32 [P].
      train_index: int32 [N, n_max].
      train_count: int32 [N].
      test_index: int32 [N, t_max].
      test_count: int32 [N].
      mean: float32 [C], of uint8 pixels divided by 255; None where inputs are used as they are.
      std: float32 [C]; None together with the mean.
      label_map: int32 [N, K], what each client calls class k; None where all go by the dataset's labels.
      rotation: float32 [N, 2], cosine and sine of the angle by which each client's images are turned; None for none.
    """

    x: jax.Array
    y: jax.Array
    train_index: jax.Array
    train_count: jax.Array
    test_index: jax.Array
    test_count: jax.Array
    mean: jax.Array | None = None
    std: jax.Array | None = None
    label_map: jax.Array | None = None
    rotation: jax.Array | None = None

    @property
    def num_clients(self) -> int:
        """Number of clients N."""
        return self.train_index.shape[0]


class OwnClients(NamedTuple):
    """Input of `client_data` on a device that holds only its own clients, see `pfl_jax.engine.sharding`.

    Attributes:
      data: those clients as a federation.
      devices: D; row p of `data` is client p D + d on device d.
    """

    data: FederatedData
    devices: int


PER_CLIENT = ("train_index", "train_count", "test_index", "test_count", "label_map", "rotation")
"""Fields of FederatedData whose leading axis are the clients."""


def federate(
    dataset: Dataset,
    partition: Partition,
    *,
    shift: shifts.Shift = "none",
    num_groups: int = 1,
    seed: int = 0,
) -> FederatedData:
    """Put a dataset and its partition onto the device.

    Examples that no client holds are left out of the pool (a few thousand of EMNIST's 814,255 are typical), so the
    tables number the examples in use, in the pool's order.

    Args:
      dataset: the examples.
      partition: for each client, indices into (training examples, then test examples).
      shift: "labels" permutes the labels, "rotation" turns the images of each group of clients in its own way.
      num_groups: G of the shift; client i belongs to group i mod G.
      seed: of the shift.

    Returns:
      The federation's data.

    Raises:
      InvalidInput: an index outside the pool, a client without training or test examples, an unknown shift, one that
        these inputs cannot have, or a mean and deviation of pixels for inputs that are none.

    Example:
      >>> from pfl_jax import data
      >>> dataset = data.load("digits")
      >>> parts = data.partition.iid(dataset.train_y, dataset.test_y, num_clients=4, train_size=30, test_size=20)
      >>> federation = data.federate(dataset, parts)
      >>> federation.num_clients, federation.train_index.shape, federation.x.shape
      (4, (4, 30), (200, 8, 8, 1))
    """
    _check(dataset, [partition], shift)
    used = _used([partition])
    return FederatedData(
        **_pool(dataset, used),
        **_clients(dataset, partition, used, shift, num_groups, seed),
    )


def federate_runs(
    dataset: Dataset,
    partitions: Sequence[Partition],
    *,
    shift: shifts.Shift = "none",
    num_groups: int = 1,
    seeds: Sequence[int] | None = None,
) -> FederatedData:
    """Several federations of equally many clients over one pool, for the runs of `pfl_jax.engine.sweep`.

    Args:
      dataset: the examples.
      partitions: R of them, of N clients each.
      shift, num_groups: of all runs, see `federate`.
      seeds: of the shift in each run; None is 0 for all.

    Returns:
      The data with a leading axis R on everything that belongs to clients (`PER_CLIENT`). Tables are padded to the
      widest of all runs. `select_run` gives the data of one.

    Raises:
      InvalidInput: as `federate`, or partitions of different numbers of clients.
    """
    _check(dataset, partitions, shift)
    numbers = sorted({len(partition.train) for partition in partitions})
    if len(numbers) > 1:
        raise InvalidInput(f"runs of {numbers} clients cannot be stacked: give all the same number")
    used = _used(partitions)
    seeds = [0] * len(partitions) if seeds is None else seeds
    runs = [
        _clients(dataset, partition, used, shift, num_groups, seed)
        for partition, seed in zip(partitions, seeds, strict=True)
    ]
    stacked: dict[str, Any] = {}
    for name in PER_CLIENT:
        leaves = [run[name] for run in runs if run[name] is not None]
        if name.endswith("_index"):
            width = max(leaf.shape[1] for leaf in leaves)
            leaves = [jnp.pad(leaf, ((0, 0), (0, width - leaf.shape[1]))) for leaf in leaves]
        stacked[name] = jnp.stack(leaves) if leaves else None
    return FederatedData(
        **_pool(dataset, used),
        **stacked,
    )


def select_run(data: FederatedData, run: int | np.ndarray | jax.Array) -> FederatedData:
    """Federation of one run, or of several, in data from `federate_runs`; the run's number may be traced."""
    return _rows(data, run)


def _rows(data: FederatedData, rows: int | np.ndarray | jax.Array) -> FederatedData:
    given = [name for name in PER_CLIENT if getattr(data, name) is not None]
    return data._replace(**{name: getattr(data, name)[rows] for name in given})


def hold_out(data: FederatedData, number: int) -> tuple[FederatedData, FederatedData]:
    """Separate the last clients of a federation: (data of the others, data of the new clients), over one pool.

    Args:
      data: of N clients.
      number: of newcomers, who never take part.

    Raises:
      InvalidInput: no client would be left, or none is held out.
    """
    if not 1 <= number < data.num_clients:
        raise InvalidInput(f"of {data.num_clients} clients 1 to {data.num_clients - 1} can be held out, not {number}")
    stay = data.num_clients - number
    return _rows(data, np.arange(stay)), _rows(data, np.arange(stay, data.num_clients))


def _check(dataset: Dataset, partitions: Sequence[Partition], shift: shifts.Shift) -> None:
    shifts.check(shift)
    _check_inputs(dataset, shift)
    size = len(dataset.train_y) + len(dataset.test_y)
    for partition in partitions:
        for name, rows in (("training", partition.train), ("test", partition.test)):
            for client, row in enumerate(rows):
                if len(row) == 0:
                    raise InvalidInput(f"client {client} has no {name} examples: use fewer clients")
                if row.min() < 0 or row.max() >= size:
                    raise InvalidInput(f"client {client} has {name} examples outside the pool of {size}")


def _check_inputs(dataset: Dataset, shift: shifts.Shift) -> None:
    kind, shape = dataset.train_x.dtype, dataset.train_x.shape
    if dataset.test_x.dtype != kind or dataset.test_x.shape[1:] != shape[1:]:
        raise InvalidInput(
            f"training inputs are {kind} {shape[1:]}, test inputs {dataset.test_x.dtype} {dataset.test_x.shape[1:]}: "
            "they must be of one type and shape"
        )
    if (dataset.mean is None) != (dataset.std is None):
        raise InvalidInput("mean and std of a dataset are given together, or both None")
    if dataset.mean is not None and kind != np.uint8:
        raise InvalidInput(
            f"mean and std are of uint8 pixels divided by 255, and the inputs are {kind}: give mean=None, std=None, "
            "and the inputs are used as they are"
        )
    if shift == "rotation" and (len(shape) != 4 or kind not in (np.uint8, np.float32)):
        raise InvalidInput(
            f"shift rotation is for images [H, W, C] of uint8 or float32, not for inputs {kind} {list(shape[1:])}"
        )


def _used(partitions: Sequence[Partition]) -> np.ndarray:
    """Sorted indices of the examples that clients hold."""
    return np.unique(np.concatenate([row for partition in partitions for row in (*partition.train, *partition.test)]))


def _pool(dataset: Dataset, used: np.ndarray) -> dict[str, Any]:
    from_train, from_test = np.split(used, [np.searchsorted(used, len(dataset.train_y))])
    from_test = from_test - len(dataset.train_y)
    return {
        "x": jnp.asarray(np.concatenate([dataset.train_x[from_train], dataset.test_x[from_test]])),
        "y": jnp.asarray(np.concatenate([dataset.train_y[from_train], dataset.test_y[from_test]]), jnp.int32),
        "mean": None if dataset.mean is None else jnp.asarray(dataset.mean, jnp.float32),
        "std": None if dataset.std is None else jnp.asarray(dataset.std, jnp.float32),
    }


def _clients(
    dataset: Dataset, partition: Partition, used: np.ndarray, shift: shifts.Shift, num_groups: int, seed: int
) -> dict[str, Any]:
    """Per-client arrays: the values of `PER_CLIENT`."""
    train_index, train_count = _table(partition.train, used)
    test_index, test_count = _table(partition.test, used)
    label_map = rotation = None
    if shift == "labels":
        label_map = jnp.asarray(shifts.label_maps(len(partition.train), dataset.num_classes, num_groups, seed))
    elif shift == "rotation":
        rotation = jnp.asarray(shifts.rotations(len(partition.train), num_groups))
    return dict(zip(PER_CLIENT, (train_index, train_count, test_index, test_count, label_map, rotation), strict=True))


def _table(rows: Sequence[np.ndarray], used: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Index table [N, n_max], padded with zeros, and counts [N]; `used` [P] lists the pool's examples, sorted."""
    counts = np.array([len(row) for row in rows], np.int32)
    table = np.zeros((len(rows), counts.max()), np.int32)
    for client, row in enumerate(rows):
        table[client, : len(row)] = np.searchsorted(used, row)
    return jnp.asarray(table), jnp.asarray(counts)


def client_data(data: FederatedData | OwnClients, client: int | jax.Array, split: Split) -> ClientData:
    """Examples of one client under its shift; with a mean and deviation, x = (pixel / 255 - mean) / std.

    Args:
      data: the federation's data, or what a device holds of it.
      client: int, may be traced; under vmap it gathers several clients.
      split: "train" or "test".

    Returns:
      ClientData with x [n_max, ...], y int32 [n_max] and mask [n_max]. Rows past the client's count repeat the pool's
      first example. x is float32 with a mean and deviation, or rotated; otherwise it has the type and the values of
      the pool.

    Example:
      >>> from pfl_jax import data
      >>> dataset = data.load("digits")
      >>> parts = data.partition.iid(dataset.train_y, dataset.test_y, num_clients=2, train_size=[30, 20], test_size=10)
      >>> one = data.client_data(data.federate(dataset, parts), 1, "train")
      >>> print(one.x.shape, one.mask.sum())  # 20 examples, padded to the largest client's 30
      (30, 8, 8, 1) 20
    """
    if isinstance(data, OwnClients):
        return client_data(data.data, client // data.devices, split)
    if split == "train":
        index, count = data.train_index[client], data.train_count[client]
    elif split == "test":
        index, count = data.test_index[client], data.test_count[client]
    else:
        raise InvalidInput(f'split is "train" or "test", not "{split}"')
    x, y = data.x[index], data.y[index]
    if data.rotation is not None:
        x = shifts.rotate(x.astype(jnp.float32), data.rotation[client])
    if data.mean is not None and data.std is not None:
        x = (x.astype(jnp.float32) / 255 - data.mean) / data.std
    if data.label_map is not None:
        y = data.label_map[client][y]
    return ClientData(
        x=x,
        y=y,
        mask=jnp.arange(index.shape[-1]) < count,
    )


def class_table(data: FederatedData, split: Split = "train", num_classes: int | None = None) -> np.ndarray:
    """Number of examples of each client under each label, for reports and pictures.

    Args:
      data: the federation's data.
      split: "train" or "test".
      num_classes: K; by default the classes up to the largest label in the pool, or those of the label map.

    Returns:
      int64 [N, K].

    Example:
      >>> from pfl_jax import data
      >>> dataset = data.load("digits")
      >>> parts = data.partition.grouped(dataset.train_y, dataset.test_y, 2, s=0, train_size=30, test_size=10)
      >>> print(data.class_table(data.federate(dataset, parts), num_classes=10))
      [[10 10 10  0  0  0  0  0  0  0]
       [ 0  0 10 10 10  0  0  0  0  0]]
    """
    y = np.asarray(data.y)
    tables = {"train": (data.train_index, data.train_count), "test": (data.test_index, data.test_count)}
    index, count = map(np.asarray, tables[split])
    known = int(y.max()) + 1 if data.label_map is None else data.label_map.shape[1]
    width = known if num_classes is None else num_classes
    label_map = None if data.label_map is None else np.asarray(data.label_map)
    rows = []
    for client, (row, size) in enumerate(zip(index, count, strict=True)):
        labels = y[row[:size]]
        rows.append(np.bincount(labels if label_map is None else label_map[client][labels], minlength=width))
    return np.stack(rows)
