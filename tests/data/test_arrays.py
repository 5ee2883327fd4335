"""A user's arrays reach the model as they are, and natural clients have their own rows alone."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pfl_jax import ClientData, InvalidInput, client_mesh
from pfl_jax.data import class_table, client_data, federate, federate_runs, from_arrays, load, partition, select_run
from pfl_jax.engine import placement
from pfl_jax.networks import models
from pfl_jax.primitives import deployed_loss, fisher

# One program for each kind of call; operation by operation, each shape would compile a dozen.
client_data = jax.jit(client_data, static_argnums=2)

RNG = np.random.default_rng(0)
Y = np.arange(40) % 4
SHAPES = [(7,), (5, 3), (6, 6, 2), (2, 3, 4, 5)]
KINDS = [np.float64, np.float32, np.float16, np.int64, np.int32, np.int16, np.uint32, np.uint8, bool]


def inputs(kind, shape, size=40):
    values = RNG.normal(size=(size, *shape)) * 50 if np.issubdtype(kind, np.floating) else None
    return (RNG.integers(0, 2 if kind is bool else 200, (size, *shape)) if values is None else values).astype(kind)


def federation(dataset, clients=3):
    parts = partition.iid(dataset, clients)
    return federate(dataset, parts), parts


@pytest.mark.parametrize(("kind", "shape"), list(zip(KINDS, itertools.cycle(SHAPES), strict=False)))
def test_inputs_are_equal_at_the_model_for_every_type_and_rank(kind, shape):
    x, test_x = inputs(kind, shape), inputs(kind, shape)
    dataset = from_arrays(x, Y, test_x=test_x, test_y=Y)
    assert dataset.input_shape == shape
    data, parts = federation(dataset)
    pool = np.concatenate([x, test_x])
    for split in ("train", "test"):
        for client, rows in enumerate(getattr(parts, split)):
            got = client_data(data, client, split)
            # JAX has no integers of 64 bits, and only those of 32 that have a sign hold both.
            assert got.x.dtype == {bool: np.uint8, np.uint32: np.int32}.get(kind, got.x.dtype)
            assert (got.x.dtype.kind == "f") == (np.dtype(kind).kind == "f")
            assert got.x.dtype.itemsize <= 4
            # float32 is all that is lost of a wider float.
            wanted = pool[rows].astype(np.float32) if pool.dtype.kind == "f" else pool[rows]
            np.testing.assert_array_equal(got.mask, np.arange(len(got.mask)) < len(rows))
            np.testing.assert_array_equal(got.x[: len(rows)], wanted)
            np.testing.assert_array_equal(got.y[: len(rows)], np.concatenate([Y, Y])[rows])


def test_the_pool_has_what_is_used_in_order():
    dataset = load("digits")
    parts = partition.dirichlet(dataset, 6, beta=0.5, train_size=[50, 60, 70, 80, 90, 100], seed=1)
    data, used = federate(dataset, parts), np.unique(np.concatenate([*parts.train, *parts.test]))
    x, y = (np.concatenate([getattr(dataset, f"{split}_{one}") for split in ("train", "test")]) for one in "xy")
    assert (len(used) < len(y), data.num_clients, data.x.dtype) == (True, 6, jnp.uint8)
    np.testing.assert_array_equal(data.x, x[used])
    np.testing.assert_array_equal(data.y, y[used])
    for split in ("train", "test"):
        expected = [np.bincount(y[rows], minlength=10) for rows in getattr(parts, split)]
        np.testing.assert_array_equal(class_table(data, split), expected)


def test_each_run_has_the_clients_and_the_shift_of_its_own_seed():
    dataset = from_arrays(inputs(np.int32, (3,)), Y)
    several, shifted = [partition.iid(dataset, 4, seed=seed) for seed in (0, 1)], {"shift": "labels", "num_groups": 2}
    runs = federate_runs(dataset, several, **shifted, seeds=[3, 4])
    for run, parts in enumerate(several):
        chex.assert_trees_all_equal(select_run(runs, run), federate(dataset, parts, **shifted, seed=3 + run))


def test_integers_do_not_overflow_in_a_network():
    model, y = models.mlp((3,), 2, hidden=(4,)), jnp.zeros(5, jnp.int32)
    params = model.init(jax.random.key(0))
    x = jnp.full((5, 3), 200, jnp.uint8)
    np.testing.assert_array_equal(model.apply(params, x), model.apply(params, x.astype(jnp.float32)))
    batches = [ClientData(inputs, y, jnp.ones(len(y), bool)) for inputs in (x, x.astype(jnp.float32))]
    loss = deployed_loss(model)
    traces = [fisher.fisher_trace(loss, params, batch) for batch in batches]
    np.testing.assert_array_equal(*traces)
    assert traces[0] > 0


def test_labels_of_any_kind_become_classes():
    x = inputs(np.float32, (2,))
    for labels, names in (
        (Y, ()),
        (Y - 7, ("-7", "-6", "-5", "-4")),
        (np.array(["d", "a", "c", "b"])[Y], ("a", "b", "c", "d")),
        (np.array(["d", "a", "c", "b"], object)[Y], ("a", "b", "c", "d")),
        (np.array([b"x", b"y"])[Y % 2], ("x", "y")),
        (Y % 2 == 1, ()),
    ):
        dataset = from_arrays(x, labels, test_x=x, test_y=labels)
        assert dataset.class_names == names
        assert dataset.num_classes == len(np.unique(labels))
        assert dataset.train_y.dtype == np.int32
        np.testing.assert_array_equal(dataset.train_y, np.unique(labels, return_inverse=True)[1])
        np.testing.assert_array_equal(dataset.test_y, dataset.train_y)
    with pytest.raises(InvalidInput, match="the test set of the data has words in y, and the data numbers"):
        from_arrays(x, Y % 2 + 9, test_x=x, test_y=np.array(["9", "10"])[Y % 2])
    # Floats are labels where the number of classes is given.
    for labels in (Y, Y.astype(float)):
        assert from_arrays(x, labels, num_classes=9).num_classes == 9
    with pytest.raises(InvalidInput, match="labels are the integers 0 to 2"):
        from_arrays(x, Y, num_classes=3)


@pytest.mark.parametrize(
    "y",
    [RNG.normal(size=40), np.arange(40.0), Y[:, None] * 0.5, RNG.integers(0, 2, (40, 3)), Y[:, None] > np.arange(4)],
    ids=["floats", "40 whole floats", "one column", "several labels", "flags"],
)
def test_other_targets_stay_as_they_are(y):
    x = np.arange(40.0)[:, None]
    dataset = from_arrays(x, y, client=np.arange(40) % 4)
    assert (dataset.num_classes, dataset.class_names) == (0, ())
    data = federate(dataset)
    want = (y[:, 0] if y.shape[1:] == (1,) else y).astype(np.float32 if y.dtype.kind == "f" else np.int32)
    assert data.y.dtype == want.dtype
    assert data.num_classes == 0
    for split in ("train", "test"):
        got = client_data(data, 2, split)
        rows = np.asarray(got.x)[np.asarray(got.mask), 0].astype(int)
        assert (rows % 4 == 2).all()
        np.testing.assert_array_equal(np.asarray(got.y)[np.asarray(got.mask)], want[rows])
    # Without clients or classes to divide by, any rows are test rows; a test set of integers beside floats is floats.
    assert len(from_arrays(x, y, test_fraction=0.3).test_y) == 12
    both = from_arrays(x, y, test_x=x, test_y=y.astype(int))
    assert both.test_y.dtype == both.train_y.dtype == want.dtype
    parts = partition.iid(dataset, 3)
    assert sum(map(len, parts.train)) == len(dataset.train_y)
    assert placement.place(data, client_mesh(jax.devices()[:2])).own.num_classes == 0


def test_a_share_of_each_class_or_client_is_the_test_set():
    x = np.arange(40.0)[:, None]
    dataset = from_arrays(x, Y, test_fraction=0.3)
    np.testing.assert_array_equal(np.bincount(dataset.test_y), [3, 3, 3, 3])
    assert sorted([*dataset.train_x[:, 0], *dataset.test_x[:, 0]]) == list(range(40))
    again, other = from_arrays(x, Y, test_fraction=0.3), from_arrays(x, Y, test_fraction=0.3, seed=1)
    np.testing.assert_array_equal(dataset.test_x, again.test_x)
    assert (dataset.test_x != other.test_x).any()

    # Any row may be a test row, and the first and last of a class are not always.
    drawn = [from_arrays(x, Y, test_fraction=0.3, seed=seed).test_x[:, 0].astype(int) for seed in range(60)]
    often = np.bincount(np.concatenate(drawn), minlength=40)
    assert often.min() > 5
    assert often.max() < 32

    owner = np.repeat(["b", "a", "c"], [2, 18, 20])
    dataset = from_arrays(x, Y, client=owner)
    assert dataset.client_names == ("a", "b", "c")
    np.testing.assert_array_equal(np.bincount(dataset.test_client), [4, 1, 5])


@pytest.mark.parametrize("shape", [(3,), (5, 2), (4, 4, 3)], ids=str)
def test_normalized_features_or_channels(shape):
    x, test_x = inputs(np.float64, shape), inputs(np.float64, shape)
    x[..., 0] = 0.1
    dataset = from_arrays(x, Y, test_x=test_x, test_y=Y, normalize=True)
    assert dataset.mean is dataset.std is None
    np.testing.assert_array_equal(dataset.train_x[..., 0], 0)
    axes = (0, 1, 2) if len(shape) == 3 else (0,)
    varying, test_varying = (part[..., 1:].astype(np.float32) for part in (x, test_x))
    mean, std = varying.mean(axes, dtype=np.float64), varying.std(axes, dtype=np.float64)
    np.testing.assert_allclose(dataset.train_x[..., 1:], (varying - mean) / std, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dataset.test_x[..., 1:], (test_varying - mean) / std, rtol=1e-5, atol=1e-6)


def test_normalized_floats_are_rounded_at_the_end():
    # Seconds since 1970, of a minute, beside a constant that is rounded in two ways.
    seconds = np.stack([1.7e9 + 30 * RNG.normal(size=40), np.where(Y > 1, 0.3, 0.1 + 0.2)], axis=1)
    dataset = from_arrays(seconds, Y, test_x=seconds, test_y=Y, normalize=True)
    mean, std = seconds[:, 0].mean(), seconds[:, 0].std()
    for found in (dataset.train_x, dataset.test_x, dataset.preparation({"x": seconds})):
        np.testing.assert_array_equal(found, dataset.train_x)
        np.testing.assert_allclose(found[:, 0], (seconds[:, 0] - mean) / std, rtol=1e-6, atol=1e-6)
        assert abs(found[:, 1]).max() < 1e-15
    # Floats of 32 bits stay as they are in stored results.
    single = seconds.astype(np.float32)
    whole, one = from_arrays(single, Y, normalize=True), from_arrays(single.astype(np.float64), Y, normalize=True)
    assert (whole.preparation.dtype, one.preparation.dtype) == ("float32", "float64")
    np.testing.assert_array_equal(whole.train_x, one.train_x)


def test_normalized_bytes_of_images_stay_bytes():
    x = inputs(np.uint8, (4, 4, 2))
    x[..., 1] = 51
    dataset = from_arrays(x, Y, test_x=x, test_y=Y, normalize=True)
    assert dataset.train_x.dtype == np.uint8
    pixels = x[..., 0] / 255
    np.testing.assert_allclose(dataset.mean, [pixels.mean(), 0.2])
    np.testing.assert_allclose(dataset.std, [pixels.std(), 1.0])
    data, parts = federation(dataset)
    for split in ("train", "test"):
        rows = getattr(parts, split)[1]
        got = client_data(data, 1, split).x[: len(rows)]
        assert got.dtype == jnp.float32
        expected = (np.concatenate([x, x])[rows] / 255 - dataset.mean) / dataset.std
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "values", [[1e19, 2e19, 3.0, 4.0], np.array([1, 2, 3, 2**63 + 1], np.uint64), [-1e19, 0.0, 1, 1]]
)
def test_numbers_beyond_64_bits_are_no_names(values):
    x, values = np.zeros((4, 2), np.float32), np.array(values)
    for words in ({"y": values, "num_classes": 4}, {"y": [0, 1, 0, 1], "client": values}):
        with pytest.raises(InvalidInput, match="is an integer of at most 64 bits or a string"):
            from_arrays(x, **words)


def test_whole_numbers_as_floats_are_classes_with_a_warning():
    x = RNG.normal(size=(40, 3))
    for y in (Y * 2.0, np.ma.array(Y * 2.0), (Y * 2.0).astype(np.float16)):
        with pytest.warns(UserWarning, match=r"floats \(0.0, 2.0, 4.0\), which are taken as 4 classes"):
            dataset = from_arrays(x, y)
        assert dataset.class_names == ("0", "2", "4", "6")
        assert from_arrays(x, y, num_classes=0).train_y.dtype == np.float32


def test_whole_numbers_are_values_where_there_are_no_classes():
    x, y = RNG.normal(size=(40, 3)), np.arange(40)
    dataset = from_arrays(x, y % 4, num_classes=0, test_x=x, test_y=y)
    assert dataset.num_classes == 0
    for got, want in ((dataset.train_y, y % 4), (dataset.test_y, y)):
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, want)
    assert federate(dataset, partition.iid(dataset, 4)).y.dtype == np.float32
    # Tokens stay numbers of tokens.
    assert from_arrays(x, np.stack([y, y], axis=1), num_classes=0).train_y.dtype == np.int32
    with pytest.raises(InvalidInput, match="y"):
        from_arrays(x, np.array(["no", "yes"] * 20), num_classes=0)
