"""Augmented examples, and examples shifted by group."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import HYPER_PARAMETERS, tiny_federation, tiny_model

from pfl_jax import ClientData, InvalidInput
from pfl_jax.data import class_table, client_data, federate, federate_phases, from_arrays, load, phases, shift
from pfl_jax.data.augment import CropAndFlip
from pfl_jax.data.federated import PER_CLIENT
from pfl_jax.data.partition import iid
from pfl_jax.methods import make_method
from pfl_jax.primitives import LocalTraining

pytestmark = pytest.mark.without_f1_auc

SHAPE = (6, 6, 3)
BLACK = (-1.0, -0.5, 0.25)
AUGMENT = CropAndFlip(SHAPE, BLACK)


def images(count, seed=0):
    return np.random.default_rng(seed).uniform(1, 2, (count, *SHAPE)).astype(np.float32)


def find(image, augmented):
    """(row, column, mirrored) of the window of the bordered image [14, 14, 3] that `augmented` is; None if none."""
    bordered = np.full((14, 14, 3), BLACK, np.float32)
    bordered[4:10, 4:10] = image
    for row in range(9):
        for column in range(9):
            window = bordered[row : row + 6, column : column + 6]
            for mirrored in (False, True):
                if np.array_equal(window[:, ::-1] if mirrored else window, augmented):
                    return row, column, mirrored
    return None


def test_every_image_becomes_a_window_of_its_own():
    x = images(200)
    got = np.asarray(jax.jit(AUGMENT)(jax.random.key(0), jnp.asarray(x)))
    found = [find(image, augmented) for image, augmented in zip(x, got, strict=True)]
    assert None not in found
    rows, columns, mirrored = zip(*found, strict=True)
    # All nine positions of either axis, and a fair coin: 200 draws, five deviations.
    assert set(rows) == set(columns) == set(range(9))
    assert abs(sum(mirrored) - 100) < 36
    assert np.abs(np.corrcoef([rows, columns, mirrored]) - np.eye(3)).max() < 0.36


def batches(augment, epochs, x, key=0, padding=0, batch_size=4):
    """The images of all batches in order, [epochs, ceil(n / 4), 4, 6, 6, 3], and their labels."""
    n = len(x)
    data = ClientData(
        x=jnp.concatenate([x, jnp.zeros((padding, *SHAPE))]),
        y=jnp.arange(n + padding),
        mask=jnp.arange(n + padding) < n,
    )
    steps = epochs * -(-n // batch_size)

    def step(carry, batch, key):
        seen, labels, index = carry
        rows, real = len(batch.mask), batch.mask[:, None, None, None]
        seen = seen.at[index, :rows].set(jnp.where(real, batch.x, 0))
        return seen, labels.at[index, :rows].set(batch.y * batch.mask), index + 1

    training = LocalTraining(batch_size=batch_size, epochs=epochs, augment=augment)
    start = (jnp.zeros((steps, batch_size, *SHAPE)), jnp.zeros((steps, batch_size), jnp.int32), 0)
    seen, labels, _ = training.fold(jax.random.key(key), start, data, step)
    return np.asarray(seen), np.asarray(labels)


def test_each_batch_is_augmented_anew_and_the_order_stays():
    x = images(8)
    _, order = batches(None, 3, x)
    seen, labels = batches(AUGMENT, 3, x)
    np.testing.assert_array_equal(labels, order)
    draws = {}
    for batch, batch_labels in zip(seen, labels, strict=True):
        for image, label in zip(batch, batch_labels, strict=True):
            draws.setdefault(int(label), []).append(find(x[label], image))
    assert all(None not in found and len(found) == 3 for found in draws.values())
    # 162 equally likely windows: three epochs of eight examples hardly ever meet one twice.
    assert len({(label, *window) for label, found in draws.items() for window in found}) > 20
    # Other positions in the batch, other batches and other keys have other draws.
    assert len({window for found in draws.values() for window in found}) > 18
    assert not np.array_equal(seen, batches(AUGMENT, 3, x, key=1)[0])


# The tiny problem's images are 2 x 3 pixels of one channel.
TINY = CropAndFlip((2, 3, 1), (-2.0,), border=1)


@pytest.mark.parametrize("name", [pytest.param("fedpac", marks=pytest.mark.slow), "fedem"])
def test_augmentation_applies_to_every_method(name):
    """FedPAC's backbone, but not its head, whose inputs are features; FedEM's labels come with responsibilities."""
    key = jax.random.key(3)

    def personal(augment):
        method = make_method(name, tiny_model(), **HYPER_PARAMETERS, augment=augment)
        train = client_data(tiny_federation(), 1, "train")

        @jax.jit
        def trained(train):
            server = method.init_server(key)
            return method.local(key, server, method.init_client(key, server, train), train).personal

        return trained(train)

    plain, augmented = personal(None), personal(TINY)
    if name == "fedpac":
        np.testing.assert_array_equal(plain["head"]["kernel"], augmented["head"]["kernel"])
        plain, augmented = plain["backbone"], augmented["backbone"]
    change = jax.tree.map(lambda one, other: jnp.max(jnp.abs(one - other)), plain, augmented)
    assert max(jax.tree.leaves(change)) > 1e-3


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
def test_noise_is_of_each_example_and_the_same_in_every_round(split):
    data = federate(DATASET, PARTITION, shift="noise", num_groups=4)
    tables = {name: getattr(data, name) for name in PER_CLIENT if getattr(data, name) is not None}
    turned = data._replace(row=jnp.arange(7)[::-1], **{name: table[::-1] for name, table in tables.items()})
    # Pixels are divided by this.
    deviation = np.std(DATASET.train_x.astype(np.float64)) / (255 * np.asarray(DATASET.std))
    noises = []
    for client in range(7):
        plain, noisy = client_data(PLAIN, client, split), client_data(data, client, split)
        noise = np.asarray(noisy.x, np.float64) - np.asarray(plain.x)
        assert noise.std() == pytest.approx(client % 4 / 4 * deviation, rel=0.1)
        noises.append(noise[np.asarray(plain.mask)])
        np.testing.assert_array_equal(noisy.y, plain.y)
        # Also where a device has the tables in another order.
        np.testing.assert_array_equal(client_data(turned, client, split).x, noisy.x)
    # Of each client, of each example and of each split another one.
    noisy, plain = (client_data(one, 1, "test" if split == "train" else "train").x[0] for one in (data, PLAIN))
    for other in (noises[5][0], noises[1][1], np.asarray(noisy) - np.asarray(plain)):
        assert abs(np.corrcoef(noises[1][0].ravel(), other.ravel())[0, 1]) < 0.5


@pytest.mark.parametrize("split", ["train", "test"])
def test_each_group_but_the_first_lacks_other_numbers(split):
    data = federate(DATASET, PARTITION, shift="missing", num_groups=4, seed=2)
    lacks = shift.missing_inputs(7, 4, DATASET.input_shape, seed=2)
    assert lacks[:4].sum(axis=(1, 2, 3)).tolist() == [0, 16, 16, 16]
    assert lacks[:4].sum(axis=0).max() == 1
    np.testing.assert_array_equal(lacks[4:], lacks[:3])
    for client in range(7):
        plain, partial = client_data(PLAIN, client, split), client_data(data, client, split)
        black = -np.asarray(DATASET.mean) / np.asarray(DATASET.std)
        np.testing.assert_allclose(partial.x, np.where(lacks[client], black, plain.x), rtol=1e-5)
        np.testing.assert_array_equal(partial.y, plain.y)


@pytest.mark.parametrize("split", ["train", "test"])
def test_images_turn_in_both_splits_and_nothing_else(split):
    data = federate(DATASET, PARTITION, shift="rotation", num_groups=4)
    gathered = jax.vmap(lambda client: client_data(data, client, split))(jnp.arange(7))
    for client in range(7):
        plain = client_data(PLAIN, client, split)
        turned = np.rot90(plain.x, client % 4, axes=(1, 2))
        np.testing.assert_allclose(gathered.x[client], turned, rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(gathered.y[client], plain.y)


def test_what_turns_into_normalized_images_is_black():
    """As it is for their bytes."""
    x, y = np.random.default_rng(0).integers(100, 256, (12, 5, 5, 2)).astype(np.uint8), np.arange(12) % 2
    of_bytes, of_floats = (from_arrays(one, y, normalize=True) for one in (x, (x / 255).astype(np.float32)))
    parts = iid(of_bytes, 3)
    want, got = (federate(one, parts, shift="rotation", num_groups=3) for one in (of_bytes, of_floats))
    for client in range(3):
        pixels = client_data(want, client, "train").x
        np.testing.assert_allclose(client_data(got, client, "train").x, pixels, rtol=1e-4, atol=1e-4)
    turned, expected = phases.rotated(of_floats, 30).train_x, phases.rotated(of_bytes, 30).train_x / 255
    # Bytes are rounded.
    atol = 0.5 / 255 / min(of_bytes.std)
    np.testing.assert_allclose(turned, (expected - of_bytes.mean) / of_bytes.std, atol=1.01 * atol)


def test_phases_have_one_scale():
    x, y = np.random.default_rng(0).normal(size=(2, 12, 4, 4, 1)), np.arange(12) % 2
    parts = [iid(from_arrays(x[0], y), 3)] * 2
    turned = [phases.rotated(from_arrays(x[0], y, normalize=True), angle) for angle in (0, 90)]
    for good in (turned, [from_arrays(one, y) for one in x]):
        federate_phases(good, parts, [2])
    dark = from_arrays(np.uint8(x[0] > 0), y)
    light = dark._replace(train_x=x[0][:8], test_x=x[0][8:])
    for bad, said in (
        ([from_arrays(one, y, normalize=True) for one in x], "preparation"),
        ([dark, light], "the type of their inputs, uint8 and float32"),
    ):
        with pytest.raises(InvalidInput, match=f"the data sets of the phases differ in {said}.*: make one data set of"):
            federate_phases(bad, parts, [2])


def test_a_shift_of_one_group_is_refused():
    with pytest.raises(InvalidInput, match="shift noise makes groups of clients differ: give num_groups, at least 2"):
        federate(DATASET, PARTITION, shift="noise")


@pytest.mark.parametrize("kind", ["noise", "missing"])
def test_symbols_have_no_noise(kind):
    symbols = DATASET._replace(train_x=DATASET.train_x.astype(np.int32), test_x=DATASET.test_x.astype(np.int32))
    with pytest.raises(InvalidInput, match=f"shift {kind} is for inputs of uint8 or float32, not int32"):
        shift.check(kind, symbols)
