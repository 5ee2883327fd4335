"""Tables of a user: arrays in an .npz file, and .csv files."""

import csv
import os
from pathlib import Path

import numpy as np

from pfl_jax.data import rows
from pfl_jax.data.table import Roles, Table, names_of, sets, table
from pfl_jax.errors import InvalidInput, one_line
from pfl_jax.safe_read import BAD_NPZ, open_npz


def npz(path: Path, roles: Roles, *, by_rows: bool = False) -> tuple[list[Table], list[Table]]:
    """Tables of the training and the test rows of an .npz file: arrays, and the same with test_ before their names.

    Only the arrays that are asked for are read; with `by_rows` the inputs stay in the file.
    """
    inputs = names_of(roles.inputs)
    wanted = [*inputs, *names_of(roles.labels), *filter(None, (roles.client, roles.time)), *names_of(roles.drop)]
    try:
        with open_npz(path) as stored:
            there = stored.files
            of_name = {name: name if name in wanted else name.removeprefix("test_") for name in there}
            named = [
                (name, rows.of_npz(path, name) if by_rows and column in inputs else stored[name])
                for name, column in of_name.items()
                if column in wanted
            ]
    except BAD_NPZ as error:
        raise InvalidInput(
            f"{path} is damaged, no .npz file, or holds a pickle, which is never read ({one_line(error, 80)})"
        ) from None
    if missing := [name for name in wanted if name not in there]:
        raise InvalidInput(f"{path} has no array {missing[0]} (there are {', '.join(there)})")
    return sets(path, named)


def csv_file(path: Path, roles: Roles) -> Table:
    """Table of a .csv file with a header, whose columns are texts."""
    header, lines = _rows(path)
    found = table(path, zip(header, map(np.array, zip(*lines, strict=True)), strict=True), form="texts")
    last = found.columns[header[-1]]
    if header[-1] in (roles.labels, roles.client) and np.sum(last == last[-1]) == 1 and is_cut(path):
        raise InvalidInput(
            f"{path} ends within its last line, and no other row has its {header[-1]}, '{last[-1]}': the file may be "
            "cut off; end the line if it is whole"
        )
    return found


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
    for number, row in rest:
        if len(row) != len(header):
            raise InvalidInput(f"{path} has {len(row)} fields in line {number}, and {len(header)} in its header")
    return header, [row for _, row in rest]
