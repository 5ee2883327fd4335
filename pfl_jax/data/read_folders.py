"""Folders of a user: images by class, and Hugging Face datasets (of the hub too)."""

from pathlib import Path
from typing import Any

import numpy as np

from pfl_jax.data.read_tables import Columns, Names, among
from pfl_jax.errors import InvalidInput, imported, one_line

IMAGES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm"})
"""Endings of images; other files are left alone."""


def image_folder(path: Path, label: str | None, client: str | None) -> Columns:
    """Images of a folder whose sub-folders are the classes: uint8 [P, H, W, 1], or [P, H, W, 3] if any has color."""
    if label is not None or client is not None:
        raise InvalidInput(f"{path} is a folder of images: its sub-folders are the labels, and it names no clients")
    pillow = imported("PIL.Image", "a folder of images needs Pillow: pip install pillow")
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
            with pillow.open(file) as opened:
                mode = opened.mode
                images.append(np.asarray(opened.convert("L" if mode in ("1", "L", "LA") else "RGB")))
        # Pillow raises SyntaxError for broken PNG chunks.
        except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as error:
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
    images = [name for name, feature in rows.features.items() if type(feature).__name__ == "Image"]
    found = among(source, arrays(rows), x or images or None, y, client)
    if found.features[0] in images and found.x.ndim == 3:
        found = found._replace(x=found.x[..., None])
    names = getattr(rows.features[y], "names", None) if isinstance(y, str) else None
    if names:
        if found.y.min() < 0:
            raise InvalidInput(f"{source} has rows without a {y} (-1): leave them out")
        found = found._replace(y=np.array(names)[found.y])
    return found
