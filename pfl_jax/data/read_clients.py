"""Files of other libraries that hold data with clients: LEAF's JSON and Flower's folders; see `interchange`."""

import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pfl_jax.data import columns, read_folders
from pfl_jax.data.table import CLIENT, Roles, Table, table
from pfl_jax.errors import InvalidInput, one_line

LABEL = "label"
"""Name of Flower's column of labels."""


def is_leaf(path: Path) -> bool:
    """Whether this is a LEAF file, or a folder of some."""
    return path.suffix == ".json" or (path.is_dir() and any(leaf_files(path).values()))


def leaf_files(path: Path) -> dict[str, list[Path]]:
    """LEAF's files of each split, train alone where there is one set of files."""
    if path.is_file():
        return {"train": [path]}
    folders = {"train": path}
    if any(one.is_dir() and not one.name.startswith(".") for one in path.iterdir()):
        folders = {split: path / split for split in ("train", "test")}
    return {
        split: sorted(one for one in folder.glob("*.json") if one.is_file() and not one.name.startswith("."))
        for split, folder in folders.items()
    }


def leaf_users(files: Sequence[Path]) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Name, x and y of each user in LEAF's files of a split.

    Raises:
      InvalidInput: a file that cannot be read, a user who is there twice, or with another number of x than of y.
    """
    seen: dict[str, Path] = {}
    for file in files:
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(content["users"], list):
                raise ValueError("its users are no list")
            # Not num_samples: LEAF counts the test rows of Shakespeare that it leaves out between the two sets.
            for user in map(str, content["users"]):
                rows = content["user_data"][user]
                if len(rows["x"]) != len(rows["y"]):
                    raise ValueError(f"user {user} has {len(rows['x'])} x and {len(rows['y'])} y")
                if user in seen:
                    raise ValueError(f"user {user} is there twice, first in {seen[user].name}: list each once")
                if len(rows["x"]):
                    seen[user] = file
                yield user, rows["x"], rows["y"]
        except KeyError as error:
            raise InvalidInput(f"{file} is no file of LEAF: it has no {error}") from None
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise InvalidInput(f"{file} is no file of LEAF: {one_line(error, 150)}") from None


def leaf(path: Path, label: str | None, client: str | None) -> tuple[list[Table], list[Table]]:
    """Tables of LEAF's users, whose x are numbers: the training and the test rows."""
    _check_names(path, label in (None, "y"), client, "y")
    sets = [
        [
            table(f"user {user}", (("x", x), ("y", y)), form="lists").with_column(CLIENT, user)
            for user, x, y in leaf_users(files)
            if len(y)
        ]
        for files in leaf_files(path).values()
    ]
    if not sets[0]:
        raise InvalidInput(f"{path} has no users with samples")
    if columns.kind(sets[0][0].columns["x"]) == "words":
        raise InvalidInput(f"{path} has texts for inputs: python -m experiments.shakespeare reads such files")
    return sets[0], [*sets, []][1]


def _check_names(path: Path, is_label: bool, client: str | None, label: str) -> None:
    """Raise InvalidInput for names of columns that a format does not have."""
    if not is_label or client not in (None, CLIENT):
        raise InvalidInput(
            f"{path} has the columns {label} and {CLIENT}: leave out --label, give --client-column client"
        )


def is_flower(path: Path) -> bool:
    """Whether this is a folder of partitions, as Flower has them."""
    return path.is_dir() and any(_partitions(path))


def _partitions(path: Path) -> list[int]:
    """Numbers of the partitions of a folder, sorted; others, such as partition_backup, are left alone."""
    found = (re.fullmatch(r"partition_(\d+)", one.name) for one in path.iterdir() if one.is_dir())
    return sorted(int(name[1]) for name in found if name)


def flower(path: Path, roles: Roles) -> tuple[list[Table], list[Table]]:
    """Tables of Flower's folder of partitions, whose numbers are the clients: the training and the test rows."""
    _check_names(path, True, roles.client, str(roles.labels))
    numbers = _partitions(path)
    if numbers != list(range(len(numbers))):
        raise InvalidInput(f"{path} has {len(numbers)} partitions up to {numbers[-1]}: give all from partition_0 on")
    sets: list[list[Table]] = [[], []]
    for number in numbers:
        folder = path / f"partition_{number}"
        for tables, found in zip(sets, read_folders.tables(folder, read_folders.splits(folder), roles), strict=True):
            found = [dataclasses.replace(one, form="lists") for one in found]
            tables += found if roles.client is None else [one.with_column(CLIENT, number) for one in found]
    return sets[0], sets[1]
