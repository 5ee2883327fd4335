"""The pool and its index tables, against the dataset they were made from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pfl_jax.data import class_table, client_data, federate, load
from pfl_jax.data.partition import dirichlet

# One program for each kind of call; operation by operation, each shape would compile a dozen.
client_data = jax.jit(client_data, static_argnums=2)

DATASET = load("digits")
PARTITION = dirichlet(DATASET, 6, beta=0.5, train_size=[50, 60, 70, 80, 90, 100], seed=1)
DATA = federate(DATASET, PARTITION)
POOL_X = np.concatenate([DATASET.train_x, DATASET.test_x])
POOL_Y = np.concatenate([DATASET.train_y, DATASET.test_y])


@pytest.mark.parametrize("split", ["train", "test"])
def test_client_data_is_the_clients_examples(split):
    for client, rows in enumerate(getattr(PARTITION, split)):
        got = client_data(DATA, client, split)
        count = len(rows)
        assert got.x.dtype == jnp.float32
        assert got.y.dtype == jnp.int32
        np.testing.assert_array_equal(got.mask, np.arange(len(got.mask)) < count)
        expected = (POOL_X[rows] / 255.0 - DATASET.mean) / DATASET.std
        np.testing.assert_allclose(got.x[:count], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(got.y[:count], POOL_Y[rows])
        assert np.isfinite(got.x).all()


def test_the_pool_is_what_is_used_in_order():
    used = np.unique(np.concatenate([*PARTITION.train, *PARTITION.test]))
    assert len(used) < len(POOL_Y)
    np.testing.assert_array_equal(DATA.x, POOL_X[used])
    np.testing.assert_array_equal(DATA.y, POOL_Y[used])
    assert DATA.x.dtype == jnp.uint8
    assert DATA.num_clients == 6


def test_class_table():
    for split in ("train", "test"):
        expected = [np.bincount(POOL_Y[rows], minlength=10) for rows in getattr(PARTITION, split)]
        np.testing.assert_array_equal(class_table(DATA, split), expected)
