"""Tables of a user: arrays in an .npz file, and .csv files."""

import csv
import io
import os
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pfl_jax.data import checks, rows
from pfl_jax.errors import InvalidInput
from pfl_jax.safe_read import open_file, open_npz

OTHERS = {";": "semicolons", "\t": "tabs", "|": "bars", " ": "spaces"}
"""Separators of columns that are not read, in words."""


class Columns(NamedTuple):
    """What a file holds, unchecked; see `pfl_jax.data.arrays.from_arrays`.

    Attributes:
      x: inputs.
      y: labels.
      client: whose row it is; None where that was not asked.
      test_x: inputs of test rows; None where there are none.
      test_y: their labels.
      test_client: whose rows they are.
      features: names of the columns in x; () where it has none.
    """

    x: np.ndarray
    y: np.ndarray
    client: np.ndarray | None = None
    test_x: np.ndarray | None = None
    test_y: np.ndarray | None = None
    test_client: np.ndarray | None = None
    features: tuple[str, ...] = ()


def npz(path: Path, label: str | None, client: str | None, *, by_rows: bool = False) -> Columns:
    """Arrays of an .npz file: x, the labels, the clients, and the same with test_ before their names.

    Args:
      path: of the file.
      label: name of the labels' array, y by default.
      client: name of the clients' array, if they are asked for.
      by_rows: whether the inputs are `pfl_jax.data.rows.Rows`, which are read later.

    Raises:
      InvalidInput: a damaged file, a missing array, or one that is a pickle.
    """
    label = label or "y"
    wanted = {"x": "x", "y": label} | ({} if client is None else {"client": client})
    wanted |= {f"test_{role}": f"test_{name}" for role, name in wanted.items()}
    try:
        with open_npz(path) as stored:
            if not isinstance(stored, np.lib.npyio.NpzFile):
                raise InvalidInput(f"{path} holds a single array, not an archive: write it with np.savez(x=..., y=...)")
            there: dict[str, Any] = {
                role: rows.of_npz(path, name) if by_rows and role in ("x", "test_x") else stored[name]
                for role, name in wanted.items()
                if name in stored.files
            }
            names = ", ".join(stored.files)
    except ValueError as error:
        if "pickle" not in str(error):
            raise InvalidInput(f"{path} is damaged ({error})") from None
        raise InvalidInput(f"{path} holds objects or a pickle, which are never read: save plain arrays") from None
    except (OSError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise InvalidInput(f"{path} is damaged, or no .npz file ({error})") from None
    for role in ("x", "y", "client"):
        if role in wanted and role not in there:
            raise InvalidInput(f"{path} has no array {wanted[role]} (there are {names})")
    return Columns(**there)


def csv_file(path: Path, label: str | None, client: str | None) -> Columns:
    """Columns of a .csv file with a header: labels, clients, and all others as features.

    Args:
      path: of the file.
      label: name of the labels' column, label by default.
      client: name of the clients' column, if they are asked for.

    Raises:
      InvalidInput: no header, rows of unequal length, a missing column, or one that is not numeric.
    """
    header, lines = _rows(path)
    label = label or "label"
    for name in filter(None, (label, client)):
        if name not in header:
            raise InvalidInput(f"{path} has no column {name} (there are {', '.join(header)})")
    if label == client:
        raise InvalidInput(f"{path}: the column {label} cannot be both label and client")
    columns = dict(zip(header, zip(*lines, strict=True), strict=True))
    for name in filter(None, (label, client)):
        if "" in columns[name]:
            raise InvalidInput(
                f"{path}: column {name} is empty in row {columns[name].index('')} (counted from 0): every row needs one"
            )
    last = columns[header[-1]]
    if header[-1] in (label, client) and last.count(last[-1]) == 1 and is_cut(path):
        raise InvalidInput(
            f"{path} ends within its last line, and no other row has its {header[-1]}, '{last[-1]}': the file may be "
            "cut off; end the line if it is whole"
        )
    features = tuple(name for name in header if name not in (label, client))
    if not features:
        raise InvalidInput(f"{path} has no features: all of its columns are label and client")
    x = _numbers(path, {name: np.array(columns[name]) for name in features})
    return Columns(
        x, _integers(columns[label]), None if client is None else _integers(columns[client]), features=features
    )


def is_cut(path: str | Path) -> bool:
    """Whether a text file that is not empty ends without the end of a line; a file that is cut off mostly does."""
    with open_file(path) as file:
        file.seek(-1, os.SEEK_END)
        return file.read() not in (b"\n", b"\r")


def _rows(path: Path) -> tuple[list[str], list[list[str]]]:
    """Header and rows, all of the same length; blank lines are left out."""
    begin, lines = 1, []
    try:
        with io.TextIOWrapper(open_file(path), encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True, skipinitialspace=True)
            for row in reader:
                if (end := reader.line_num) > begin:
                    raise InvalidInput(f"{path}: a quote in line {begin} is closed in line {end}: close it in its own")
                if row:
                    lines.append((begin, [field.strip() for field in row]))
                begin += 1
    except csv.Error as error:
        raise InvalidInput(f"{path}: line {begin} is no CSV ({error}): a quote there may not be closed") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path} cannot be read as CSV ({error})") from None
    if len(lines) < 2:
        raise InvalidInput(f"{path} has no rows: give a header and a row for each example")
    (_, header), *rest = lines
    _check_header(path, header)
    for number, row in rest:
        if len(row) != len(header):
            raise InvalidInput(f"{path} has {len(row)} fields in line {number}, and {len(header)} in its header")
    return header, [row for _, row in rest]


def _check_header(path: Path, header: list[str]) -> None:
    """Raise InvalidInput unless there are several columns, each with a name of its own."""
    if len(header) == 1:
        seen = next((f", separated by {name}" for mark, name in OTHERS.items() if mark in header[0]), "")
        raise InvalidInput(f"{path} has one column, '{header[0]}'{seen}: separate columns by commas, as in 1.5,2,yes")
    check_names(path, header)
    if len(set(header)) < len(header):
        raise InvalidInput(f"{path} has two columns of one name: {', '.join(header)}")


def check_names(source: Path | str, columns: Sequence[str]) -> None:
    """Raise InvalidInput for the first column that nobody named: rows sorted by class are known by their numbers."""
    for number, name in enumerate(columns, start=1):
        if not name or name.startswith(("Unnamed: ", "__index_level_")):
            raise InvalidInput(
                f"{source}: column {name or number} has no name of its own, like the row numbers that pandas writes: "
                "leave it out (df.to_csv(..., index=False)), or name it"
            )


def _numbers(path: Path, columns: dict[str, np.ndarray]) -> np.ndarray:
    """Features [P, F] as int64 if all of them are integers, otherwise float64."""
    wrong = [name for name, values in columns.items() if _converted(values, np.float64) is None]
    if wrong:
        first = next(value for value in columns[wrong[0]] if _converted(np.array([value]), np.float64) is None)
        what = f"columns {', '.join(wrong)} are" if len(wrong) > 1 else f"column {wrong[0]} is"
        found = f"'{first}'" if first else "an empty field"
        raise InvalidInput(f"{path}: {what} not numeric ({found} in {wrong[0]}): leave it out, or write it as numbers")
    whole = [_converted(values, np.int64) for values in columns.values()]
    exact = [values for values in whole if values is not None]
    if len(exact) == len(whole):
        return np.stack(exact, axis=1)
    x = np.stack([values.astype(np.float64) for values in columns.values()], axis=1)
    bad = np.argwhere(~checks.are_finite(x))
    if len(bad):
        row, column = bad[0]
        raise InvalidInput(
            f"{path}: column {list(columns)[column]} has {checks.no_number(x[row, column])} in row {row} (counted from "
            f"0; there are {len(bad)} such values): leave these rows out, or fill them in"
        )
    return x


def _integers(values: tuple[str, ...]) -> np.ndarray:
    """Integers if all of them are, otherwise strings."""
    texts = np.array(values)
    numbers = _converted(texts, np.int64)
    return texts if numbers is None else numbers


def _converted(values: np.ndarray, kind: type) -> np.ndarray | None:
    """Strings as numbers; None if one is not such a number."""
    try:
        return values.astype(kind)
    except (ValueError, OverflowError):
        return None
