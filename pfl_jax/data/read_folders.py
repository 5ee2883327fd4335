"""Folders of a user: images by class, and Hugging Face datasets (of the hub too)."""

import dataclasses
import os
import warnings
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from pfl_jax.data import pictures
from pfl_jax.data.table import Roles, Table, names_of, table
from pfl_jax.errors import InvalidInput, imported, one_line, shortened

SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing"), "test"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
}
"""Name of a split, in lower case -> what it is."""

T = TypeVar("T")


def sets(source: object, splits: dict[str, T]) -> tuple[T, T | None]:
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
        names[:] = [] if os.path.realpath(folder) in seen else [name for name in names if not name.startswith(".")]
        if os.path.realpath(folder) not in seen:
            found += [Path(folder, name) for name in files if not name.startswith(".")]
        seen.add(os.path.realpath(folder))
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
    files = [one for one in regular_files(path) if one.suffix.lower() in pictures.ENDINGS]
    levels = {one: one.relative_to(path).parts[:-1] for one in files}
    files = [one for one in files if levels[one]]
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
    train, test = sets(path, of_split)
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
    train, test = sets(source, splits)
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
