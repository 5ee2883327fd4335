"""Normalization of inputs by the mean and standard deviation of the training rows."""

import numpy as np

Channels = tuple[float, ...]
"""One number for each channel."""


def normalized(
    train_x: np.ndarray, test_x: np.ndarray
) -> tuple[np.ndarray, np.ndarray, Channels | None, Channels | None]:
    """Inputs normalized for each feature, or for each channel of images [P, H, W, C].

    What does not vary in the training rows becomes 0 there.

    Args:
      train_x: [P_train, ...].
      test_x: [P_test, ...].

    Returns:
      Both as float32, and None, None; or uint8 images as they are, and the mean and deviation per channel of pixels
      divided by 255, as `pfl_jax.data.sources.Dataset` has them.
    """
    if train_x.dtype == np.uint8 and train_x.ndim == 4:
        mean, std = _of_pixels(train_x)
        return train_x, test_x, mean, std
    axes = (0, 1, 2) if train_x.ndim == 4 else (0,)
    mean, std = train_x.mean(axes, np.float64), train_x.std(axes, np.float64)
    lowest, constant = train_x.min(axes), train_x.min(axes) == train_x.max(axes)
    # Rounding would leave a constant a mean and a deviation that are nearly, and not exactly, its own and 0.
    mean, std = np.where(constant, lowest, mean), np.where(constant, 1.0, std)
    return *(((part - mean) / std).astype(np.float32) for part in (train_x, test_x)), None, None


def _of_pixels(images: np.ndarray) -> tuple[Channels, Channels]:
    """Mean and deviation per channel of pixels / 255, from counts of the 256 values; deviation 1 of a constant."""
    values, means, deviations = np.arange(256) / 255, [], []
    for channel in range(images.shape[-1]):
        share = np.bincount(images[..., channel].ravel(), minlength=256) / images[..., channel].size
        mean = float(share @ values)
        deviation = float(np.sqrt(share @ (values - mean) ** 2))
        means.append(mean)
        deviations.append(deviation if np.count_nonzero(share) > 1 else 1.0)
    return tuple(means), tuple(deviations)
