"""Data sets from common forms: each client's arrays, or a table with a column of clients."""

from collections.abc import Mapping, Sequence
from typing import Any

from pfl_jax.data import readers
from pfl_jax.data.arrays import from_tables
from pfl_jax.data.sources import Dataset
from pfl_jax.data.table import Names, Roles, Table, named_columns, sets
from pfl_jax.errors import InvalidInput


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
        different columns or shapes, some clients with whole numbers as labels and others with fractions (unless
        `num_classes` decides), or anything that `from_arrays` refuses.

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
