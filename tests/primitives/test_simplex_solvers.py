"""The solvers of one program: which of them `auto` tries in turn, and what each promises."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_simplex_qp import groups_of_clients, random_matrices

from pfl_jax.errors import InvalidInput
from pfl_jax.primitives import simplex_qp, simplex_solvers
from pfl_jax.primitives.float64 import in_float64
from pfl_jax.primitives.simplex_qp import solve_simplex_qp

CLIENTS, SIZE = 40, 16


@in_float64
def few(matrix):
    weights, found = simplex_solvers.few_coordinates(
        matrix.astype(jnp.float64), jnp.zeros(CLIENTS), size=SIZE, tolerance=1e-9, floor=1e-12
    )
    return weights.astype(jnp.float32), found


@in_float64
def whole(matrix):
    weights = simplex_solvers.interior_point(matrix.astype(jnp.float64), jnp.zeros(len(matrix)))
    return weights.astype(jnp.float32)


def solve_in_turn(matrices):
    matrices = jnp.asarray(matrices, jnp.float32)
    return simplex_qp._minimizers(matrices, jnp.zeros(matrices.shape[:2]), "auto", 1e-4, 1e-7)


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


def test_auto_gives_small_programs_to_jaxopt_and_the_rows_it_misses_to_the_interior_point(monkeypatch):
    equal, marked = jnp.full(6, 1 / 6), jnp.arange(6.0)
    monkeypatch.setattr(simplex_solvers, "projected_gradient", lambda *_, **__: equal)
    monkeypatch.setattr(simplex_solvers, "interior_point", lambda *_, **__: marked)
    matrices = jnp.asarray(np.stack([np.eye(6), groups_of_clients(6)[0]]), jnp.float32)
    np.testing.assert_array_equal(solve_in_turn(matrices), [equal, marked])
    monkeypatch.setattr(simplex_solvers, "projected_gradient", lambda *_, **__: equal / 0 * 0)
    np.testing.assert_array_equal(solve_in_turn(matrices), [marked, marked])


@pytest.mark.parametrize("clients", [12, 30])
@pytest.mark.parametrize("population", [groups_of_clients, lambda clients: random_matrices(clients, clients)])
def test_jaxopt_solves_every_program_of_a_cohort(population, clients):
    @in_float64
    def gaps(matrices):
        matrices = matrices.astype(jnp.float64)

        def gap(matrix):
            program = matrix, jnp.zeros(clients)
            weights = simplex_solvers.projected_gradient(*program, floor=1e-7)
            return simplex_solvers.frank_wolfe_gap(*program, weights, 1e-7)

        return jax.lax.map(gap, matrices).astype(jnp.float32)

    matrices = population(clients)
    assert np.max(gaps(jnp.asarray(matrices / matrices.max(axis=(1, 2), keepdims=True), jnp.float32))) < 1e-7


def test_without_jaxopt_auto_is_the_interior_point(monkeypatch):
    matrices = jnp.asarray(random_matrices(2, 3), jnp.float32)
    want = solve_simplex_qp(matrices, solver="interior_point")
    with_jaxopt = solve_simplex_qp(matrices)
    simplex_qp._solve.clear_cache()
    monkeypatch.setattr(simplex_solvers, "jaxopt_is_installed", lambda: False)
    monkeypatch.setattr(simplex_solvers, "_jaxopt", lambda: pytest.fail("jaxopt is not installed"))
    got = solve_simplex_qp(matrices).weights
    simplex_qp._solve.clear_cache()
    np.testing.assert_array_equal(got, want.weights)
    np.testing.assert_allclose(got, with_jaxopt.weights, atol=1e-4)
    for solver in ("projected_gradient", "osqp"):
        with pytest.raises(InvalidInput, match="jaxopt") as error:
            solve_simplex_qp(matrices, solver=solver)
        assert "\n" not in str(error.value)
