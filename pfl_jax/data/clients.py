"""Data sets from what people have: each client's arrays, or a table with a column of clients."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pfl_jax.data import checks, pictures, read_folders
from pfl_jax.data.arrays import from_arrays
from pfl_jax.data.read_tables import Names, among
from pfl_jax.data.sources import Dataset
from pfl_jax.errors import InvalidInput


def from_clients(
    given: Any,
    *,
    x: Names | None = None,
    y: Names = "y",
    client: str = "client",
    **options: Any,
) -> Dataset:
    """Data set of clients, who keep their own rows.

    Args:
      given: a mapping from clients to their rows, a list of the clients' rows, or a table with a column of clients: a
        pandas DataFrame, or a Hugging Face dataset, whose split "test" has the test rows. The rows of a client are a
        tuple (x, y), a dict of arrays (by default x and y; test_x and test_y are its test rows), or a table.
      x: name or names of the inputs; by default the only array of rank 2 or more that is not y, and where there is none
        all columns but y and client, side by side.
      y: name of the labels or targets, or names of columns that are [P, L] targets side by side.
      client: in a table of all clients, name of the column that says whose row it is.
      **options: `test_fraction`, `normalize`, `num_classes`, `name`, `source`, `origin` and `seed` of `from_arrays`.

    Returns:
      The dataset. Clients have the order of the mapping or list; those of a table are sorted.

    Raises:
      InvalidInput: another type, no clients, a missing column, a client without training or test rows, clients of
        different shapes, or some with labels and others with floats, which are targets (unless `num_classes` says what
        they are), or anything that `from_arrays` refuses.

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
    if _is_table(given):
        return from_arrays(**_arrays("the table", given, x, y, client), **options)
    if isinstance(given, str) or not isinstance(given, Mapping | Sequence):
        raise InvalidInput(f"clients are a mapping, a list or a table, not a {type(given).__name__}")
    tables = given if isinstance(given, Mapping) else dict(enumerate(given))
    if not tables:
        raise InvalidInput("there are no clients")
    parts = {name: _arrays(f"client {name}", rows, x, y, None) for name, rows in tables.items()}
    first = next(iter(parts))
    for number, (name, part) in enumerate(parts.items()):
        _check(f"client {name}", part, f"client {first}", parts[first])
        # Joined, labels beside floats would be floats, and labels beside words would be words.
        usual, kind = (_kind(rows["y"], options.get("num_classes")) for rows in (parts[first], part))
        if kind != usual:
            raise InvalidInput(f"client {name} has {kind} in y, and client {first} {usual}: give all the same")
        for split in ("", "test_"):
            if part[f"{split}x"] is not None:
                part[f"{split}client"] = np.full(len(part[f"{split}x"]), number)
    columns = {field: [part[field] for part in parts.values()] for field in parts[first]}
    joined = {
        field: None if arrays[0] is None else np.concatenate(pictures.alike(arrays))
        for field, arrays in columns.items()
    }
    return from_arrays(**joined, **options)._replace(client_names=tuple(map(str, parts)))


def _is_table(given: Any) -> bool:
    """Whether something has named columns: a DataFrame, or a Hugging Face dataset or its splits."""
    return hasattr(given, "columns") or hasattr(given, "with_format")


def _arrays(source: str, rows: Any, x: Names | None, y: Names, client: str | None) -> dict[str, Any]:
    """Arguments of `from_arrays` from the rows of one client, or of all."""
    if hasattr(rows, "with_format"):
        splits = dict(rows) if isinstance(rows, Mapping) else {"train": rows}
        found = read_folders.of_splits(source, splits, x, y, client)
    else:
        if isinstance(rows, tuple) and len(rows) == 2:
            rows = {"x": rows[0], "y": rows[1]}
        if not isinstance(rows, Mapping) and not _is_table(rows):
            kinds = "(x, y), a dict of arrays, or a table of pandas or Hugging Face"
            raise InvalidInput(f"{source} is a {type(rows).__name__}: give {kinds}")
        arrays = {
            str(name): pictures.as_array(rows[name], f"{name} of {source}") for name in getattr(rows, "columns", rows)
        }
        test = {name: arrays.pop(f"test_{name}") for name in list(arrays) if f"test_{name}" in arrays}
        found = among(source, arrays, x, y, client)
        if test:
            found = found.tested_on(among(f"the test set of {source}", test, x, y, client))
    return found.arrays()


def _kind(y: np.ndarray, num_classes: int | None) -> str:
    """Type of labels or targets in words; a given number of classes says what any numbers are."""
    if y.dtype.kind not in "biuf":
        return "words"
    return "numbers" if num_classes is not None else "floats" if y.dtype.kind == "f" else "whole numbers"


def _check(name: str, part: dict[str, Any], first_name: str, first: dict[str, Any]) -> None:
    """Raise InvalidInput for a client whose arrays do not belong together, or not to those of the first client."""
    if (part["test_x"] is None) != (first["test_x"] is None):
        raise InvalidInput(f"{name} or {first_name} has test rows, and the other has none: give all or none")
    has_test = part["test_x"] is not None
    for split, least in (("", 1 if has_test else 2), ("test_", 1))[: 1 + has_test]:
        one_x, one_y, x, y = (rows[f"{split}{role}"] for rows in (part, first) for role in ("x", "y"))
        if len(one_x) != len(one_y):
            raise InvalidInput(f"{name} has {len(one_x)} rows in {split}x, and {len(one_y)} in {split}y")
        if len(one_x) < least:
            raise InvalidInput(f"{name} has {len(one_x)} rows in {split}x, and needs at least {least}")
        checks.one_type(x, one_x, (first_name, name))
        if y.shape[1:] != one_y.shape[1:]:
            raise InvalidInput(f"{split}y has shape {list(one_y.shape)} of {name}, and {list(y.shape)} of {first_name}")
