"""Data sets from a user's own files: .npz, .csv, a folder of images by class, Hugging Face's, LEAF's or Flower's.

Nothing is unpickled, and no code that comes with data is run.
"""

import functools
import hashlib
from pathlib import Path

from pfl_jax.data import read_clients, read_folders, read_tables
from pfl_jax.data.arrays import from_arrays
from pfl_jax.data.read_tables import Columns
from pfl_jax.data.sources import Dataset
from pfl_jax.errors import InvalidInput

HUB = "hf:"
"""What the name of a dataset on the Hugging Face hub starts with."""

FORMATS = (
    "an .npz or .csv file, a folder of images by class, a Hugging Face dataset's folder, hf:NAME of the hub, or the "
    "folder of LEAF's files or of Flower's partitions"
)


def from_file(
    data: str | Path,
    *,
    label: str | None = None,
    client_column: str | None = None,
    test_data: str | Path | None = None,
    test_fraction: float | None = None,
    normalize: bool = False,
    num_classes: int | None = None,
    by_rows: bool = False,
) -> Dataset:
    """Data set of a file or folder, with the digest of the files as its origin.

    - .npz: arrays x [P, ...], y [P], and if there are, test_x, test_y.
    - .csv: a header, then one row for each example; all columns but label and client are numbers. Integers if all of
      them are integers, otherwise float32.
    - Folder of images: a sub-folder for each class, images of one size; uint8 [H, W, 1] or [H, W, 3].
    - Folder of Hugging Face's `save_to_disk`, or hf:NAME of the hub: the images, the column of equally long lists, or
      all columns as numbers; the split "test" is the test set.
    - LEAF's files, or their folder, and the folder of Flower's partitions: see `pfl_jax.data.interchange`; the column
      of the clients is client.

    Args:
      data: the file, the folder, or hf:NAME.
      label: array or column of the labels; by default y of .npz, otherwise label.
      client_column: array or column that says whose row it is; None leaves the clients to a partition.
      test_data: file or folder with the test rows, of the same format; by default those within `data`.
      test_fraction: where there are no test rows, share of the rows that become them, see `from_arrays`.
      normalize, num_classes: see `from_arrays`.
      by_rows: whether the inputs of .npz files stay there, see `pfl_jax.data.sources.load`; those of the other formats
        are read into memory.

    Raises:
      InvalidInput: a missing or damaged file, an unknown format, a missing column, or anything `from_arrays` refuses.
    """
    columns, kind = _read(data, label, client_column, by_rows=by_rows)
    if test_data is not None:
        if columns.test_x is not None:
            raise InvalidInput(f"{data} has test rows of its own: leave out either them or {test_data}")
        other, _ = _read(test_data, label, client_column, by_rows=by_rows)
        if other.features != columns.features:
            raise InvalidInput(
                f"{test_data} has the columns {', '.join(other.features)}, {data} has {', '.join(columns.features)}"
            )
        columns = columns.tested_on(other)
    try:
        return from_arrays(
            **columns.arrays(),
            test_fraction=test_fraction,
            normalize=normalize,
            num_classes=num_classes,
            name=str(data)[len(HUB) :] if str(data).startswith(HUB) else Path(data).expanduser().resolve().stem,
            source=kind,
            origin=digest(data, test_data),
        )
    except InvalidInput as error:
        place = data if test_data is None else f"{data}, tested on {test_data}"
        raise InvalidInput(f"{place}: {error}") from None


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
        files = [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file())
        try:
            stamps = tuple((str(one), one.stat().st_size, one.stat().st_mtime_ns) for one in files)
            whole.update(_digest_of_files(str(path), stamps).encode())
        except OSError as error:
            raise InvalidInput(f"cannot read {error.filename or data}: {error.strerror or error}") from None
    return whole.hexdigest()[:16]


@functools.lru_cache(maxsize=64)
def _digest_of_files(path: str, stamps: tuple[tuple[str, int, int], ...]) -> str:
    """SHA-256 of a file, or of a folder's files with their names in it; read again if size or time of one changes."""
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
    for split, rows in sorted(read_folders.splits(name).items()):
        for column, array in sorted(read_folders.arrays(rows).items()):
            whole.update(f"{split}/{column}/{array.dtype}/{array.shape}".encode())
            whole.update(str(array.tolist()).encode() if array.dtype == object else array.tobytes())
    return whole.hexdigest()


def _existing(data: str | Path) -> Path:
    """The path, if there is something; InvalidInput otherwise."""
    path = Path(data).expanduser()
    if not path.exists():
        raise InvalidInput(f"{data} is not there: data is {FORMATS}")
    return path


def _read(data: str | Path, label: str | None, client: str | None, *, by_rows: bool) -> tuple[Columns, str]:
    """Columns of a file or folder, and its kind."""
    source = str(data).removeprefix(HUB) if str(data).startswith(HUB) else _existing(data)
    if isinstance(source, str) or read_folders.is_hugging_face(source):
        splits = read_folders.splits(source)
        return read_folders.of_splits(source, splits, None, label or "label", client), "Hugging Face"
    if read_clients.is_leaf(source):
        return read_clients.leaf(source, label, client), "LEAF"
    if read_clients.is_flower(source):
        return read_clients.flower(source, label, client), "Flower"
    if source.is_dir():
        return read_folders.image_folder(source, label, client), "image folder"
    if source.suffix.lower() == ".npz":
        return read_tables.npz(source, label, client, by_rows=by_rows), "npz"
    if source.suffix.lower() == ".csv":
        return read_tables.csv_file(source, label, client), "csv"
    raise InvalidInput(f"{data} has the ending {source.suffix or 'of no format'}: data is {FORMATS}")
