"""Client statistics against loops over the examples in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import tiny_federation

from pfl_jax import ClientData
from pfl_jax import data as datasets
from pfl_jax.data import client_data
from pfl_jax.primitives import fingerprint, fingerprint_key, label_feature_statistics, order_by_fingerprint

label_feature_statistics = jax.jit(label_feature_statistics, static_argnums=3)

CLASSES, FEATURES = 5, 3


def client(sizes, pad=0, offset=0.0, seed=0):
    """Features, labels and mask of a client with so many examples of each class, padding spread among them."""
    generator = np.random.default_rng(seed)
    labels = np.repeat(np.arange(len(sizes)), sizes)
    features = generator.normal(size=(len(labels), FEATURES)) + labels[:, None] + offset
    mask = np.ones(len(labels), bool)
    features = np.concatenate([features, 1e6 * np.ones((pad, FEATURES))])
    labels = np.concatenate([labels, np.ones(pad, int)])
    mask = np.concatenate([mask, np.zeros(pad, bool)])
    order = generator.permutation(len(labels))
    return jnp.float32(features[order]), jnp.int32(labels[order]), jnp.asarray(mask[order])


def by_class(features, labels, mask):
    features, labels, mask = np.float64(features), np.asarray(labels), np.asarray(mask)
    return [features[mask & (labels == k)] for k in range(CLASSES)]


def reference(features, labels, mask):
    """FedPAC's Eq. 44 and 46 as printed."""
    groups = by_class(features, labels, mask)
    total = sum(map(len, groups))
    mu, variance = np.zeros((CLASSES, FEATURES)), 0.0
    for k, group in enumerate(groups):
        if len(group):
            share = len(group) / total
            second_moment = sum(np.outer(row, row) for row in group) / len(group)
            mu[k] = share * group.mean(axis=0)
            variance += share * np.trace(second_moment) - share**2 * np.sum(group.mean(axis=0) ** 2)
    return mu, variance


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=CLASSES, max_size=CLASSES).filter(any), st.integers(0, 1000))
def test_statistics_are_the_equations(sizes, seed):
    # Always 24 rows: one compiled shape.
    features, labels, mask = client(sizes, pad=24 - sum(sizes), seed=seed)
    mu, variance = label_feature_statistics(features, labels, mask, CLASSES)
    want_mu, want_variance = reference(features, labels, mask)
    np.testing.assert_allclose(mu, want_mu, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(variance, want_variance, rtol=1e-4, atol=1e-5)


def test_the_variance_survives_a_large_common_feature():
    # E||f||^2 and sum ||mu_k||^2 are 3e8 here, their difference 3: float32 could not hold it.
    features, labels, mask = client([40, 0, 0, 0, 0], offset=1e4)
    _, variance = label_feature_statistics(features, labels, mask, CLASSES)
    _, want = reference(features, labels, mask)
    assert want < 10
    np.testing.assert_allclose(variance, want, rtol=1e-2)


def test_labels_of_no_class_count_for_none_within_jit():
    features, labels, mask = client((3, 4))[:3]
    strange = jnp.concatenate([labels, jnp.array([-1, 9])])
    more = jnp.concatenate([features, 50 + features[:2]]), strange, jnp.concatenate([mask, jnp.ones(2, bool)])
    found = jax.jit(lambda *arrays: label_feature_statistics(*arrays, num_classes=2))(*more)
    jax.tree.map(np.testing.assert_array_equal, found, label_feature_statistics(features, labels, mask, num_classes=2))


def test_a_client_without_examples_gives_zeros():
    features, labels, mask = client([0] * CLASSES, pad=4)
    mu, variance = label_feature_statistics(features, labels, mask, CLASSES)
    np.testing.assert_array_equal(mu, 0)
    assert float(variance) == 0


fingerprint = jax.jit(fingerprint)  # one program for each shape

SIZES = (9, 20, 14)
CLIENT = client_data(tiny_federation(SIZES, pad=7), 1, "train")


def of(x, y=None, mask=None):
    """Words of a client with these inputs [n, ...]."""
    x = jnp.asarray(x)
    y = jnp.zeros(len(x), jnp.int32) if y is None else jnp.asarray(y)
    return tuple(fingerprint(ClientData(x, y, jnp.ones(len(x), bool) if mask is None else mask)).tolist())


@pytest.mark.parametrize(
    "same",
    [
        client_data(tiny_federation(SIZES), 1, "train"),
        CLIENT._replace(x=jnp.where(CLIENT.mask[:, None, None, None], CLIENT.x, 3.0)),
        jax.tree.map(lambda leaf: leaf[::-1], CLIENT),
        jax.jit(client_data, static_argnums=2)(tiny_federation(SIZES), 1, "train"),
    ],
    ids=["less padding", "other padding", "another order", "another compilation"],
)
def test_padding_order_and_compilation_do_not_count(same):
    assert of(*same) == of(*CLIENT)


TOKENS = np.arange(24).reshape(4, 6)
IMAGES = np.random.default_rng(0).integers(0, 256, (4, 28, 28, 1)) / 255.0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (IMAGES, IMAGES[:, ::-1, ::-1]),
        (IMAGES, IMAGES.swapaxes(1, 2)),
        (TOKENS, TOKENS[:, ::-1]),
        (TOKENS + 2**24, TOKENS + 2**24 + np.eye(4, 6, dtype=int)),
        (np.full((3, 2), 1 / 64), np.full((3, 2), 1 / 128)),
        (IMAGES, IMAGES + 0.004 * (np.arange(28) == 5)[:, None]),
        (np.array([[3e9]]), np.array([[4.8e9]])),
        (np.array([[1e-6]]), np.array([[1.001e-6]])),
        (np.array([[1.0]]), np.array([[-1.0]])),
        (np.ones((2, 3)), np.ones((3, 3))),
        (np.zeros((2, 3)), np.zeros((3, 3))),
    ],
)
def test_every_value_and_its_place_count(one, other):
    kind = np.float32 if one.dtype == np.float64 else np.int32
    assert of(one.astype(kind)) != of(other.astype(kind))


def test_neighboring_floats_are_the_same():
    ones = np.ones((2, 3), np.float32)
    assert of(np.nextafter(ones, 0, dtype=np.float32)) == of(ones) == of(np.nextafter(ones, 2, dtype=np.float32))


def test_labels_count_with_their_inputs():
    x = jnp.arange(6.0).reshape(3, 2)
    assert len({of(x, jnp.array(y)) for y in ([0, 0, 1], [0, 1, 0], [1, 0, 0], [0, 0, 0])}) == 4
    assert of(x * -0.0) == of(x * 0.0)


def test_no_two_of_many_small_clients_share_one():
    """20,000 clients of five digits: a word of 32 bits is shared hardly ever by chance, both of them never."""
    dataset, generator = datasets.load("digits"), np.random.default_rng(0)
    pool = np.asarray(dataset.train_x, np.float32).reshape(len(dataset.train_y), -1) / 16
    rows = np.unique(np.sort([generator.choice(len(pool), 5, replace=False) for _ in range(20_000)], axis=1), axis=0)
    x, y = jnp.asarray(pool), jnp.asarray(dataset.train_y)
    one = lambda index: fingerprint(ClientData(x[index], y[index], jnp.ones(5, bool)))  # noqa: E731
    found = np.asarray(jax.jit(lambda rows: jax.lax.map(one, rows, batch_size=1000))(jnp.asarray(rows)))
    assert len(np.unique(found, axis=0)) == len(rows)
    for word in found.T:
        assert len(np.unique(word)) > len(rows) - 3


def test_keys_and_orders_by_fingerprint():
    identities = jnp.uint32([[1, 2], [1, 3], [2, 2], [1, 1]])
    keys = jax.vmap(fingerprint_key, in_axes=(None, 0))(jax.random.key(0), identities)
    assert len(np.unique(jax.random.key_data(keys), axis=0)) == 4
    present = jnp.array([True, True, False, True])
    first = order_by_fingerprint(identities, present)
    assert first[-1] == 2
    again = order_by_fingerprint(identities[::-1], present[::-1])
    np.testing.assert_array_equal(identities[first], identities[::-1][again])
