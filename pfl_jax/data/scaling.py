"""Normalization of inputs by the mean and standard deviation of the training rows."""

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np

from pfl_jax.data.rows import Rows, blocks

Channels = tuple[float, ...]
"""One number for each channel."""


def normalized(train_x: Any, test_x: Any) -> tuple[Any, Any, Channels | None, Channels | None]:
    """Inputs normalized for each feature, or for each channel of images [P, H, W, C].

    What does not vary in the training rows becomes 0 there.

    Args:
      train_x: [P_train, ...]; `pfl_jax.data.rows.Rows` stay so, and are read block by block.
      test_x: [P_test, ...].

    Returns:
      Both as float32, and None, None; or uint8 images as they are, and the mean and deviation per channel of pixels
      divided by 255, as `pfl_jax.data.sources.Dataset` has them.
    """
    if train_x.dtype == np.uint8 and train_x.ndim == 4:
        mean, std = _of_pixels(train_x)
        return train_x, test_x, mean, std
    axes = (0, 1, 2) if train_x.ndim == 4 else (0,)
    size = int(np.prod([train_x.shape[axis] for axis in axes], dtype=np.int64))
    mean = _sum(part.sum(axes, np.float64) for _, part in blocks(train_x)) / size
    # As by ndarray.std, for arrays of one block.
    std = np.sqrt(_sum(np.square(part - mean).sum(axes, np.float64) for _, part in blocks(train_x)) / size)
    lowest = np.min([part.min(axes) for _, part in blocks(train_x)], axis=0)
    constant = lowest == np.max([part.max(axes) for _, part in blocks(train_x)], axis=0)
    # Rounding would leave a constant a mean and a deviation that are nearly, and not exactly, its own and 0.
    mean, std = np.where(constant, lowest, mean), np.where(constant, 1.0, std)

    def scale(part):
        return ((part - mean) / std).astype(np.float32)

    train, test = (
        part.map(scale, part.shape[1:], np.float32) if isinstance(part, Rows) else scale(part)
        for part in (train_x, test_x)
    )
    return train, test, None, None


def _sum(terms: Iterable[np.ndarray]) -> np.ndarray:
    return functools.reduce(np.add, terms)


def _of_pixels(images: np.ndarray | Rows) -> tuple[Channels, Channels]:
    """Mean and deviation per channel of pixels / 255, from counts of the 256 values; deviation 1 of a constant."""
    values, means, deviations = np.arange(256) / 255, [], []
    counts = np.zeros((images.shape[-1], 256), np.int64)
    for _, part in blocks(images):
        for channel, count in enumerate(counts):
            count += np.bincount(part[..., channel].ravel(), minlength=256)
    for count in counts:
        share = count / count.sum()
        mean = float(share @ values)
        deviation = float(np.sqrt(share @ (values - mean) ** 2))
        means.append(mean)
        deviations.append(deviation if np.count_nonzero(share) > 1 else 1.0)
    return tuple(means), tuple(deviations)
