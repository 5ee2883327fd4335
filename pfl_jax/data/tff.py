"""Client data of TensorFlow Federated (TFF), read without TensorFlow: SQLite, possibly compressed, and HDF5.

SQLite has a table client_metadata (client_id, split_name, num_examples) and a table examples (split_name, client_id,
serialized_example_proto) of serialized tf.train.Example messages. HDF5 has a file for each split, NAME_train.h5 and
NAME_test.h5, with groups examples/CLIENT of arrays with a row for each example.
"""

import contextlib
import functools
import gzip
import lzma
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from pfl_jax.atomic_write import write_binary
from pfl_jax.errors import imported

COMPRESSED: dict[str, Callable[..., Any]] = {".lzma": lzma.open, ".xz": lzma.open, ".gz": gzip.open}

_SCHEMA = """
message_type { name: "Texts" field { name: "value" number: 1 type: TYPE_BYTES label: LABEL_REPEATED } }
message_type { name: "Floats" field { name: "value" number: 1 type: TYPE_FLOAT label: LABEL_REPEATED } }
message_type { name: "Integers" field { name: "value" number: 1 type: TYPE_INT64 label: LABEL_REPEATED } }
message_type {
  name: "Feature" oneof_decl { name: "kind" }
  field { name: "texts" number: 1 type: TYPE_MESSAGE type_name: "Texts" oneof_index: 0 }
  field { name: "floats" number: 2 type: TYPE_MESSAGE type_name: "Floats" oneof_index: 0 }
  field { name: "integers" number: 3 type: TYPE_MESSAGE type_name: "Integers" oneof_index: 0 }
}
message_type {
  name: "Entry"
  field { name: "key" number: 1 type: TYPE_STRING }
  field { name: "value" number: 2 type: TYPE_MESSAGE type_name: "Feature" }
}
message_type {
  name: "Features" field { name: "feature" number: 1 type: TYPE_MESSAGE type_name: "Entry" label: LABEL_REPEATED }
}
message_type { name: "Example" field { name: "features" number: 1 type: TYPE_MESSAGE type_name: "Features" } }
"""
"""Messages of tf.train.Example, with a map in its wire format, a list of entries."""

Features: TypeAlias = tuple[str, Sequence[Any], Sequence[Any]]
"""Name of a client, features of its training examples and of its test examples: each a list with one value per example.

A value is a text as bytes, a whole number, or an array of floats."""


def read(path: Path, splits: Sequence[str], features: Sequence[str], number: int | None) -> Iterator[Features]:
    """The first clients, in the order of their names, that have training and test examples.

    Errors are raised by the packages that read the file.

    Args:
      path: the SQLite file, or the folder of HDF5 files.
      splits: names of the training and test splits in SQLite; HDF5 files end in _train and _test.
      features: names of the features that are wanted.
      number: number of clients; None for all.
    """
    return _read_hdf5(path, features, number) if path.is_dir() else _read_sqlite(path, splits, features, number)


def _read_sqlite(path: Path, splits: Sequence[str], features: Sequence[str], number: int | None) -> Iterator[Features]:
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
        # In one pass for each split, since a file may have no index of its clients.
        query = "SELECT client_id, serialized_example_proto FROM examples JOIN chosen USING (client_id)"
        tables: list[dict[str, list[bytes]]] = []
        for split in splits:
            tables.append({name: [] for name in names})
            for name, serialized in connection.execute(f"{query} WHERE split_name = ?", (split,)):
                tables[-1][name].append(serialized)
    for name in names:
        examples = ([parse_example(one) for one in table[name]] for table in tables)
        train, test = ([[one[feature] for one in some] for feature in features] for some in examples)
        yield name, train, test


def _uncompressed(path: Path) -> Path:
    """The file; a compressed one is unpacked beside it, once, as TFF does."""
    if path.suffix not in COMPRESSED:
        return path
    target = path.with_suffix("")
    if not target.exists():
        with COMPRESSED[path.suffix](path) as packed:
            write_binary(target, lambda file: shutil.copyfileobj(packed, file))
    return target


def _read_hdf5(path: Path, features: Sequence[str], number: int | None) -> Iterator[Features]:
    files = [one for split in ("train", "test") for one in sorted(path.glob(f"*_{split}.h5"))[:1]]
    if len(files) < 2:
        raise ValueError("it has no files of LEAF (train/*.json and test/*.json) or TFF (*_train.h5 and *_test.h5)")
    h5py = imported("h5py", "HDF5 files need h5py: pip install h5py, or give TFF's .sqlite file")
    with h5py.File(files[0]) as first, h5py.File(files[1]) as second:
        sets: Any = first["examples"], second["examples"]
        for name in sorted(set(sets[0]) & set(sets[1]))[:number]:
            train, test = ([list(one[name][feature]) for feature in features] for one in sets)
            yield name, train, test


@functools.cache
def _parser() -> Callable[[bytes], Any]:
    """Parser of a message of _SCHEMA."""
    # Imported only here: otherwise every start of an experiment would wait for it.
    from google.protobuf import text_format
    from google.protobuf.descriptor_pb2 import FileDescriptorProto
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message_factory import GetMessageClass

    pool = DescriptorPool()
    pool.Add(text_format.Parse(_SCHEMA, FileDescriptorProto(name="example.proto", syntax="proto3")))
    message: Any = GetMessageClass(pool.FindMessageTypeByName("Example"))
    return message.FromString


def parse_example(serialized: bytes) -> dict[str, Any]:
    """Features of a serialized tf.train.Example: a single value as bytes or a whole number, several or floats as array.

    Reference:
      tensorflow/core/example/example.proto and feature.proto.
    """
    found: dict[str, Any] = {}
    for entry in _parser()(serialized).features.feature:
        kind = entry.value.WhichOneof("kind")
        values = getattr(entry.value, kind).value if kind else ()
        if kind == "floats":
            found[entry.key] = np.array(values, np.float32)
        elif len(values) == 1:
            found[entry.key] = values[0]
        else:
            found[entry.key] = np.array(values, np.int64) if kind == "integers" else list(values)
    return found
