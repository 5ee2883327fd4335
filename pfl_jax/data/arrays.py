"""Data sets from a user's own arrays: any inputs, any labels, with clients of its own where rows say whose they are."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from pfl_jax.data import checks
from pfl_jax.data.allocation import Partition
from pfl_jax.data.rows import Rows, take
from pfl_jax.data.scaling import normalized
from pfl_jax.data.sources import Dataset
from pfl_jax.errors import InvalidInput

TEST_FRACTION = 0.25
"""Share of test examples where there is no test set."""


class InvalidTestRows(InvalidInput):
    """Invalid test rows, on their own or beside the training rows."""


def from_arrays(
    x: Any,
    y: Any,
    *,
    test_x: Any = None,
    test_y: Any = None,
    test_fraction: float | None = None,
    client: Any = None,
    test_client: Any = None,
    normalize: bool = False,
    num_classes: int | None = None,
    name: str = "arrays",
    source: str = "arrays",
    origin: str = "",
    seed: int = 0,
) -> Dataset:
    """Data set of arrays. Floats stay floats, integers stay integers, and nothing is rescaled unless asked.

    Args:
      x: inputs [P, ...] of any rank from 2: numbers, as float32 (wider floats are rounded to it) or as integers of at
        most 32 bits; booleans are integers 0 and 1. Images are [P, H, W, C].
      y: labels [P], integers or strings, at least two different ones; they become 0 to K - 1 in sorted order.
      test_x: test inputs [P_test, ...]; without them a share of the rows is the test set.
      test_y: test labels [P_test], all of them among those of y.
      test_fraction: share of test rows, 0.25 by default: of each client where clients are given, else of each class;
        drawn by `seed`, and at least one row of either kind for a client. Not together with a test set.
      client: [P], integers or strings: whose row it is, for `pfl_jax.data.partition.natural`.
      test_client: [P_test], likewise; with a test set and clients.
      normalize: subtract the mean of the training rows and divide by their deviation, for each feature, or for each
        channel of images; what does not vary becomes 0. uint8 images stay uint8, with mean and std of pixels / 255.
      num_classes: K, where labels are integers from 0 to K - 1 of which some may be missing; by default the labels
        there are.
      name: of the data set.
      source: what kind of data this is.
      origin: where it came from.
      seed: of the division into training and test rows.

    Returns:
      The dataset: `class_names` are the labels where these are not 0 to K - 1, `client_names` the clients.

    Raises:
      InvalidInput: arrays of unequal length or of a wrong type or shape, NaN or infinite inputs, missing labels, one
        class only, labels that are no classes, test labels or clients unknown in training, a client without training
        or test rows.

    Example:
      >>> import numpy as np
      >>> from pfl_jax import data
      >>> x, y = np.arange(24.0).reshape(8, 3), np.array(["no", "yes"] * 4)
      >>> dataset = data.from_arrays(x, y, client=["a"] * 4 + ["b"] * 4)
      >>> dataset.input_shape, dataset.num_classes, dataset.class_names
      ((3,), 2, ('no', 'yes'))
      >>> parts = data.partition.natural(dataset.train_client, dataset.test_client)
      >>> [len(rows) for rows in parts.train], [len(rows) for rows in parts.test]
      ([3, 3], [1, 1])
    """
    _check_test_set(test_x, test_y, test_client, test_fraction)
    x = _inputs(x, "x", normalize=normalize)
    labels = _names(y, "y", len(x), "label")
    classes = _classes(labels, num_classes)
    clients = () if client is None else _names(client, "client", len(x), "client")
    owners = np.unique(clients)
    train = (x, _numbers(labels, classes), _numbers(clients, owners))
    if test_x is None:
        train, test = _divide(train, TEST_FRACTION if test_fraction is None else test_fraction, owners, seed)
    else:
        train, test = _with_test_set(train, (test_x, test_y, test_client), classes, owners, normalize=normalize)
    (train_x, train_y, train_client), (test_x, test_y, test_client) = train, test
    mean = std = None
    if normalize:
        train_x, test_x, mean, std = normalized(train_x, test_x)
    dataset = Dataset(
        name=name,
        source=source,
        origin=origin,
        is_real=True,
        train_x=train_x,
        train_y=train_y,
        test_x=test_x,
        test_y=test_y,
        num_classes=len(classes),
        mean=mean,
        std=std,
        keep_split=True,
        class_names=() if _are_numbers(classes) else tuple(map(str, classes)),
    )
    if client is None:
        return dataset
    natural(train_client, test_client, names=owners)
    return dataset._replace(train_client=train_client, test_client=test_client, client_names=tuple(map(str, owners)))


def _check_test_set(test_x: Any, test_y: Any, test_client: Any, test_fraction: float | None) -> None:
    """Raise InvalidInput for arguments of `from_arrays` that do not go together."""
    if (test_x is None) != (test_y is None):
        raise InvalidTestRows("test inputs and test labels are given together")
    if test_x is not None and test_fraction is not None:
        raise InvalidInput("a test fraction and a test set cannot both be given")
    if test_x is None and test_client is not None:
        raise InvalidInput("clients of test rows are given without test rows")


def natural(client_of_train_row: Any, client_of_test_row: Any, *, names: Any = None) -> Partition:
    """Natural clients: the rows that name the same client are that client's.

    Args:
      client_of_train_row: integers or strings [P_train]; clients are numbered in sorted order.
      client_of_test_row: likewise [P_test].
      names: for errors, what the clients 0, 1, ... are called.

    Returns:
      The partition: disjoint and complete.

    Raises:
      InvalidInput: a client without training or test rows.

    Example:
      >>> from pfl_jax.data import partition
      >>> parts = partition.natural(["x", "y", "x"], ["y", "x"])
      >>> [rows.tolist() for rows in parts.train], [rows.tolist() for rows in parts.test]
      ([[0, 2], [1]], [[4], [3]])
    """
    train, test = np.asarray(client_of_train_row), np.asarray(client_of_test_row)
    owners, numbers = np.unique(np.concatenate([train, test]), return_inverse=True)
    parts = []
    for what, own, offset in (("training", numbers[: len(train)], 0), ("test", numbers[len(train) :], len(train))):
        counts = np.bincount(own, minlength=len(owners))
        if len(counts) and counts.min() == 0:
            empty = int(counts.argmin())
            kind = InvalidTestRows if what == "test" else InvalidInput
            raise kind(f"client {owners[empty] if names is None else names[empty]} has no {what} rows")
        order = np.argsort(own, kind="stable")
        parts.append([offset + rows for rows in np.split(order, np.cumsum(counts)[:-1])])
    return Partition(*parts, pooled=True)


def _inputs(x: Any, what: str, *, normalize: bool) -> Any:
    """Inputs as float32 or integers of at most 32 bits, checked."""
    x = x if isinstance(x, Rows) else np.asarray(x)
    converted = checks.inputs(x, what, normalize=normalize)
    checks.check_finite(x, what)
    return converted


def _names(values: Any, what: str, size: int, role: str) -> np.ndarray:
    """Labels or clients [P] as int64 or strings, checked."""
    values = np.asarray(values)
    if values.ndim != 1:
        raise InvalidInput(f"{what} has shape {list(values.shape)}: give one {role} for each row, [P]")
    if len(values) != size:
        raise InvalidInput(f"{what} has {len(values)} {role}s for {size} rows")
    if values.dtype.kind == "O" and all(isinstance(value, str) for value in values):
        values = values.astype(str)
    if values.dtype.kind == "f":
        missing = np.flatnonzero(~np.isfinite(values))
        if len(missing):
            raise InvalidInput(f"{what} has {values[missing[0]]} in row {missing[0]}: every row needs a {role}")
        fractions = np.flatnonzero(values != np.round(values))
        if len(fractions):
            raise InvalidInput(
                f"{what} has {values[fractions[0]]:g} in row {fractions[0]}: a {role} is an integer or a string"
            )
    if values.dtype.kind in "biuf":
        large = np.flatnonzero((np.abs(values.astype(float)) >= 2.0**63) & (values.dtype.kind in "uf"))
        if len(large):
            raise InvalidInput(f"{what} has {values[large[0]]} in row {large[0]}: give so large numbers as strings")
        return values.astype(np.int64)
    if values.dtype.kind not in "US":
        raise InvalidInput(f"{what} holds {checks.kind(values)}: a {role} is an integer or a string")
    values = np.char.decode(values, "utf-8", "replace") if values.dtype.kind == "S" else values
    empty = np.flatnonzero(values == "")
    if len(empty):
        raise InvalidInput(f"{what} is empty in row {empty[0]}: every row needs a {role}")
    return values


def _classes(labels: np.ndarray, num_classes: int | None) -> np.ndarray:
    """Sorted labels [K] of all classes."""
    found = np.unique(labels)
    if len(found) < 2:
        raise InvalidInput(f"y has one class only, {found[0]}: there is nothing to tell apart")
    if num_classes is not None:
        are_integers = found.dtype.kind == "i"
        if (found[0] < 0 or found[-1] >= num_classes) if are_integers else len(found) != num_classes:
            raise InvalidInput(
                f"y has {len(found)} different labels, {found[0]} to {found[-1]}; {num_classes} classes are the "
                f"integers 0 to {num_classes - 1}, or so many strings"
            )
        return np.arange(num_classes) if are_integers else found
    if 2 * len(found) > len(labels):
        raise InvalidInput(
            f"y has {len(found)} different labels in {len(labels)} rows: these are no classes; name another column"
        )
    return found


def _numbers(values: Any, known: np.ndarray) -> np.ndarray:
    """Positions int32 [P] of values in the sorted names of all."""
    return np.searchsorted(known, values).astype(np.int32) if len(known) else np.zeros(0, np.int32)


def _are_numbers(classes: np.ndarray) -> bool:
    return classes.dtype.kind == "i" and np.array_equal(classes, np.arange(len(classes)))


Part = tuple[Any, np.ndarray, np.ndarray]
"""Inputs, classes and clients of rows; clients of length 0 where there are none."""


@contextlib.contextmanager
def _reading_test_rows() -> Iterator[None]:
    """Context whose errors are about test rows."""
    try:
        yield
    except InvalidInput as error:
        raise InvalidTestRows(str(error)) from None


@_reading_test_rows()
def _with_test_set(
    train: Part, test: tuple[Any, Any, Any], classes: np.ndarray, owners: np.ndarray, *, normalize: bool
) -> list[Part]:
    """Training and test rows of one type, from a test set as given."""
    x, y, own = train
    test_x = _inputs(test[0], "test x", normalize=normalize)
    x, test_x = checks.one_type(x, test_x, ("x", "test x"))
    test_y = _known(test[1], "test y", len(test_x), classes, "label")
    if (test[2] is None) == (len(owners) > 0):
        raise InvalidInput("clients are given for both training and test rows, or for neither")
    none = np.zeros(0, np.int32)
    client = none if test[2] is None else _known(test[2], "test client", len(test_x), owners, "client")
    return [(x, y, own), (test_x, test_y, client)]


def _known(values: Any, what: str, size: int, known: np.ndarray, role: str) -> np.ndarray:
    """Numbers of labels or clients of test rows, all of them known from training."""
    values = _names(values, what, size, role)
    if (values.dtype.kind == "U") != (known.dtype.kind == "U"):
        values, known_as = values.astype(str), known.astype(str)
    else:
        known_as = known
    strange = values[~np.isin(values, known_as)]
    if len(strange):
        raise InvalidInput(f"{what} has the {role} {strange[0]}, which no training row has ({len(strange)} such rows)")
    order = np.argsort(known_as)
    return order[np.searchsorted(known_as, values, sorter=order)].astype(np.int32)


def _divide(rows: Part, fraction: float, owners: np.ndarray, seed: int) -> list[Part]:
    """Training and test rows by a share of each group: of each client, or of each class where there are none."""
    if not 0 < fraction < 1:
        raise InvalidInput(f"the test fraction must be above 0 and below 1, not {fraction:g}")
    x, y, client = rows
    group = client if len(client) else y
    rng = np.random.default_rng(seed)
    is_test = np.zeros(len(x), bool)
    for number in range(group.max() + 1):
        of_group = rng.permutation(np.flatnonzero(group == number))
        size = len(of_group)
        if len(client) and size < 2:
            raise InvalidInput(f"client {owners[number]} has {size} row, and needs a training and a test row")
        is_test[of_group[: min(max(round(fraction * size), 1), size - 1)]] = True
    if not is_test.any():
        raise InvalidInput(f"{len(x)} rows leave none for a test set")
    return [
        (take(x, chosen), y[chosen], client[chosen] if len(client) else client)
        for chosen in (np.flatnonzero(~is_test), np.flatnonzero(is_test))
    ]
