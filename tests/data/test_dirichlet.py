"""Dirichlet partitions end for every request that can be met, and say which cannot."""

import contextlib

import numpy as np
import pytest

from pfl_jax.data import dirichlet_counts, from_arrays
from pfl_jax.data.partition import dirichlet
from pfl_jax.errors import InvalidInput


def labeled(train, test, num_classes):
    """Dataset of so many rows whose classes take turns."""
    x, y = np.zeros((train + test, 1), np.float32), np.arange(train + test) % num_classes
    return from_arrays(x[:train], y[:train], test_x=x[train:], test_y=y[train:])


def sizes(rows):
    return [len(row) for row in rows]


@pytest.mark.parametrize("beta", [0.3, 1e-5])
@pytest.mark.parametrize("protocol", ["fedpac", "fedas"])
def test_500_clients_and_100_classes_are_served(protocol, beta, monkeypatch):
    """As many rows as CIFAR-100 has. With a tiny beta each class has one client, and 400 clients begin with nothing."""
    monkeypatch.setattr(dirichlet_counts, "MAX_TRIES", 3)
    dataset = labeled(50_000, 10_000, 100)
    with contextlib.nullcontext() if beta == 0.3 else pytest.warns(UserWarning, match="were moved from the largest"):
        partition = dirichlet(dataset, 500, beta=beta, protocol=protocol)
    np.testing.assert_array_equal(np.sort(np.concatenate([*partition.train, *partition.test])), np.arange(60_000))
    train, test = np.array(sizes(partition.train)), np.array(sizes(partition.test))
    assert test.min() >= 1
    assert (train if protocol == "fedpac" else train + test).min() >= (10 if protocol == "fedpac" else 40)


def test_all_that_can_be_met_is_met():
    """To the last example: 1,200 for 40 clients of 30. One more cannot be met, which is said at once."""
    with pytest.warns(UserWarning, match="none of 1000"):
        partition = dirichlet(labeled(1200, 400, 10), 40, beta=0.1, min_size=30)
    assert sizes(partition.train) == [30] * 40
    with pytest.raises(InvalidInput, match="40 clients cannot each have 31 of the 1200 training examples"):
        dirichlet(labeled(1200, 400, 10), 40, beta=0.1, min_size=31)
