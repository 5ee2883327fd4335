"""Theorem 1 of FedPAC and Eq. 28 in numbers, on populations whose inputs are few enough to be counted."""

import jax.numpy as jnp
import numpy as np
import pytest

from pfl_jax.primitives.feature_statistics import label_feature_statistics, second_moment
from pfl_jax.primitives.head_combination import RIDGE, head_weights

INPUTS, LABELS, FEATURES, CLIENTS = 12, 3, 4, 5
COUNTS = np.array([20, 40, 80, 30, 160])


class Population:
    """Clients with the same marginal over the inputs (Assumption 1) and features of mean zero (Assumption 2)."""

    def __init__(self, seed):
        self.generator = np.random.default_rng(seed)
        self.marginal = self.generator.dirichlet(np.full(INPUTS, 3.0))
        features = self.generator.normal(size=(INPUTS, FEATURES))
        self.features = features - self.marginal @ features
        first, second = (self.generator.dirichlet(np.ones(LABELS), INPUTS) for _ in range(2))
        # The first three clients resemble each other.
        mixed = [first + share * (second - first) for share in (0.0, 0.05, 0.1, 0.8, 1.0)]
        self.joint = self.marginal[:, None] * np.stack(mixed)
        self.covariance = self.features.T @ (self.marginal[:, None] * self.features)

    def head(self, joint):
        """Eq. 28 with P_Y = 1 / K: [..., K, d] of a joint distribution [..., X, K]."""
        return LABELS * np.einsum("...xy,xd->...yd", joint, self.features) @ np.linalg.inv(self.covariance)

    def distance(self, joint, heads):
        """chi^2(P_XY, P_X Q(g)), Eq. 26."""
        modelled = self.marginal[:, None] * (1 + self.features @ np.swapaxes(heads, -1, -2)) / LABELS
        return np.sum((joint - modelled) ** 2 / self.marginal[:, None], axis=(-2, -1))

    def statistics(self):
        """h [M, K, d] (Eq. 34) and V [M] (Eq. 35)."""
        mu = np.einsum("jxy,xd->jyd", self.joint, self.features)
        inverse = np.linalg.inv(self.covariance)
        total = np.einsum("jxy,xd,de,xe->j", self.joint, self.features, inverse, self.features)
        return mu, total - np.einsum("jyd,de,jye->j", mu, inverse, mu)

    def loss(self, client, weights):
        """Theorem 1, Eq. 10 with Eq. 33 and 35."""
        mu, variance = self.statistics()
        apart = np.tensordot(weights, mu[client] - mu, 1)
        bias = np.einsum("yd,de,ye->", apart, np.linalg.inv(self.covariance), apart)
        rest = self.distance(self.joint[client], self.head(self.joint[client]))
        return bias + np.sum(weights**2 * variance / COUNTS) + rest


@pytest.mark.parametrize("seed", range(3))
def test_equation_28_minimizes_the_training_loss(seed):
    population = Population(seed)
    joint = population.joint[0]
    best = population.head(joint)
    for _ in range(20):
        other = best + 0.1 * population.generator.normal(size=best.shape)
        assert population.distance(joint, other) > population.distance(joint, best)


@pytest.mark.parametrize("seed", range(3))
def test_theorem_1_is_the_mean_of_the_testing_loss(seed):
    population = Population(seed)
    draws = 4000
    samples = [
        population.generator.multinomial(count, joint.ravel(), draws).reshape(draws, INPUTS, LABELS) / count
        for count, joint in zip(COUNTS, population.joint, strict=True)
    ]
    heads = np.stack([population.head(sample) for sample in samples])
    for client in range(CLIENTS):
        weights = population.generator.dirichlet(np.ones(CLIENTS))
        losses = population.distance(population.joint[client], np.tensordot(weights, heads, 1))
        error = losses.std() / np.sqrt(draws)
        assert abs(losses.mean() - population.loss(client, weights)) < 4 * error
        assert error < 0.02 * losses.mean()


@pytest.mark.parametrize("seed", range(3))
def test_the_identity_in_place_of_the_covariance_bounds_the_loss(seed):
    # Eq. 46 times the largest eigenvalue of the inverse is never below the part of Theorem 1 that weights change.
    population = Population(seed)
    mu, _ = population.statistics()
    spread = np.einsum("jxy,xd->j", population.joint, population.features**2) - np.sum(mu**2, axis=(1, 2))
    largest = 1 / np.linalg.eigvalsh(population.covariance).min()
    for client in range(CLIENTS):
        rest = population.distance(population.joint[client], population.head(population.joint[client]))
        for weights in population.generator.dirichlet(np.ones(CLIENTS), 50):
            apart = np.tensordot(weights, mu[client] - mu, 1)
            bound = largest * (np.sum(apart**2) + np.sum(weights**2 * spread / COUNTS))
            assert population.loss(client, weights) - rest <= bound * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_the_head_weights_minimize_the_loss_of_theorem_1(seed):
    population = Population(seed)
    mu, _ = population.statistics()
    moments = np.broadcast_to(population.covariance, (CLIENTS, FEATURES, FEATURES))
    weights = np.float64(head_weights(*(jnp.asarray(part, jnp.float32) for part in (mu, moments, COUNTS))))
    np.testing.assert_allclose(weights.sum(axis=1), 1, atol=1e-5)
    for client, row in enumerate(weights):
        best = population.loss(client, row)
        for other in [*np.eye(CLIENTS), *population.generator.dirichlet(np.ones(CLIENTS), 100)]:
            for step in (0.02, 0.3, 1.0):
                # The ridge and the cut of small weights move the minimum by less than a thousandth of the gain.
                assert population.loss(client, row + step * (other - row)) > best * (1 - 1e-4)
    assert ((weights > 0).sum(axis=1) > 1).any()
    assert np.abs(weights - np.eye(CLIENTS)).max() > 0.1


def reference_weights_objective(mu, moments, counts, client, weights):
    """Eq. 33 and 35 with the empirical quantities of Eq. 37 to 39, class after class."""
    mean_eigenvalue = np.trace(moments[client]) / moments.shape[-1]
    inverse = np.linalg.inv(moments[client] + RIDGE * mean_eigenvalue * np.eye(moments.shape[-1]))
    objective = 0.0
    for j, weight in enumerate(weights):
        variance = np.trace(inverse @ moments[j]) - sum(row @ inverse @ row for row in mu[j])
        objective += weight**2 * variance / counts[j]
        for k, other in enumerate(weights):
            pairs = zip(mu[client] - mu[j], mu[client] - mu[k], strict=True)
            objective += weight * other * sum(one @ inverse @ two for one, two in pairs)
    return objective


def test_head_weights_with_the_empirical_covariance_of_each_client():
    generator = np.random.default_rng(0)
    counts = np.array([30, 12, 50, 3])  # the last one has fewer examples than features
    statistics = []
    for client, count in enumerate(counts):
        labels = generator.integers(0, 3, count)
        features = np.eye(3, 5)[labels] * (1 + (client == 2)) + generator.normal(size=(count, 5)) * [3, 1, 1, 0.3, 0]
        arrays = jnp.asarray(features, jnp.float32), jnp.asarray(labels), jnp.ones(count, bool)
        np.testing.assert_allclose(second_moment(*arrays[::2]), features.T @ features / count, rtol=1e-4, atol=1e-6)
        statistics.append((label_feature_statistics(*arrays, 3)[0], second_moment(*arrays[::2])))
    mu, moments = (np.stack(part) for part in zip(*statistics, strict=True))
    weights = np.float64(head_weights(jnp.asarray(mu), jnp.asarray(moments), jnp.asarray(counts)))
    mu, moments = np.float64(mu), np.float64(moments)
    for client, row in enumerate(weights):
        best = reference_weights_objective(mu, moments, counts, client, row)
        for other in np.eye(4):
            for step in (0.01, 0.1):
                moved = reference_weights_objective(mu, moments, counts, client, row + step * (other - row))
                assert moved >= best * (1 - 1e-4)
    identity = head_weights(jnp.asarray(mu, jnp.float32), jnp.full(4, 10.0), jnp.asarray(counts))
    assert np.abs(weights - identity).max() > 0.1


def test_padding_has_no_second_moment():
    features = jnp.array([[1.0, 2.0], [3.0, -1.0], [9.0, 9.0]])
    want = np.array([[5.0, -0.5], [-0.5, 2.5]])
    np.testing.assert_allclose(second_moment(features, jnp.array([True, True, False])), want, rtol=1e-6)
