"""Fingerprints of clients: what they depend on, and that different clients have different ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import tiny_federation

from pfl_jax import data as datasets
from pfl_jax.base import ClientData
from pfl_jax.data.federated import client_data
from pfl_jax.primitives.fingerprints import fingerprint, fingerprint_key, order_by_fingerprint

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


def test_labels_count_with_their_inputs():
    x = jnp.arange(6.0).reshape(3, 2)
    assert len({of(x, jnp.array(y)) for y in ([0, 0, 1], [0, 1, 0], [1, 0, 0], [0, 0, 0])}) == 4
    assert of(x * -0.0) == of(x * 0.0)


def test_no_two_of_many_small_clients_share_one():
    """100,000 clients of five digits: a word of 32 bits is shared about once by chance, both of them never."""
    dataset, generator = datasets.load("digits"), np.random.default_rng(0)
    pool = np.asarray(dataset.train_x, np.float32).reshape(len(dataset.train_y), -1) / 16
    rows = np.unique(np.sort([generator.choice(len(pool), 5, replace=False) for _ in range(100_000)], axis=1), axis=0)
    x, y = jnp.asarray(pool), jnp.asarray(dataset.train_y)
    one = lambda index: fingerprint(ClientData(x[index], y[index], jnp.ones(5, bool)))  # noqa: E731
    found = np.asarray(jax.jit(lambda rows: jax.lax.map(one, rows, batch_size=1000))(jnp.asarray(rows)))
    assert len(np.unique(found, axis=0)) == len(rows)
    for word in found.T:
        assert len(np.unique(word)) > len(rows) - 10


def test_keys_and_orders_by_fingerprint():
    identities = jnp.uint32([[1, 2], [1, 3], [2, 2], [1, 1]])
    keys = jax.vmap(fingerprint_key, in_axes=(None, 0))(jax.random.key(0), identities)
    assert len(np.unique(jax.random.key_data(keys), axis=0)) == 4
    present = jnp.array([True, True, False, True])
    first = order_by_fingerprint(identities, present)
    assert first[-1] == 2
    again = order_by_fingerprint(identities[::-1], present[::-1])
    np.testing.assert_array_equal(identities[first], identities[::-1][again])
