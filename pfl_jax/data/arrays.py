"""Data sets from a user's own arrays, from each client's rows, and from any tables: labels and clients as numbers."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pfl_jax.data import checks, preparation, readers
from pfl_jax.data.allocation import by_client
from pfl_jax.data.preparation import Encode, Impute
from pfl_jax.data.sources import Dataset
from pfl_jax.data.table import Columns, Names, Roles, Table, check_numbers, join, named_columns, sets
from pfl_jax.errors import InvalidInput, shortened
from pfl_jax.validation import Count, check_value


def from_arrays(
    x: Any,
    y: Any,
    *,
    test_x: Any = None,
    test_y: Any = None,
    test_fraction: float | None = None,
    client: Any = None,
    test_client: Any = None,
    time: Any = None,
    impute: Impute | None = None,
    min_rows: int | None = None,
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
        order. Floats [P] are values to predict, as float32, and K is 0. But floats that are whole numbers, with at most
        half as many different values as rows, are classes, with a warning. Numbers [P, ...] are targets that stay
        unchanged, as float32 or int32, and K is 0.
      test_x: test inputs [P_test, ...]; without them a share of the rows is the test set.
      test_y: test labels [P_test], which must all occur in y; or targets [P_test, ...].
      test_fraction: share of test rows, 0.25 by default: of each client if clients are given, otherwise of each class,
        or of all rows without classes. They are drawn by `seed`; each client keeps at least one training and one test
        row. Cannot be given with a test set.
      client: [P], integers or strings: the client of each row, for `pfl_jax.data.partition.natural`.
      test_client: [P_test], likewise; required with a test set if clients are given.
      time: [P], numbers or dates: instead of a draw, the test rows are the latest ones of each client, or of all. A
        training row is older than all test rows of its client; partitions other than `natural` mix such clients.
      impute: replacement of NaN in x, for each feature from the training rows: its "mean", "median" or "most_frequent"
        value; for words always the most frequent one. None refuses missing values.
      min_rows: clients with fewer rows, or without training or test rows, are left out, with a warning.
      normalize: before rounding, subtract the mean of the training rows and divide by their deviation, of each feature
        or channel of images; constant features become 0. uint8 images stay uint8, with mean and std of pixels / 255.
      num_classes: K, if labels are integers (or whole floats) from 0 to K - 1 and some classes may be missing; by
        default the number of different labels. 0 for targets that are not classes although they are whole numbers.
      name: name of the data set.
      source: kind of the data.
      origin: where the data came from.
      seed: seed of the division into training and test rows.

    Returns:
      The dataset: `class_names` are the labels unless these are 0 to K - 1, `client_names` the clients.

    Raises:
      InvalidInput: arrays of unequal length or of a wrong type or shape, NaN or infinite numbers, missing labels, one
        class only, labels that are not classes, test labels or clients unknown in training, a client without training
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
    named = {"x": x, "test_x": test_x, "y": y, "test_y": test_y, "client": client, "test_client": test_client}
    given = [(name, values) for name, values in {**named, "time": time}.items() if values is not None]
    roles = Roles("x", "y", None if client is None else "client", None if time is None else "time")
    return from_tables(
        *(sets("the data", given), roles, name, source, origin),
        test_fraction=test_fraction,
        impute=impute,
        min_rows=min_rows,
        normalize=normalize,
        num_classes=num_classes,
        seed=seed,
    )


def from_clients(
    given: Any,
    *,
    x: Names | None = None,
    y: Names = "y",
    client: str = "client",
    drop: Names = (),
    time: str | None = None,
    **options: Any,
) -> Dataset:
    """Data set of clients, each with its own rows.

    Args:
      given: a mapping from clients to their rows, a list of the clients' rows, a partitioner of Flower (anything with
        `load_partition` and `num_partitions`), or a table with a column of clients: a pandas DataFrame, or a Hugging
        Face dataset, whose split "test" has the test rows. The rows of a client are a
        tuple (x, y), a dict of arrays (by default x and y; test_x and test_y are its test rows), or a table. Columns of
        clients are matched by their names; the first client's columns give the order.
      x: name or names of the inputs. By default the only array of rank 2 or more that is not y; without such an array,
        all columns but y and client, side by side.
      y: name of the labels or targets, or names of columns that are [P, L] targets side by side.
      client: in a table of all clients, name of the column with the client of each row.
      drop, time: columns that are left out, and the column of times; see `pfl_jax.data.own_files.from_file`.
      **options: `encode` of `from_file`; `test_fraction`, `impute`, `min_rows`, `normalize`, `num_classes`, `name`,
        `source`, `origin` and `seed` of `from_arrays`.

    Returns:
      The dataset. Clients have the order of the mapping or list; clients of a table are sorted.

    Raises:
      InvalidInput: another type, no clients, a missing column, a client without training or test rows, clients with
        different columns or shapes, or anything that `from_arrays` refuses.

    Example:
      >>> import numpy as np
      >>> from pfl_jax import data
      >>> rows = {"ward": (np.ones((6, 3)), [0, 1] * 3), "clinic": (np.zeros((4, 3)), [0, 1] * 2)}
      >>> dataset = data.from_clients(rows)
      >>> dataset.client_names, np.bincount(dataset.train_client).tolist()
      (('ward', 'clinic'), [4, 3])
      >>> federation = data.federate(rows)  # the same, at once
      >>> federation.train_count.tolist()
      [4, 3]
    """
    roles = Roles(x, y, client, time, drop)
    if _is_table(given):
        return from_tables(_tables("the table", given, roles), roles, **options)
    if hasattr(given, "load_partition") and hasattr(given, "num_partitions"):
        given = [given.load_partition(number) for number in range(given.num_partitions)]
    if isinstance(given, str) or not isinstance(given, Mapping | Sequence):
        raise InvalidInput(f"clients are a mapping, a list, a table or a partitioner, not a {type(given).__name__}")
    clients = given if isinstance(given, Mapping) else dict(enumerate(given))
    if not clients:
        raise InvalidInput("there are no clients")
    if len(set(names := tuple(map(str, clients)))) < len(clients):
        raise InvalidInput(f"two clients have one name, as text: {', '.join(names)}")
    # Numbered clients keep their order.
    tables = [
        one.with_column(client, number)
        for number, (name, rows) in enumerate(clients.items())
        for one in _tables(f"client {name}", rows, roles)
    ]
    return from_tables(tables, roles, client_names=names, **options)


def _is_table(given: Any) -> bool:
    """Whether an object has named columns: a DataFrame, or a Hugging Face dataset or its splits."""
    return hasattr(given, "columns") or hasattr(given, "with_format")


def _tables(source: str, rows: Any, roles: Roles) -> list[Table]:
    """Tables of the rows of one client, or of all clients."""
    if hasattr(rows, "with_format"):
        return readers.tables(source, dict(rows) if isinstance(rows, Mapping) else {"train": rows}, roles)
    if isinstance(rows, tuple) and len(rows) == 2:
        rows = {"x": rows[0], "y": rows[1]}
    if not isinstance(rows, Mapping) and not _is_table(rows):
        kinds = "(x, y), a dict of arrays, or a table of pandas or Hugging Face"
        raise InvalidInput(f"{source} is a {type(rows).__name__}: give {kinds}")
    found = sets(source, named_columns(source, rows))
    if empty := [one.source for one in found if not len(one)]:
        raise InvalidInput(f"{empty[0]} has no rows")
    return found


def from_tables(
    tables: Sequence[Table],
    roles: Roles,
    name: str = "arrays",
    source: str = "arrays",
    origin: str = "",
    *,
    test_fraction: float | None = None,
    impute: Impute | None = None,
    encode: Encode | None = None,
    min_rows: int | None = None,
    normalize: bool = False,
    num_classes: int | None = None,
    client_names: Sequence[str] | None = None,
    seed: int = 0,
) -> Dataset:
    """Data set of tables; every reader ends here. Errors number the test rows after the training rows.

    Args:
      tables: tables of the rows, at least one with training rows; if none is for testing, a share of the rows is.
      roles: roles of the columns.
      encode: conversion of words in the inputs; None refuses words.
      name, source, origin, test_fraction, impute, min_rows, normalize, num_classes, seed: see `from_arrays`.
      client_names: names of the clients 0 to N - 1 if the column of clients has numbers; None if it has names.
    """
    check_value("impute", impute, Impute | None)
    check_value("encode", encode, Encode | None)
    has_test = any(one.is_test for one in tables)
    if has_test and (test_fraction is not None or roles.time is not None):
        raise InvalidInput(f"a {'time' if roles.time else 'test fraction'} and a test set cannot both be given")
    joined = join(tables, roles)
    if min_rows is not None:
        joined = _of_large_clients(joined, min_rows, has_test=has_test)
    check_numbers(joined.source, joined.inputs, impute=impute is not None, encode=encode is not None)
    y, classes = _targets(joined, num_classes)
    client, owners = _clients(joined, client_names)
    rows: Sequence[Any] = (slice(0, joined.num_train), slice(joined.num_train, None))
    if has_test and client is not None:
        by_client(client[rows[0]], client[rows[1]], owners)
    elif not has_test:
        group = y if client is None and len(classes) and joined.time is None else client
        rows = _divided(group, joined.time, len(y), 0.25 if test_fraction is None else test_fraction, owners, seed)
    prepared, x = preparation.fit(joined.inputs, rows[0], impute, encode, normalize=normalize)
    train_rows, test_rows = rows
    arrays: dict[str, Any] = {"train_x": x[train_rows], "train_y": y[train_rows]}
    arrays |= {"test_x": x[test_rows], "test_y": y[test_rows], "test_rows": np.arange(len(y))[test_rows]}
    made = Dataset(name, source, origin, True, **arrays, num_classes=len(classes), keep_split=True)
    if normalize:
        made, prepared = preparation.normalized(made, prepared)
    if client is not None:
        made = made._replace(train_client=client[train_rows], test_client=client[test_rows])
    return made._replace(
        class_names=() if np.array_equal(classes, np.arange(len(classes))) else tuple(map(str, classes)),
        client_names=tuple(map(str, owners)),
        preparation=prepared,
    )


def _targets(joined: Columns, num_classes: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Labels as numbers, or other targets, and the classes [K] of the training rows, empty for other targets."""
    y = checks.column(joined.labels)
    if not (num_classes or (num_classes is None and _are_classes(y[: joined.num_train]))):
        return checks.values(y, "y"), np.zeros(0, np.int64)
    y = checks.names(y, "y", "label")
    if num_classes is not None:
        y = checks.labels(y, num_classes, "y")
    classes = np.unique(y[: joined.num_train])
    if len(classes) < 2:
        raise InvalidInput(f"y has one class only, {classes[0]}: there is nothing to tell apart")
    if num_classes is not None:
        return y, np.arange(num_classes)
    if 2 * len(classes) > joined.num_train:
        raise InvalidInput(
            f"y has {len(classes)} different labels in {joined.num_train} rows: these are not classes; name another "
            "column"
        )
    return _numbers(y, classes, "label"), classes


def _are_classes(y: np.ndarray) -> bool:
    """Whether targets are labels of classes: whole numbers or words [P], or floats that must be meant as labels."""
    if y.ndim != 1 or y.dtype.kind != "f":
        return y.ndim == 1
    found = np.unique(y)
    if not np.isfinite(found).all() or (found % 1).any() or 2 * len(found) > len(y):
        return False
    warnings.warn(
        f"y holds whole numbers as floats ({', '.join(f'{value:.1f}' for value in found[:3])}), which are taken as "
        f"{len(found)} classes; num_classes=0 (--task regression) takes them as values",
        stacklevel=2,
    )
    return True


def _clients(joined: Columns, names: Sequence[str] | None) -> tuple[np.ndarray | None, np.ndarray]:
    """Numbers of the rows' clients, and the names [N] of the clients in training; without clients None and empty."""
    if joined.client is None:
        return None, np.zeros(0, np.int64)
    found = checks.names(joined.client, "client", "client")
    owners = np.unique(found[: joined.num_train])
    return _numbers(found, owners, "client"), owners if names is None else np.array(names)[owners]


def _of_large_clients(joined: Columns, min_rows: int, *, has_test: bool) -> Columns:
    """Rows of clients with at least `min_rows`, and with training and test rows; warns about the clients left out."""
    check_value("min_rows", min_rows, Count)
    if joined.client is None:
        raise InvalidInput("min_rows is for data with clients: name their column")
    owners, numbers = np.unique(checks.names(joined.client, "client", "client"), return_inverse=True)
    counts = np.stack([np.bincount(part, minlength=len(owners)) for part in np.split(numbers, [joined.num_train])])
    # One row cannot be both a training and a test row.
    large = (counts.sum(axis=0) >= max(min_rows, 2)) & (not has_test or (counts > 0).all(axis=0))
    if not large.any():
        raise InvalidInput(f"none of {len(owners)} clients has {min_rows} rows (of both kinds, with a test set)")
    if gone := int(np.sum(~large)):
        warnings.warn(
            f"{gone} of {len(owners)} clients have fewer than {max(min_rows, 2)} rows, and are left out", stacklevel=3
        )
    return joined.take(np.flatnonzero(large[numbers]))


def _numbers(values: np.ndarray, known: np.ndarray, role: str) -> np.ndarray:
    """Positions int32 [P] of labels or clients among the known ones, which are sorted; InvalidInput for others."""
    found = np.searchsorted(known, values).clip(max=len(known) - 1)
    strange = values[known[found] != values]
    if len(strange):
        some = shortened(", ".join(np.unique(strange).astype(str)))
        raise InvalidInput(f"{len(strange)} test rows have a {role} that no training row has: {some}")
    return found.astype(np.int32)


def _divided(
    group: np.ndarray | None, time: np.ndarray | None, size: int, fraction: float, owners: np.ndarray, seed: int
) -> list[np.ndarray]:
    """Numbers of the training rows, and of the test rows: a draw from each group, or its latest rows by time.

    Groups [P] are clients, with names `owners`, or classes; None for all rows together.
    """
    if not 0 < fraction < 1:
        raise InvalidInput(f"the test fraction must be above 0 and below 1, not {fraction:g}")
    group = np.zeros(size, np.int64) if group is None else group
    sizes = np.bincount(group)
    if len(owners) and (few := np.flatnonzero(sizes < 2)).size:
        raise InvalidInput(
            f"client {owners[few[0]]} has 1 row, and needs a training and a test row ({len(few)} of {len(owners)} "
            "clients): leave such clients out with min_rows=2 (--min-rows 2)"
        )
    rng, is_test = np.random.default_rng(seed), np.zeros(size, bool)
    for number, rows in enumerate(np.split(np.argsort(group, kind="stable"), np.cumsum(sizes)[:-1])):
        count = min(max(round(fraction * len(rows)), 1), len(rows) - 1)
        if time is None or not count:
            is_test[rng.permutation(rows)[:count]] = True
            continue
        # Rows of the same time are on one side: the test set, unless no training row would be left.
        times = time[rows]
        first = np.sort(times)[len(rows) - count]
        later = times >= first if (times < first).any() else times > first
        if not later.any():
            whose = f"client {owners[number]} has" if len(owners) else "there are"
            raise InvalidInput(f"{whose} rows of one time only, {first}: nothing is later than the training rows")
        is_test[rows[later]] = True
    if not is_test.any():
        raise InvalidInput(f"{size} rows leave none for a test set")
    return [np.flatnonzero(~is_test), np.flatnonzero(is_test)]
