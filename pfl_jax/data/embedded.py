"""Synthetic image classification without a download: images composed of scikit-learn's handwritten digits.

The images have the shapes and class counts of the real datasets and replace them where those are not available:
one digit (10 classes) or two digits side by side (62 or 100 classes, class = 10 * left + right), shifted, scaled,
slanted, colored, under clutter and noise. Every output says which data it is (`pfl_jax.data.sources.Dataset`).

All arithmetic is on integers (the matrix products are of integers small enough to be exact in float32), so the
bytes of an image depend on the seed alone and not on the machine.
"""

import gzip
import importlib.util
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pfl_jax.data.specs import Arrays, DatasetSpec
from pfl_jax.errors import InvalidInput

FIRST_TEST_DIGIT = 1287
"""scikit-learn's digits come writer by writer: the label sequence 0-9, 0-9, 0-9, 0, 9, 5, 5, ... that each writer was
asked for starts anew at 0, 130, 256, ..., 1157, 1287, 1415, ... Cutting there gives ten writers to the training
images and the other four to the test images."""

SIZES: dict[int, tuple[int, int]] = {10: (12_000, 4_000), 62: (12_400, 6_200), 100: (9_000, 3_000)}
"""(training, test) images by number of classes; every class has equally many."""

_UNIT = 16  # positions and pixel weights are in sixteenths
_INK = 128  # full ink: the largest for which (difference of two colors) * ink fits 16 bits
_CHUNK = 500  # images rendered at once: they fit the cache
_FRAGMENTS = 2_000  # pieces of digits to draw the clutter from
_CLUTTER = {False: 4, True: 16}  # pieces in an image of one digit, of a pair
_NOISE = 32  # largest change of a pixel's value, of 255


class _Glyphs(NamedTuple):
    """Place and size of one digit per image; each field is int32 [B]."""

    digit: np.ndarray  # row of the digit table
    left: np.ndarray  # column at which the digit's 8 x 8 box starts, in sixteenths of a pixel
    top: np.ndarray  # row at which it starts, in sixteenths
    width: np.ndarray  # of the box, in pixels
    height: np.ndarray
    slant: np.ndarray  # columns, in sixteenths, by which the box leans over its height


def is_pairs(num_classes: int) -> bool:
    """Whether each class of this dataset is a pair of digits."""
    return num_classes > 10


def digits() -> Arrays:
    """scikit-learn's digits, scaled from 0..16 to 0..255: uint8 [., 8, 8, 1]."""
    images, labels = _handwriting()
    stretched = (images * 255 // 16).astype(np.uint8)[..., None]
    cut = FIRST_TEST_DIGIT
    return Arrays(stretched[:cut], labels[:cut], stretched[cut:], labels[cut:])


def compose_images(spec: DatasetSpec, seed: int = 0) -> Arrays:
    """Composed images with the shape and classes of a dataset; training and test images are of disjoint handwriting.

    Args:
      spec: the dataset to stand in for; 10, 62 or 100 classes, one or three channels.
      seed: the same seed gives the same bytes.
    """
    images, labels = _handwriting()
    parts = []
    handwriting = slice(0, FIRST_TEST_DIGIT), slice(FIRST_TEST_DIGIT, None)
    for part, (size, rows) in enumerate(zip(SIZES[spec.num_classes], handwriting, strict=True)):
        rng = np.random.Generator(np.random.PCG64([seed, part, spec.num_classes, *spec.shape]))
        y = rng.permutation(np.repeat(np.arange(spec.num_classes, dtype=np.int32), size // spec.num_classes))
        fragments = _fragments(rng, images[rows], spec.shape[:2])
        chunks = [
            _compose(rng, images[rows], labels[rows], fragments, y[start : start + _CHUNK], spec)
            for start in range(0, size, _CHUNK)
        ]
        parts += [np.concatenate(chunks), y]
    return Arrays(*parts)


def _handwriting() -> tuple[np.ndarray, np.ndarray]:
    """The 1797 digits, float32 [1797, 8, 8] with the values 0, 1, ..., 16, and their labels, int32 [1797]."""
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise InvalidInput("the digits need scikit-learn: pip install scikit-learn")
    # Read as a file, because importing scikit-learn takes about a second of every start.
    with gzip.open(Path(package.origin).parent / "datasets/data/digits.csv.gz", "rt") as file:
        rows = np.loadtxt(file, delimiter=",")
    return rows[:, :-1].reshape(-1, 8, 8).astype(np.float32), rows[:, -1].astype(np.int32)


def _compose(
    rng: np.random.Generator,
    images: np.ndarray,
    labels: np.ndarray,
    fragments: np.ndarray,
    y: np.ndarray,
    spec: DatasetSpec,
) -> np.ndarray:
    """Images uint8 [B, H, W, C] of the classes y [B]: background, digits, clutter, noise."""
    canvas, channels = spec.shape[:2], spec.shape[2]
    wanted = np.stack([y // 10, y % 10]) if is_pairs(spec.num_classes) else y[None]
    ink = np.zeros((len(y), *canvas), np.int16)
    for column, classes in enumerate(wanted):
        glyphs = _place(rng, _draw_digits(rng, labels, classes), canvas, column, len(wanted))
        np.maximum(ink, _render(images, glyphs, canvas), out=ink)
    pieces = _CLUTTER[is_pairs(spec.num_classes)]
    clutter = fragments[rng.integers(0, len(fragments), (pieces, len(y)))].max(axis=0)
    image = _paint(rng, ink, clutter, channels)
    # Noise from whole bytes is the fastest.
    noise = np.frombuffer(rng.bytes(image.size), np.uint8).reshape(image.shape).astype(np.int16)
    image += noise // (128 // _NOISE) - _NOISE
    return np.clip(image, 0, 255).astype(np.uint8)


def _draw_digits(rng: np.random.Generator, labels: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Random row of the digit table for each requested digit 0..9; int32 [B]."""
    order = np.argsort(labels, kind="stable").astype(np.int32)
    sizes = np.bincount(labels, minlength=10)
    starts = np.cumsum(sizes) - sizes
    return order[starts[classes] + rng.integers(0, sizes[classes])]


def _place(rng: np.random.Generator, digit: np.ndarray, canvas: tuple[int, int], column: int, columns: int) -> _Glyphs:
    """Random size and position of a digit that roughly fills one of `columns` parts of the canvas."""
    height, width = canvas
    batch = len(digit)
    cell = width // columns
    glyph_height = rng.integers(height * 5 // 8, height * 15 // 16 + 1, batch, dtype=np.int32)
    if columns == 1:
        glyph_width = np.maximum(glyph_height * rng.integers(11, 17, batch, dtype=np.int32) // 16, 8)
    else:
        glyph_width = rng.integers(cell * 3 // 4, cell * 9 // 8 + 1, batch, dtype=np.int32)
    spare_x, spare_y = (cell - glyph_width) * _UNIT, (height - glyph_height) * _UNIT
    reach = cell * _UNIT // 8  # a digit may leave its cell, or be cut at the edge, by an eighth of it
    left = column * cell * _UNIT + spare_x // 2 + _uniform(rng, np.abs(spare_x) // 3 + reach)
    top = spare_y // 2 + _uniform(rng, spare_y // 3 + height * _UNIT // 16)
    slant = _uniform(rng, glyph_width * _UNIT // 4)
    return _Glyphs(digit, left, top, glyph_width, glyph_height, slant)


def _uniform(rng: np.random.Generator, reach: np.ndarray) -> np.ndarray:
    """Uniform integers in [-reach, reach], int32 [B]."""
    return rng.integers(-reach, reach + 1).astype(np.int32)


def _render(images: np.ndarray, glyphs: _Glyphs, canvas: tuple[int, int]) -> np.ndarray:
    """Ink in 0..128, int16 [B, H, W], of the digits magnified bilinearly into their boxes.

    Bilinear weights are kernel max(0, 16 - |position - 16 j|) in sixteenths. Rows first: [B, H, 8] x [B, 8, 8] gives
    values up to 16 * 16, exact in float32 whatever the order of summation; then the columns of each row, where the
    slant makes the positions depend on the row.
    """
    height, width = canvas
    # Pixel centers, in sixteenths of a pixel of the canvas, then of the digit table.
    rows = np.arange(height, dtype=np.int32) * _UNIT + _UNIT // 2 - glyphs.top[:, None]
    position_y = rows * 8 // glyphs.height[:, None] - _UNIT // 2
    lean = rows * glyphs.slant[:, None] // (glyphs.height[:, None] * _UNIT) - glyphs.slant[:, None] // 2
    columns = np.arange(width, dtype=np.int32) * _UNIT + _UNIT // 2 - glyphs.left[:, None]
    # A multiplication by 1024 * 8 / width, rounded down, in place of a division for every pixel.
    position_x = (columns[:, None, :] + lean[:, :, None]) * (8 * 1024 // glyphs.width)[:, None, None]
    position_x = (position_x >> 10) - _UNIT // 2
    kernel = _UNIT - np.abs(position_y[..., None] - np.arange(8, dtype=np.int32) * _UNIT)
    stretched = np.maximum(kernel, 0).astype(np.float32) @ images[glyphs.digit]  # [B, H, 8], up to 256
    # One column of nothing to the left and two to the right: positions outside read from there.
    padded = np.zeros((*stretched.shape[:2], 11), np.int16)
    padded[..., 1:9] = stretched
    position_x = np.clip(position_x, -_UNIT, 8 * _UNIT)
    first = (position_x >> 4) + (1 + 11 * np.arange(len(padded) * height).reshape(-1, height, 1))
    fraction = (position_x & (_UNIT - 1)).astype(np.int16)
    flat = padded.reshape(-1)
    value = flat.take(first) * (_UNIT - fraction) + flat.take(first + 1) * fraction  # up to 4096
    return value >> 5


def _fragments(rng: np.random.Generator, images: np.ndarray, canvas: tuple[int, int]) -> np.ndarray:
    """Ink, int16 [F, H, W], of pieces of digits, cut by windows too small for the digit to be recognized."""
    height, width = canvas
    size = rng.integers(height // 2, height + 1, (2, _FRAGMENTS), dtype=np.int32)
    left, top = rng.integers(-height // 4 * _UNIT, height * 3 // 4 * _UNIT, (2, _FRAGMENTS), dtype=np.int32)
    digit = rng.integers(0, len(images), _FRAGMENTS, dtype=np.int32)
    ink = _render(images, _Glyphs(digit, left, top, size[0], size[1], np.zeros(_FRAGMENTS, np.int32)), canvas)
    window = rng.integers(height // 5, height // 3 + 1, (2, _FRAGMENTS), dtype=np.int32)
    corner = rng.integers(0, np.array([height, width])[:, None] - window)
    seen_y, seen_x = (
        (np.arange(extent) >= corner[axis][:, None]) & (np.arange(extent) < (corner + window)[axis][:, None])
        for axis, extent in enumerate(canvas)
    )
    return ink * (seen_y[:, :, None] & seen_x[:, None, :])


def _paint(rng: np.random.Generator, ink: np.ndarray, clutter: np.ndarray, channels: int) -> np.ndarray:
    """Colors, int16 [B, H, W, C]: background, digits and clutter, blended in this order by their ink.

    Every image has its own three colors; digits are lighter than the background, as in the gray datasets.
    """
    shape = (len(ink), 1, 1, channels)
    background = rng.integers(0, 60 if channels == 1 else 100, shape, dtype=np.int16)
    foreground = rng.integers(150, 256, shape, dtype=np.int16)
    distraction = rng.integers(50, 220, shape, dtype=np.int16)
    return _blend(_blend(background, foreground, ink), distraction, clutter)


def _blend(under: np.ndarray, over: np.ndarray, ink: np.ndarray) -> np.ndarray:
    """Blend of the color `over` onto `under` with opacity ink / 128."""
    return under + (((over - under) * ink[..., None]) >> 7)
