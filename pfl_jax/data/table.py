"""Tables with named columns, the results of all readers, and the function that joins them by the roles of columns.

Columns are matched by their names, never by their places; the first table gives the order of the inputs.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from pfl_jax.data import columns
from pfl_jax.errors import InvalidInput, shortened

Names: TypeAlias = str | Sequence[str]
"""Name of one column, or names of several columns side by side."""

CLIENT = "client"
"""Name of the column of clients in formats without such a column."""


@dataclass(frozen=True)
class Table:
    """Named columns with equal numbers of rows.

    Attributes:
      source: source of the columns, for errors.
      columns: name -> [P, ...], an array as from `columns.plain`.
      is_test: whether the rows are for testing.
    """

    source: str
    columns: Mapping[str, Any]
    is_test: bool = False

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()))) if self.columns else 0

    def with_column(self, name: str, value: Any) -> "Table":
        """The table with a column that has the same value in all rows."""
        return replace(self, columns={**self.columns, name: np.full(len(self), value)})


def table(source: object, named: Iterable[tuple[Any, Any]], *, is_test: bool = False) -> Table:
    """Table of names and columns of any type; InvalidInput for two columns with one name, or of different lengths."""
    source = f"the test set of {source}" if is_test else str(source)
    pairs = [(str(name), columns.plain(values, f"{name} of {source}")) for name, values in named]
    found = dict(pairs)
    if len(found) < len(pairs):
        raise InvalidInput(f"{source} has two columns of one name: {_listed(name for name, _ in pairs)}")
    for name, column in pairs:
        if column.ndim == 0:
            raise InvalidInput(f"{source} has a single value in {name}: give one for each row")
        if len(column) != len(pairs[0][1]):
            raise InvalidInput(f"{source} has {len(pairs[0][1])} rows in {pairs[0][0]}, and {len(column)} in {name}")
    return Table(source, found, is_test)


def named_columns(source: object, rows: Any) -> Iterator[tuple[str, Any]]:
    """Names and columns of a mapping or a data frame; InvalidInput for anything else."""
    if not isinstance(rows, Mapping) and not hasattr(rows, "columns"):
        raise InvalidInput(f"{source} is a {type(rows).__name__}: give a dict of columns by name, or a data frame")
    frame: Any = rows
    for place, name in enumerate(getattr(rows, "columns", rows)):
        # By place: if two columns have the same name, a data frame gives both by name.
        yield str(name), frame.iloc[:, place] if hasattr(rows, "iloc") else frame[name]


def sets(source: object, named: Iterable[tuple[Any, Any]]) -> list[Table]:
    """Tables of the training rows and of the test rows; a test column has test_ before the name of another column."""
    pairs = [(str(name), values) for name, values in named]
    tests = {f"test_{name}" for name, _ in pairs} & {name for name, _ in pairs}
    train = table(source, (pair for pair in pairs if pair[0] not in tests))
    test = ((name.removeprefix("test_"), values) for name, values in pairs if name in tests)
    return [train, table(source, test, is_test=True)] if tests else [train]


class Roles(NamedTuple):
    """Roles of the columns.

    Attributes:
      inputs: the inputs; None for the only array of rank 2 or more or, if there is none, all other columns.
      labels: the labels, one column or several side by side.
      client, time: columns with the client and the time of each row, or None.
      drop: columns that are left out.
    """

    inputs: Names | None = None
    labels: Names = "y"
    client: str | None = None
    time: str | None = None
    drop: Names = ()


class Columns(NamedTuple):
    """Joined columns of all rows; the first `num_train` rows are for training, the others for testing."""

    source: str
    inputs: dict[str, Any]
    labels: np.ndarray
    client: np.ndarray | None
    time: np.ndarray | None
    num_train: int

    def take(self, rows: np.ndarray) -> "Columns":
        """The columns of these rows [B], given by sorted numbers."""
        client, time = (None if column is None else column[rows] for column in (self.client, self.time))
        inputs = {name: column[rows] for name, column in self.inputs.items()}
        num_train = int(np.searchsorted(rows, self.num_train))
        return Columns(self.source, inputs, self.labels[rows], client, time, num_train)


def join(tables: Sequence[Table], roles: Roles) -> Columns:
    """Columns of tables in any order, joined by name; at least one has training rows.

    InvalidInput for a column that is missing or has no name, tables with other columns or shapes, words beside numbers,
    rows without a time, or no inputs.
    """
    tables = sorted(tables, key=lambda one: one.is_test)
    first = tables[0]
    labels, dropped = names_of(roles.labels), names_of(roles.drop)
    special = [name for name in (*labels, roles.client, roles.time) if name is not None]
    for name in (*special, *names_of(roles.inputs), *dropped):
        if name not in first.columns:
            raise InvalidInput(f"{first.source} has no column {name} (there are {_listed(first.columns)})")
    named = [*special, *dropped, *(name for name in names_of(roles.inputs) if name in labels)]
    if twice := [name for name in special if named.count(name) > 1]:
        raise InvalidInput(f"{first.source}: column {twice[0]} is named for two things: give another name for one")
    chosen = [name for name in names_of(roles.inputs) or _inputs(first, {*special, *dropped}) if name not in dropped]
    if not chosen:
        raise InvalidInput(f"{first.source} has no inputs: its only columns are {_listed(first.columns)}")
    wanted = {*special, *chosen} if roles.inputs is not None else first.columns.keys() - set(dropped)
    for other in tables[1:]:
        # Dropped columns may be missing in a test set.
        there = other.columns.keys() - set(dropped)
        if not wanted <= there or (roles.inputs is None and wanted != there):
            lacking = [name for name in first.columns if name in wanted - there]
            more = [name for name in other.columns if name in there - wanted and roles.inputs is None]
            gaps = [f"{word} {_listed(names)}" for word, names in (("lacks", lacking), ("also has", more)) if names]
            raise InvalidInput(
                f"{other.source} {' and '.join(gaps)}, unlike {first.source}: name the columns alike, or say which are "
                "the inputs"
            )
    _check_names(first, chosen)
    for names in (labels, chosen):
        if len(names) > 1 and any(first.columns[name].ndim > 1 for name in names):
            raise InvalidInput(f"{first.source} has several columns of arrays ({_listed(names)}): leave one")
    found = {name: _joined(tables, name) for name in (*special, *chosen)}
    return Columns(
        source=first.source,
        inputs={name: found[name] for name in chosen},
        labels=found[labels[0]] if len(labels) == 1 else np.stack([found[name] for name in labels], axis=1),
        client=None if roles.client is None else found[roles.client],
        time=None if roles.time is None else _times(first.source, roles.time, found[roles.time]),
        num_train=sum(len(one) for one in tables if not one.is_test),
    )


def names_of(names: Names | None) -> list[str]:
    """Names as a list."""
    return [names] if isinstance(names, str) else list(names or ())


def _listed(names: Iterable[str]) -> str:
    return shortened(", ".join(names), 300)


def _inputs(first: Table, others: set[str]) -> list[str]:
    """Default inputs: arrays of rank 2 or more, and without such arrays all columns."""
    rest = [name for name in first.columns if name not in others]
    return [name for name in rest if first.columns[name].ndim > 1] or rest


def _check_names(first: Table, chosen: Sequence[str]) -> None:
    """Raise InvalidInput for the first column without a name: row numbers give away the classes of sorted rows."""
    for number, name in enumerate(chosen, start=1):
        if not name or name.startswith(("Unnamed: ", "__index_level_")):
            raise InvalidInput(
                f"{first.source}: column {name or number} has no name of its own, like the row numbers that pandas "
                "writes: leave it out (df.to_csv(..., index=False)), or name it"
            )


def _joined(tables: Sequence[Table], name: str) -> Any:
    """A column of all rows; InvalidInput if tables have different kinds of values in it."""
    parts = [(one.source, one.columns[name]) for one in tables if len(one)] or [("", tables[0].columns[name])]
    return np.concatenate(columns.alike(name, parts)) if len(parts) > 1 else parts[0][1]


def _times(source: str, name: str, times: np.ndarray) -> np.ndarray:
    """Times [P] of all rows, numbers or dates, which can be sorted."""
    times = columns.dated(times) if columns.kind(times) == "words" else times
    if times.dtype.kind == "O" and columns.mixes_zones(times):
        raise InvalidInput(f"{source}: {name} has times with and without a time zone: give all of them one, or none")
    is_odd = times.ndim > 1 or columns.kind(times) not in ("numbers", "dates")
    if is_odd or columns.missing(times).any():
        row = 0 if is_odd else int(columns.missing(times).argmax())
        raise InvalidInput(
            f"{source}: {name} is not a column of times (there is {columns.sample(times, row)} in row {row}): write "
            "numbers, or dates as in 2020-01-31 or 2020-01-31T12:00"
        )
    return times


def odd_value(column: np.ndarray) -> tuple[int, str]:
    """Row of the first value that is not a number, and that value."""
    if column.ndim > 1:
        return 0, f"{column.dtype} {list(column.shape[1:])}"
    if isinstance(column[0], list | tuple | np.ndarray):
        return 0, "rows of different shapes"
    there = [(row, value) for row, value in enumerate(column) if value is not None]
    texts = (row for row, value in there if columns.of_texts(np.array([str(value)])).dtype.kind not in "if")
    row = next(texts, there[0][0] if there else 0)
    return row, columns.sample(column, row)


def check_numbers(source: str, inputs: Mapping[str, Any], *, impute: bool, encode: bool) -> None:
    """Raise InvalidInput that names every input column with words or dates, or with a missing value.

    Missing values are allowed if they are filled in (`impute`), and words if they become numbers (`encode`).
    """
    odd = []
    for name, column in inputs.items():
        kind = columns.kind(column)
        if kind == "numbers" and column.ndim > 1:
            # `checks.inputs` gives the place of a NaN in a row.
            continue
        if kind != "numbers" and not (kind == "words" and encode):
            row, found = odd_value(column)
        elif columns.missing(column).any() and not impute:
            row, found = int(columns.missing(column).argmax()), "nothing"
        else:
            continue
        odd.append(f"{name} ({found} in row {row})")
    if odd:
        raise InvalidInput(
            f"{source}: not numeric (rows are counted from 0): {', '.join(odd)}. Leave columns out (--drop), "
            "encode words (--encode), fill in missing values (--impute), or write numbers"
        )
