"""Pictures made from scikit-learn's digits: shapes, balance, bytes, disjoint handwriting, difficulty."""

import hashlib

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier

from pfl_jax.data import embedded
from pfl_jax.data.specs import SPECS

STAND_INS = ("cifar10", "cifar100", "cinic10", "fashion_mnist", "emnist")


def digest(arrays) -> str:
    return hashlib.sha256(b"".join(part.tobytes() for part in arrays)).hexdigest()


@pytest.mark.parametrize("name", STAND_INS)
def test_shapes_and_balance(name):
    spec = SPECS[name]
    arrays = embedded.compose_images(spec)
    for x, y, size in zip(arrays[::2], arrays[1::2], embedded.SIZES[spec.num_classes], strict=True):
        assert x.shape == (size, *spec.shape)
        assert x.dtype == np.uint8
        assert y.dtype == np.int32
        np.testing.assert_array_equal(np.bincount(y), np.full(spec.num_classes, size // spec.num_classes))


def test_bytes_are_the_same_on_every_machine():
    """Published figures rest on these bytes: a change of the pictures must be a decision."""
    assert digest(embedded.compose_images(SPECS["fashion_mnist"], 0)) == GREY
    assert digest(embedded.compose_images(SPECS["cifar100"], 0)) == COLOUR


GREY = "7dd8b2909888253f5992abda7fe1df327ff166dbd998266fea3b73f26092d9eb"
COLOUR = "7d2b275e720ea9613856349c811e0f18ac52ff6e57fb3191a97a837334d8ceab"


def test_training_and_test_digits_are_by_different_writers():
    """Every writer was asked for the same sequence of digits, so the sequence starts anew with each."""
    labels = load_digits().target
    asked = np.tile(np.arange(10), 3)
    cut = embedded.FIRST_TEST_DIGIT
    np.testing.assert_array_equal(labels[cut : cut + 30], asked)
    np.testing.assert_array_equal(labels[:30], asked)
    assert np.bincount(labels[cut:], minlength=10).min() >= 40


def test_rendering_equals_bilinear_interpolation():
    """Against the interpolation formula in float64, pixel by pixel, for a digit in a box without slant."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 17, (1, 8, 8)).astype(np.float32)
    left, top, width, height = 5, 3, 16, 24
    glyphs = embedded._Glyphs(*(np.array([v], np.int32) for v in (0, left * 16, top * 16, width, height, 0)))
    ink = embedded._render(images, glyphs, (32, 32))[0]
    for row, column in np.ndindex(32, 32):
        y, x = (row + 0.5 - top) * 8 / height - 0.5, (column + 0.5 - left) * 8 / width - 0.5
        weights = np.outer(np.maximum(0, 1 - abs(y - np.arange(8))), np.maximum(0, 1 - abs(x - np.arange(8))))
        # 16 is full ink of 128; positions are rounded down to sixteenths, once for rows and once for columns.
        assert abs(ink[row, column] - 8 * (weights * images[0]).sum()) <= 17


def test_digits_are_scikit_learns_own():
    arrays = embedded.digits()
    assert arrays.train_x.shape == (1287, 8, 8, 1)
    assert arrays.test_x.shape == (510, 8, 8, 1)
    original = load_digits().images
    whole = np.concatenate([arrays.train_x, arrays.test_x])[..., 0]
    np.testing.assert_array_equal(np.round(whole / 255 * 16), original)


def test_accuracy_is_far_from_chance_and_from_perfect():
    """Nearest neighbors among the gray ten-class pictures are far from both chance and the ceiling."""
    arrays = embedded.compose_images(SPECS["fashion_mnist"])
    flat = [x[:2000].reshape(2000, -1) / 255 for x in arrays[::2]]
    classifier = KNeighborsClassifier(5).fit(flat[0], arrays.train_y[:2000])
    assert 0.3 < classifier.score(flat[1], arrays.test_y[:2000]) < 0.75
