"""Clients' rows for other libraries, as LEAF's JSON and Flower's folders, and as an .npz file; `from_file` reads them.

LEAF (Caldas et al. 2018): a folder with sub-folders train and test of files {"users": [...], "num_samples": [...],
"user_data": {user: {"x": [...], "y": [...]}}}. Flower: the output of `flwr-datasets create`, a folder partition_N of
Hugging Face's `save_to_disk` for each client; flwr-datasets 0.6 has no file of indices.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pfl_jax.atomic_write import make_folder, write_binary, write_text
from pfl_jax.data import checks
from pfl_jax.data.allocation import Partition
from pfl_jax.data.readers import CLIENT, LABEL
from pfl_jax.data.sources import Dataset
from pfl_jax.errors import CannotWrite, InvalidInput, imported, one_line


def _client_rows(dataset: Dataset, parts: Partition) -> dict[str, list[tuple[Any, np.ndarray]]]:
    """Inputs and labels of each client by split; classes by their names if there are names."""
    parts = checks.partition(parts, len(dataset.train_y), len(dataset.test_y))
    if parts.validation is not None:
        raise InvalidInput("these formats have training and test rows: leave out --val-fraction")
    x, y = (np.concatenate(both) for both in ((dataset.train_x, dataset.test_x), (dataset.train_y, dataset.test_y)))
    names = np.array(dataset.class_names)
    y = names[y] if len(names) else y
    return {split: [(x[one], y[one]) for one in getattr(parts, split)] for split in ("train", "test")}


def write_leaf(folder: str | Path, dataset: Dataset, parts: Partition, clients: Sequence[str]) -> None:
    """Write LEAF's files train/data.json and test/data.json.

    Args:
      folder: a new folder; InvalidInput if it exists, CannotWrite if it cannot be written.
      dataset: the data.
      parts: its partition.
      clients: names of the clients, the users.
    """
    _check_new(folder)
    for split, found in _client_rows(dataset, parts).items():
        make_folder(Path(folder) / split)
        content = {
            "users": list(clients),
            "num_samples": [len(y) for _, y in found],
            "user_data": {
                user: {"x": np.asarray(x).tolist(), "y": y.tolist()}
                for user, (x, y) in zip(clients, found, strict=True)
            },
        }
        write_text(Path(folder) / split / "data.json", json.dumps(content))


def write_flower(folder: str | Path, dataset: Dataset, parts: Partition) -> None:
    """Write a folder partition_N for each client N, with splits train and test of columns x and label.

    Args:
      folder, dataset, parts: see `write_leaf`. The package datasets is needed.
    """
    datasets = imported("datasets", "Flower's folders need the package datasets: pip install datasets")
    _check_new(folder)
    found = _client_rows(dataset, parts)
    for number in range(len(found["train"])):
        splits = {split: {"x": np.asarray(rows[number][0]), LABEL: rows[number][1]} for split, rows in found.items()}
        made = {split: datasets.Dataset.from_dict(columns) for split, columns in splits.items()}
        try:
            datasets.DatasetDict(made).save_to_disk(str(Path(folder) / f"partition_{number}"))
        except OSError as error:
            raise CannotWrite(f"cannot write {folder}: {one_line(error)}") from None


def write_npz(path: str | Path, dataset: Dataset, parts: Partition, clients: Sequence[str]) -> None:
    """Write the clients' rows as a file for `from_file`: x, y, client, and test_x, test_y, test_client.

    Args:
      path: the file; an existing one is replaced.
      dataset, parts, clients: see `write_leaf`.
    """
    arrays = {}
    for split, found in _client_rows(dataset, parts).items():
        prefix = "test_" if split == "test" else ""
        arrays[f"{prefix}x"] = np.concatenate([x for x, _ in found])
        arrays[f"{prefix}y"] = np.concatenate([y for _, y in found])
        arrays[f"{prefix}{CLIENT}"] = np.repeat(list(clients), [len(y) for _, y in found])
    write_binary(Path(path), lambda file: np.savez(file, **arrays))


def _check_new(folder: str | Path) -> None:
    if Path(folder).exists():
        raise InvalidInput(f"{folder} is there already: give another name, or remove it")
