"""Federated data: one pool of examples on the device, and tables with the indices of each client's examples."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from pfl_jax.base import ClientData
from pfl_jax.data import checks
from pfl_jax.data import shift as shifts
from pfl_jax.data.arrays import from_clients
from pfl_jax.data.partition import Partition, natural
from pfl_jax.data.sources import Dataset
from pfl_jax.data.specs import Shift
from pfl_jax.errors import InvalidInput, described
from pfl_jax.frozen import Frozen
from pfl_jax.validation import Count, check_arguments, check_value

Split = Literal["train", "test", "validation"]


@jax.tree_util.register_static
class NumClasses(int):
    """Number of classes; part of a federation's structure and not a leaf, so that it is known while tracing."""


@jax.tree_util.register_static
class ClientNames(tuple[str, ...]):
    """Names of the clients; part of a federation's structure and not a leaf, like `NumClasses`."""

    __slots__ = ()


class FederatedData(NamedTuple):
    """Pool of examples, and index tables whose row i has `count[i]` indices of client i into it, padded with zeros.

    Attributes:
      x: [P, ...], the inputs of the pool: training examples, then test examples. uint8 [P, H, W, C] for images,
        otherwise float32 or integers.
      y: [P], int32, the labels of the pool; for targets that are not classes, float32 [P] or numbers [P, ...].
      train_index, train_count: int32 [N, n_max] and [N].
      test_index, test_count: int32 [N, t_max] and [N].
      num_classes: number of classes K of the dataset.
      mean, std: float32 [C], of uint8 pixels divided by 255; None for inputs that are not rescaled.
      label_map: int32 [N, K], the label that each client has for class k; None for the dataset's labels.
      rotation: float32 [N, 2] or [N, 2 + C], `pfl_jax.data.shift.direction` of each client; None for no rotation.
      noise: float32 [N], standard deviation of the noise on each client's inputs; None for no noise.
      missing: bool [N, ...], the numbers of an input that each client lacks; None if no client lacks any.
      validation_index, validation_count: int32 [N, v_max] and [N], 0 for clients without validation examples; None for
        a federation without validation examples.
      active: bool [N], clients with training examples, in a phase of `pfl_jax.data.phases`; None if all have some.
      frozen: frozen parameters of the model that is trained, held by every device beside the examples, or None.
      client_names: names [N] of the clients, if they come with the data; () otherwise.
      row: int32 [N], row of each client in the tables; None if row i is client i. A device that has only some clients'
        examples (`pfl_jax.engine.placement`) has only their rows in its tables.
    """

    x: jax.Array
    y: jax.Array
    train_index: jax.Array
    train_count: jax.Array
    test_index: jax.Array
    test_count: jax.Array
    num_classes: NumClasses
    mean: jax.Array | None = None
    std: jax.Array | None = None
    label_map: jax.Array | None = None
    rotation: jax.Array | None = None
    noise: jax.Array | None = None
    missing: jax.Array | None = None
    validation_index: jax.Array | None = None
    validation_count: jax.Array | None = None
    row: jax.Array | None = None
    active: jax.Array | None = None
    frozen: Frozen | None = None
    client_names: ClientNames = ClientNames()

    def __repr__(self) -> str:
        """One line for each field, instead of all numbers."""
        return described(self, f"{self.num_clients} clients")

    @property
    def num_clients(self) -> int:
        """Number of clients N."""
        return self.train_index.shape[0]

    @property
    def per_client(self) -> dict[str, jax.Array]:
        """Fields whose leading axis is the clients, as far as the federation has them."""
        return {name: leaf for name in PER_CLIENT if (leaf := getattr(self, name)) is not None}

    # The following members are shared with `pfl_jax.engine.placement.PlacedData`, whose clients belong to devices.

    @property
    def mesh(self) -> None:
        """Mesh of the devices that own the clients; None, since every device can read all examples."""
        return None

    @property
    def specs(self) -> PartitionSpec:
        """Sharding of the fields over a mesh: every device has all of them."""
        return PartitionSpec()

    def on_device(self) -> "FederatedData":
        """Federation that a device reads with `client_data`."""
        return self

    def assign_devices(self, clients: jax.Array | np.ndarray, devices: int) -> np.ndarray:
        """Positions in `clients` [M], sorted by size, of the clients of each of D `devices`: int32, see `spread`."""
        return spread(len(clients), devices)

    def with_frozen(self, frozen: Frozen | None) -> "FederatedData":
        """Federation that passes a model's frozen parameters, `Model.frozen`, to compiled programs."""
        return self._replace(frozen=frozen)

    def own_clients(self) -> np.ndarray:
        """Sorted numbers of the clients whose states this process stores: all clients."""
        return np.arange(self.num_clients, dtype=np.int32)


def spread(size: int, devices: int) -> np.ndarray:
    """Ranks of each device's clients, int32 [D, ceil(M / D)]: M = `size` clients sorted by size, D = `devices`.

    The D largest go to the devices in turn, the next D in the reverse order, and so on. So loads are balanced, and
    successive clients of a device have similar sizes.

    Example:
      >>> from pfl_jax.data import federated
      >>> federated.spread(5, 2).tolist()
      [[0, 3, 4], [1, 2, 5]]
    """
    ranks = np.arange(-(-size // devices) * devices, dtype=np.int32).reshape(-1, devices)
    ranks[1::2] = ranks[1::2, ::-1]
    return np.minimum(ranks, size).T


PER_CLIENT = (
    *("train_index", "train_count", "test_index", "test_count", "label_map", "rotation", "noise", "missing"),
    *("validation_index", "validation_count", "active"),
)
"""Fields of FederatedData whose leading axis is the clients."""


@check_arguments
def federate(
    dataset: Any,
    partition: Partition | None = None,
    *,
    shift: Shift = "none",
    num_groups: Count = 1,
    seed: int = 0,
    **columns: Any,
) -> FederatedData:
    """Data of a federation: the examples of its clients, on the device.

    The pool contains only examples that clients use (typically a few thousand of EMNIST's 814,255); the indices in the
    tables are into this pool.

    Args:
      dataset: a `Dataset`, or any data that `pfl_jax.data.from_clients` takes, such as a list of the clients' arrays.
      partition: indices of each client's examples; None for the dataset's own clients.
      shift: "labels" permutes the labels, "rotation" rotates the images, "noise" adds noise to the inputs, "missing"
        sets some of their numbers to zero, differently for each group of clients.
      num_groups: number of groups G of the shift; client i belongs to group i mod G.
      seed: seed of the shift and, if `dataset` is not a `Dataset`, of the division into training and test rows.
      **columns: other arguments of `from_clients`, if `dataset` is not a `Dataset`.

    Raises:
      InvalidInput: data that `from_clients` refuses, inputs or labels not as in `Dataset`, NaN among them, a partition
        not as in `Partition`, or a shift that is unknown or not possible for these inputs.

    Example:
      >>> from pfl_jax import data
      >>> dataset = data.load("digits")
      >>> parts = data.partition.iid(dataset, num_clients=4, train_size=30, test_size=20)
      >>> federation = data.federate(dataset, parts)
      >>> federation.num_clients, federation.train_index.shape, federation.x.shape
      (4, (4, 30), (200, 8, 8, 1))
    """
    if not isinstance(dataset, Dataset) and partition is None:
        dataset = from_clients(dataset, seed=seed, **columns)
    elif columns:
        raise InvalidInput(f"{next(iter(columns))} is not for a Dataset, whose columns have their places already")
    partition = natural(dataset) if partition is None else partition
    fields = _fields(dataset, [partition], shift, num_groups, [seed])
    fields |= {name: fields[name][0] for name in PER_CLIENT if fields[name] is not None}
    return FederatedData(**jax.device_put(fields), client_names=ClientNames(partition.client_names))


@check_arguments
def federate_runs(
    dataset: Dataset,
    partitions: Sequence[Partition],
    *,
    shift: Shift = "none",
    num_groups: Count = 1,
    seeds: Sequence[int] | None = None,
) -> FederatedData:
    """Several federations with the same number of clients and a common pool, for `pfl_jax.engine.sweep`.

    Args:
      dataset: the examples.
      partitions: R partitions over N clients each.
      shift, num_groups: see `federate`; the same for all runs.
      seeds: seed of the shift in each run; None for 0 in all runs.

    Returns:
      The data, with a leading axis R on all fields of `PER_CLIENT`. Tables are padded to the largest width of all runs.
      `select_run` returns the data of one run.

    Raises:
      InvalidInput: as for `federate`; the partitions differ in the number of clients; or no partition is given.
    """
    seeds = [0] * len(partitions) if seeds is None else seeds
    kinds = {(len(partition.train), partition.validation is None) for partition in partitions}
    if len(kinds) != 1 or len(seeds) != len(partitions):
        raise InvalidInput("runs need a partition and a seed each, of as many clients, all with validation or none")
    return FederatedData(**jax.device_put(_fields(dataset, partitions, shift, num_groups, seeds)))


def select_run(data: FederatedData, run: int | np.ndarray | jax.Array) -> FederatedData:
    """Federation of one run (index `run`, may be traced) or of several runs in data from `federate_runs`."""
    return data._replace(**{name: table[run] for name, table in data.per_client.items()})


def hold_out(data: FederatedData, number: int) -> tuple[FederatedData, FederatedData]:
    """Hold out the last clients of a federation: (data of the other clients, data of the held-out clients).

    Args:
      data: data of N clients; both results share its pool.
      number: number of clients to hold out.

    Raises:
      InvalidInput: no client would be left, or none is held out, or the data is of several runs.
    """
    if data.train_count.ndim == 2:
        runs = data.train_count.shape[0]
        raise InvalidInput(f"hold_out is for one federation, and this data has {runs} runs: give one, see select_run")
    if not 1 <= number < data.num_clients:
        raise InvalidInput(f"of {data.num_clients} clients 1 to {data.num_clients - 1} can be held out, not {number}")
    stay, new = np.split(np.arange(data.num_clients), [data.num_clients - number])
    both = [(stay, data.client_names[: len(stay)]), (new, data.client_names[len(stay) :])]
    first, second = (select_run(data, some)._replace(client_names=ClientNames(names)) for some, names in both)
    return first, second


def _fields(
    dataset: Dataset, partitions: Sequence[Partition], shift: Shift, groups: int, seeds: Sequence[int], least: int = 1
) -> dict[str, Any]:
    """Fields of the data, on the host; fields in `PER_CLIENT` have a leading axis of the partitions."""
    dataset = checks.dataset(dataset)
    shifts.check(shift, dataset)
    partitions = [checks.partition(each, len(dataset.train_y), len(dataset.test_y), least) for each in partitions]
    used = _used_examples(partitions)
    from_train, from_test = np.split(used, [np.searchsorted(used, len(dataset.train_y))])
    from_test = from_test - len(dataset.train_y)
    fields: dict[str, Any] = dict.fromkeys(PER_CLIENT)
    fields["x"] = np.concatenate([dataset.train_x[from_train], dataset.test_x[from_test]])
    fields["y"] = np.concatenate([dataset.train_y[from_train], dataset.test_y[from_test]])
    fields["num_classes"], num_clients = NumClasses(dataset.num_classes), len(partitions[0].train)
    for name, value in (("mean", dataset.mean), ("std", dataset.std)):
        fields[name] = None if value is None else np.asarray(value, np.float32)
    for split in checks.SPLITS:
        if getattr(partitions[0], split) is not None:
            rows = [getattr(each, split) for each in partitions]
            fields[f"{split}_index"], fields[f"{split}_count"] = _indices(rows, used)
    drawn = [shifts.draw(shift, dataset, num_clients, groups, seed) for seed in seeds]
    fields |= {name: np.stack([one[name] for one in drawn]) for name in drawn[0]}
    return fields


def _used_examples(partitions: Sequence[Partition]) -> np.ndarray:
    """Sorted indices of the examples that clients use."""
    rows = np.concatenate([row for each in partitions for table in each[:3] for row in table or ()])
    # With very many clients there are millions of rows, for which np.unique would build a table of hashes.
    is_used = np.zeros(int(rows.max()) + 1, bool)
    is_used[rows] = True
    return np.flatnonzero(is_used)


def _indices(runs: Sequence[Sequence[np.ndarray]], used: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Index tables [R, N, n_max], padded with zeros, and counts [R, N]; `used` [P] has the sorted examples."""
    counts = np.array([[len(row) for row in rows] for rows in runs], np.int32)
    table = np.zeros((*counts.shape, max(1, counts.max())), np.int32)
    for run, rows in enumerate(runs):
        for client, row in enumerate(rows):
            table[run, client, : len(row)] = np.searchsorted(used, row)
    return table, counts


def client_data(data: FederatedData, client: int | jax.Array, split: Split) -> ClientData:
    """Examples of one client, after its shift; with a mean and std, normalized: x = (pixel / 255 - mean) / std.

    Args:
      data: the federation's data, or a device's part of it.
      client: number of the client, may be traced; under vmap several clients are gathered.
      split: "train", "test" or "validation".

    Returns:
      ClientData with x [n_max, ...], y [n_max, ...] and mask [n_max]. Padding repeats the pool's first example. x is
      float32 if it is normalized, rotated or noisy; otherwise x and y keep the type and the values of the pool.

    Example:
      >>> from pfl_jax import data
      >>> dataset = data.load("digits")
      >>> parts = data.partition.iid(dataset, num_clients=2, train_size=[30, 20], test_size=10)
      >>> one = data.client_data(data.federate(dataset, parts), 1, "train")
      >>> print(one.x.shape, one.mask.sum())  # 20 examples, padded to the largest client's 30
      (30, 8, 8, 1) 20
    """
    # For a client number that is too large, JAX would silently take the last client.
    if isinstance(client, int | np.integer) and not 0 <= client < len(
        data.train_count if data.row is None else data.row
    ):
        raise InvalidInput(f"there is no client {client}")
    row = client if data.row is None else data.row[client]
    index, count = (table[row] for table in _tables(data, split))
    x, y = shifts.shifted(data.x[index], data, row, client, list(checks.SPLITS).index(split)), data.y[index]
    if data.mean is not None and data.std is not None:
        x = (x.astype(jnp.float32) / 255 - data.mean) / data.std
    if data.label_map is not None:
        y = data.label_map[row][y]
    return ClientData(x, y, mask=jnp.arange(index.shape[-1]) < count)


def _tables(data: FederatedData, split: Split) -> tuple[jax.Array, jax.Array]:
    """Index table and counts of a split."""
    check_value("split", split, Split)
    if getattr(data, f"{split}_index") is None:
        raise InvalidInput("the federation has no validation examples: see pfl_jax.data.partition.with_validation")
    return getattr(data, f"{split}_index"), getattr(data, f"{split}_count")


def class_table(data: FederatedData, split: Split = "train") -> np.ndarray:
    """Number of examples of each client and label, int64 [N, K], for reports and figures.

    Args:
      data: the federation's data.
      split: "train", "test" or "validation".
    """
    if not data.num_classes:
        raise InvalidInput("the targets of this federation are not classes: there is nothing to count")
    index, count = map(np.asarray, _tables(data, split))
    y = np.asarray(data.y)[index]
    if data.label_map is not None:
        y = np.take_along_axis(np.asarray(data.label_map), y, axis=1)
    return np.stack([np.bincount(row[:size], minlength=data.num_classes) for row, size in zip(y, count, strict=True)])
