"""Restricted quadratic programs: they find minimizers with few positive weights, and say where they do not."""

import jax.numpy as jnp
import numpy as np
import pytest

from pfl_jax.primitives import active_set, simplex_qp
from pfl_jax.primitives.active_set import minimize_with_few
from pfl_jax.primitives.float64 import in_float64
from pfl_jax.primitives.interior_point import minimize_on_simplex
from pfl_jax.primitives.simplex_qp import solve_simplex_qp

CLIENTS, SIZE = 40, 16


@in_float64
def few(matrix):
    return minimize_with_few(matrix.astype(jnp.float64), size=SIZE, tolerance=1e-9, floor=1e-12)


@in_float64
def whole(matrix):
    return minimize_on_simplex(matrix.astype(jnp.float64))


def distances(noise, clients=CLIENTS, spread=1.0, seed=0):
    """The program of client 0: squared distances of the clients' means, and each one's noise."""
    means = spread * np.random.default_rng(seed).normal(size=(clients, 60))
    differences = means[0] - means
    matrix = differences @ differences.T + np.diag(np.broadcast_to(noise, clients))
    return (matrix / matrix.max()).astype(np.float32)


@pytest.mark.parametrize("seed", range(4))
def test_few_weights_are_found_and_certain(seed):
    matrix = distances(np.r_[60.0, np.full(CLIENTS - 1, 0.1)], seed=seed)
    want = np.asarray(whole(matrix))
    assert 2 <= (want > 1e-3).sum() <= SIZE
    weights, found = few(matrix)
    assert found
    np.testing.assert_allclose(weights, want, atol=1e-5)
    assert np.asarray(weights).sum() == pytest.approx(1)


def test_many_weights_are_not_found():
    # Everybody is equally good: the weights are 1 / CLIENTS each.
    weights, found = few(np.eye(CLIENTS, dtype=np.float32))
    assert not found
    assert np.asarray(weights).sum() == pytest.approx(1)


def test_equal_clients_outside_of_the_program_could_have_weight_too():
    # The first half is one client without noise, so any weights among them are optimal; the others are far away.
    matrix = np.full((CLIENTS, CLIENTS), 0.1, np.float32) + 0.9 * np.eye(CLIENTS, dtype=np.float32)
    matrix[:20, :20] = 1e-3
    _, found = few(matrix)
    assert not found
    matrix[SIZE:20, :] = matrix[:, SIZE:20] = matrix[-1, 0]
    matrix[SIZE:20, SIZE:20] += 0.9 * np.eye(20 - SIZE, dtype=np.float32)
    weights, found = few(matrix)
    assert found
    np.testing.assert_allclose(weights[:SIZE], 1 / SIZE, atol=1e-6)


def test_cohorts_of_some_hundred_clients_are_solved_by_restricted_programs(monkeypatch):
    marked = jnp.arange(float(CLIENTS))
    monkeypatch.setattr(active_set, "minimize_with_few", lambda matrix, **_: (marked, jnp.bool_(True)))
    matrices = jnp.stack([jnp.asarray(distances(0.1)), jnp.zeros((CLIENTS, CLIENTS))])
    usual = simplex_qp._solve_batch(matrices, "auto", 1e-4, 1e-7)
    np.testing.assert_allclose(usual[0], whole(matrices[0]), atol=2e-2)
    monkeypatch.setattr(simplex_qp, "FEW", CLIENTS // 2)
    monkeypatch.setattr(simplex_qp, "SMALL", CLIENTS - 1)
    np.testing.assert_allclose(
        simplex_qp._solve_batch(matrices, "auto", 1e-4, 1e-7), [marked, np.full(CLIENTS, 1 / CLIENTS)], rtol=1e-6
    )


@pytest.mark.slow
def test_restricted_programs_of_a_cohort_of_256_are_the_whole_ones():
    matrix = distances(np.r_[60.0, np.full(255, 0.1)], clients=256)
    got = solve_simplex_qp(jnp.asarray(matrix), tolerance=1e-7).weights
    np.testing.assert_allclose(got, whole(matrix), atol=1e-3)
