"""Checks of data sets and partitions, once on the host: mistakes are named, unusual forms of valid data are converted.

Lists and other kinds of arrays become NumPy arrays, wider floats float32, booleans 0 and 1, labels [P, 1] labels [P].
"""

from typing import Any

import numpy as np

from pfl_jax.data import columns
from pfl_jax.data.allocation import Partition
from pfl_jax.data.sources import Dataset
from pfl_jax.errors import InvalidInput, describe_value
from pfl_jax.validation import check_value

SPLITS = {"train": "training", "test": "test", "validation": "validation"}
"""Field of a partition -> the word for its examples."""


def inputs(x: Any, what: str, *, wide: bool = False) -> Any:
    """Inputs [P, ...] as float32, or float64 if they stay `wide`, or integers of at most 32 bits; `what` names them."""
    shape = np.shape(x)
    if len(shape) < 2 or 0 in shape:
        raise InvalidInput(f"{what} has shape {list(shape)}: give one row for each example, [P, ...]")
    if len(shape) == 4 and shape[1] in (1, 3) and min(shape[2:]) > 4:
        raise InvalidInput(
            f"{what} has shape {list(shape)}, channels first: give [P, H, W, C], with np.moveaxis({what}, 1, -1)"
        )
    found = _numbers(x, what, ", or fill NaN in with --impute (impute=)")
    return x.astype(np.float64, copy=False) if wide and found.dtype == np.float32 else found


def _numbers(x: Any, what: str, instead: str = "") -> Any:
    """Numbers as float32 or integers of at most 32 bits; `instead` is another remedy for NaN and infinity."""
    if x.dtype.kind not in "fiub":
        raise InvalidInput(f"{what} holds {x.dtype}: give numbers")
    if x.dtype.kind == "b":
        return x.astype(np.uint8)
    if x.dtype.kind in "iu":
        if x.dtype.itemsize < 4 or x.dtype == np.int32:
            return x
        limits = np.iinfo(np.int32)
        if x.min() < limits.min or x.max() > limits.max:
            raise InvalidInput(f"{what} has integers from {x.min()} to {x.max()}, beyond 32 bits: give floats")
        return x.astype(np.int32)
    with np.errstate(over="ignore"):
        found = x.astype(np.float32, copy=False)
    bad = np.argwhere(~np.isfinite(found))
    if len(bad):
        row, *place = bad[0].tolist()
        at, value = f"row {row}, place {place}" if place else f"row {row}", x[tuple(bad[0])]
        is_what = "a missing value" if np.isnan(value) else "not a finite float32"
        raise InvalidInput(
            f"{what} has {value} in {at} (counted from 0), which is {is_what}: leave such rows out{instead}"
        )
    return found


def names(values: Any, what: str, role: str) -> np.ndarray:
    """Labels or clients, [P] or [P, 1], as int64 or strings [P]; their name `what` and `role` are for errors."""
    values = column(columns.plain(values, what))
    if values.ndim != 1 or not len(values):
        one_hot = f"; of one-hot labels take np.argmax({what}, axis=1)" if values.ndim == 2 else ""
        raise InvalidInput(f"{what} has shape {list(values.shape)}: give one {role} for each row, [P]{one_hot}")
    kind = columns.kind(values)
    if kind == "numbers":
        with np.errstate(invalid="ignore"):
            found = values.astype(np.int64)
        strange = np.flatnonzero(found != values)
    elif kind == "words":
        found, strange = values, np.flatnonzero(columns.missing(values) | (values == ""))
    else:
        raise InvalidInput(f"{what} holds {kind}: a {role} is an integer or a string")
    if len(strange):
        value = columns.sample(values, strange[0])
        raise InvalidInput(
            f"{what} has {value} in row {strange[0]} (counted from 0), the first of {len(strange)} such rows: a {role} "
            "is an integer of at most 64 bits or a string, leave other rows out"
        )
    return found if kind == "numbers" else found.astype(str)


def labels(y: Any, num_classes: int | None, what: str) -> np.ndarray:
    """Labels 0 to K - 1 as int32 [P], with `num_classes` K, or any K if it is None."""
    y = names(y, what, "label")
    if y.dtype.kind != "i":
        raise InvalidInput(f"{what} holds strings: labels are integers here; data.from_arrays makes these of any names")
    highest = np.iinfo(np.int32).max if num_classes is None else num_classes - 1
    strange = np.flatnonzero((y < 0) | (y > highest))
    if len(strange):
        raise InvalidInput(f"{what} has {y[strange[0]]} in row {strange[0]}: labels are the integers 0 to {highest}")
    return y.astype(np.int32)


def values(y: Any, what: str) -> np.ndarray:
    """Targets that are not classes: [P] as float32, or [P, ...] as float32 or int32; `what` is their name."""
    y = column(y)
    if y.ndim == 0 or 0 in y.shape:
        raise InvalidInput(f"{what} has shape {list(y.shape)}: give one target for each row, [P] or [P, ...]")
    if y.dtype.kind in "UO":
        try:
            y = y.astype(np.float64)
        except (ValueError, TypeError) as error:
            raise InvalidInput(f"{what} has to be numbers here: {error}") from None
    y = _numbers(y, what)
    return y.astype(np.float32 if y.dtype == np.float32 or y.ndim == 1 else np.int32)


def column(y: Any) -> np.ndarray:
    """Labels or targets [P] if they are given as one column [P, 1]; others unchanged."""
    y = np.asarray(y)
    return y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y


def both_labels(given: Dataset) -> tuple[np.ndarray, np.ndarray, int]:
    """Labels of both sets as int32, and the number of classes K, for a partition by class."""
    if not given.num_classes:
        raise InvalidInput(f"{given.description} has no classes to divide: use partition.iid or partition.natural")
    train_y, test_y = labels(given.train_y, None, "train_y"), labels(given.test_y, None, "test_y")
    return train_y, test_y, 1 + int(max(train_y.max(), test_y.max()))


def dataset(given: Dataset) -> Dataset:
    """The same dataset as NumPy arrays of the types that `federate` needs."""
    check_value("dataset", given, Dataset)
    found: dict[str, Any] = {}
    for part in ("x", "y"):
        fields = [f"train_{part}", f"test_{part}"]
        sides = [(name, columns.plain(getattr(given, name), name)) for name in fields]
        for name, array in zip(fields, columns.alike(part, sides), strict=True):
            if part == "y":
                found[name] = labels(array, given.num_classes, name) if given.num_classes else values(array, name)
            else:
                found[name] = inputs(array, name)
    for split in ("train", "test"):
        x, y = found[f"{split}_x"], found[f"{split}_y"]
        if len(x) != len(y):
            raise InvalidInput(f"there are {len(x)} rows in {split}_x, and {len(y)} labels in {split}_y")
    if given.mean is not None or given.std is not None:
        x = found["train_x"]
        mean, std = (np.atleast_1d(np.asarray(value, np.float64)) for value in (given.mean, given.std))
        right = all(one.shape in ((1,), x.shape[-1:]) and ((one >= 0) & (one <= 1)).all() for one in (mean, std))
        if x.dtype != np.uint8 or not right or not (std > 0).all():
            raise InvalidInput(
                f"mean {given.mean} and std {given.std} do not fit inputs {x.dtype} {list(x.shape[1:])}: they are of "
                "uint8 pixels divided by 255, between 0 and 1 for each channel, std above 0, or both None"
            )
    return given._replace(**found)


def partition(given: Partition, num_train: int, num_test: int, least: int = 1) -> Partition:
    """The same partition, with int64 indices into the pool of training and test examples.

    No test example is a training example of any client, and every client has a training and a test example
    unless `least` is 0.
    """
    splits = [split for split in SPLITS if getattr(given, split) is not None]
    sizes = {len(getattr(given, split)) for split in splits}
    if len(sizes) > 1 or 0 in sizes:
        raise InvalidInput(f"partition has tables of {', '.join(map(str, sorted(sizes)))} clients: give all the same")
    total, tables, examples, owners = num_train + num_test, {}, {}, {}
    for split in splits:
        size, begin = (num_test, num_train) if split == "test" else (num_train, 0)
        size, begin = (total, 0) if given.pooled else (size, begin)
        rows = [begin + _indices(row, client, split, least) for client, row in enumerate(getattr(given, split))]
        flat, owners[split] = np.concatenate(rows), np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        if len(outside := np.flatnonzero((flat < begin) | (flat >= begin + size))):
            which = "training and test examples together" if given.pooled else "its own set, unless pooled=True"
            client, example = owners[split][outside[0]], flat[outside[0]] - begin
            raise InvalidInput(
                f"client {client} has {SPLITS[split]} example {example}, and there are 0 to {size - 1}: indices are "
                f"into {which}"
            )
        tables[split], examples[split] = rows, flat
    others = np.concatenate([examples[split] for split in splits if split != "test"])
    if len(shared := np.intersect1d(others, examples["test"])):
        raise InvalidInput(
            f"example {shared[0]} is a test example and one for training or validation ({len(shared)} such examples); "
            f"test examples begin at {num_train}"
        )
    keys = np.sort(np.concatenate([owners[split] * total + examples[split] for split in splits]))
    if len(twice := keys[1:][keys[1:] == keys[:-1]]):
        client, example = divmod(int(twice[0]), total)
        raise InvalidInput(f"client {client} has example {example} twice; test examples begin at {num_train}")
    return Partition(**tables, pooled=True)


def _indices(given: Any, client: int, split: str, least: int) -> np.ndarray:
    """Indices of one client as int64 [n]."""
    row = np.asarray(given)
    if row.shape == (0,):
        if split != "validation" and least:
            raise InvalidInput(f"client {client} has no {SPLITS[split]} examples: use fewer clients")
        return np.zeros(0, np.int64)
    if row.ndim != 1 or row.dtype.kind not in "iu":
        raise InvalidInput(
            f"client {client} has {SPLITS[split]} indices {describe_value(row)}: give whole numbers [n], for a mask "
            "np.flatnonzero"
        )
    return row.astype(np.int64, copy=False)
