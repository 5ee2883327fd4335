"""Client data of TensorFlow Federated (TFF), read without TensorFlow: SQLite, also compressed, and HDF5.

SQLite has a table client_metadata (client_id, split_name, num_examples) and a table examples (split_name, client_id,
serialized_example_proto) of serialized tf.train.Example messages. HDF5 has a file for each split, NAME_train.h5 and
NAME_test.h5, with groups examples/CLIENT of arrays with a row for each example.
"""

import contextlib
import gzip
import lzma
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pfl_jax.atomic_write import write_binary
from pfl_jax.errors import InvalidInput, imported, one_line

COMPRESSED: dict[str, Callable[..., Any]] = {".lzma": lzma.open, ".xz": lzma.open, ".gz": gzip.open}

Examples = dict[str, list[Any]]
"""Feature -> its value of each example: a text as bytes, a whole number, or an array of floats."""


def is_tff(path: Path) -> bool:
    """Whether this is a SQLite file, or a folder of HDF5 files."""
    return path.is_file() or any(path.glob("*_train.h5"))


def read(
    path: Path,
    splits: tuple[str, str],
    features: Sequence[str],
    number: int | None,
    most: tuple[int | None, int | None] = (None, None),
) -> Iterator[tuple[str, Examples, Examples]]:
    """Name, training and test examples of the first clients that have both, by their names' order.

    Args:
      path: the SQLite file, or the folder of HDF5 files.
      splits: names of the splits of training and of test examples in SQLite; HDF5 files end in _train and _test.
      features: names of those that are wanted of an example.
      number: of clients; None for all.
      most: training and test examples of a client, the first ones; None for all.

    Raises:
      InvalidInput: the file cannot be read, has no such splits or features, or an example that is none.
    """
    try:
        yield from (_read_hdf5 if path.is_dir() else _read_sqlite)(path, splits, features, number, most)
    except (OSError, sqlite3.Error, lzma.LZMAError, EOFError, ValueError, IndexError, KeyError) as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(f"{path} cannot be read as client data of TFF: {one_line(error, 100)}") from None


def _read_sqlite(
    path: Path, splits: Any, features: Sequence[str], number: int | None, most: Any
) -> Iterator[tuple[str, Examples, Examples]]:
    file = _uncompressed(path)
    with contextlib.closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)) as connection:
        of_split = "SELECT client_id FROM client_metadata WHERE split_name = ?"
        connection.execute(
            f"CREATE TEMP TABLE chosen AS {of_split} INTERSECT {of_split} ORDER BY client_id LIMIT ?",
            (*splits, -1 if number is None else number),
        )
        names = [name for (name,) in connection.execute("SELECT client_id FROM chosen ORDER BY client_id")]
        if not names:
            there = [name for (name,) in connection.execute("SELECT DISTINCT split_name FROM client_metadata")]
            raise ValueError(f"no client has the splits {splits[0]} and {splits[1]} (there are {', '.join(there)})")
        tables: list[dict[str, list[bytes]]] = []
        for split, limit in zip(splits, most, strict=True):
            table: dict[str, list[bytes]] = {name: [] for name in names}
            # In one pass, since a file may have no index of its clients.
            query = "SELECT client_id, serialized_example_proto FROM examples JOIN chosen USING (client_id)"
            for name, serialized in connection.execute(f"{query} WHERE split_name = ?", (split,)):
                if limit is None or len(table[name]) < limit:
                    table[name].append(serialized)
            tables.append(table)
    for name in names:
        examples = ([parse_example(one) for one in table[name]] for table in tables)
        train, test = ({feature: [one[feature] for one in some] for feature in features} for some in examples)
        yield name, train, test


def _uncompressed(path: Path) -> Path:
    """The file, which is unpacked beside a compressed one, once, as TFF does."""
    if path.suffix not in COMPRESSED:
        return path
    target = path.with_suffix("")
    if not target.exists():
        with COMPRESSED[path.suffix](path) as packed:
            write_binary(target, lambda file: shutil.copyfileobj(packed, file))
    return target


def _read_hdf5(
    path: Path, splits: Any, features: Sequence[str], number: int | None, most: Any
) -> Iterator[tuple[str, Examples, Examples]]:
    h5py = imported("h5py", "HDF5 files need h5py: pip install h5py, or give TFF's .sqlite file")
    files = [next(iter(sorted(path.glob(f"*_{split}.h5"))), None) for split in ("train", "test")]
    if None in files:
        raise ValueError("there is no file that ends in _test.h5")
    with h5py.File(files[0]) as train, h5py.File(files[1]) as test:
        sets: Any = train["examples"], test["examples"]
        for name in sorted(set(sets[0]) & set(sets[1]))[:number]:
            rows = [
                {key: list(one[name][key][:limit]) for key in one[name]} for one, limit in zip(sets, most, strict=True)
            ]
            yield name, rows[0], rows[1]


def parse_example(serialized: bytes) -> dict[str, Any]:
    """Features of a serialized tf.train.Example: bytes or a whole number of one value, an array of several or floats.

    Raises:
      ValueError, IndexError: it is none.

    Reference:
      tensorflow/core/example/example.proto and feature.proto; protobuf.dev, "Encoding".
    """
    found: dict[str, Any] = {}
    for features in _values(memoryview(serialized), 1):
        for entry in _values(features, 1):
            name = bytes(_values(entry, 1)[0]).decode()
            for kind, values in _fields(_values(entry, 2)[0]):
                found[name] = _list(kind, _values(values, 1))
    return found


def _list(kind: int, values: list[Any]) -> Any:
    """Value of a feature, by the number of its field: 1 bytes, 2 floats, 3 whole numbers; of floats always an array."""
    if kind == 1:
        texts = [bytes(value) for value in values]
        return texts[0] if len(texts) == 1 else texts
    if kind == 2:
        return np.frombuffer(b"".join(values), "<f4")
    if kind != 3:
        raise ValueError(f"a feature of the unknown kind {kind}")
    # Packed into one value, or each by itself.
    plain = [number for value in values for number in ([value] if isinstance(value, int) else _varints(value))]
    signed = np.array(plain, np.uint64).astype(np.int64)
    return int(signed[0]) if len(signed) == 1 else signed


def _values(message: memoryview, number: int) -> list[Any]:
    """Values of a field of a message, by the field's number."""
    return [value for field, value in _fields(message) if field == number]


def _fields(message: memoryview) -> Iterator[tuple[int, Any]]:
    """Number and value of each field: a whole number, or bytes."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        if tag & 7 == 0:
            value, at = _varint(message, at)
        else:
            size, at = _varint(message, at) if tag & 7 == 2 else ({1: 8, 5: 4}[tag & 7], at)
            value, at = message[at : at + size], at + size
            if at > len(message):
                raise ValueError("an example is cut off")
        yield tag >> 3, value


def _varints(packed: memoryview) -> Iterator[int]:
    at = 0
    while at < len(packed):
        value, at = _varint(packed, at)
        yield value


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """Whole number of seven bits a byte, the lowest first, and the place after it."""
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
