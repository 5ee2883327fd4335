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


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_draws_that_are_no_numbers_end_too(broken):
    """NumPy draws nothing but NaN for the smallest concentrations."""

    class Rng:
        integers = np.random.default_rng(0).integers

        def dirichlet(self, alpha, size):
            return np.full((size, len(alpha)), broken)

    totals = np.full((2, 5), 8)
    with pytest.warns(UserWarning, match="moved"):
        counts = dirichlet_counts.draw(Rng(), totals, dirichlet_counts.separate_sets, 4, 1e-300, (3, 1, 0))
    np.testing.assert_array_equal(counts.sum(axis=1), totals)
    assert (counts.sum(axis=2).min(axis=1) >= [3, 1]).all()


def test_a_client_gives_of_the_set_that_it_has_enough_of():
    """The first has one training example, which it needs itself, and 50 for testing."""
    counts = np.array([[[1, 0], [3, 0]], [[20, 30], [0, 1]]])
    assert dirichlet_counts._complete(counts, (1, 1, 10)) == 6
    np.testing.assert_array_equal(counts.sum(axis=2), [[1, 3], [44, 7]])
    assert (counts >= 0).all()
