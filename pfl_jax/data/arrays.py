"""Data sets from a user's own arrays: any inputs, any labels or targets, and clients where rows say whose they are."""

from typing import Any

import numpy as np

from pfl_jax.data import checks
from pfl_jax.data.allocation import by_client
from pfl_jax.data.rows import Rows, blocks, take
from pfl_jax.data.sources import Dataset
from pfl_jax.errors import InvalidInput


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
      y: labels [P] of classes, integers or strings, at least two different ones; they become 0 to K - 1 in sorted
        order. Floats [P] and numbers [P, ...] are targets that are no classes: they stay as they are, as float32 or
        int32, and K is 0.
      test_x: test inputs [P_test, ...]; without them a share of the rows is the test set.
      test_y: test labels [P_test], all of them among those of y; or targets [P_test, ...].
      test_fraction: share of test rows, 0.25 by default: of each client where clients are given, else of each class, or
        of all rows where there are no classes; drawn by `seed`, and at least one row of either kind for a client. Not
        together with a test set.
      client: [P], integers or strings: whose row it is, for `pfl_jax.data.partition.natural`.
      test_client: [P_test], likewise; with a test set and clients.
      normalize: subtract the mean of the training rows and divide by their deviation, for each feature, or for each
        channel of images; what does not vary becomes 0. uint8 images stay uint8, with mean and std of pixels / 255.
      num_classes: K, where labels are integers (or whole floats) from 0 to K - 1 of which some may be missing; by
        default the labels there are. 0 for targets that are no classes although they are integers [P].
      name: of the data set.
      source: what kind of data this is.
      origin: where it came from.
      seed: of the division into training and test rows.

    Returns:
      The dataset: `class_names` are the labels where these are not 0 to K - 1, `client_names` the clients.

    Raises:
      InvalidInput: arrays of unequal length or of a wrong type or shape, NaN or infinite numbers, missing labels, one
        class only, labels that are no classes, test labels or clients unknown in training, a client without training
        or test rows.

    Example:
      >>> import numpy as np
      >>> from pfl_jax import data
      >>> x, y = np.arange(24.0).reshape(8, 3), np.array(["no", "yes"] * 4)
      >>> dataset = data.from_arrays(x, y, client=["a"] * 4 + ["b"] * 4)
      >>> dataset.input_shape, dataset.num_classes, dataset.class_names
      ((3,), 2, ('no', 'yes'))
      >>> data.federate(dataset).train_count.tolist()
      [3, 3]
    """
    if (test_x is None) != (test_y is None) or (test_client is None) != (test_x is None or client is None):
        raise InvalidInput("test rows have inputs, labels and, if training rows have them, clients: give all or none")
    if test_x is not None and test_fraction is not None:
        raise InvalidInput("a test fraction and a test set cannot both be given")
    x, y, client = _checked(x, y, client, "", num_classes)
    classes = _classes(y, num_classes) if checks.are_classes(y) else np.zeros(0, np.int64)
    owners = np.zeros(0, np.int64) if client is None else np.unique(client)
    train = x, _numbers(y, classes, "y", "label"), _numbers(client, owners, "client", "client")
    if test_x is None:
        train, test = _divide(train, 0.25 if test_fraction is None else test_fraction, owners, seed)
    else:
        train, test = _alike(train, _checked(test_x, test_y, test_client, "test ", len(classes)), classes, owners)
    x, test_x, mean, std = _normalized(train[0], test[0]) if normalize else (train[0], test[0], None, None)
    return Dataset(
        name=name,
        source=source,
        origin=origin,
        is_real=True,
        train_x=x,
        train_y=train[1],
        test_x=test_x,
        test_y=test[1],
        num_classes=len(classes),
        mean=mean,
        std=std,
        keep_split=True,
        class_names=() if np.array_equal(classes, np.arange(len(classes))) else tuple(map(str, classes)),
        train_client=train[2],
        test_client=test[2],
        client_names=tuple(map(str, owners)),
    )


Part = tuple[Any, np.ndarray, np.ndarray | None]
"""Inputs, labels or targets, and clients, if there are any, of some rows."""


def _alike(train: Part, test: Part, classes: np.ndarray, owners: np.ndarray) -> tuple[Part, Part]:
    """Training rows, and test rows as they were given, with inputs and labels of one type."""
    test_y, test_client = (
        _numbers(test[1], classes, "test y", "label"),
        _numbers(test[2], owners, "test client", "client"),
    )
    x, test_x = checks.one_type(train[0], test[0], ("x", "test x"))
    y, test_y = checks.one_type(train[1], test_y, ("y", "test y"))
    if train[2] is not None and test_client is not None:
        by_client(train[2], test_client, owners)
    return (x, y, train[2]), (test_x, test_y, test_client)


def _checked(x: Any, y: Any, client: Any, prefix: str, num_classes: int | None) -> Part:
    """Rows as arrays of one length; the `prefix` of their names is for errors."""
    x, y = checks.inputs(x, f"{prefix}x"), checks.targets(y, f"{prefix}y", num_classes)
    client = None if client is None else checks.names(client, f"{prefix}client", "client")
    for name, values in (("y", y), ("client", client)):
        if values is not None and len(values) != len(x):
            raise InvalidInput(f"{prefix}{name} has {len(values)} values for {len(x)} rows")
    return x, y, client


def _classes(labels: np.ndarray, num_classes: int | None) -> np.ndarray:
    """Sorted labels [K] of all classes."""
    found = np.unique(labels)
    if len(found) < 2:
        raise InvalidInput(f"y has one class only, {found[0]}: there is nothing to tell apart")
    if num_classes is not None:
        checks.labels(labels, num_classes, "y")
        return np.arange(num_classes)
    if 2 * len(found) > len(labels):
        raise InvalidInput(
            f"y has {len(found)} different labels in {len(labels)} rows: these are no classes; name another column"
        )
    return found


def _numbers(values: Any, known: np.ndarray, what: str, role: str) -> Any:
    """Positions int32 [P] of labels or clients among the known ones, which are sorted; InvalidInput for others.

    Where none are known, there are no classes or clients, and the values stay as they are.
    """
    if not len(known):
        return values
    if values.dtype.kind != known.dtype.kind:
        # Of two files, one may have integers alone.
        values, known = values.astype(str), known.astype(str)
    order = np.argsort(known)
    found = order[np.searchsorted(known, values, sorter=order).clip(max=len(known) - 1)]
    strange = values[known[found] != values]
    if len(strange):
        raise InvalidInput(f"{what} has the {role} {strange[0]}, which no training row has ({len(strange)} such rows)")
    return found.astype(np.int32)


def _divide(rows: Part, fraction: float, owners: np.ndarray, seed: int) -> list[Part]:
    """Training and test rows, these drawn from each client, or where there are none from each class, or from all."""
    if not 0 < fraction < 1:
        raise InvalidInput(f"the test fraction must be above 0 and below 1, not {fraction:g}")
    x, y, client = rows
    group = client if client is not None else y if checks.are_classes(y) else np.zeros(len(y), np.int64)
    rng = np.random.default_rng(seed)
    is_test = np.zeros(len(y), bool)
    for number in range(group.max() + 1):
        of_group = rng.permutation(np.flatnonzero(group == number))
        size = len(of_group)
        if client is not None and size < 2:
            raise InvalidInput(f"client {owners[number]} has {size} row, and needs a training and a test row")
        is_test[of_group[: min(max(round(fraction * size), 1), size - 1)]] = True
    if not is_test.any():
        raise InvalidInput(f"{len(y)} rows leave none for a test set")
    return [
        (take(x, chosen), y[chosen], None if client is None else client[chosen])
        for chosen in (np.flatnonzero(~is_test), np.flatnonzero(is_test))
    ]


def _normalized(train_x: Any, test_x: Any) -> tuple[Any, Any, tuple[float, ...] | None, tuple[float, ...] | None]:
    """Training and test inputs normalized by the training rows; and mean and deviation of uint8 images, which stay."""
    axes = (0, 1, 2) if train_x.ndim == 4 else (0,)
    size = int(np.prod([train_x.shape[axis] for axis in axes], dtype=np.int64))
    mean = sum(part.sum(axes, np.float64) for _, part in blocks(train_x)) / size
    std = np.sqrt(sum(np.square(part - mean).sum(axes, np.float64) for _, part in blocks(train_x)) / size)
    lowest = np.min([part.min(axes) for _, part in blocks(train_x)], axis=0)
    constant = lowest == np.max([part.max(axes) for _, part in blocks(train_x)], axis=0)
    # Rounding would leave a constant a mean and a deviation that are nearly, and not exactly, its own and 0.
    mean, std = np.where(constant, lowest, mean), np.where(constant, 1.0, std)
    if train_x.dtype == np.uint8 and train_x.ndim == 4:
        std = np.where(constant, 1.0, std / 255)
        return train_x, test_x, tuple((mean / 255).tolist()), tuple(std.tolist())

    def scale(part):
        return ((part - mean) / std).astype(np.float32)

    train, test = (
        part.map(scale, part.shape[1:], np.float32) if isinstance(part, Rows) else scale(part)
        for part in (train_x, test_x)
    )
    return train, test, None, None
