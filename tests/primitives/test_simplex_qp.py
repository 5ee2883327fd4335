"""Every solver against an exact active-set method, and the inputs that break solvers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.optimize import nnls

from pfl_jax.errors import InvalidInput
from pfl_jax.primitives import active_set, interior_point, jaxopt_solvers, simplex_qp
from pfl_jax.primitives.float64 import in_float64
from pfl_jax.primitives.frank_wolfe import frank_wolfe_gap
from pfl_jax.primitives.simplex_qp import solve_simplex_qp

SOLVERS = ["auto", "projected_gradient", "osqp", "interior_point"]


def exact(matrix):
    """The minimizer for one positive definite P = A'A, in float64.

    Nonnegative least squares |Ax|^2 + (sum x - 1)^2 over x = t s, s on the simplex, is least at t = 1 / (1 + s.Ps)
    with the value s.Ps / (1 + s.Ps): its direction s minimizes s.Ps.
    """
    matrix = np.float64(matrix)
    size = len(matrix)
    factor = np.linalg.cholesky(matrix / matrix.mean()).T
    weights, _ = nnls(np.vstack([factor, np.ones(size)]), np.append(np.zeros(size), 1.0), maxiter=100 * size)
    return weights / weights.sum()


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


@pytest.mark.parametrize("solver", SOLVERS)
def test_solvers_find_the_minimizer(solver):
    matrices = random_matrices(4, 6)
    solution = solve_simplex_qp(jnp.asarray(matrices, jnp.float32), solver=solver)
    assert_on_simplex(solution.weights)
    assert float(solution.gap.max()) < 1e-4
    want = [exact(matrix) for matrix in matrices]
    assert min(map(min, want)) == 0
    np.testing.assert_allclose(solution.weights, want, atol=2e-3)


@pytest.mark.parametrize("solver", ["auto", "interior_point"])
@pytest.mark.parametrize("clients", [1, 2, 20, 61])
def test_programmes_of_groups_of_clients_are_solved(solver, clients):
    matrices = groups_of_clients(clients)[:20]
    solution = solve_simplex_qp(jnp.asarray(matrices, jnp.float32), solver=solver, tolerance=1e-7)
    assert_on_simplex(solution.weights)
    assert float(solution.gap.max()) < 1e-7
    np.testing.assert_allclose(solution.weights, [exact(matrix) for matrix in matrices], atol=1e-3)


@pytest.mark.slow
def test_three_hundred_clients():
    matrices = groups_of_clients(300)[:2]
    solution = solve_simplex_qp(jnp.asarray(matrices, jnp.float32))
    assert_on_simplex(solution.weights)
    assert float(solution.gap.max()) < 1e-4
    np.testing.assert_allclose(solution.weights, [exact(matrix) for matrix in matrices], atol=1e-3)


@pytest.mark.parametrize("solver", SOLVERS)
def test_singular_matrices_give_finite_symmetric_weights(solver):
    direction = np.array([1.0, 1.0, -2.0, 3.0])
    matrices = np.stack(
        [
            np.zeros((4, 4)),
            np.ones((4, 4)),
            np.outer(direction, direction),
            np.diag([1.0, 1.0, 0.0, 0.0]),
        ]
    )
    solution = solve_simplex_qp(jnp.asarray(matrices, jnp.float32), solver=solver)
    weights = np.float64(solution.weights)
    assert_on_simplex(solution.weights)
    assert np.isfinite(solution.gap).all()
    np.testing.assert_allclose(weights[:2], 0.25, atol=1e-5)
    np.testing.assert_array_equal(solution.gap[:2], 0)
    assert abs(weights[2] @ direction) < 1e-2
    np.testing.assert_allclose(weights[2, 0], weights[2, 1], atol=1e-5)
    np.testing.assert_allclose(weights[3], [0, 0, 0.5, 0.5], atol=1e-3)


@pytest.mark.parametrize("solver", SOLVERS)
def test_identical_clients_get_equal_weights(solver):
    matrix = 5 * np.ones((7, 7)) + 0.1 * np.eye(7)
    solution = solve_simplex_qp(jnp.asarray(matrix, jnp.float32), solver=solver)
    np.testing.assert_allclose(solution.weights, np.full(7, 1 / 7), atol=1e-5)


def test_the_interior_point_chooses_the_analytic_centre():
    # The minimizers are the x with x_0 = x_1 + 2 x_2; the center maximizes sum log x among them.
    direction = jnp.array([1.0, -1.0, -2.0])
    weights = solve_simplex_qp(jnp.outer(direction, direction), solver="interior_point").weights
    first = np.linspace(0, 1, 100001)[1:-1]
    third = 2 * first - 1
    candidates = np.stack([first, 1 - first - third, third], axis=1)
    candidates = candidates[(candidates > 0).all(axis=1)]
    np.testing.assert_allclose(candidates @ np.asarray(direction), 0, atol=1e-9)
    np.testing.assert_allclose(weights, candidates[np.log(candidates).sum(1).argmax()], atol=0.03)


def test_only_the_symmetric_part_counts():
    matrices = jnp.asarray(random_matrices(2, 6), jnp.float32)
    upper = jnp.triu(matrices, 1)
    want = solve_simplex_qp(matrices, solver="interior_point").weights
    got = solve_simplex_qp(matrices + upper - upper.mT, solver="interior_point").weights
    np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1e6, 1e30])
def test_weights_do_not_depend_on_the_scale(scale):
    matrices = np.concatenate([groups_of_clients(6), random_matrices(2, 6)])
    want = solve_simplex_qp(jnp.asarray(matrices, jnp.float32))
    got = solve_simplex_qp(jnp.asarray(matrices * scale, jnp.float32))
    np.testing.assert_allclose(got.weights, want.weights, atol=1e-4)
    np.testing.assert_allclose(got.gap, want.gap, atol=1e-4)


@pytest.mark.parametrize("solver", ["auto", pytest.param("interior_point", marks=pytest.mark.slow)])
def test_jit_vmap_and_scan_give_the_same_weights(solver):
    matrices = jnp.asarray(groups_of_clients(5), jnp.float32)

    def solve(matrix):
        return solve_simplex_qp(matrix, solver=solver)

    def scanned(matrices):
        return jax.lax.scan(lambda carry, matrix: (carry, solve(matrix)), 0, matrices)[1]

    want = solve(matrices)
    # vmap of what is traced already (a jitted function, a scan) must not lose the float64 inside.
    transformed = [
        jax.vmap(jax.jit(solve))(matrices),
        jax.jit(jax.vmap(jax.vmap(jax.jit(scanned))))(matrices[None, :, None]),
    ]
    for got in transformed:
        got = jax.tree.map(lambda leaf, like: leaf.reshape(like.shape), got, want)
        assert got.weights.dtype == got.gap.dtype == jnp.float32
        np.testing.assert_allclose(got.weights, want.weights, atol=1e-6)
        np.testing.assert_allclose(got.gap, want.gap, atol=1e-7)


def test_double_precision_stays_double():
    with jax.enable_x64(True):
        matrix = jnp.asarray(groups_of_clients(8)[3])
        solution = solve_simplex_qp(matrix, solver="interior_point")
        assert solution.weights.dtype == solution.gap.dtype == jnp.float64
        assert_on_simplex(solution.weights)
        np.testing.assert_allclose(solution.weights, exact(matrix), atol=1e-4)


def test_programmes_are_solved_one_after_another_on_a_cpu():
    matrices = jnp.arange(2.0 * 9).reshape(2, 3, 3)
    seen = []

    def solve(batch):
        seen.append(batch.shape)
        return batch.sum(axis=-1)

    np.testing.assert_array_equal(simplex_qp._map_batches(solve, matrices, 2), matrices.sum(axis=-1))
    assert (1, 3, 3) in seen


@pytest.mark.parametrize(("size", "batch"), [(2, 2), (5, 5), (7, 5)])
def test_an_accelerator_solves_batch_after_batch(size, batch):
    matrices = jnp.arange(5.0 * 4).reshape(5, 2, 2)

    def solve(part):
        assert part.shape == (batch, 2, 2)
        return part.sum(axis=-1), part[:, 0, 0]

    rows, corners = simplex_qp._solve_in_batches(solve, matrices, size)
    np.testing.assert_array_equal(rows, matrices.sum(axis=-1))
    np.testing.assert_array_equal(corners, matrices[:, 0, 0])


def test_auto_hands_only_the_missed_rows_to_the_interior_point(monkeypatch):
    marked = jnp.arange(6.0)
    monkeypatch.setattr(simplex_qp, "FEW", 3)
    monkeypatch.setattr(simplex_qp, "SMALL", 5)
    monkeypatch.setattr(active_set, "minimize_with_few", lambda matrix, **_: (marked, jnp.bool_(False)))
    monkeypatch.setattr(interior_point, "minimize_on_simplex", lambda matrix, **_: marked)
    easy, hard = np.eye(6), groups_of_clients(6)[0]
    both = simplex_qp._solve_batch(jnp.asarray(np.stack([easy, hard]), jnp.float32), "auto", 1e-4, 1e-7)
    np.testing.assert_allclose(both, [np.full(6, 1 / 6), marked], atol=1e-6)


def test_auto_gives_small_programs_to_jaxopt_and_the_rows_it_misses_to_the_interior_point(monkeypatch):
    equal, marked = jnp.full(6, 1 / 6), jnp.arange(6.0)
    monkeypatch.setattr(jaxopt_solvers, "minimize_on_support", lambda matrix, **_: equal)
    monkeypatch.setattr(interior_point, "minimize_on_simplex", lambda matrix, **_: marked)
    matrices = jnp.asarray(np.stack([np.eye(6), groups_of_clients(6)[0]]), jnp.float32)
    np.testing.assert_array_equal(simplex_qp._solve_batch(matrices, "auto", 1e-4, 1e-7), [equal, marked])
    monkeypatch.setattr(jaxopt_solvers, "minimize_on_support", lambda matrix, **_: equal / 0 * 0)
    np.testing.assert_array_equal(simplex_qp._solve_batch(matrices, "auto", 1e-4, 1e-7), [marked, marked])


@pytest.mark.parametrize("clients", [12, 20, 30])
@pytest.mark.parametrize("population", [groups_of_clients, lambda clients: random_matrices(clients, clients)])
def test_jaxopt_solves_every_program_of_a_cohort(population, clients):
    @in_float64
    def gaps(matrices):
        matrices = matrices.astype(jnp.float64)

        def gap(matrix):
            return frank_wolfe_gap(matrix, jaxopt_solvers.minimize_on_support(matrix, floor=1e-7), 1e-7)

        return jax.lax.map(gap, matrices).astype(jnp.float32)

    matrices = population(clients)
    assert np.max(gaps(jnp.asarray(matrices / matrices.max(axis=(1, 2), keepdims=True), jnp.float32))) < 1e-7


def test_without_jaxopt_auto_is_the_interior_point(monkeypatch):
    matrices = jnp.asarray(random_matrices(2, 3), jnp.float32)
    want = solve_simplex_qp(matrices, solver="interior_point")
    with_jaxopt = solve_simplex_qp(matrices)
    simplex_qp._solver.cache_clear()
    monkeypatch.setattr(jaxopt_solvers, "available", lambda: False)
    monkeypatch.setattr(jaxopt_solvers, "_jaxopt", lambda: pytest.fail("jaxopt is not installed"))
    got = solve_simplex_qp(matrices).weights
    simplex_qp._solver.cache_clear()
    np.testing.assert_array_equal(got, want.weights)
    np.testing.assert_allclose(got, with_jaxopt.weights, atol=1e-4)
    for solver in ("projected_gradient", "osqp"):
        with pytest.raises(InvalidInput, match="jaxopt") as error:
            solve_simplex_qp(matrices, solver=solver)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("shape", "solver", "message"),
    [((2, 3, 3), "simplex", "auto, projected_gradient"), ((2, 3), "auto", "square"), ((0, 0), "auto", "square")],
)
def test_bad_input_is_one_line(shape, solver, message):
    with pytest.raises(InvalidInput, match=message) as error:
        solve_simplex_qp(jnp.ones(shape), solver=solver)
    assert "\n" not in str(error.value)


def test_the_gap_is_the_relative_frank_wolfe_gap():
    matrices = random_matrices(3, 4)
    solution = solve_simplex_qp(jnp.asarray(matrices, jnp.float32), solver="projected_gradient", tolerance=1e-2)
    want = [relative_gap(matrix, weights) for matrix, weights in zip(matrices, solution.weights, strict=True)]
    np.testing.assert_allclose(solution.gap, want, atol=1e-6)
    # Far from the minimizers too.
    anywhere = np.random.default_rng(1).dirichlet(np.ones(4), 3)
    for matrix, weights in zip(matrices, anywhere, strict=True):
        gap = frank_wolfe_gap(jnp.float32(matrix), jnp.float32(weights), 1e-7)
        np.testing.assert_allclose(gap, relative_gap(matrix, weights), rtol=1e-4)
        assert gap > 0.1


@settings(max_examples=50, deadline=None)
@given(hnp.arrays(np.float64, (5, 5), elements=st.floats(-1, 1, width=32)), st.lists(st.floats(0, 1), min_size=5))
def test_the_gap_bounds_what_the_minimum_gains(factor, weights):
    matrix = factor @ factor.T + 1e-3 * np.eye(5)
    weights = np.float64(weights[:5]) + 1e-3
    weights /= weights.sum()
    minimizer = exact(matrix)
    objective = weights @ matrix @ weights
    assert minimizer @ matrix @ minimizer >= (1 - min(relative_gap(matrix, weights), 1)) ** 2 * objective * (1 - 1e-6)


@settings(max_examples=100, deadline=None)
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
