"""Data sets from a user's own files: .npz, .csv, a folder of images by class, Hugging Face's, LEAF's or Flower's.

Nothing is unpickled, and no code that comes with data is run.
"""

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pfl_jax.data import readers
from pfl_jax.data.arrays import from_tables
from pfl_jax.data.sources import Dataset
from pfl_jax.data.table import Names, Roles, Table
from pfl_jax.errors import InvalidInput, one_line
from pfl_jax.safe_read import BAD_NPZ

HUB = "hf:"
"""Prefix of the name of a dataset on the Hugging Face hub."""

FORMATS = (
    "an .npz or .csv file, a folder of images by class, a Hugging Face dataset's folder, hf:NAME of the hub, or the "
    "folder of LEAF's files or of Flower's partitions"
)


def from_file(
    data: str | Path,
    *,
    label: str | None = None,
    client_column: str | None = None,
    inputs: Names | None = None,
    drop: Names = (),
    time: str | None = None,
    test_data: str | Path | None = None,
    **options: Any,
) -> Dataset:
    """Data set of a file or folder, with the digest of the files as its origin.

    - .npz: arrays x [P, ...], y [P], and possibly test_x, test_y.
    - .csv: a header, then one row for each example; all columns but label and client are numbers, unless encoded.
      Inputs are integers if all of them are integers, otherwise float32.
    - Folder of images: a sub-folder for each class, images of one size; uint8 [H, W, 1] or [H, W, 3]. Above the classes
      there may be folders train and test (or val), and with `client_column` a folder for each client.
    - Folder of Hugging Face's `save_to_disk`, or hf:NAME of the hub: the column of images or of equally long lists, or
      all columns as numbers; the split "test", or else the validation split, is the test set.
    - LEAF's files, or their folder, and the folder of Flower's partitions: see `pfl_jax.data.interchange`; the column
      of the clients is client.

    Args:
      data: the file, the folder, or hf:NAME.
      label: array or column of the labels; by default y for .npz and LEAF, otherwise label.
      client_column: array or column with the client of each row; None leaves the clients to a partition. For a folder
        of images: any name, if it has a level of folders for clients.
      inputs: columns of the inputs; None for x in .npz, otherwise as in `from_clients`.
      drop: columns that are left out.
      time: column of numbers or dates, by which the latest rows of each client, or of all, are the test rows.
      test_data: file or folder with the test rows, in the same format; by default the test rows within `data`.
      **options: `encode`, the conversion of words: "one_hot" flags, or "ordinal" numbers; by default words are refused.
        `test_fraction`, `impute`, `min_rows`, `normalize`, `num_classes` and `seed` of `from_arrays`.

    Raises:
      InvalidInput: a missing or damaged file, an unknown format, a missing column, columns that differ, or anything
        else that `from_arrays` refuses.
    """
    roles = Roles(inputs, label or "label", client_column, time, drop)
    try:
        tables, roles, kind = _read(data, label, roles)
        if test_data is not None:
            if any(one.is_test for one in tables):
                raise InvalidInput(f"{data} has test rows of its own: leave out either them or {test_data}")
            tests, *_ = _read(test_data, label, roles)
            if any(one.is_test for one in tests):
                raise InvalidInput(f"{test_data} has training and test rows: give a file with only the test rows")
            tables += [dataclasses.replace(one, is_test=True) for one in tests]
        path = str(data)
        name = path[len(HUB) :] if path.startswith(HUB) else Path(data).expanduser().resolve().stem
        return from_tables(tables, roles, name, kind, digest(data, test_data), **options)
    except InvalidInput as error:
        place = data if test_data is None else f"{data}, tested on {test_data}"
        text = str(error)
        raise InvalidInput(text if text.startswith((str(data), str(test_data))) else f"{place}: {text}") from None


@contextlib.contextmanager
def _reading(data: object) -> Iterator[None]:
    """Context in which any error of a package that reads a file becomes an InvalidInput that names the file."""
    try:
        yield
    except InvalidInput:
        raise
    except (*BAD_NPZ, TypeError, RecursionError) as error:
        if "Object arrays" in str(error):
            raise InvalidInput(
                f"{data} has an array of Python objects, which is never read: save numbers as x.astype(np.float32), "
                "words as x.astype(str)"
            ) from None
        raise InvalidInput(
            f"{data} is damaged, of another format, or holds a pickle, which is never read ({one_line(error, 150)})"
        ) from error


def digest(data: str | Path, test_data: str | Path | None = None) -> str:
    """First 16 hexadecimal digits of the SHA-256 of the contents, whatever the files' names and places.

    Args:
      data, test_data: see `from_file`.
    """
    whole = hashlib.sha256()
    for part in [str(one) for one in (data, test_data) if one is not None]:
        if part.startswith(HUB):
            whole.update(_digest_on_hub(part.removeprefix(HUB)).encode())
            continue
        path = _existing(part)
        with _reading(part):
            files = [path] if path.is_file() else readers.regular_files(path)
            stamps = tuple((str(one), one.stat().st_size, one.stat().st_mtime_ns) for one in files)
            whole.update(_digest_of_files(str(path), stamps).encode())
    return whole.hexdigest()[:16]


@functools.lru_cache(maxsize=64)
def _digest_of_files(path: str, stamps: tuple[tuple[str, int, int], ...]) -> str:
    """SHA-256 of a file, or of a folder's files with their names in it; cached until a file's size or time changes."""
    whole = hashlib.sha256()
    for name, _, _ in stamps:
        if name != path:
            whole.update(f"{Path(name).relative_to(path).as_posix()}\0".encode())
        with open(name, "rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()


@functools.lru_cache(maxsize=8)
def _digest_on_hub(name: str) -> str:
    """SHA-256 of all arrays of a dataset on the hub."""
    whole = hashlib.sha256()
    for split, rows in sorted(readers.splits(name).items()):
        for column, array in sorted(readers.arrays(rows).items()):
            whole.update(f"{split}/{column}/{array.dtype}/{array.shape}".encode())
            whole.update(str(array.tolist()).encode() if array.dtype == object else array.tobytes())
    return whole.hexdigest()


def _existing(data: str | Path) -> Path:
    """The path, if it is a file or folder; InvalidInput otherwise."""
    path = Path(data).expanduser()
    if not path.exists():
        raise InvalidInput(f"{data} is not there: data is {FORMATS}")
    if not path.is_file() and not path.is_dir():
        raise InvalidInput(f"{data} is a pipe or a device, not a file or folder: data is {FORMATS}")
    return path


def _read(data: str | Path, label: str | None, roles: Roles) -> tuple[list[Table], Roles, str]:
    """Tables of a file or folder, the roles of their columns, and the kind of the data."""
    source = str(data).removeprefix(HUB) if str(data).startswith(HUB) else _existing(data)
    with _reading(data):
        if isinstance(source, str) or readers.is_hugging_face(source):
            return readers.tables(source, readers.splits(source), roles), roles, "Hugging Face"
        if readers.is_leaf(source):
            return readers.leaf(source), roles._replace(inputs="x", labels=label or "y"), "LEAF"
        if readers.is_flower(source):
            return readers.flower(source, roles), roles, "Flower"
        if source.is_dir():
            return readers.image_folder(source, label, roles.client), roles, "image folder"
        if source.suffix.lower() == ".npz":
            roles = roles._replace(inputs=roles.inputs or "x", labels=label or "y")
            return readers.npz(source, roles), roles, "npz"
        if source.suffix.lower() == ".csv":
            return [readers.csv_file(source, roles)], roles, "csv"
    raise InvalidInput(f"{data} has the ending {source.suffix or 'of no format'}: data is {FORMATS}")
