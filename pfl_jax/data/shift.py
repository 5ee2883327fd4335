"""Distribution shift between groups of clients: permuted labels (concept shift), or inputs that differ (feature skew).

Source of labels and rotations: FedPAC (Xu, Tong & Huang 2023), Section 6.2 "Robustness to Concept Shift" and Appendix
C.10. Source of the noise, which grows from client to client: Li et al., Federated Learning on Non-IID Data Silos (ICDE
2022), Section 4. Client i belongs to group i mod G, as in the partitions. This module draws the shift;
`pfl_jax.data.federated.client_data` applies it to all examples.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.ndimage import map_coordinates

from pfl_jax.data.sources import Dataset
from pfl_jax.data.specs import Shift
from pfl_jax.errors import InvalidInput
from pfl_jax.validation import Count, check_arguments


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
def missing_inputs(num_clients: int, num_groups: Count, shape: Sequence[int], seed: int = 0) -> np.ndarray:
    """Numbers of an input that each client lacks, bool [N, ...]: 1 / G of them, different ones in each group.

    The first group lacks none. In images [H, W, C], pixels are missing in all channels: [N, H, W, 1].

    Args:
      num_clients: N.
      num_groups: G.
      shape: shape of one input.
      seed: seed of the draw.

    Example:
      >>> from pfl_jax.data import shift
      >>> lacks = shift.missing_inputs(num_clients=3, num_groups=2, shape=(4,))
      >>> lacks.sum(axis=1).tolist()
      [0, 2, 0]
    """
    drawn = shape[:2] if len(shape) == 3 else shape
    # (seed, 2): see `label_maps`.
    lacking = np.random.default_rng((seed, 2)).permutation(math.prod(drawn)) % num_groups
    group = np.arange(num_clients)[:, None] % num_groups
    lacks = (lacking == group) & (group > 0)
    return lacks.reshape(num_clients, *drawn, *(1 for _ in shape[len(drawn) :]))


def check(shift: Shift, dataset: Dataset) -> None:
    """Raise InvalidInput for a shift that is not possible for the inputs or targets of `dataset`."""
    kind, shape = dataset.train_x.dtype, dataset.train_x.shape
    if shift == "rotation" and (len(shape) != 4 or kind not in (np.uint8, np.float32)):
        raise InvalidInput(
            f"shift rotation is for images [H, W, C] of uint8 or float32, not for inputs {kind} {list(shape[1:])}"
        )
    if shift in ("noise", "missing") and kind not in (np.uint8, np.float32):
        raise InvalidInput(f"shift {shift} is for inputs of uint8 or float32, not {kind}")
    if shift == "labels" and not dataset.num_classes:
        raise InvalidInput(f"shift labels permutes classes, but the targets of {dataset.description} are not classes")


def draw(shift: Shift, dataset: Dataset, num_clients: int, num_groups: int, seed: int) -> dict[str, np.ndarray]:
    """Values [N, ...] of the fields of `FederatedData` that define how a shift changes each client's examples.

    In group g of G, images are rotated by g 360 / G degrees, and noise has g / G times the deviation of the inputs.

    Args:
      shift: kind of the shift.
      dataset: the examples.
      num_clients, num_groups, seed: N, G and the seed of all random numbers.

    Raises:
      InvalidInput: there is only one group, so clients would not differ.
    """
    if shift != "none" and num_groups == 1 < num_clients:
        raise InvalidInput(f"shift {shift} makes groups of clients differ: give num_groups, at least 2")
    if shift == "labels":
        return {"label_map": label_maps(num_clients, dataset.num_classes, num_groups, seed)}
    group = np.arange(num_clients) % num_groups
    if shift == "rotation":
        # The paper does not state its angles (Appendix C.10).
        return {"rotation": direction(group * 360 / num_groups, dataset)}
    if shift == "noise":
        return {"noise": (group / num_groups * np.std(dataset.train_x, dtype=np.float64)).astype(np.float32)}
    if shift == "missing":
        return {"missing": missing_inputs(num_clients, num_groups, dataset.input_shape, seed)}
    return {}


def shifted(x: jax.Array, data: Any, row: jax.Array | int, client: jax.Array | int, split: int) -> jax.Array:
    """Inputs [n, ...] of a client after its shift.

    Args:
      x: the inputs.
      data: the `FederatedData`.
      row: row of the client in the tables.
      client: number of the client.
      split: number of the split.
    """
    if data.rotation is not None:
        return rotate(x.astype(jnp.float32), data.rotation[row])
    if data.noise is not None:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), split), client)
        # The same in every round. A key for each example: its noise must not depend on the padding.
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(len(x)))
        return x.astype(jnp.float32) + data.noise[row] * jax.vmap(lambda key: jax.random.normal(key, x.shape[1:]))(keys)
    if data.missing is not None:
        return jnp.where(data.missing[row], jnp.zeros((), x.dtype), x)
    return x


def direction(degrees: float | np.ndarray, dataset: Dataset | None = None) -> np.ndarray:
    """Cosine and sine of angles, float32 [..., 2], with exact zeros and ones; and where black is not 0, black [C] too.

    Args:
      degrees: the angles [...].
      dataset: images; if their preparation normalized them, the result has the value of black in each channel.
    """
    # Rounding to 15 decimals turns 6e-17 into 0, and float32 has far fewer digits.
    radians, scale = np.deg2rad(degrees), dataset and dataset.preparation
    found = np.stack([np.cos(radians), np.sin(radians)], axis=-1).round(15)
    if scale is not None and scale.mean is not None:
        black = -np.divide(scale.mean, scale.std)
        found = np.concatenate([found, np.broadcast_to(black, (*found.shape[:-1], len(black)))], axis=-1)
    return found.astype(np.float32)


def rotate(x: jax.Array, rotation: jax.Array) -> jax.Array:
    """Rotate images [n, H, W, C] counterclockwise about their center; pixels outside the original image are black.

    The interpolation is bilinear, so multiples of 90 degrees move the pixels of square images exactly.

    Args:
      x: pixels [n, H, W, C], float32.
      rotation: [2], cosine and sine of the angle, or [2 + C], followed by black, otherwise zero; may be traced.
    """
    height, width = x.shape[1:3]
    cosine, sine, *black = rotation
    middle_row, middle_column = (height - 1) / 2, (width - 1) / 2
    row, column = jnp.meshgrid(jnp.arange(height) - middle_row, jnp.arange(width) - middle_column, indexing="ij")
    # Source position of each target pixel; rows are numbered downwards.
    source = [cosine * row + sine * column + middle_row, cosine * column - sine * row + middle_column]
    over_channels = jax.vmap(lambda channel: map_coordinates(channel, source, order=1), in_axes=-1, out_axes=-1)
    return jax.vmap(over_channels)(x - jnp.stack(black)) + jnp.stack(black) if black else jax.vmap(over_channels)(x)
