"""Readers of a user's files and folders, which give tables: .npz, .csv, images by class, Hugging Face, LEAF and Flower.

What is written for others, and the formats of LEAF and Flower, is in `pfl_jax.data.interchange`.
"""

import csv
import dataclasses
import json
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from pfl_jax.data import columns, pictures
from pfl_jax.data.rows import of_npz
from pfl_jax.data.table import CLIENT, Roles, Table, names_of, sets, table
from pfl_jax.errors import InvalidInput, imported, one_line, shortened
from pfl_jax.safe_read import BAD_NPZ, open_npz

SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing"), "test"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
}
"""Name of a split, in lower case -> what it is."""

T = TypeVar("T")

LABEL = "label"
"""Name of Flower's column of labels."""


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
                (name, of_npz(path, name) if by_rows and column in inputs else stored[name])
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


def train_and_test(source: object, splits: dict[str, T]) -> tuple[T, T | None]:
    """Training and test set of splits by name; without a test split, the one for validation is the test set.

    Splits that are neither are left out, with a warning.
    """
    kinds = {SPLITS.get(name.lower(), name): name for name in reversed(splits)}
    train = kinds.get("train", next(iter(splits)) if len(splits) == 1 else None)
    if train is None:
        raise InvalidInput(f"{source} has no split train (there are {', '.join(splits)})")
    test = next((kinds[kind] for kind in ("test", "val") if kind in kinds and kinds[kind] != train), None)
    if others := [name for name in splits if name not in (train, test)]:
        warnings.warn(f"{source}: the rows of {', '.join(others)} are left out", stacklevel=2)
    return splits[train], None if test is None else splits[test]


def regular_files(path: Path) -> list[Path]:
    """Regular files below a folder, sorted, without those that are hidden or lie in hidden folders.

    Raises:
      InvalidInput: a name is not UTF-8.
    """
    found, seen = [], set()
    for folder, names, files in os.walk(path, followlinks=True):
        # A link may lead to a folder that it lies in.
        is_new = (real := os.path.realpath(folder)) not in seen
        seen.add(real)
        names[:] = [name for name in names if is_new and not name.startswith(".")]
        found += [Path(folder, name) for name in files if is_new and not name.startswith(".")]
    for one in found:
        if not os.fsencode(one).decode("utf-8", "ignore") == str(one):
            raise InvalidInput(
                f"{path} has a name that is not UTF-8, {os.fsencode(one.relative_to(path))!r}: rename it"
            )
    return sorted(one for one in found if one.is_file())


def image_folder(path: Path, label: str | None, client: str | None) -> tuple[list[Table], list[Table]]:
    """Tables of the training and the test images of a folder: columns image, that of the labels, and of the clients.

    Folders are [split/][client/]class/: a first level of names like train and test are splits. Of two further levels
    the first are the clients if `client` is given, and the classes if `label` is, which takes what is below as one.
    """
    images = [one for one in regular_files(path) if one.suffix.lower() in pictures.ENDINGS]
    levels = {one: folders for one in images if (folders := one.relative_to(path).parts[:-1])}
    files = list(levels)
    if not files:
        raise InvalidInput(f"{path} has no images: give a folder with a sub-folder of images for each class")
    first = {levels[one][0].lower() for one in files}
    is_split = "train" in {SPLITS.get(name) for name in first} and first <= SPLITS.keys()
    of_split: dict[str, list[Path]] = {"train": files}
    if is_split and all(len(levels[one]) > 1 for one in files):
        of_split = {}
        for one in files:
            of_split.setdefault(levels[one][0], []).append(one)
            levels[one] = levels[one][1:]
    depth = min(len(levels[one]) for one in files)
    if depth < (2 if client is not None else 1):
        raise InvalidInput(f"{path} has one level of folders, which are the classes: it names no clients")
    if client is None and label is None and depth > 1:
        some = shortened(", ".join(dict.fromkeys("/".join(levels[one][:2]) for one in files)), 80)
        raise InvalidInput(
            f"{path} has two levels of folders ({some}): say that the first ones are the clients with --client-column "
            "client, or that they are the classes with --label class"
        )
    train, test = train_and_test(path, of_split)
    chosen = [*train, *(test or ())]
    named: dict[str, Any] = {"image": pictures.stack((one, one) for one in chosen)}
    for place, name in enumerate((label or "label",) if client is None else (client, label or "label")):
        named[name] = [levels[one][place] for one in chosen]
    found = [
        [table(path, ((name, values[part]) for name, values in named.items()))]
        for part in (slice(len(train)), slice(len(train), None))
    ]
    return found[0], found[1] if test else []


def is_hugging_face(path: Path) -> bool:
    """Whether a folder was written by `save_to_disk`."""
    return any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))


def splits(source: Path | str) -> dict[str, Any]:
    """Splits of a Hugging Face dataset by name; `source` is a folder of `save_to_disk`, or a name on the hub."""
    datasets = imported("datasets", "a Hugging Face dataset needs the package datasets: pip install datasets")
    try:
        loaded = datasets.load_from_disk(str(source)) if isinstance(source, Path) else datasets.load_dataset(source)
    except Exception as error:  # whatever Arrow, the file system or the network raise
        raise InvalidInput(f"{source} cannot be loaded as a Hugging Face dataset ({one_line(error)})") from None
    return dict(loaded) if isinstance(loaded, dict) else {"train": loaded}


def arrays(rows: Any) -> dict[str, np.ndarray]:
    """Columns of a split as arrays."""
    return {name: np.asarray(values) for name, values in rows.with_format("numpy")[:].items()}


def tables(source: object, splits: dict[str, Any], roles: Roles) -> tuple[list[Table], list[Table]]:
    """Tables of the splits of a Hugging Face dataset, by name: the training and the test rows."""
    train, test = train_and_test(source, splits)
    found = [] if test is None else [_table(f"the test set of {source}", test, roles)]
    return [_table(source, train, roles)], found


def _table(source: object, rows: Any, roles: Roles) -> Table:
    """Table of a split, with pictures as they look, and names in the place of the numbers of classes."""
    if not hasattr(rows, "__len__"):
        raise InvalidInput(
            f"{source} is a stream: take rows of it, datasets.Dataset.from_list(list(stream.take(1000)))"
        )
    features = {name: feature for name, feature in rows.features.items() if type(feature).__name__ == "Image"}
    # Targets stay as they are stored: the palette of a mask numbers its classes. Other pictures are not read.
    chosen = set(names_of(roles.inputs) or features) - {*names_of(roles.labels), *names_of(roles.drop)}
    unread = features.keys() - {*names_of(roles.labels)}
    named = arrays(rows.select_columns([name for name in rows.features if name not in unread]))
    images = [name for name in features if name in chosen]
    for name in images:
        encoded = rows.with_format(None).cast_column(name, dataclasses.replace(features[name], decode=False))
        named[name] = pictures.stack(pictures.rows(encoded[name], f"{source}: {name}"), features[name].mode)
    name = roles.labels if isinstance(roles.labels, str) else ""
    if name in named and (names := getattr(rows.features[name], "names", None)):
        # Without a label is None, which is NaN here, or -1.
        there = named[name] >= 0
        words = np.array(names, object)[np.where(there, named[name], 0).astype(int)]
        words[~there] = None
        named[name] = words
    return table(source, named.items(), pictures=tuple(images))


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
    """Name, x and y of each user with rows in LEAF's files of a split.

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
    train, test = (
        [
            table(f"user {user}", (("x", x), ("y", y)), form="lists").with_column(CLIENT, user)
            for user, x, y in leaf_users(leaf_files(path).get(split, []))
        ]
        for split in ("train", "test")
    )
    if not train:
        raise InvalidInput(f"{path} has no users with samples")
    if columns.kind(train[0].columns["x"]) == "words":
        raise InvalidInput(f"{path} has texts for inputs: python -m experiments.shakespeare reads such files")
    return train, test


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
    train, test = [], []
    for number in numbers:
        folder = path / f"partition_{number}"
        for every, found in zip((train, test), tables(folder, splits(folder), roles), strict=True):
            found = [dataclasses.replace(one, form="lists") for one in found]
            every += found if roles.client is None else [one.with_column(CLIENT, number) for one in found]
    return train, test
