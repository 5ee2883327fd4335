"""Partitions as files: one JSON with the rows of each client, and the name and the digest of the data set.

    {"source": "digits (scikit-learn digits)", "digest": "6c2f...", "train_rows": 1287, "test_rows": 510,
     "clients": [{"train": [4, 17], "test": [1290]}, ...]}

Rows are counted through the training examples and on through the test examples, which begin at `train_rows`.
"""

import hashlib
import json
from pathlib import Path

import numpy as np

from pfl_jax.atomic_write import write_text
from pfl_jax.data import checks
from pfl_jax.data.allocation import Partition
from pfl_jax.data.sources import Dataset
from pfl_jax.errors import InvalidInput, one_line


def digest(dataset: Dataset) -> str:
    """First 16 hexadecimal digits of the SHA-256 of all examples, in their order.

    Args:
      dataset: inputs and labels of any kind; the digest leaves out names of classes and the normalization of pixels.
    """
    whole = hashlib.sha256()
    for array in (dataset.train_x, dataset.train_y, dataset.test_x, dataset.test_y):
        array = np.ascontiguousarray(array)
        whole.update(f"{array.dtype.str}{list(array.shape)}".encode())
        whole.update(array.tobytes())
    return whole.hexdigest()[:16]


def save(path: str | Path, parts: Partition, dataset: Dataset) -> None:
    """Write a partition as a file.

    Args:
      path: the file; an existing one is replaced.
      parts: a partition from `pfl_jax.data.partition`, or your own.
      dataset: the data that it divides; InvalidInput if partition and data do not fit.

    Example:
      >>> import tempfile
      >>> from pathlib import Path
      >>> from pfl_jax import data
      >>> digits = data.load("digits")
      >>> file = Path(tempfile.mkdtemp()) / "digits.json"
      >>> data.partition_files.save(file, data.partition.iid(digits, num_clients=4), digits)
      >>> parts = data.partition_files.load(file, digits)
      >>> [len(rows) for rows in parts.train]
      [322, 322, 322, 321]
    """
    sizes = len(dataset.train_y), len(dataset.test_y)
    parts = checks.partition(parts, *sizes)
    splits = [split for split in checks.SPLITS if getattr(parts, split) is not None]
    tables = zip(*(getattr(parts, split) for split in splits), strict=True)
    clients = [{split: rows.tolist() for split, rows in zip(splits, client, strict=True)} for client in tables]
    about = {"source": dataset.description, "digest": digest(dataset), "train_rows": sizes[0], "test_rows": sizes[1]}
    write_text(Path(path), json.dumps(about | {"clients": clients}) + "\n")


def load(path: str | Path, dataset: Dataset | None) -> Partition:
    """Partition from a file, with exactly its rows.

    Args:
      path: the file, written by `save` or by another program in the same form.
      dataset: the data that the partition divides; None skips this check.

    Raises:
      InvalidInput: the file cannot be read, belongs to other data, or has a row that does not exist, a row twice, or a
        row for both training and test.
    """
    try:
        content = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
        clients, wanted, source = content["clients"], content["digest"], content["source"]
        if strange := {split for client in clients for split in client} - checks.SPLITS.keys():
            raise ValueError(f"it has rows for {strange.pop()}, and rows are for {', '.join(checks.SPLITS)}")
        train, test, validation = ([client.get(split, []) for client in clients] for split in checks.SPLITS)
        parts = Partition(train, test, validation if any(validation) else None, pooled=True)
        parts = checks.partition(parts, content["train_rows"], content["test_rows"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise InvalidInput(f"{path} cannot be read as a partition: {one_line(error)}") from None
    if dataset is not None and (found := digest(dataset)) != wanted:
        raise InvalidInput(
            f"{path} divides {source} with the digest {wanted}, not {dataset.description} with {found}: load the data "
            "as it was, with the same options"
        )
    return parts


def digest_of(parts: Partition, shift: str = "none") -> str:
    """Digest of the examples of each client: 16 hexadecimal digits, the same for the same clients of one data set.

    Args:
      parts: the partition.
      shift: name of the shift between groups of clients, see `pfl_jax.data.shift`.
    """
    whole = hashlib.sha256(shift.encode())
    for split in (parts.train, parts.test, parts.validation):
        for rows in split or ():
            whole.update(f" {len(rows)} ".encode() + np.sort(rows).astype("<i8").tobytes())
    return whole.hexdigest()[:16]
