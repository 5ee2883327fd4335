"""Checks of data sets and partitions, once on the host: what is wrong is named, what is meant is made right.

Lists and other kinds of arrays become NumPy arrays, wider floats float32, booleans 0 and 1, labels [P, 1] and whole
floats labels [P], masks of examples their indices.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from pfl_jax import hyper_parameters
from pfl_jax.data.allocation import Partition
from pfl_jax.data.rows import Rows, blocks
from pfl_jax.data.sources import Dataset
from pfl_jax.errors import InvalidInput

SPLITS = {"train": "training", "test": "test", "validation": "validation"}
"""Field of a partition -> the word for its examples."""


def inputs(x: Any, what: str, *, normalize: bool = False) -> Any:
    """Inputs as float32 or integers of at most 32 bits; floats may be NaN or infinite, see `check_finite`.

    Args:
      x: inputs [P, ...]; `Rows` stay so.
      what: their name, for errors.
      normalize: whether they will be normalized, so that images may be integers of any size.

    Raises:
      InvalidInput: another type, no rows, or images that are neither uint8 nor floats or have their channels first.
    """
    x = x if isinstance(x, Rows) else np.asarray(x)
    if x.dtype.kind not in "fiub":
        raise InvalidInput(f"{what} holds {kind(x)}: inputs are numbers")
    if x.ndim < 2 or len(x) == 0:
        raise InvalidInput(f"{what} has shape {list(x.shape)}: give one row for each example, [P, ...]")
    if 0 in x.shape:
        raise InvalidInput(f"{what} has shape {list(x.shape)}: a row holds at least one number")
    if x.ndim == 4:
        _check_images(x, what, normalize=normalize)
    if x.dtype.kind == "b":
        return x.astype(np.uint8)
    if x.dtype.kind == "f":
        with np.errstate(over="ignore"):
            return x.astype(np.float32, copy=False)
    if x.dtype.itemsize < 4 or x.dtype == np.int32:
        return x
    limits = np.iinfo(np.int32)
    if x.min() < limits.min or x.max() > limits.max:
        raise InvalidInput(f"{what} has integers from {x.min()} to {x.max()}, beyond 32 bits: give them as floats")
    return x.astype(np.int32)


def _check_images(x: np.ndarray | Rows, what: str, *, normalize: bool) -> None:
    """Raise InvalidInput for images [P, H, W, C] that no network here is meant for."""
    _, first, height, width = x.shape
    if first in (1, 3) and min(height, width) > 4:
        raise InvalidInput(
            f"{what} has shape {list(x.shape)}, channels first: give [P, H, W, C], with np.moveaxis({what}, 1, -1)"
        )
    if x.dtype.kind in "iu" and x.dtype != np.uint8 and x.shape[-1] in (1, 3, 4) and not normalize:
        raise InvalidInput(
            f"{what} has {x.dtype} from {x.min()} to {x.max()}: images are uint8 or floats; divide them into floats "
            "from 0 to 1, or give them as uint8"
        )


def are_finite(x: np.ndarray) -> np.ndarray:
    """Whether floats are numbers as float32: bool of the same shape."""
    with np.errstate(over="ignore"):
        return np.isfinite(x.astype(np.float32, copy=False))


def no_number(value: Any) -> str:
    """Float that `are_finite` denies, in words."""
    return f"{value}, beyond float32," if np.isfinite(value) else f"{value}"


def check_finite(x: np.ndarray | Rows, what: str) -> None:
    """Raise InvalidInput for the first NaN or infinity in inputs [P, ...], or float that is one as float32."""
    if x.dtype.kind != "f":
        return
    first, number = None, 0
    for start, part in blocks(x):
        bad = np.argwhere(~are_finite(part))
        number += len(bad)
        if len(bad) and first is None:
            first = part[tuple(bad[0])], start + int(bad[0][0]), bad[0][1:].tolist()
    if first is not None:
        value, row, place = first
        raise InvalidInput(
            f"{what} has {no_number(value)} in row {row}, place {place} ({number} such values): leave these rows out, "
            "or fill them in"
        )


def one_type(train_x: Any, test_x: Any, names: tuple[str, str]) -> tuple[Any, Any]:
    """Training and test inputs of one type: floats if either are, but never pixels beside other images.

    Args:
      train_x, test_x: results of `inputs`.
      names: their names, for errors.

    Raises:
      InvalidInput: examples of different shapes, or images of different types.
    """
    one, other = (f"{name} {x.dtype} {list(x.shape[1:])}" for name, x in zip(names, (train_x, test_x), strict=True))
    if train_x.shape[1:] != test_x.shape[1:] or (train_x.ndim == 4 and train_x.dtype != test_x.dtype):
        raise InvalidInput(f"{one} and {other} must be of one type and shape")
    if train_x.dtype == test_x.dtype:
        return train_x, test_x
    common = np.float32 if "f" in (train_x.dtype.kind, test_x.dtype.kind) else np.int32
    return train_x.astype(common), test_x.astype(common)


def labels(y: Any, num_classes: int | None, what: str) -> np.ndarray:
    """Labels as int32 [P].

    Args:
      y: labels [P] or [P, 1].
      num_classes: K; None for any number of classes.
      what: their name, for errors.

    Raises:
      InvalidInput: another shape, no integers, or not 0 to K - 1.
    """
    y = np.asarray(y)
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1 or not len(y):
        one_hot = f"; of one-hot labels take np.argmax({what}, axis=1)" if y.ndim == 2 else ""
        raise InvalidInput(f"{what} has shape {list(y.shape)}: give one label for each row, [P]{one_hot}")
    if y.dtype.kind not in "iuf":
        raise InvalidInput(
            f"{what} holds {kind(y)}: labels are integers from 0 to K - 1; data.from_arrays makes these of any names"
        )
    if y.dtype.kind == "f":
        odd = np.flatnonzero(y != np.round(y))
        if len(odd) or not np.isfinite(y).all():
            row = int(odd[0] if len(odd) else np.flatnonzero(~np.isfinite(y))[0])
            raise InvalidInput(f"{what} has {y[row]:g} in row {row}: labels are integers from 0 to K - 1")
    highest = np.iinfo(np.int32).max if num_classes is None else num_classes - 1
    strange = np.flatnonzero((y < 0) | (y > highest))
    if len(strange):
        last = "K - 1" if num_classes is None else highest
        shifted = "; subtract 1 from all of them" if y.min() == 1 and y.max() == num_classes else ""
        raise InvalidInput(
            f"{what} has {y[strange[0]]:g} in row {strange[0]} ({len(strange)} such rows): labels are the integers "
            f"0 to {last}{shifted}"
        )
    return y.astype(np.int32)


def dataset(given: Dataset) -> Dataset:
    """The same dataset as NumPy arrays of the types that `federate` needs; values may still be NaN or infinite.

    Args:
      given: a user's own, or one that this package loaded.

    Raises:
      InvalidInput: inputs, labels, classes, mean and std that cannot be used, or do not belong together.
    """
    if not isinstance(given, Dataset):
        raise InvalidInput(f"dataset must be a Dataset, of data.load or data.from_arrays, not a {type(given).__name__}")
    hyper_parameters.whole("num_classes", given.num_classes)
    train_x, test_x = one_type(inputs(given.train_x, "train_x"), inputs(given.test_x, "test_x"), ("train_x", "test_x"))
    train_y, test_y = (labels(getattr(given, name), given.num_classes, name) for name in ("train_y", "test_y"))
    for split, x, y in (("train", train_x, train_y), ("test", test_x, test_y)):
        if len(x) != len(y):
            raise InvalidInput(f"there are {len(x)} rows in {split}_x, and {len(y)} labels in {split}_y")
    _check_pixels(given, train_x)
    return given._replace(train_x=train_x, train_y=train_y, test_x=test_x, test_y=test_y)


def _check_pixels(given: Dataset, x: np.ndarray | Rows) -> None:
    """Raise InvalidInput unless mean and standard deviation are those of these inputs' pixels."""
    if (given.mean is None) != (given.std is None):
        raise InvalidInput("mean and std of a dataset are given together, or both None")
    if given.mean is None:
        return
    if x.dtype != np.uint8:
        raise InvalidInput(
            f"mean and std are of uint8 pixels divided by 255, and the inputs are {x.dtype}: give mean=None, std=None, "
            "and the inputs are used as they are"
        )
    for name, rule, right in (
        ("mean", "finite", np.isfinite),
        ("std", "positive", lambda values: np.isfinite(values) & (values > 0)),
    ):
        values = np.atleast_1d(np.asarray(getattr(given, name), np.float64))
        if values.ndim != 1 or len(values) not in (1, x.shape[-1]):
            raise InvalidInput(
                f"{name} has {values.size} numbers, and the inputs have {x.shape[-1]} channel"
                f"{'s' * (x.shape[-1] > 1)}: give one for each"
            )
        if not right(values).all():
            raise InvalidInput(f"{name} must be {rule} for every channel, not {_numbers(values)}")
        if values.max() > 1:
            raise InvalidInput(
                f"{name} is of pixels divided by 255, in [0, 1], not {_numbers(values)}: divide it by 255 too"
            )


def _numbers(values: np.ndarray) -> str:
    return ", ".join(f"{value:g}" for value in values)


def partition(given: Partition, num_train: int, num_test: int) -> Partition:
    """The same partition with int64 indices into the pool of training and test examples.

    Args:
      given: a user's own, or one that this package made.
      num_train, num_test: examples of either set.

    Raises:
      InvalidInput: indices of a wrong type or range, repeated ones, a client without examples, or one that is tested on
        an example that it or another client trains on.
    """
    if not isinstance(given, Partition):
        raise InvalidInput(
            f"partition must be a data.Partition, such as those of data.partition, not a {type(given).__name__}"
        )
    sizes = {split: len(getattr(given, split)) for split in SPLITS if getattr(given, split) is not None}
    for split, size in sizes.items():
        if size != sizes["train"]:
            raise InvalidInput(
                f"partition has training examples for {sizes['train']} clients and {SPLITS[split]} examples for {size}"
            )
    if not sizes["train"]:
        raise InvalidInput("partition has no clients")
    whole = num_train + num_test
    tables = {}
    for split in sizes:
        end = whole if given.pooled else num_test if split == "test" else num_train
        offset = num_train if split == "test" and not given.pooled else 0
        rows = _rows(getattr(given, split), split, end)
        flat, owner = np.concatenate(rows), np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        _check_range(flat, owner, split, end, given, num_train)
        _check_distinct(flat, owner, split, whole)
        tables[split] = rows if not offset else [row + offset for row in rows]
    parts = Partition(**tables, pooled=True)
    _check_disjoint(parts.train, parts.test, "training", num_train)
    if parts.validation is not None:
        _check_disjoint(parts.validation, parts.test, "validation", num_train)
        for client, (train, validation) in enumerate(zip(parts.train, parts.validation, strict=True)):
            if np.isin(validation, train).any():
                raise InvalidInput(f"client {client} has validation examples among its training examples")
    return parts


def _rows(table: Iterable[Any], split: str, end: int) -> list[np.ndarray]:
    """Rows of a table as int64, masks as the indices that they choose."""
    rows = []
    for client, given in enumerate(table):
        row = np.asarray(given)
        if row.ndim == 1 and row.dtype.kind == "b":
            if len(row) != end:
                raise InvalidInput(
                    f"client {client}: a mask of {SPLITS[split]} examples has one entry for each of {end}, "
                    f"not {len(row)}"
                )
            row = np.flatnonzero(row)
        if row.ndim == 1 and not len(row) and split == "validation":
            row = np.zeros(0, np.int64)
        elif row.ndim == 1 and not len(row):
            raise InvalidInput(f"client {client} has no {SPLITS[split]} examples: use fewer clients")
        if row.ndim != 1 or row.dtype.kind not in "iu":
            raise InvalidInput(
                f"client {client} has {SPLITS[split]} indices of {kind(row)} and shape {list(row.shape)}: give whole "
                "numbers [n]"
            )
        rows.append(row.astype(np.int64, copy=False))
    return rows


def _check_range(flat: np.ndarray, owner: np.ndarray, split: str, end: int, given: Partition, num_train: int) -> None:
    outside = np.flatnonzero((flat < 0) | (flat >= end))
    if not len(outside):
        return
    if given.pooled:
        hint = f"0 to {end - 1}, training and test examples together, which begin at {num_train}"
    else:
        both = (
            "; of indices into training and test examples together, say pooled=True" if flat[outside[0]] >= end else ""
        )
        hint = f"0 to {end - 1}, those of the {SPLITS[split]} set{both}"
    raise InvalidInput(
        f"client {owner[outside[0]]} has {SPLITS[split]} example {flat[outside[0]]}, and there are {hint}"
    )


def _check_distinct(flat: np.ndarray, owner: np.ndarray, split: str, whole: int) -> None:
    """Raise InvalidInput if a client has an example twice."""
    pairs, counts = np.unique(owner * whole + flat, return_counts=True)
    if len(pairs) < len(flat):
        client, example = divmod(int(pairs[counts > 1][0]), whole)
        raise InvalidInput(f"client {client} has {SPLITS[split]} example {example} twice")


def _check_disjoint(train: Sequence[np.ndarray], test: Sequence[np.ndarray], word: str, num_train: int) -> None:
    """Raise InvalidInput if an example in the pool is for training, or validation, and for testing."""
    used = [np.concatenate(rows) for rows in (train, test)]
    is_used = np.zeros((2, 1 + max(int(rows.max(initial=0)) for rows in used)), bool)
    for flags, rows in zip(is_used, used, strict=True):
        flags[rows] = True
    shared = np.flatnonzero(is_used.all(0))
    if not len(shared):
        return
    client = next(number for number, row in enumerate(test) if np.isin(shared, row).any())
    example = shared[np.isin(shared, test[client])][0]
    owner = next(number for number, row in enumerate(train) if example in row)
    raise InvalidInput(
        f"client {client} is tested on example {example}, which is a {word} example of client {owner} ({len(shared)} "
        f"such examples): with pooled=True, test examples begin at {num_train}; without, each table is of its own set"
    )


def client_inputs(parts: Partition, given: Dataset) -> None:
    """Raise InvalidInput for the first client that has NaN or an infinity in its inputs.

    Args:
      parts: result of `partition`.
      given: result of `dataset`.
    """
    # Those that stay in their file were checked when it was opened.
    if given.train_x.dtype.kind != "f" or isinstance(given.train_x, Rows):
        return
    axes = tuple(range(1, given.train_x.ndim))
    bad = np.concatenate([~np.isfinite(x).all(axes) for x in (given.train_x, given.test_x)])
    if not bad.any():
        return
    splits = [table for table in (parts.train, parts.test, parts.validation) if table is not None]
    for client, every in enumerate(zip(*splits, strict=True)):
        rows = np.concatenate(every)
        found = rows[bad[rows]]
        if len(found):
            first, start = int(found[0]), len(given.train_x)
            split, row = ("train", first) if first < start else ("test", first - start)
            x = getattr(given, f"{split}_x")[row]
            raise InvalidInput(
                f"client {client} has {x[~np.isfinite(x)][0]} in row {row} of {split}_x ({len(found)} such rows): "
                "leave them out, or fill them in"
            )


def kind(values: np.ndarray | Rows) -> str:
    """Type of an array's values in words."""
    words = {"O": "objects", "U": "strings", "S": "strings", "c": "complex numbers", "M": "dates", "m": "durations"}
    return words.get(values.dtype.kind, str(values.dtype))
