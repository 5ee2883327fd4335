"""Folders of a user: images by class, and Hugging Face datasets (of the hub too)."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from pfl_jax.data import pictures
from pfl_jax.data.read_tables import Columns, Names, among
from pfl_jax.errors import InvalidInput, imported, one_line


def image_folder(path: Path, label: str | None, client: str | None) -> Columns:
    """Images of a folder whose sub-folders are the classes, as of `pictures.stack`."""
    if label is not None or client is not None:
        raise InvalidInput(f"{path} is a folder of images: its sub-folders are the labels, and it names no clients")
    files = [
        (folder.name, file)
        for folder in sorted(path.iterdir())
        if folder.is_dir() and not folder.name.startswith(".")
        for file in sorted(folder.rglob("*"))
        if file.suffix.lower() in pictures.ENDINGS and not file.name.startswith(".")
    ]
    if not files:
        raise InvalidInput(f"{path} has no images: give a folder with a sub-folder of images for each class")
    return Columns(pictures.stack((file, file) for _, file in files), np.array([name for name, _ in files]))


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


def of_splits(source: Path | str, splits: dict[str, Any], x: Names | None, y: Names, client: str | None) -> Columns:
    """Columns of the splits of a Hugging Face dataset: the only one or "train", and "test" if there is one.

    Args:
      source: what has the splits, for errors.
      splits: name -> rows.
      x: the inputs; None for the images, or what `read_tables.among` chooses.
      y, client: see `read_tables.among`.
    """
    first = "train" if "train" in splits else next(iter(splits))
    if first != "train" and len(splits) > 1:
        raise InvalidInput(f"{source} has no split train (there are {', '.join(splits)})")
    found = _columns(source, splits[first], x, y, client)
    if "test" not in splits or first == "test":
        return found
    return found.tested_on(_columns(source, splits["test"], x, y, client))


def _columns(source: Path | str, rows: Any, x: Names | None, y: Names, client: str | None) -> Columns:
    """Inputs, labels and clients of a split."""
    features = {name: feature for name, feature in rows.features.items() if type(feature).__name__ == "Image"}
    # Targets stay as they are stored: the palette of a mask numbers its classes.
    inputs = {x} if isinstance(x, str) else set(x or features) - ({y} if isinstance(y, str) else set(y))
    images = [name for name in features if name in inputs]
    found = arrays(rows.select_columns([name for name in rows.features if name not in images]))
    for name in images:
        encoded = rows.with_format(None).cast_column(name, dataclasses.replace(features[name], decode=False))
        found[name] = pictures.stack(pictures.rows(encoded[name], f"{source}: {name}"), features[name].mode)
    found = among(source, found, x or images or None, y, client)
    names = getattr(rows.features[y], "names", None) if isinstance(y, str) else None
    if names:
        if found.y.min() < 0:
            raise InvalidInput(f"{source} has rows without a {y} (-1): leave them out")
        found = found._replace(y=np.array(names)[found.y])
    return found
