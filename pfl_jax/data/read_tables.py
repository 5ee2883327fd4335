"""Tables of a user: arrays in an .npz file, and .csv files."""

import contextlib
import csv
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from pfl_jax.data import rows
from pfl_jax.errors import InvalidInput, one_line
from pfl_jax.safe_read import BAD_NPZ, open_npz


class Columns(NamedTuple):
    """What a file holds, unchecked: arguments of `from_arrays`, and the names of the columns in x, if it has any."""

    x: np.ndarray
    y: np.ndarray
    client: np.ndarray | None = None
    test_x: np.ndarray | None = None
    test_y: np.ndarray | None = None
    test_client: np.ndarray | None = None
    features: tuple[str, ...] = ()

    def arrays(self) -> dict[str, Any]:
        """The arrays as arguments of `from_arrays`."""
        return {name: value for name, value in self._asdict().items() if name != "features"}

    def tested_on(self, other: "Columns") -> "Columns":
        """These columns, with the rows of others as test rows."""
        return self._replace(test_x=other.x, test_y=other.y, test_client=other.client)


Names: TypeAlias = str | Sequence[str]
"""Name of one array or column, or names of several columns side by side."""


def among(
    source: Path | str,
    arrays: dict[str, np.ndarray],
    x: Names | None,
    y: Names,
    client: str | None,
) -> Columns:
    """Inputs, labels and clients among named arrays [P, ...].

    Args:
      source: what holds the arrays, for errors.
      arrays: name -> array.
      x: the inputs; None for the only array of rank 2 or more, or all columns [P], besides labels and clients.
      y: the labels.
      client: the clients; None for none.
    """
    labels, chosen = ([names] if isinstance(names, str) else list(names or ()) for names in (y, x))
    for name in filter(None, (*labels, *chosen, client)):
        if name not in arrays:
            raise InvalidInput(f"{source} has no column {name} (there are {', '.join(arrays)})")
    rest = [name for name in arrays if name not in (*labels, client)]
    chosen = chosen or [name for name in rest if arrays[name].ndim > 1] or rest
    if not chosen:
        raise InvalidInput(f"{source} has no inputs: its only columns are {', '.join(arrays)}")
    _check_names(source, chosen)
    if odd := [name for name in chosen if arrays[name].dtype.kind not in "fiub"]:
        texts = (each for each in enumerate(arrays[odd[0]]) if _numbers(each[1], float).dtype.kind in "US")
        what = next((f"{str(text)!r} in row {row}, counted from 0" for row, text in texts), "rows of different shapes")
        raise InvalidInput(
            f"{source}: {', '.join(odd)} not numeric ({what}): leave such columns or rows out, or write numbers"
        )
    for names in (chosen, labels):
        shapes = {arrays[name].shape for name in names}
        if len(names) > 1 and (len(shapes) > 1 or len(shapes.pop()) > 1):
            raise InvalidInput(f"{source} has several columns of arrays ({', '.join(names)}): leave one")
    features = arrays[chosen[0]]
    if features.ndim == 1:
        features = np.stack([arrays[name] for name in chosen], axis=1)
    targets = arrays[y] if isinstance(y, str) else np.stack([arrays[name] for name in labels], axis=1)
    return Columns(features, targets, None if client is None else arrays[client], features=tuple(chosen))


def npz(path: Path, label: str | None, client: str | None, *, by_rows: bool = False) -> Columns:
    """Arrays of an .npz file: x, the labels (by default y), the clients, and the same with test_ before their names."""
    wanted = {"x": "x", "y": label or "y"} | ({} if client is None else {"client": client})
    both = wanted | {f"test_{role}": f"test_{name}" for role, name in wanted.items()}
    try:
        with open_npz(path) as stored:
            names = stored.files
            there: dict[str, Any] = {
                role: rows.of_npz(path, name) if by_rows and role in ("x", "test_x") else stored[name]
                for role, name in both.items()
                if name in names
            }
    except BAD_NPZ as error:
        raise InvalidInput(
            f"{path} is damaged, no .npz file, or holds a pickle, which is never read ({one_line(error, 80)})"
        ) from None
    if missing := [name for role, name in wanted.items() if role not in there]:
        raise InvalidInput(f"{path} has no array {missing[0]} (there are {', '.join(names)})")
    return Columns(**there)


def csv_file(path: Path, label: str | None, client: str | None) -> Columns:
    """Columns of a .csv file with a header: labels (by default label), clients, and all others as features."""
    header, lines = _rows(path)
    label = label or "label"
    columns = {name: np.array(values) for name, values in zip(header, zip(*lines, strict=True), strict=True)}
    last = columns[header[-1]]
    if header[-1] in (label, client) and np.sum(last == last[-1]) == 1 and is_cut(path):
        raise InvalidInput(
            f"{path} ends within its last line, and no other row has its {header[-1]}, '{last[-1]}': the file may be "
            "cut off; end the line if it is whole"
        )
    arrays = {
        name: _names(texts) if name in (label, client) else _numbers(texts, np.int64, np.float64)
        for name, texts in columns.items()
    }
    return among(path, arrays, None, label, client)


def _names(texts: Any) -> np.ndarray:
    """Labels or clients as integers if all of them are written like these: 07 is another one than 7."""
    numbers = _numbers(texts, np.int64)
    words = np.asarray(texts)
    return numbers if np.array_equal(numbers.astype(str), words) else words


def _numbers(texts: Any, *kinds: type) -> np.ndarray:
    """Texts as numbers of the first of these types that all of them are, or as they are."""
    texts = np.asarray(texts)
    # To Python 1_0 is a ten.
    for kind in () if np.any(np.char.find(texts, "_") >= 0) else kinds:
        with contextlib.suppress(ValueError, OverflowError):
            return texts.astype(kind)
    return texts


def is_cut(path: str | Path) -> bool:
    """Whether a text file that is not empty ends without the end of a line; a file that is cut off mostly does."""
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() not in (b"\n", b"\r")


def _rows(path: Path) -> tuple[list[str], list[list[str]]]:
    """Header and rows, all of the same length; blank lines are left out."""
    begin, lines = 1, []
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
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
    if len(header) == 1:
        raise InvalidInput(f"{path} has one column, {header[0]!r}: separate columns by commas, as in 1.5,2,yes")
    if len(set(header)) < len(header):
        raise InvalidInput(f"{path} has two columns of one name: {', '.join(header)}")
    for number, row in rest:
        if len(row) != len(header):
            raise InvalidInput(f"{path} has {len(row)} fields in line {number}, and {len(header)} in its header")
    return header, [row for _, row in rest]


def _check_names(source: Path | str, columns: Sequence[str]) -> None:
    """Raise InvalidInput for the first column that nobody named: rows sorted by class are known by their numbers."""
    for number, name in enumerate(columns, start=1):
        if not name or name.startswith(("Unnamed: ", "__index_level_")):
            raise InvalidInput(
                f"{source}: column {name or number} has no name of its own, like the row numbers that pandas writes: "
                "leave it out (df.to_csv(..., index=False)), or name it"
            )
