"""Readers of a user's files and folders, which give tables: .npz, .csv, images by class, Hugging Face, LEAF and Flower.

Damaged files raise the errors of the packages that read them; `pfl_jax.data.own_files` adds the name of the file. The
writers for other libraries, and the formats of LEAF and Flower, are in `pfl_jax.data.interchange`.
"""

import csv
import json
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from pfl_jax.data import columns, pictures
from pfl_jax.data.table import CLIENT, Roles, Table, names_of, sets, table
from pfl_jax.errors import InvalidInput, imported, one_line, shortened
from pfl_jax.safe_read import open_npz

SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing"), "test"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
}
"""Name of a split, in lower case -> its use."""

T = TypeVar("T")

LABEL = "label"
"""Name of Flower's column of labels."""

_WHOLE = r"(0|[1-9]\d{0,18})"
CLIENT_NUMBER = re.compile(f"-?{_WHOLE}")
LABEL_NUMBER = re.compile(rf"[-+]?({_WHOLE}(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
"""Forms of whole and other numbers among texts; not 07, because as a name it differs from 7, nor more than 19 digits,
which a float would round."""


def npz(path: Path, roles: Roles) -> list[Table]:
    """Tables of an .npz file: its arrays, and those of the test rows, whose names begin with test_.

    Only the arrays that are asked for are read.
    """
    wanted = [name for names in (roles.inputs, roles.labels, roles.client, roles.time) for name in names_of(names)]
    wanted += names_of(roles.drop)
    with open_npz(path) as stored:
        there = stored.files
        of_name = {name: name if name in wanted else name.removeprefix("test_") for name in there}
        named = [(name, stored[name]) for name, column in of_name.items() if column in wanted]
    if missing := [name for name in wanted if name not in there]:
        raise InvalidInput(f"{path} has no array {missing[0]} (there are {', '.join(there)})")
    if others := ", ".join(name for name, column in of_name.items() if column not in wanted and _is_of_test(name)):
        right = ", ".join(f"test_{name}" for name in (*names_of(roles.inputs), *names_of(roles.labels)))
        warnings.warn(f"{path}: the rows of {others} are left out; name them {right} to test on them", stacklevel=2)
    return sets(path, named)


def _is_of_test(name: str) -> bool:
    """Whether an array's name has the word test or val, as x_test has."""
    return any(SPLITS.get(word, "train") != "train" for word in re.split("[^a-z]+", name.lower()))


def csv_file(path: Path, roles: Roles) -> Table:
    """Table of a .csv file with a header; blank lines are left out."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True, skipinitialspace=True)
        try:
            lines = [(reader.line_num, [field.strip() for field in row]) for row in reader if row]
        except csv.Error as error:
            raise InvalidInput(f"{path}: line {reader.line_num} is not CSV ({error}): is a quote closed?") from None
        except UnicodeDecodeError as error:
            raise InvalidInput(f"{path} is not text in UTF-8 ({error}): save it in that encoding") from None
    if len(lines) < 2:
        raise InvalidInput(f"{path} has no rows: give a header and a row for each example")
    (_, header), *rows = lines
    if len(header) == 1:
        raise InvalidInput(f"{path} has one column, {header[0]!r}: separate columns by commas, as in 1.5,2,yes")
    for number, row in rows:
        if len(row) != len(header):
            raise InvalidInput(f"{path} has {len(row)} fields in line {number}, and {len(header)} in its header")
    forms = dict.fromkeys(names_of(roles.labels), LABEL_NUMBER) | {roles.client: CLIENT_NUMBER}
    texts = zip(header, map(np.array, zip(*(row for _, row in rows), strict=True)), strict=True)
    return table(path, ((name, columns.of_texts(values, forms.get(name))) for name, values in texts))


def train_and_test(source: object, splits: dict[str, T]) -> list[tuple[T, bool]]:
    """Training set, and test set if there is one, from splits by name; each with whether it is the test set.

    Without a test split, the validation split is the test set. Other splits are left out, with a warning.
    """
    kinds = {SPLITS.get(name.lower(), name): name for name in reversed(splits)}
    train = kinds.get("train", next(iter(splits)) if len(splits) == 1 else None)
    if train is None:
        raise InvalidInput(f"{source} has no split train (there are {', '.join(splits)})")
    test = next((kinds[kind] for kind in ("test", "val") if kind in kinds and kinds[kind] != train), None)
    if others := [name for name in splits if name not in (train, test)]:
        warnings.warn(f"{source}: the rows of {', '.join(others)} are left out", stacklevel=2)
    return [(splits[name], name == test) for name in (train, test) if name is not None]


def regular_files(path: Path) -> list[Path]:
    """Regular files below a folder, sorted, without hidden files and files in hidden folders."""
    found, seen = [], set()
    for folder, names, files in os.walk(path, followlinks=True):
        # A link may lead to a folder above it.
        is_new = (real := os.path.realpath(folder)) not in seen
        seen.add(real)
        names[:] = [name for name in names if is_new and not name.startswith(".")]
        found += [Path(folder, name) for name in files if is_new and not name.startswith(".")]
    return sorted(one for one in found if one.is_file())


def image_folder(path: Path, label: str | None, client: str | None) -> list[Table]:
    """Tables of the images in a folder, with columns for images, labels and, if there are any, clients.

    Folders are [split/][client/]class/: a first level of names like train and test are splits. If two further levels
    follow, the first is the clients if `client` is given; if only `label` is given, it is the classes, and all images
    below count. Beside splits nothing else is allowed, but without folders in it, train may be one of several classes.
    """
    images = [one for one in regular_files(path) if one.suffix.lower() in pictures.ENDINGS]
    levels = {one: folders for one in images if (folders := one.relative_to(path).parts[:-1])}
    if not levels:
        raise InvalidInput(f"{path} has no images: give a folder with a sub-folder of images for each class")
    uses = {one: SPLITS.get(folders[0].lower()) for one, folders in levels.items()}
    is_split = any(use == "train" and (len(levels[one]) > 1 or None not in uses.values()) for one, use in uses.items())
    if is_split and (odd := [one for one, use in uses.items() if use is None or len(levels[one]) == 1]):
        name = odd[0].relative_to(path)
        raise InvalidInput(
            f"{path} has a split train, and {name} is in no folder such as train/CLASS or test/CLASS: move it to one, "
            "or out"
        )
    below, parts = {one: folders[is_split:] for one, folders in levels.items()}, dict[str, list[Path]]()
    for one, folders in levels.items():
        parts.setdefault(folders[0] if is_split else "train", []).append(one)
    depth = min(map(len, below.values()))
    if depth < (2 if client is not None else 1):
        raise InvalidInput(f"{path} has one level of folders, which are the classes: it names no clients")
    if client is None and label is None and depth > 1:
        some = shortened(", ".join(dict.fromkeys("/".join(folders[:2]) for folders in below.values())), 80)
        raise InvalidInput(
            f"{path} has two levels of folders ({some}): say that the first ones are the clients with --client-column "
            "client, or that they are the classes with --label class"
        )
    names = (label or "label",) if client is None else (client, label or "label")
    tables = []
    for part, is_test in train_and_test(path, parts):
        named = [(name, [below[one][place] for one in part]) for place, name in enumerate(names)]
        images = pictures.stack((one, one) for one in part)
        tables.append(table(path, [("image", images), *named], is_test=is_test))
    return tables


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
    found = {name: np.asarray(values) for name, values in rows.with_format("numpy")[:].items()}
    # The format rounds floats to 32 bits: different times and clients would become equal.
    wide = [name for name, feature in rows.features.items() if getattr(feature, "dtype", "") == "float64"]
    return found | {name: np.array(rows.with_format(None)[name][:], np.float64) for name in wide}


def tables(source: object, splits: dict[str, Any], roles: Roles) -> list[Table]:
    """Tables of the splits of a Hugging Face dataset, by name."""
    return [_table(source, rows, roles, is_test=is_test) for rows, is_test in train_and_test(source, splits)]


def _table(source: object, rows: Any, roles: Roles, *, is_test: bool) -> Table:
    """Table of a split, with pictures as arrays, and names in place of the numbers of classes."""
    if not hasattr(rows, "__len__"):
        raise InvalidInput(
            f"{source} is a stream: take rows of it, datasets.Dataset.from_list(list(stream.take(1000)))"
        )
    images = {name for name, feature in rows.features.items() if type(feature).__name__ == "Image"}
    # Targets stay as stored: the palette of a mask numbers its classes. Other pictures are not read.
    images -= {*names_of(roles.labels)}
    chosen = images & {*names_of(roles.inputs or list(images))} - {*names_of(roles.drop)}
    named: dict[str, Any] = {name: list(rows.with_format(None)[name]) for name in rows.features if name in chosen}
    named |= arrays(rows.select_columns([name for name in rows.features if name not in images]))
    name = roles.labels if isinstance(roles.labels, str) else ""
    if name in named and (names := getattr(rows.features[name], "names", None)):
        # A missing label is None, NaN here, or -1.
        there = named[name] >= 0
        named[name] = columns.without(np.array(names)[np.where(there, named[name], 0).astype(int)], ~there)
    return table(source, named.items(), is_test=is_test)


def is_leaf(path: Path) -> bool:
    """Whether this is a LEAF file, or a folder of LEAF files."""
    return path.suffix == ".json" or (path.is_dir() and any(leaf_files(path).values()))


def leaf_files(path: Path) -> dict[str, list[Path]]:
    """LEAF's files of each split; only train if there is one set of files."""
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
      ValueError: a user occurs twice, or has different numbers of x and y.
    """
    seen: dict[str, Path] = {}
    for file in files:
        content = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(content["users"], list):
            raise ValueError(f"the users of {file.name} are not a list")
        # Not num_samples: for Shakespeare, LEAF includes the test rows that it leaves out between the two sets.
        for user in map(str, content["users"]):
            rows = content["user_data"][user]
            if len(rows["x"]) != len(rows["y"]):
                raise ValueError(f"user {user} has {len(rows['x'])} x and {len(rows['y'])} y in {file.name}")
            if user in seen:
                raise ValueError(f"user {user} is there twice, in {seen[user].name} and in {file.name}")
            if len(rows["x"]):
                seen[user] = file
                yield user, rows["x"], rows["y"]


def leaf(path: Path) -> list[Table]:
    """Tables of LEAF's users, whose x are numbers."""
    tables = [
        table(f"user {user}", (("x", _narrow(x)), ("y", y)), is_test=split == "test").with_column(CLIENT, user)
        for split, files in leaf_files(path).items()
        for user, x, y in leaf_users(files)
    ]
    if not tables or tables[0].is_test:
        raise InvalidInput(f"{path} has no users with samples")
    if columns.kind(tables[0].columns["x"]) == "words":
        raise InvalidInput(f"{path} has texts for inputs: python -m experiments.shakespeare reads such files")
    return tables


def _narrow(values: Any) -> Any:
    """A column of lists as bytes, if all of its numbers fit: whole numbers in lists have no width."""
    column = columns.plain(values)
    is_bytes = column.dtype.kind in "iu" and 0 <= column.min(initial=0) <= column.max(initial=0) < 256
    return column.astype(np.uint8) if is_bytes else column


def is_flower(path: Path) -> bool:
    """Whether this is a folder of partitions in Flower's format."""
    return path.is_dir() and any(_partitions(path))


def _partitions(path: Path) -> list[int]:
    """Numbers of the partitions in a folder, sorted; other folders, such as partition_backup, are ignored."""
    found = (re.fullmatch(r"partition_(\d+)", one.name) for one in path.iterdir() if one.is_dir())
    return sorted(int(name[1]) for name in found if name)


def flower(path: Path, roles: Roles) -> list[Table]:
    """Tables of Flower's folder of partitions; the numbers of the partitions are the clients."""
    found = []
    for number in _partitions(path):
        folder = path / f"partition_{number}"
        for one in tables(folder, splits(folder), roles):
            narrow = replace(one, columns={name: _narrow(values) for name, values in one.columns.items()})
            found.append(narrow if roles.client is None else narrow.with_column(CLIENT, number))
    return found
