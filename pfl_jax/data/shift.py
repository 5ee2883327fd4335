"""Distribution shift between groups of clients: permuted labels (concept shift) or rotations (feature skew).

Source: FedPAC (Xu, Tong & Huang 2023), Section 6.2 "Robustness to Concept Shift" and Appendix C.10. Client i belongs to
group i mod G, as in the partitions. A shift is drawn here once; `pfl_jax.data.federated.client_data` applies it to
training and test examples alike.
"""

from typing import Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np

from pfl_jax.errors import InvalidInput

Shift: TypeAlias = Literal["none", "labels", "rotation"]
"""What differs between groups of clients: nothing, the labels' names, or how images are turned."""

SHIFTS: tuple[str, ...] = get_args(Shift)
"""All of them."""


def label_maps(num_clients: int, num_classes: int, num_groups: int, seed: int = 0) -> np.ndarray:
    """Random permutation of the labels for each group (Section 6.2: "a specific permutation of labels").

    Args:
      num_clients: N.
      num_classes: K.
      num_groups: G.
      seed: of the permutations; those of different groups are independent.

    Returns:
      int32 [N, K]: what client i calls class k.

    Raises:
      InvalidInput: fewer than one group.

    Example:
      >>> from pfl_jax.data import shift
      >>> maps = shift.label_maps(num_clients=4, num_classes=3, num_groups=2)
      >>> bool((maps[0] == maps[2]).all()), sorted(maps[0].tolist())
      (True, [0, 1, 2])
    """
    _check_groups(num_groups)
    # A stream of its own: the partition draws from the seed alone.
    rng = np.random.default_rng((seed, 1))
    permutations = np.stack([rng.permutation(num_classes) for _ in range(num_groups)])
    return permutations[np.arange(num_clients) % num_groups].astype(np.int32)


def rotations(num_clients: int, num_groups: int) -> np.ndarray:
    """Angles g 360 / G for the groups g: the paper gives none (Appendix C.10: "a certain degree"), these differ most.

    Args:
      num_clients: N.
      num_groups: G.

    Returns:
      float32 [N, 2]: cosine and sine of each client's angle; exact for multiples of 90 degrees.

    Raises:
      InvalidInput: fewer than one group.

    Example:
      >>> from pfl_jax.data import shift
      >>> print(shift.rotations(num_clients=3, num_groups=2))
      [[ 1.  0.]
       [-1.  0.]
       [ 1.  0.]]
    """
    _check_groups(num_groups)
    return direction(np.arange(num_clients) % num_groups * 360 / num_groups)


def direction(degrees: float | np.ndarray) -> np.ndarray:
    """Cosine and sine of angles in degrees [...], float32 [..., 2], with exact zeros and ones."""
    # 15 decimals turn 6e-17 into 0 and are far more than float32 keeps.
    radians = np.deg2rad(degrees)
    return np.stack([np.cos(radians), np.sin(radians)], axis=-1).round(15).astype(np.float32)


def rotate(x: jax.Array, rotation: jax.Array) -> jax.Array:
    """Images rotated counterclockwise about their center, with black where they have no pixels.

    Bilinear between the four nearest pixels, so multiples of 90 degrees move square images' pixels exactly.

    Args:
      x: pixels [n, H, W, C], float32; zero is black.
      rotation: [2], cosine and sine of the angle; may be traced.

    Returns:
      [n, H, W, C].
    """
    height, width, channels = x.shape[1:]
    cosine, sine = rotation
    middle_row, middle_column = (height - 1) / 2, (width - 1) / 2
    row, column = jnp.meshgrid(jnp.arange(height) - middle_row, jnp.arange(width) - middle_column, indexing="ij")
    # Where each target pixel comes from; rows count downwards.
    source_row = cosine * row + sine * column + middle_row
    source_column = cosine * column - sine * row + middle_column
    top, left = jnp.floor(source_row), jnp.floor(source_column)
    flat = x.reshape(x.shape[0], height * width, channels)
    turned = jnp.zeros_like(flat)
    # One index table for all images: a gather along the pixels.
    for r, row_weight in ((top, 1 - (source_row - top)), (top + 1, source_row - top)):
        for c, column_weight in ((left, 1 - (source_column - left)), (left + 1, source_column - left)):
            inside = (r >= 0) & (r < height) & (c >= 0) & (c < width)
            index = jnp.where(inside, r * width + c, 0).astype(jnp.int32).reshape(-1)
            weight = jnp.where(inside, row_weight * column_weight, 0).reshape(-1, 1)
            turned += weight * flat[:, index]
    return turned.reshape(x.shape)


def check(shift: str) -> None:
    """Raise InvalidInput for an unknown shift."""
    if shift not in SHIFTS:
        raise InvalidInput(f"unknown shift '{shift}' (there are {', '.join(SHIFTS)})")


def _check_groups(num_groups: int) -> None:
    if num_groups < 1:
        raise InvalidInput(f"the number of groups is at least 1, not {num_groups}")
