"""Federations whose data change: in each phase of a run the same clients have other examples, of equal shapes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pfl_jax.data import checks
from pfl_jax.data import shift as shifts
from pfl_jax.data.federated import PER_CLIENT, ClientNames, FederatedData, _fields
from pfl_jax.data.partition import Partition
from pfl_jax.data.sources import Dataset
from pfl_jax.data.specs import Shift
from pfl_jax.errors import InvalidInput, shortened
from pfl_jax.validation import Count, check_arguments


@dataclass(frozen=True, eq=False)
class Phases:
    """Federation over phases, in place of a federation in `pfl_jax.run`; `federate_phases` makes it.

    Attributes:
      parts: data of each phase. All have one pool of examples and tables of equal shapes, so that they share a program.
      starts: number of rounds before each phase; the first is 0, and the last phase lasts to the end of the run.
      first: examples of each client in the first phase in which it has any, from which its state is initialized.
    """

    parts: tuple[FederatedData, ...]
    starts: tuple[int, ...]
    first: FederatedData

    def phase_of(self, completed: int) -> int:
        """Number of the phase, from 0, of the round that follows the `completed` rounds."""
        return sum(start <= completed for start in self.starts) - 1

    def tested(self, phase: int, on: int) -> FederatedData:
        """Data of a phase, with the test and validation examples of the phase `on`."""
        other = self.parts[on]
        names = ("test_index", "test_count", "validation_index", "validation_count")
        return self.parts[phase]._replace(**{name: getattr(other, name) for name in names})


@check_arguments
def federate_phases(
    dataset: Dataset | Sequence[Dataset],
    partitions: Sequence[Partition],
    rounds: Sequence[int],
    *,
    shift: Shift = "none",
    num_groups: Count = 1,
    seed: int = 0,
) -> Phases:
    """Federation whose clients have the examples of one partition after the other.

    In each phase, clients without training examples take no part: they are absent in the draws, keep their states, and
    have no score if they have no test examples.

    Args:
      dataset: examples of all phases; or a dataset for each phase, all with the same classes and the same scale of
        their inputs, such as `rotated` images.
      partitions: P partitions over the same N clients, whose tables may be empty in some phases.
      rounds: number of rounds of each phase, P or P - 1 numbers; the last phase lasts to the end of the run.
      shift, num_groups, seed: see `pfl_jax.data.federate`; the same in all phases.

    Raises:
      InvalidInput: as for `federate`; numbers do not fit each other; a client never trains; or no client in a phase.

    Example:
      >>> from pfl_jax import data
      >>> dataset = data.load("digits")
      >>> parts = data.partition.iid(dataset, num_clients=4, train_size=40, test_size=20)
      >>> federation = data.federate_phases(dataset, data.phases.classes(dataset, parts, 2), rounds=[5])
      >>> federation.starts, [int(part.train_count.sum()) for part in federation.parts]
      ((0, 5), [79, 81])
    """
    number = len(partitions)
    if number < 2 or len(rounds) not in (number, number - 1) or min(rounds) < 1:
        raise InvalidInput(f"{number} partitions need at least 2 phases, of 1 round or more each, not {list(rounds)}")
    several = [checks.dataset(one) for one in ([dataset] if isinstance(dataset, Dataset) else dataset)]
    if len(several) not in (1, number) or len({len(parts.train) for parts in partitions}) > 1:
        raise InvalidInput("give a dataset for each partition, or one for all, and partitions of the same clients")
    pooled = [_pooled(one, parts) for one, parts in zip(several * (number // len(several)), partitions, strict=True)]
    joined = several[0]
    scales = [
        {name: getattr(one, name) for name in ("num_classes", "class_names", "mean", "std", "preparation")}
        | {"the type of their inputs": one.train_x.dtype}
        for one in several
    ]
    for name, wanted in scales[0].items():
        if others := [scale[name] for scale in scales if scale[name] != wanted]:
            both = shortened(f"{wanted} and {others[0]}")
            raise InvalidInput(
                f"the data sets of the phases differ in {name}, {both}: make one data set of all rows first"
            )
    if len(several) > 1:
        sizes = [len(one.train_y) + len(one.test_y) for one in several]
        pooled = [_moved(parts, sum(sizes[:place])) for place, parts in enumerate(pooled)]
        x, y = (
            np.concatenate([getattr(one, f"{split}_{part}") for one in several for split in ("train", "test")])
            for part in "xy"
        )
        # All indices are into both together, and neither may be empty.
        joined = joined._replace(train_x=x[:-1], train_y=y[:-1], test_x=x[-1:], test_y=y[-1:])
    trains = np.array([[len(rows) > 0 for rows in parts.train] for parts in pooled])
    if not trains.any(axis=0).all():
        raise InvalidInput(f"client {np.argmin(trains.any(axis=0))} has no training examples in any phase")
    if not trains.any(axis=1).all():
        raise InvalidInput(f"no client has training examples in phase {np.argmin(trains.any(axis=1))}")
    entries = trains.argmax(axis=0)

    def entered(split: str) -> list[np.ndarray]:
        return [getattr(pooled[phase], split)[client] for client, phase in enumerate(entries)]

    validation = None if pooled[0].validation is None else entered("validation")
    first = Partition(entered("train"), entered("test"), validation, pooled=True)
    fields = _fields(joined, [*pooled, first], shift, num_groups, [seed] * (number + 1), 0)
    fields["active"] = np.concatenate([trains, np.ones_like(trains[:1])])
    fields = jax.device_put(fields)
    names = ClientNames(partitions[0].client_names)

    def part(index: int) -> FederatedData:
        own = {name: fields[name][index] for name in PER_CLIENT if fields[name] is not None}
        return FederatedData(**fields | own, client_names=names)

    starts = tuple(int(start) for start in np.cumsum([0, *rounds])[:number])
    return Phases(tuple(map(part, range(number))), starts, part(number))


def classes(dataset: Dataset, parts: Partition, phases: Count, seed: int = 0) -> list[Partition]:
    """Partitions in which classes arrive in groups: in each phase clients have their examples of other classes.

    Args:
      dataset: the examples.
      parts: all examples of each client.
      phases: number of phases P, among which the classes are dealt in a random order.
      seed: seed of the order.

    Example:
      >>> import numpy as np
      >>> from pfl_jax import data
      >>> dataset = data.load("digits")
      >>> parts = data.partition.iid(dataset, num_clients=2, train_size=40, test_size=20)
      >>> [np.unique(dataset.train_y[part.train[0]]).tolist() for part in data.phases.classes(dataset, parts, 3)]
      [[0, 5, 7, 9], [2, 6, 8], [1, 3, 4]]
    """
    if not 2 <= phases <= dataset.num_classes:
        raise InvalidInput(f"classes arrive in 2 to {dataset.num_classes} phases, not {phases}")
    order = np.random.default_rng((seed, 4)).permutation(dataset.num_classes)
    labels = np.concatenate([dataset.train_y, dataset.test_y])
    groups = np.array_split(order, phases)
    return [
        _kept(_pooled(dataset, parts), lambda rows, group=group: rows[np.isin(labels[rows], group)]) for group in groups
    ]


def clients(parts: Partition, phases: Count, seed: int = 0) -> list[Partition]:
    """Partitions in which clients join late: with each phase another share of them, in a random order.

    Args:
      parts: examples of each client from its first phase on.
      phases: number of phases P.
      seed: seed of the order.

    Example:
      >>> from pfl_jax import data
      >>> parts = data.partition.iid(data.load("digits"), num_clients=4, train_size=10, test_size=5)
      >>> [[len(rows) for rows in part.train] for part in data.phases.clients(parts, 2)]
      [[10, 0, 0, 10], [10, 10, 10, 10]]
    """
    number = len(parts.train)
    if not 2 <= phases <= number:
        raise InvalidInput(f"{number} clients join in 2 to {number} phases, not {phases}")
    groups = np.array_split(np.random.default_rng((seed, 5)).permutation(number), phases)
    late = [np.concatenate([np.zeros(0, int), *groups[phase + 1 :]]) for phase in range(phases)]

    def there(split, absent):
        return split and [np.zeros(0, int) if client in absent else rows for client, rows in enumerate(split)]

    return [
        parts._replace(**{split: there(getattr(parts, split), absent) for split in checks.SPLITS})
        for absent in map(set, late)
    ]


def rotated(dataset: Dataset, degrees: float) -> Dataset:
    """Dataset of images [H, W, C] rotated counterclockwise; pixels from outside are black.

    Args:
      dataset: images of uint8, which stay whole numbers, or float32.
      degrees: the angle.
    """
    shifts.check("rotation", dataset)
    direction = jnp.asarray(shifts.direction(degrees, dataset))

    def turned(images: np.ndarray) -> np.ndarray:
        found = np.asarray(shifts.rotate(jnp.asarray(images, jnp.float32), direction))
        return np.rint(found).clip(0, 255).astype(np.uint8) if images.dtype == np.uint8 else found

    return dataset._replace(train_x=turned(dataset.train_x), test_x=turned(dataset.test_x))


def _pooled(dataset: Dataset, parts: Partition) -> Partition:
    found = checks.partition(parts, len(dataset.train_y), len(dataset.test_y), 0)
    return found._replace(client_names=parts.client_names)


def _kept(parts: Partition, keep: Callable[[np.ndarray], np.ndarray]) -> Partition:
    tables = {split: getattr(parts, split) for split in checks.SPLITS}
    return parts._replace(**{split: rows and [keep(one) for one in rows] for split, rows in tables.items()})


def _moved(parts: Partition, offset: int) -> Partition:
    return _kept(parts, lambda rows: rows + offset)
