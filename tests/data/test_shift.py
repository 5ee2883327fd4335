"""Concept shift and feature skew: permutations of labels and rotations, against NumPy, and where they act."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pfl_jax.data import class_table, client_data, federate, load, shift
from pfl_jax.data.partition import iid

# One program for each kind of call; operation by operation, each shape would compile a dozen.
client_data = jax.jit(client_data, static_argnums=2)
rotate = jax.jit(shift.rotate)

DATASET = load("digits")
PARTITION = iid(DATASET, 7, train_size=[10, 20, 30, 15, 12, 9, 8], test_size=6)
PLAIN = federate(DATASET, PARTITION)


def slow_rotation(image, degrees):
    """Bilinear rotation in float64, pixel by pixel: image [H, W]."""
    height, width = image.shape
    cosine, sine = np.cos(np.deg2rad(degrees)), np.sin(np.deg2rad(degrees))
    result = np.zeros((height, width))
    for row in range(height):
        for column in range(width):
            # Mathematical coordinates about the center, y upwards.
            x, y = column - (width - 1) / 2, (height - 1) / 2 - row
            from_x, from_y = cosine * x + sine * y, -sine * x + cosine * y
            from_row, from_column = (height - 1) / 2 - from_y, from_x + (width - 1) / 2
            for r in range(height):
                for c in range(width):
                    weight = max(0, 1 - abs(r - from_row)) * max(0, 1 - abs(c - from_column))
                    result[row, column] += weight * image[r, c]
    return result


@pytest.mark.parametrize("degrees", [0, 30, 72, 144, 216, 288, -45])
def test_rotation_is_bilinear(degrees):
    images = np.random.default_rng(0).integers(0, 256, (2, 7, 9, 2)).astype(np.float32)
    got = rotate(jnp.asarray(images), jnp.asarray(shift.direction(degrees)))
    for image, turned in zip(images, got, strict=True):
        for channel in range(2):
            expected = slow_rotation(image[..., channel], degrees)
            np.testing.assert_allclose(turned[..., channel], expected, rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize("size", [7, 8])
def test_quarter_turns_move_pixels_exactly(size):
    images = np.random.default_rng(1).integers(0, 256, (3, size, size, 3)).astype(np.float32)
    for quarter in range(5):
        got = rotate(jnp.asarray(images), jnp.asarray(shift.direction(90.0 * quarter)))
        np.testing.assert_array_equal(got, np.rot90(images, quarter, axes=(1, 2)))


def test_groups_turn_by_equal_steps():
    got = shift.rotations(7, 4)
    np.testing.assert_array_equal(got, np.array([[1, 0], [0, 1], [-1, 0], [0, -1]] * 2, np.float32)[:7])
    degrees = np.rad2deg(np.arctan2(*shift.rotations(5, 5).T[::-1])) % 360
    np.testing.assert_allclose(degrees, [0, 72, 144, 216, 288], atol=1e-4)


def test_label_maps_are_one_permutation_for_each_group():
    maps = shift.label_maps(12, 10, 5, seed=3)
    np.testing.assert_array_equal(np.sort(maps, axis=1), np.tile(np.arange(10), (12, 1)))
    np.testing.assert_array_equal(maps[5:10], maps[:5])
    assert len(np.unique(maps, axis=0)) == 5
    assert not np.array_equal(maps, shift.label_maps(12, 10, 5, seed=4))
    np.testing.assert_array_equal(maps, shift.label_maps(12, 10, 5, seed=3))
    # As in stored results.
    assert shift.label_maps(2, 6, 2, seed=7).tolist() == [[3, 0, 2, 1, 4, 5], [4, 5, 2, 0, 1, 3]]


@pytest.mark.parametrize("split", ["train", "test"])
def test_labels_change_in_both_splits_and_nothing_else(split):
    data = federate(DATASET, PARTITION, shift="labels", num_groups=5, seed=2)
    maps = shift.label_maps(7, 10, 5, seed=2)
    for client in range(7):
        plain, shifted = client_data(PLAIN, client, split), client_data(data, client, split)
        np.testing.assert_array_equal(shifted.x, plain.x)
        np.testing.assert_array_equal(shifted.y, maps[client][np.asarray(plain.y)])
        assert shifted.y.dtype == jnp.int32
    before, after = class_table(PLAIN, split), class_table(data, split)
    np.testing.assert_array_equal(np.take_along_axis(after, maps, axis=1), before)


@pytest.mark.parametrize("split", ["train", "test"])
def test_images_turn_in_both_splits_and_nothing_else(split):
    data = federate(DATASET, PARTITION, shift="rotation", num_groups=4)
    gathered = jax.vmap(lambda client: client_data(data, client, split))(jnp.arange(7))
    for client in range(7):
        plain = client_data(PLAIN, client, split)
        turned = np.rot90(plain.x, client % 4, axes=(1, 2))
        np.testing.assert_allclose(gathered.x[client], turned, rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(gathered.y[client], plain.y)
