"""Files of other libraries that hold data with clients: LEAF's JSON and Flower's folders; see `interchange`."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pfl_jax.data import pictures, read_folders
from pfl_jax.data.read_tables import Columns
from pfl_jax.errors import InvalidInput, one_line

CLIENT = "client"
"""Name of the column of clients, where a format has none."""

LABEL = "label"
"""Name of Flower's column of labels."""

Part = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Inputs, labels and clients of some rows."""


def is_leaf(path: Path) -> bool:
    """Whether this is a LEAF file, or a folder of some."""
    return path.suffix == ".json" or (path.is_dir() and any(leaf_files(path).values()))


def leaf_files(path: Path) -> dict[str, list[Path]]:
    """LEAF's files of each split, train alone where there is one set of files."""
    if path.is_file():
        return {"train": [path]}
    if any(one.is_dir() for one in path.iterdir()):
        return {split: sorted((path / split).glob("*.json")) for split in ("train", "test")}
    return {"train": sorted(path.glob("*.json"))}


def leaf_users(files: Sequence[Path]) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Name, x and y of each user in LEAF's files.

    Raises:
      InvalidInput: a file that cannot be read, or a user with another number of x than of y.
    """
    for file in files:
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            # Not num_samples: LEAF counts the test rows of Shakespeare that it leaves out between the two sets.
            for user in content["users"]:
                rows = content["user_data"][user]
                if len(rows["x"]) != len(rows["y"]):
                    raise ValueError(f"user {user} has {len(rows['x'])} x and {len(rows['y'])} y")
                yield str(user), rows["x"], rows["y"]
        except KeyError as error:
            raise InvalidInput(f"{file} is no file of LEAF: it has no {error}") from None
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise InvalidInput(f"{file} is no file of LEAF: {one_line(error, 100)}") from None


def together(rows: Sequence[tuple[Any, Any]]) -> Part:
    """Inputs, labels and numbers of the clients of all rows, from the inputs and labels of each client."""
    owners = np.repeat(np.arange(len(rows), dtype=np.int32), [len(y) for _, y in rows])
    return np.concatenate(pictures.alike([x for x, _ in rows])), np.concatenate([y for _, y in rows]), owners


def leaf(path: Path, label: str | None, client: str | None) -> Columns:
    """Columns of LEAF's files, whose x are numbers."""
    _check_names(path, label in (None, "y"), client, "y")
    parts = [_stacked(path, list(leaf_users(files))) for files in leaf_files(path).values() if files]
    return _columns(parts, client)


def _stacked(path: Path, users: list[tuple[str, Any, Any]]) -> Part:
    """Inputs, labels and clients of all users."""
    if not any(len(y) for _, _, y in users):
        raise InvalidInput(f"{path} has no users with samples")
    try:
        x = np.concatenate([np.asarray(x) for _, x, _ in users if len(x)])
        y = np.concatenate([np.asarray(y) for _, _, y in users if len(y)])
    except ValueError:
        raise InvalidInput(f"{path} has inputs of different shapes") from None
    if x.dtype.kind not in "fiu":
        raise InvalidInput(f"{path} has texts for inputs: python -m experiments.shakespeare reads such files")
    return x, y, np.repeat([name for name, _, _ in users], [len(y) for _, _, y in users])


def _columns(parts: list[Part], client: str | None) -> Columns:
    """Columns of the training rows, and of the test rows if there are any."""
    if all(x.dtype.kind in "iu" and x.min() >= 0 and x.max() <= 255 for x, _, _ in parts):
        # Neither JSON nor Arrow's nested lists keep how many bits an integer had.
        parts = [(x.astype(np.uint8), y, owners) for x, y, owners in parts]
    found = [Columns(x, y, None if client is None else owners) for x, y, owners in parts]
    return found[0] if len(found) == 1 else found[0].tested_on(found[1])


def _check_names(path: Path, is_label: bool, client: str | None, label: str) -> None:
    """Raise InvalidInput for names of columns that a format does not have."""
    if not is_label or client not in (None, CLIENT):
        raise InvalidInput(
            f"{path} has the columns {label} and {CLIENT}: leave out --label, give --client-column client"
        )


def is_flower(path: Path) -> bool:
    """Whether this is a folder of partitions, as Flower has them."""
    return (path / "partition_0").is_dir()


def flower(path: Path, label: str | None, client: str | None) -> Columns:
    """Columns of Flower's folder of partitions, whose numbers are the clients."""
    _check_names(path, True, client, label or LABEL)
    folders = [path / f"partition_{number}" for number in range(sum(1 for _ in path.glob("partition_*")))]
    found = [read_folders.of_splits(one, read_folders.splits(one), None, label or LABEL, None) for one in folders]
    if len({one.test_x is None for one in found}) > 1:
        raise InvalidInput(f"{path}: some partitions have a split test, and others have none")
    sets = [[(one.x, one.y) for one in found], [(one.test_x, one.test_y) for one in found]]
    return _columns([together(rows) for rows in sets[: 1 + (found[0].test_x is not None)]], client)
