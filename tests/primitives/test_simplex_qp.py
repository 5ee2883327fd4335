"""Every solver against an exact active-set method, the inputs that break solvers, and mirror descent."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from reference import minimizer_on_simplex as exact

from pfl_jax import InvalidInput
from pfl_jax.primitives import in_float64, mirror_descent, simplex_qp, simplex_solvers, solve_simplex_qp
from pfl_jax.primitives.simplex_solvers import frank_wolfe_gap

SOLVERS = [
    "auto",
    "interior_point",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("projected_gradient", "osqp")),
]


def random_matrices(batch, size, seed=0, shift=0.3):
    """Positive definite, of condition number about 1 / shift; their minimizers have zeros."""
    factors = np.random.default_rng(seed).normal(size=(batch, size, size)) / np.sqrt(size)
    return factors @ np.swapaxes(factors, 1, 2) + shift * np.eye(size)


def groups_of_clients(clients, seed=0):
    """FedPAC's programs for clients in four groups: condition numbers of 1e3 to 1e4."""
    generator = np.random.default_rng(seed)
    centers = generator.normal(size=(4, 50))
    means = centers[np.arange(clients) % 4] + 0.05 * generator.normal(size=(clients, 50))
    differences = means[:, None] - means[None]
    bias = np.einsum("ijd,ikd->ijk", differences, differences)
    return bias + np.diag(generator.choice([0.05, 0.1, 0.2], clients))


def relative_gap(matrix, weights):
    gradient = np.float64(matrix) @ np.float64(weights)
    objective = np.float64(weights) @ gradient
    return (objective - gradient.min()) / objective


def assert_on_simplex(weights):
    weights = np.asarray(weights)
    assert (weights >= 0).all()
    np.testing.assert_allclose(np.float64(weights).sum(-1), 1, atol=2 * np.finfo(weights.dtype).eps)


@pytest.mark.parametrize("solver", ["auto", "interior_point"])
@pytest.mark.parametrize("clients", [1, 20, 61])
def test_programmes_of_groups_of_clients_are_solved(solver, clients):
    matrices = groups_of_clients(clients)[:20]
    solution = solve_simplex_qp(jnp.asarray(matrices, jnp.float32), solver=solver, tolerance=1e-7)
    assert_on_simplex(solution.weights)
    assert float(solution.gap.max()) < 1e-7
    np.testing.assert_allclose(solution.weights, [exact(matrix) for matrix in matrices], atol=1e-3)


@pytest.mark.parametrize("solver", SOLVERS)
def test_singular_matrices_give_finite_symmetric_weights(solver):
    direction = np.array([1.0, 1.0, -2.0, 3.0])
    edge = np.diag([1.0, 1.0, 0.0, 0.0])
    matrices = np.stack([np.zeros((4, 4)), np.ones((4, 4)), np.outer(direction, direction), edge])
    solution = solve_simplex_qp(jnp.asarray(matrices, jnp.float32), solver=solver)
    weights = np.float64(solution.weights)
    assert_on_simplex(solution.weights)
    assert np.isfinite(solution.gap).all()
    np.testing.assert_allclose(weights[:2], 0.25, atol=1e-5)
    np.testing.assert_array_equal(solution.gap[:2], 0)
    assert abs(weights[2] @ direction) < 1e-2
    np.testing.assert_allclose(weights[2, 0], weights[2, 1], atol=2e-4)
    np.testing.assert_allclose(weights[3], [0, 0, 0.5, 0.5], atol=1e-3)


def exact_with_linear(matrix, linear):
    """The minimizer of x.Px + q.x: with (q 1' + 1 q') / 2 added to P, the objective on the simplex is x.Px alone.

    A multiple of 1 1' is a constant there, and makes the sum positive definite.
    """
    ones = np.ones(len(linear))
    return exact(matrix + (np.outer(linear, ones) + np.outer(ones, linear)) / 2 + 1e3 * np.outer(ones, ones))


@pytest.mark.parametrize("solver", SOLVERS)
def test_solvers_find_the_minimizer(solver):
    matrices, linear = random_matrices(4, 6), np.random.default_rng(5).normal(size=(4, 6))
    for terms in ((), (jnp.float32(linear),)):
        want = [exact_with_linear(*program) for program in zip(matrices, linear if terms else 0 * linear, strict=True)]
        assert min(map(min, want)) == 0
        solution = solve_simplex_qp(jnp.float32(matrices), *terms, solver=solver)
        assert_on_simplex(solution.weights)
        assert float(solution.gap.max()) < 1e-4
        np.testing.assert_allclose(solution.weights, want, atol=2e-3)
    # Without a quadratic term, all weight is on the smallest entry.
    weights = solve_simplex_qp(jnp.zeros((3, 3)), jnp.array([5.0, 3.0, 4.0]), solver=solver).weights
    np.testing.assert_allclose(weights, [0, 1, 0], atol=1e-4)


@pytest.mark.parametrize(
    "solver", ["interior_point", *(pytest.param(name, marks=pytest.mark.slow) for name in ("auto", "osqp"))]
)
def test_derivatives_are_those_of_the_minimizer(solver):
    matrix, linear = random_matrices(1, 6)[0], np.random.default_rng(7).normal(size=6) / 3
    toward = np.arange(6.0)
    support = exact_with_linear(matrix, linear) > 0
    assert 2 < support.sum() < 6

    def objective(matrix, linear):
        solution = solve_simplex_qp(matrix, linear, solver=solver, tolerance=1e-9)
        return jnp.float32(toward) @ solution.weights + 100 * solution.gap

    got = jax.jit(jax.grad(objective, (0, 1)))(jnp.float32(matrix), jnp.float32(linear))
    # vmap of grad: the derivative of the batched programs.
    many = jax.vmap(jax.grad(objective, (0, 1)))(jnp.float32([matrix] * 2), jnp.float32([linear] * 2))
    jax.tree.map(lambda one, both: np.testing.assert_allclose(both, [one, one], rtol=1e-4, atol=1e-5), got, many)

    def difference(where, step=1e-5):
        up, down = ([matrix.copy(), linear.copy()] for _ in range(2))
        up[where[0]][where[1:]] += step
        down[where[0]][where[1:]] -= step
        # Both triangles of P count alike.
        parts = [exact_with_linear((part[0] + part[0].T) / 2, part[1]) for part in (up, down)]
        return toward @ (parts[0] - parts[1]) / (2 * step)

    want = [[difference((0, i, j)) for j in range(6)] for i in range(6)], [difference((1, i)) for i in range(6)]
    assert np.abs(want[0]).max() > 0.1
    np.testing.assert_allclose(got[0], want[0], atol=1e-3)
    np.testing.assert_allclose(got[1], want[1], atol=1e-3)


def test_only_the_symmetric_part_counts():
    matrices = jnp.asarray(random_matrices(2, 6), jnp.float32)
    upper = jnp.triu(matrices, 1)
    want = solve_simplex_qp(matrices, solver="interior_point").weights
    got = solve_simplex_qp(matrices + upper - upper.mT, solver="interior_point").weights
    np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_weights_do_not_depend_on_the_scale(scale):
    matrices = np.concatenate([groups_of_clients(6), random_matrices(2, 6)])
    want = solve_simplex_qp(jnp.asarray(matrices, jnp.float32))
    got = solve_simplex_qp(jnp.asarray(matrices * scale, jnp.float32))
    np.testing.assert_allclose(got.weights, want.weights, atol=1e-4)
    np.testing.assert_allclose(got.gap, want.gap, atol=1e-4)


def test_the_gap_is_the_relative_frank_wolfe_gap():
    matrices = random_matrices(3, 4)
    solution = solve_simplex_qp(jnp.asarray(matrices, jnp.float32), solver="projected_gradient", tolerance=1e-2)
    want = [relative_gap(matrix, weights) for matrix, weights in zip(matrices, solution.weights, strict=True)]
    np.testing.assert_allclose(solution.gap, want, atol=1e-6)
    # Far from the minimizers too.
    anywhere = np.random.default_rng(1).dirichlet(np.ones(4), 3)
    for matrix, weights in zip(matrices, anywhere, strict=True):
        gap = frank_wolfe_gap(jnp.float32(matrix), jnp.zeros(4), jnp.float32(weights), 1e-7)
        np.testing.assert_allclose(gap, relative_gap(matrix, weights), rtol=1e-4)
        assert gap > 0.1


@settings(max_examples=30, deadline=None)
@given(
    hnp.arrays(np.float64, (5, 3), elements=st.floats(-1, 1, width=32)),
    hnp.arrays(np.int64, 5, elements=st.integers(-8, 2)),
)
def test_the_interior_point_solves_ill_conditioned_matrices(factor, exponents):
    # Rank three, plus variances that differ by up to ten orders of magnitude.
    matrix = factor @ factor.T + np.diag(10.0**exponents)
    solution = solve_simplex_qp(jnp.asarray(matrix, jnp.float32), solver="interior_point")
    assert_on_simplex(solution.weights)
    # What float32 makes of P's entries decides how small an objective can be told from zero.
    rounded = np.float64(np.float32(matrix))
    weights = np.float64(solution.weights)
    gradient = rounded @ weights
    assert weights @ gradient - gradient.min() <= 1e-4 * weights @ gradient + 1e-6 * np.abs(rounded).max()


def test_a_matrix_made_indefinite_by_rounding_is_solved():
    generator = np.random.default_rng(3)
    factors = generator.normal(size=(20, 12, 2))
    matrices = jnp.asarray(factors @ np.swapaxes(factors, 1, 2), jnp.float32)
    assert np.linalg.eigvalsh(np.float64(matrices)).min() < -1e-8
    solution = solve_simplex_qp(matrices, solver="interior_point")
    assert_on_simplex(solution.weights)
    # The minimum is 0 before rounding: only what is left of P's largest entry can be asked for.
    for matrix, weights in zip(np.float64(matrices), np.float64(solution.weights), strict=True):
        assert weights @ matrix @ weights < 1e-6 * np.abs(matrix).max()


def test_auto_gives_programs_to_jaxopt_and_those_it_misses_to_the_interior_point(monkeypatch):
    matrices = jnp.asarray(np.stack([np.eye(6), groups_of_clients(6)[0]]), jnp.float32)

    def solve(one):
        return simplex_qp._minimizer(one, jnp.zeros(6), "auto", 1e-4, 1e-7)

    interior = jnp.arange(6.0)
    monkeypatch.setattr(simplex_solvers, "interior_point", lambda *_, needed, **__: jnp.where(needed, interior, 9))
    for attempt in (jnp.full(6, 1 / 6), jnp.full(6, jnp.nan)):
        monkeypatch.setattr(simplex_solvers, "projected_gradient", lambda *_, attempt=attempt, **__: attempt)
        want = [attempt if jnp.isfinite(attempt[0]) else interior, interior]
        for mapped in (jax.vmap(solve), lambda matrices: jax.lax.map(solve, matrices)):
            np.testing.assert_array_equal(mapped(matrices), want)


def test_an_interior_point_that_is_not_needed_takes_no_step():
    def solve(needed):
        return simplex_solvers.interior_point(jnp.diag(jnp.arange(1.0, 4)), jnp.zeros(3), tolerance=1e-4, needed=needed)

    weights = jax.vmap(solve)(jnp.array([True, False]))
    np.testing.assert_allclose(weights, [[6 / 11, 3 / 11, 2 / 11], [1 / 3] * 3], rtol=1e-2)


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


@pytest.mark.slow
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


@pytest.mark.parametrize("solver", ["auto", "interior_point"])
def test_what_is_not_finite_has_no_weights_and_spoils_no_other_program(solver):
    programs = jnp.stack(
        [jnp.diag(jnp.array([1.0, 3.0])), jnp.full((2, 2), jnp.nan), jnp.diag(jnp.array([1.0, jnp.inf]))]
    )
    weights = solve_simplex_qp(programs, solver=solver).weights
    np.testing.assert_allclose(weights[0], [0.75, 0.25], atol=1e-3)
    assert jnp.isnan(weights[1:]).all()
    assert jnp.isnan(solve_simplex_qp(jnp.eye(2), jnp.array([0.0, jnp.nan]), solver=solver).weights).all()


# Mirror descent


def test_the_steps_are_exponentiated_gradients():
    matrix, start, want = random_matrices(1, 6)[0], np.random.default_rng(1).dirichlet(np.ones(6), 2), []
    for x in start:
        for _ in range(7):
            x = x * np.exp(-0.3 * 2 * matrix @ x)
            x = x / x.sum()
        want.append(x)
    with jax.enable_x64(True):
        descend = jax.jit(lambda start: mirror_descent(lambda x: 2 * x @ matrix, start, lr=0.3, steps=7))
        got = descend(jnp.asarray(start))
        assert got.dtype == jnp.float64
        np.testing.assert_allclose(got, want, rtol=1e-12)


def test_what_is_nan_spoils_its_own_row_alone():
    rows = jnp.stack([jnp.ones(3), jnp.array([1.0, jnp.nan, 1.0])])
    weights = mirror_descent(lambda x: rows * x, jnp.full((2, 3), 1 / 3), lr=0.1, steps=3)
    np.testing.assert_allclose(weights[0], 1 / 3, rtol=1e-6)
    assert jnp.isnan(weights[1]).all()


def test_many_programs_are_announced_while_they_are_traced(caplog):
    with caplog.at_level("INFO", logger="pfl_jax"):
        jax.eval_shape(solve_simplex_qp, jnp.zeros((100, 300, 300)))
    assert "100 quadratic programs of 300 variables, in some 1.8 s of a CPU core" in caplog.text
