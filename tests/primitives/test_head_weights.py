"""FedPAC's head weights against float64 computations written from the paper's equations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from pfl_jax.primitives import head_weights, in_float64
from pfl_jax.primitives.head_combination import _drop_negligible, _weights_by_variances


def groups_of_clients(clients, classes, sizes, seed=0, offset=0.0, features=16):
    """(mu, V, n) of clients that sample features of their group's dominant classes; `offset` is common to all."""
    generator = np.random.default_rng(seed)
    centers = np.abs(generator.normal(size=(classes, features))) + offset
    counts = generator.choice(sizes, clients)
    mu, variance = np.zeros((clients, classes, features)), np.zeros(clients)
    for client in range(clients):
        proportions = np.full(classes, 0.2 / classes)
        proportions[(np.arange(3 * classes // 10) + client % 5 * classes // 5) % classes] += 0.8 / (3 * classes // 10)
        labels = generator.choice(classes, counts[client], p=proportions / proportions.sum())
        samples = centers[labels] + 0.5 * generator.normal(size=(counts[client], features))
        np.add.at(mu[client], labels, samples / counts[client])
        variance[client] = np.mean(np.sum(samples**2, axis=1)) - np.sum(mu[client] ** 2)
    return mu, variance, counts


def float32(*arrays):
    return [jnp.asarray(array, jnp.float32) for array in arrays]


@pytest.mark.slow
def test_head_weights_of_a_cohort_of_three_hundred_are_optimal():
    mu, variance, counts = float32(*groups_of_clients(300, 10, [300, 600, 1200]))
    # Before weights below 1e-3 are set to zero: of so many clients, these are a part that counts.
    solve = functools.partial(_weights_by_variances, solver="auto")
    solution = in_float64(solve)(mu, variance, counts)
    assert float(solution.gap.max()) < 1e-6
    weights, means = np.float64(solution.weights), np.float64(mu).reshape(300, -1)
    np.testing.assert_allclose(weights.sum(axis=1), 1, atol=1e-5)
    assert (weights >= 0).all()
    noise = np.float64(variance) / np.float64(counts)
    for own, row in zip(means, weights, strict=True):
        # Eq. 46 and half its gradient, written for one client; the gap bounds what any other weights could gain.
        differences = own - means
        gradient = row * noise + differences @ (row @ differences)
        objective = row @ gradient
        assert (objective - gradient.min()) / objective < 1e-3


def test_derivatives_of_head_weights():
    """By the differences of a float64 solve; weights that stay below the threshold have none."""
    mu, variance, counts = groups_of_clients(6, 10, [600])
    toward = np.random.default_rng(1).normal(size=(6, 6))

    def total(mu, variance):
        return jnp.sum(toward * head_weights(mu, variance, jnp.asarray(counts)))

    of_mu, of_variance = jax.jit(jax.grad(total, (0, 1)))(*float32(mu, variance))

    def difference(which, place, step):
        ends = []
        for sign in (1, -1):
            moved = [mu.copy(), variance.copy()]
            moved[which][place] += sign * step
            ends.append(np.sum(toward * reference.head_weights(*moved, counts)))
        return (ends[0] - ends[1]) / (2 * step)

    want = [difference(1, client, 1e-4) for client in range(6)]
    assert np.abs(want).max() > 1e-3
    np.testing.assert_allclose(of_variance, want, rtol=2e-3, atol=1e-5)
    for place in ((0, 1, 2), (3, 5, 0), (5, 0, 7)):
        np.testing.assert_allclose(of_mu[place], difference(0, place, 1e-6), rtol=2e-3, atol=1e-3)


def test_head_weights_survive_large_common_means():
    statistics = groups_of_clients(20, 10, [300, 600, 1200])
    mu, variance, counts = float32(*statistics)
    mu = mu + 16.0  # exactly representable beside mu up to 2^-19
    statistics = np.float64(mu), statistics[1], statistics[2]
    got = np.asarray(head_weights(mu, variance, counts))
    np.testing.assert_allclose(got, reference.head_weights(*statistics), atol=2e-3)
    assert ((got == 0) | (got > 1e-3 * (1 - 1e-6))).all()
    np.testing.assert_allclose(got.sum(axis=1), 1, atol=3e-7)


def test_head_weights_of_simple_cohorts():
    def weights(mu, variance, counts):
        return np.asarray(head_weights(*float32(mu, variance, counts), solver="interior_point"))

    np.testing.assert_array_equal(weights(np.ones((1, 2, 2)), [1.0], [5]), [[1]])
    # Equal clients share equally; equal distributions in proportion to n / V; no statistics at all, equally.
    same = np.ones((3, 2, 2))
    np.testing.assert_allclose(weights(same, [2.0] * 3, [50] * 3), np.full((3, 3), 1 / 3), atol=1e-5)
    np.testing.assert_allclose(weights(same, [2.0, 2.0, 1.0], [10, 30, 20]), [[0.125, 0.375, 0.5]] * 3, atol=1e-4)
    np.testing.assert_allclose(weights(0 * same, [0.0] * 3, [5] * 3), np.full((3, 3), 1 / 3), atol=1e-5)
    np.testing.assert_allclose(weights(0 * same, [0.0] * 3, [5, 0, 0])[0], [1, 0, 0], atol=1e-6)
    # Far from everyone else: its own head only. Without examples: weight for nobody.
    far = 1e3 * np.eye(4)[:3].reshape(3, 2, 2)
    np.testing.assert_allclose(weights(far, [1.0] * 3, [10] * 3), np.eye(3), atol=1e-5)
    empty = weights(same * [[[1]], [[1]], [[0]]], [1.0, 1.0, 0.0], [10, 10, 0])
    np.testing.assert_allclose(empty, [[0.5, 0.5, 0]] * 3, atol=1e-5)
    np.testing.assert_array_equal(empty[:, 2], 0)
    # Of so many that all weights are negligible, all stay.
    np.testing.assert_allclose(_drop_negligible(jnp.full((1, 2000), 5e-4)), 5e-4, rtol=1e-5)
