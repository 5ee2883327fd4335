"""Synthetic image classification without a download: images composed of scikit-learn's handwritten digits.

The images have the shapes and class counts of the real datasets and replace them where these are not available:
one digit (10 classes) or two digits side by side (62 or 100 classes, class = 10 * left + right), of random size, place
and colors, under pieces of other digits and noise. Every output says which data was used
(`pfl_jax.data.sources.Dataset`). All arithmetic is on integers, so the bytes of an image depend only on the seed.
"""

import gzip
import importlib.util
from pathlib import Path

import numpy as np

from pfl_jax.data.specs import Arrays, DatasetSpec
from pfl_jax.errors import InvalidInput

FIRST_TEST_DIGIT = 1287
"""scikit-learn's digits come writer by writer. Each was asked for one label sequence, 0-9, 0-9, 0-9, 0, 9, 5, 5, ...,
which starts anew at 0, 130, 256, ..., 1157, 1287, 1415, ... Cutting at 1287 gives ten writers to the training
images and the other four to the test images."""

SIZES: dict[int, tuple[int, int]] = {10: (12_000, 4_000), 62: (12_400, 6_200), 100: (9_000, 3_000)}
"""(training, test) images by number of classes; each class has the same number."""

NOISE = 32
"""Largest change of a pixel's value, which is at most 255."""


def is_pairs(num_classes: int) -> bool:
    """Whether each class of this dataset is a pair of digits."""
    return num_classes > 10


def digits() -> Arrays:
    """scikit-learn's digits, scaled from 0..16 to 0..255: uint8 [., 8, 8, 1]."""
    images, labels = _handwriting()
    stretched = (images.astype(np.int32) * 255 // 16).astype(np.uint8)[..., None]
    cut = FIRST_TEST_DIGIT
    return Arrays(stretched[:cut], labels[:cut], stretched[cut:], labels[cut:])


def compose_images(spec: DatasetSpec, seed: int = 0) -> Arrays:
    """Composed images with the shape and classes of a dataset; training and test images have different writers."""
    (height, width, channels), classes = spec.shape, spec.num_classes
    images, labels = _handwriting()
    parts = []
    handwriting = slice(0, FIRST_TEST_DIGIT), slice(FIRST_TEST_DIGIT, None)
    for part, (size, rows) in enumerate(zip(SIZES[classes], handwriting, strict=True)):
        rng = np.random.Generator(np.random.PCG64([seed, part, classes, *spec.shape]))
        own, of_digit = images[rows], [np.flatnonzero(labels[rows] == digit) for digit in range(10)]
        y = rng.permutation(np.repeat(np.arange(classes, dtype=np.int32), size // classes))
        wanted = (y // 10, y % 10) if is_pairs(classes) else (y,)
        cell, ink = width // len(wanted), np.zeros((size, height, width), np.int16)
        for column, which in enumerate(wanted):
            drawn = np.stack([rng.choice(of_digit[digit], size) for digit in range(10)])[which, np.arange(size)]
            np.maximum(ink, _placed(rng, own[drawn], (height, width), column * cell, cell), out=ink)
        # Some rows of another digit, at half brightness.
        pieces = own[rng.integers(0, len(own), size)] * rng.integers(0, 2, (size, 8, 1), np.int16)
        np.maximum(ink, _placed(rng, pieces, (height, width), 0, width) // 2, out=ink)
        dark, light = (rng.integers(*ends, (size, 1, 1, channels), np.int16) for ends in ((0, 100), (150, 256)))
        image = dark + (light - dark) * ink[..., None] // 16
        image += rng.integers(-NOISE, NOISE + 1, image.shape, np.int16)
        parts += [np.clip(image, 0, 255).astype(np.uint8), y]
    return Arrays(*parts)


def _placed(rng: np.random.Generator, glyphs: np.ndarray, canvas: tuple[int, int], left: int, cell: int) -> np.ndarray:
    """Ink [B, H, W] of digits [B, 8, 8] of random size and place, within the columns that begin at `left`."""
    places = []
    for extent, start, room in ((canvas[0], 0, canvas[0]), (canvas[1], left, cell)):
        size = rng.integers(room * 5 // 8, room + 1, (len(glyphs), 1))
        first = start - room // 8 + rng.integers(0, room - size + room // 4 + 1)
        places.append(np.clip((np.arange(extent) - first) * 8 // size, -1, 8) + 1)
    ink, rows = np.pad(glyphs, ((0, 0), (1, 1), (1, 1))), np.arange(len(glyphs))
    return ink[rows[:, None, None], places[0][:, :, None], places[1][:, None, :]]


def _handwriting() -> tuple[np.ndarray, np.ndarray]:
    """The 1797 digits, int16 [1797, 8, 8] with the values 0, 1, ..., 16, and their labels, int32 [1797]."""
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise InvalidInput("the digits need scikit-learn: pip install scikit-learn")
    # Read as a file, because importing scikit-learn takes about a second of every start.
    with gzip.open(Path(package.origin).parent / "datasets/data/digits.csv.gz", "rt") as file:
        rows = np.loadtxt(file, delimiter=",")
    return rows[:, :-1].reshape(-1, 8, 8).astype(np.int16), rows[:, -1].astype(np.int32)
