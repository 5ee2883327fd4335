"""Folders of a user: images by class, and Hugging Face datasets (of the hub too)."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np

from pfl_jax.data.read_tables import Columns, check_names, require
from pfl_jax.errors import InvalidInput, one_line

IMAGES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm"})
"""Endings of images; other files are left alone."""

GRAY = ("1", "L", "LA")
"""Modes of Pillow that have no color."""


def image_folder(path: Path, label: str | None, client: str | None) -> Columns:
    """Images of a folder whose sub-folders are the classes: uint8 [P, H, W, 1], or [P, H, W, 3] if any has color.

    Raises:
      InvalidInput: no images, a damaged one, or images of different sizes.
    """
    if label is not None or client is not None:
        raise InvalidInput(f"{path} is a folder of images: its sub-folders are the labels, and it names no clients")
    try:
        from PIL import Image
    except ImportError:
        raise InvalidInput("a folder of images needs Pillow: pip install pillow") from None
    files = [
        (folder.name, file)
        for folder in sorted(path.iterdir())
        if folder.is_dir() and not folder.name.startswith(".")
        for file in sorted(folder.rglob("*"))
        if file.suffix.lower() in IMAGES and not file.name.startswith(".")
    ]
    if not files:
        raise InvalidInput(f"{path} has no images: give a folder with a sub-folder of images for each class")
    images: list[Any] = []
    for _, file in files:
        try:
            with Image.open(file) as opened:
                mode = opened.mode
                images.append(np.asarray(opened.convert("L" if mode in GRAY else "RGB")))
        # Pillow raises SyntaxError for broken PNG chunks.
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise InvalidInput(f"{file} is no image that can be read ({one_line(error)})") from None
        if mode.startswith(("I", "F")):
            raise InvalidInput(f"{file} has more than 8 bits for a pixel: give it as arrays in an .npz file")
    height, width = images[0].shape[:2]
    for (_, file), image in zip(files, images, strict=True):
        if image.shape[:2] != (height, width):
            raise InvalidInput(
                f"{file} has {image.shape[1]} x {image.shape[0]} pixels, and {files[0][1]} {width} x {height}: "
                "all images must have one size"
            )
    channels = 3 if any(image.ndim == 3 for image in images) else 1
    x = np.stack([np.broadcast_to(image.reshape(height, width, -1), (height, width, channels)) for image in images])
    return Columns(x, np.array([name for name, _ in files]))


def is_hugging_face(path: Path) -> bool:
    """Whether a folder was written by `save_to_disk`."""
    return any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))


def hugging_face(source: Path | str, label: str | None, client: str | None) -> Columns:
    """Columns of a Hugging Face dataset: its only split or "train", and "test" if there is one.

    Args:
      source: a folder of `save_to_disk`, or a name on the hub.
      label, client: names of columns, the labels' by default label.

    Raises:
      InvalidInput: the package datasets is missing, the data cannot be read, or has no such columns.
    """
    label = label or "label"
    splits = _splits(source)
    first = "train" if "train" in splits else next(iter(splits))
    if first != "train" and len(splits) > 1:
        raise InvalidInput(f"{source} has no split train (there are {', '.join(splits)})")
    found = _columns(source, splits[first], label, client)
    if "test" not in splits or first == "test":
        return found
    test = _columns(source, splits["test"], label, client)
    return found._replace(test_x=test.x, test_y=test.y, test_client=test.client)


def hugging_face_rows(name: str) -> dict[str, dict[str, np.ndarray]]:
    """All arrays of a dataset on the hub, by split and column."""
    return {split: _arrays(rows) for split, rows in _splits(name).items()}


def _splits(source: Path | str) -> dict[str, Any]:
    """Splits of a dataset by name."""
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise InvalidInput("a Hugging Face dataset needs the package datasets: pip install datasets") from None
    try:
        loaded = datasets.load_from_disk(str(source)) if isinstance(source, Path) else datasets.load_dataset(source)
    except Exception as error:  # whatever Arrow, the file system or the network raise
        raise InvalidInput(f"{source} cannot be loaded as a Hugging Face dataset ({one_line(error)})") from None
    return dict(loaded) if isinstance(loaded, dict) else {"train": loaded}


def _arrays(rows: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(values) for name, values in rows.with_format("numpy")[:].items()}


def _columns(source: Path | str, rows: Any, label: str, client: str | None) -> Columns:
    """Inputs, labels and clients of a split."""
    arrays = _arrays(rows)
    require(source, "column", (label, client), arrays)
    y, owner = arrays[label], None if client is None else arrays[client]
    names = getattr(rows.features[label], "names", None)
    if names:
        if y.min() < 0:
            raise InvalidInput(f"{source} has rows without a {label} (-1): leave them out")
        y = np.array(names)[y]
    inputs = {name: values for name, values in arrays.items() if name not in (label, client)}
    images = [name for name in inputs if type(rows.features[name]).__name__ == "Image"]
    chosen = images or [name for name, values in inputs.items() if values.ndim > 1] or list(inputs)
    if not chosen:
        raise InvalidInput(f"{source} has no inputs: its only columns are {', '.join(arrays)}")
    check_names(source, chosen)
    if odd := [name for name in chosen if inputs[name].dtype.kind not in "fiub"]:
        raise InvalidInput(f"{source}: the column {odd[0]} is not numeric, or its rows are of different shapes")
    if len(chosen) > 1 and inputs[chosen[0]].ndim > 1:
        raise InvalidInput(f"{source} has several columns of arrays ({', '.join(chosen)}): leave one")
    x = inputs[chosen[0]]
    if x.ndim == 1:
        x = np.stack([inputs[name] for name in chosen], axis=1)
    elif images and x.ndim == 3:
        x = x[..., None]
    return Columns(x, y, owner, features=tuple(chosen))
