"""Pictures as arrays that look as the pictures do, whatever file, package or table they come from."""

import io
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pfl_jax.errors import InvalidInput, imported, one_line

ENDINGS = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm"})
"""Endings of picture files."""


def stack(named: Iterable[tuple[object, Any]]) -> np.ndarray:
    """Pictures of one size, uint8 [P, H, W, 1], or [P, H, W, 3] if any of them has color.

    - Turned upright, by the orientation in their EXIF data.
    - Palettes, CMYK and other kinds of color become RGB; black and white become 0 and 255.
    - Transparent parts become white.
    - If there are several frames, the first is read, with a warning. If color has 16 bits for a channel, the upper 8
      are read, as Pillow does.

    Each is given by a name, for errors, and the picture: a file's path, an image of Pillow, or, in the form of Hugging
    Face and pandas, {"bytes": content or None, "path": file or None}. InvalidInput for a picture that is missing or
    damaged, has another size than the first, or has numbers that do not fix a brightness (16 or 32 bits, floats).
    """
    read = [(name, _read(name, picture)) for name, picture in named]
    for name, image in read:
        (height, width), (others, across) = image.shape[1:3], read[0][1].shape[1:3]
        if (height, width) != (others, across):
            raise InvalidInput(
                f"{name} has {width} x {height} pixels, and {read[0][0]} {across} x {others}: all images must have one "
                "size"
            )
    return np.concatenate(alike([image for _, image in read]))


def alike(arrays: Sequence[Any]) -> list[Any]:
    """The arrays; gray pictures uint8 [P, H, W, 1] get three channels if others have three."""
    channels = {x.shape[-1] if x.dtype == np.uint8 and x.ndim == 4 else 0 for x in arrays}
    return [np.broadcast_to(x, (*x.shape[:-1], 3)) for x in arrays] if channels == {1, 3} else list(arrays)


def as_array(values: Any, what: str) -> np.ndarray:
    """Values as an array, pictures as in `stack`; `what` is the source of the values, for errors."""
    if getattr(values, "dtype", None) in (None, object) and np.iterable(values):
        first = next((value for value in values if value is not None), None)
        if _is_of_pillow(first) or (isinstance(first, Mapping) and set(first) == {"bytes", "path"}):
            return stack((f"{what} in row {row} (counted from 0)", value) for row, value in enumerate(values))
    return np.asarray(values)


def _is_of_pillow(value: Any) -> bool:
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def _read(name: object, picture: Any) -> np.ndarray:
    """A picture, uint8 [1, H, W, 1] or [1, H, W, 3]."""
    pillow = imported("PIL.Image", "pictures need Pillow: pip install pillow")
    if isinstance(picture, Mapping):
        picture = picture["path"] if picture["bytes"] is None else io.BytesIO(picture["bytes"])
    if picture is None:
        raise InvalidInput(f"{name} has no picture: leave such rows out")
    try:
        if _is_of_pillow(picture):
            return _decoded(pillow, picture)
        with pillow.open(picture) as opened:
            return _decoded(pillow, opened)
    except Exception as error:  # any error that decoders raise at damaged bytes
        raise InvalidInput(f"{name} is not an image that can be read ({one_line(error)})") from None


def _decoded(pillow: Any, opened: Any) -> np.ndarray:
    from PIL import ImageOps

    if getattr(opened, "n_frames", 1) > 1:
        warnings.warn("of pictures with several frames the first is read", stacklevel=2)
    opened = ImageOps.exif_transpose(opened)
    if opened.mode[0] in "IF":
        raise ValueError(f"mode {opened.mode}: its numbers have no brightness; give them as arrays in an .npz file")
    is_gray = opened.mode in ("1", "L", "LA")
    if opened.has_transparency_data:
        opened = opened.convert("RGBA")
        opened = pillow.alpha_composite(pillow.new("RGBA", opened.size, "white"), opened)
    pixels = np.asarray(opened.convert("L" if is_gray else "RGB"))
    return pixels.reshape(1, *pixels.shape[:2], -1)
