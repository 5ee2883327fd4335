"""Distribution shift between groups of clients: permuted labels (concept shift) or rotations (feature skew).

Source: FedPAC (Xu, Tong & Huang 2023), Section 6.2 "Robustness to Concept Shift" and Appendix C.10. Client i belongs to
group i mod G, as in the partitions. This module draws the shift; `pfl_jax.data.federated.client_data` applies it to
training and test examples.
"""

from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.ndimage import map_coordinates

from pfl_jax.data.sources import Dataset
from pfl_jax.errors import InvalidInput
from pfl_jax.validation import Count, check_arguments

Shift: TypeAlias = Literal["none", "labels", "rotation"]
"""Difference between groups of clients: none, a permutation of the labels, or a rotation of the images."""


@check_arguments
def label_maps(num_clients: int, num_classes: int, num_groups: Count, seed: int = 0) -> np.ndarray:
    """Label that each client has for each class, int32 [N, K]: a random permutation for each group (Section 6.2).

    Args:
      num_clients: N.
      num_classes: K.
      num_groups: G.
      seed: seed of the permutations, which are independent between groups.

    Example:
      >>> from pfl_jax.data import shift
      >>> maps = shift.label_maps(num_clients=4, num_classes=3, num_groups=2)
      >>> bool((maps[0] == maps[2]).all()), sorted(maps[0].tolist())
      (True, [0, 1, 2])
    """
    # (seed, 1) is independent of the partition's stream, which uses the seed itself.
    rng = np.random.default_rng((seed, 1))
    permutations = np.stack([rng.permutation(num_classes) for _ in range(num_groups)])
    return permutations[np.arange(num_clients) % num_groups].astype(np.int32)


@check_arguments
def rotations(num_clients: int, num_groups: Count) -> np.ndarray:
    """Cosine and sine of each client's angle, float32 [N, 2]: g 360 / G degrees for group g.

    Multiples of 90 degrees are exact. The paper does not state its angles (Appendix C.10).

    Args:
      num_clients: N.
      num_groups: G.

    Example:
      >>> from pfl_jax.data import shift
      >>> print(shift.rotations(num_clients=3, num_groups=2))
      [[ 1.  0.]
       [-1.  0.]
       [ 1.  0.]]
    """
    return direction(np.arange(num_clients) % num_groups * 360 / num_groups)


def check(shift: Shift, dataset: Dataset) -> None:
    """Raise InvalidInput for a shift that is not possible for the inputs or targets of `dataset`."""
    kind, shape = dataset.train_x.dtype, dataset.train_x.shape
    if shift == "rotation" and (len(shape) != 4 or kind not in (np.uint8, np.float32)):
        raise InvalidInput(
            f"shift rotation is for images [H, W, C] of uint8 or float32, not for inputs {kind} {list(shape[1:])}"
        )
    if shift == "labels" and not dataset.num_classes:
        raise InvalidInput(f"shift labels permutes classes, and the targets of {dataset.description} are none")


def direction(degrees: float | np.ndarray) -> np.ndarray:
    """Cosine and sine of angles in degrees [...], float32 [..., 2], with exact zeros and ones."""
    # Rounding to 15 decimals turns 6e-17 into 0, and float32 has far fewer digits.
    radians = np.deg2rad(degrees)
    return np.stack([np.cos(radians), np.sin(radians)], axis=-1).round(15).astype(np.float32)


def rotate(x: jax.Array, rotation: jax.Array) -> jax.Array:
    """Rotate images [n, H, W, C] counterclockwise about their center; pixels outside the original image are black.

    The interpolation is bilinear, so multiples of 90 degrees move the pixels of square images exactly.

    Args:
      x: pixels [n, H, W, C], float32; zero is black.
      rotation: [2], cosine and sine of the angle; may be traced.
    """
    height, width = x.shape[1:3]
    cosine, sine = rotation
    middle_row, middle_column = (height - 1) / 2, (width - 1) / 2
    row, column = jnp.meshgrid(jnp.arange(height) - middle_row, jnp.arange(width) - middle_column, indexing="ij")
    # Source position of each target pixel; rows are numbered downwards.
    source = [cosine * row + sine * column + middle_row, cosine * column - sine * row + middle_column]
    over_channels = jax.vmap(lambda channel: map_coordinates(channel, source, order=1), in_axes=-1, out_axes=-1)
    return jax.vmap(over_channels)(x)
