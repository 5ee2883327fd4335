"""Batched quadratic programs on the probability simplex. Only this file imports jaxopt."""

import functools
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp

from pfl_jax.base import PyTree
from pfl_jax.errors import InvalidInput
from pfl_jax.primitives import active_set, interior_point
from pfl_jax.primitives.float64 import in_float64
from pfl_jax.primitives.tree import gather

Solver: TypeAlias = Literal["auto", "projected_gradient", "osqp", "interior_point"]
"""Names of the solvers of `solve_simplex_qp`."""

FEW = 128
"""Coordinates of a restricted program of `solver="auto"`, or a quarter of all where that is more: the clients of one of
FedPAC's five groups fit. They pay from twice as many coordinates on."""

GRADIENT_STEPS = 5000
"""Maximum number of steps of `solver="projected_gradient"`."""

BATCH_ENTRIES = 2**27
"""Entries of the matrices that an accelerator solves at once: 1 GiB in float64, 512 programs of 512 clients."""


class SimplexSolution(NamedTuple):
    """Solutions of min x.Px over the simplex.

    Attributes:
      weights: x [..., m], nonnegative, summing to 1 up to the rounding of their dtype.
      gap: relative Frank-Wolfe gap [...], a bound on the distance from the optimum; see `frank_wolfe_gap`.
    """

    weights: jax.Array
    gap: jax.Array


def solve_simplex_qp(matrices: jax.Array, *, solver: Solver = "auto", tolerance: float = 1e-4) -> SimplexSolution:
    r"""Minimize x.Px subject to x >= 0 and sum x = 1, for every matrix of a batch.

    It computes in float64 for any dtype of P, also if JAX's 64-bit mode is off, and divides P by its largest entry, so
    the weights do not depend on P's scale. It may be called inside jit, vmap and scan.

    Solvers:

    - "auto": for m below 256 the interior-point method; from 256 on equal weights and `pfl_jax.primitives.active_set`
      are tried before it, and accepted if their Frank-Wolfe gap is at most `tolerance`.
    - "projected_gradient": jaxopt.ProjectedGradient, accelerated, for at most 5000 steps.
    - "osqp": jaxopt.BoxOSQP with LU factorizations; slow for more than a few dozen clients.
    - "interior_point": `pfl_jax.primitives.interior_point`, to a gap of 1e-9 or `tolerance`, whichever is smaller.

    If the minimizer is not unique (P singular), the result is deterministic and symmetric: clients with equal rows and
    columns get equal weights, and P = 0 gives weights 1/m. The interior-point method ends near the analytic center of
    the minimizers, the other solvers at the minimizer that they reach from equal weights.

    Args:
      matrices: P [..., m, m], positive semidefinite; only the symmetric part is used.
      solver: name of a solver, see above.
      tolerance: relative Frank-Wolfe gap to reach. A gap r bounds the distance to the minimizer x* by
        sum_j v_j (x_j - x*_j)^2 <= 2 r x.Px, for any v >= 0 such that P - diag(v) is positive semidefinite. Weights
        accurate to 1e-3 need a gap of about 1e-7.

    Returns:
      Weights [..., m] and gaps [...] in P's dtype, in float32 for a type of lower precision. They have no derivative.

    Raises:
      InvalidInput: the solver is unknown or needs jaxopt, which is not installed; or P is not square.

    Example:
      >>> import jax.numpy as jnp
      >>> import numpy as np
      >>> from pfl_jax.primitives import simplex_qp
      >>> solution = simplex_qp.solve_simplex_qp(jnp.diag(jnp.array([1.0, 3.0])), solver="interior_point")
      >>> print(np.asarray(solution.weights).round(3))  # proportional to 1 / variance
      [0.75 0.25]
    """
    _check_solver(solver)
    if matrices.ndim < 2 or matrices.shape[-1] != matrices.shape[-2] or matrices.shape[-1] == 0:
        raise InvalidInput(f"a quadratic program needs square matrices [..., m, m], got shape {matrices.shape}")

    return _solver(solver, float(tolerance))(matrices)


@functools.cache
def _solver(solver: Solver, tolerance: float) -> Callable[[jax.Array], SimplexSolution]:
    """Compiled part of `solve_simplex_qp`, cached by its options so that repeated calls compile once."""

    def solve(matrices: jax.Array) -> SimplexSolution:
        *batch, size, _ = matrices.shape
        dtype = jnp.result_type(matrices.dtype, jnp.float32)
        each = matrices.reshape(-1, size, size)
        weights, gap = minimize_each(lambda matrix: matrix, each, dtype, solver=solver, tolerance=tolerance)
        return SimplexSolution(weights.reshape(*batch, size), gap.reshape(batch))

    return in_float64(solve)


def minimize_each(
    matrix_fn: Callable[[PyTree], jax.Array],
    inputs: PyTree,
    dtype: jnp.dtype | type,
    *,
    solver: Solver = "auto",
    tolerance: float = 1e-4,
) -> SimplexSolution:
    """Solve the programs of `solve_simplex_qp` with P = matrix_fn(input), one for each row of `inputs`.

    A matrix exists only while its program is solved: one on a CPU, as many as BATCH_ENTRIES allows on an accelerator.
    It must be called in JAX's 64-bit mode, that is within a function given to `pfl_jax.primitives.float64.in_float64`.

    Args:
      matrix_fn: row of `inputs` -> P [m, m].
      inputs: leaves [b, ...].
      dtype: of the results.
      solver, tolerance: see `solve_simplex_qp`.

    Returns:
      Weights [b, m] and gaps [b].

    Raises:
      InvalidInput: the solver is unknown or needs jaxopt, which is not installed.
    """
    _check_solver(solver)
    floor = float(jnp.finfo(dtype).eps)

    def solve(part: PyTree) -> tuple[jax.Array, jax.Array]:
        matrices = jax.vmap(matrix_fn)(part).astype(jnp.float64)
        scale = jnp.max(jnp.abs(matrices), axis=(-2, -1), keepdims=True)
        matrices = matrices / jnp.where(scale > 0, scale, 1)
        matrices = (matrices + matrices.mT) / 2
        weights = _onto_simplex(_solve_batch(matrices, solver, tolerance, floor))
        return weights, jax.vmap(lambda matrix, row: frank_wolfe_gap(matrix, row, floor))(matrices, weights)

    entries = jax.eval_shape(matrix_fn, gather(inputs, 0)).size
    weights, gap = _map_batches(solve, inputs, max(BATCH_ENTRIES // entries, 1))
    return SimplexSolution(weights.astype(dtype), gap.astype(dtype))


def frank_wolfe_gap(matrix: jax.Array, weights: jax.Array, floor: float) -> jax.Array:
    r"""Relative Frank-Wolfe gap (x.Px - min_j (Px)_j) / max(x.Px, floor) of one P at x.

    It is zero exactly at the minimizers, and it bounds the suboptimality of x: for a gap r and a minimizer x*,
    x*.Px* >= (1 - r)^2 x.Px, because min_j (Px)_j <= x*.Px <= sqrt(x*.Px* x.Px). The floor is for minima of 0, which
    have no relative accuracy because of rounding in P.

    Args:
      matrix: P [m, m], largest absolute entry 1 (or 0).
      weights: x [m] on the simplex.
      floor: positive lower bound on the denominator: the relative rounding error of P's entries.

    Returns:
      Scalar, at least 0.

    Reference:
      Jaggi, "Revisiting Frank-Wolfe: Projection-Free Sparse Convex Optimization", ICML 2013, Eq. 2.
    """
    gradient = matrix @ weights
    objective = weights @ gradient
    return jnp.maximum(objective - jnp.min(gradient), 0) / jnp.maximum(objective, floor)


def _solve_batch(matrices: jax.Array, solver: Solver, tolerance: float, floor: float) -> jax.Array:
    """Weights [b, m] for normalized float64 matrices [b, m, m]."""

    def interior(matrix: jax.Array) -> jax.Array:
        return interior_point.minimize_on_simplex(matrix, tolerance=min(tolerance, 1e-9), floor=floor)

    if solver == "interior_point" or (solver == "auto" and matrices.shape[-1] < 2 * FEW):
        return jax.vmap(interior)(matrices)
    if solver == "osqp":
        return jax.vmap(lambda matrix: _osqp(matrix, tolerance))(matrices)
    if solver == "projected_gradient":
        return jax.vmap(lambda matrix: _projected_gradient(matrix, tolerance))(matrices)

    def equal(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
        weights = jnp.full(matrix.shape[0], 1 / matrix.shape[0], matrix.dtype)
        return weights, frank_wolfe_gap(matrix, weights, floor) <= tolerance

    def few(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
        size = max(FEW, matrix.shape[0] // 4)
        return active_set.minimize_with_few(matrix, size=size, tolerance=tolerance, floor=floor)

    weights, missed = jnp.zeros(matrices.shape[:-1], matrices.dtype), jnp.ones(matrices.shape[0], bool)
    for attempt in (equal, few, lambda matrix: (interior(matrix), jnp.bool_(True))):
        weights, missed = _solve_missed(attempt, matrices, weights, missed)
    return weights


def _solve_missed(
    attempt: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
    matrices: jax.Array,
    weights: jax.Array,
    missed: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Weights [b, m], those of missed rows by an attempt where it finds the minimizer, and which rows it missed."""

    def replace_missed() -> tuple[jax.Array, jax.Array]:
        attempted, found = jax.vmap(attempt)(matrices)
        return jnp.where((missed & found)[:, None], attempted, weights), missed & ~found

    return jax.lax.cond(jnp.any(missed), replace_missed, lambda: (weights, missed))


def _map_batches(solve: Callable[[PyTree], PyTree], inputs: PyTree, size: int) -> PyTree:
    """Solve the programs of inputs [b, ...], at most `size` at once on an accelerator, one after another on a CPU."""

    def one_by_one(inputs: PyTree) -> PyTree:
        # A batched factorization waits for threads of XLA's pool. Two CPU devices that solve at the same time can use
        # up all threads and deadlock, as happened with 30 matrices on two devices and two cores.
        return jax.lax.map(lambda one: gather(solve(jax.tree.map(lambda leaf: leaf[None], one)), 0), inputs)

    return jax.lax.platform_dependent(
        inputs, cpu=one_by_one, default=lambda inputs: _solve_in_batches(solve, inputs, size)
    )


def _solve_in_batches(solve: Callable[[PyTree], PyTree], inputs: PyTree, size: int) -> PyTree:
    """Solve the programs of inputs [b, ...], `size` at once; copies of the first program fill the last batch."""
    count = jax.tree.leaves(inputs)[0].shape[0]
    if count <= size:
        return solve(inputs)
    places = jnp.arange(-(-count // size) * size)
    rows = gather(inputs, jnp.where(places < count, places, 0).reshape(-1, size))
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:count], jax.lax.map(solve, rows))


def _check_solver(solver: str) -> None:
    if solver not in get_args(Solver):
        raise InvalidInput(f"unknown solver {solver!r}: choose one of {', '.join(get_args(Solver))}")
    if solver in ("projected_gradient", "osqp") and not _has_jaxopt():
        raise InvalidInput(f"solver {solver!r} needs jaxopt: pip install jaxopt, or choose solver 'interior_point'")


def _onto_simplex(weights: jax.Array) -> jax.Array:
    """Clip and normalize rows that are nearly on the simplex, so that they are nonnegative and sum to 1."""
    weights = jnp.maximum(weights, 0)
    return weights / jnp.sum(weights, axis=-1, keepdims=True)


def _projected_gradient(matrix: jax.Array, tolerance: float) -> jax.Array:
    """Accelerated projected gradient from equal weights, with P divided by its curvature (step length 1)."""
    jaxopt = _import_jaxopt()
    size = matrix.shape[-1]

    def centered(vector: jax.Array) -> jax.Array:
        return vector - jnp.mean(vector)

    def iterate(_, vector: jax.Array) -> jax.Array:
        image = centered(matrix @ vector)
        return image / jnp.maximum(jnp.linalg.norm(image), jnp.finfo(matrix.dtype).tiny)

    # Steps stay in {sum x = 1}, so the step length depends only on P's largest curvature within this plane. It is found
    # by power iteration from a vector without symmetries, increased by 5 % because the iteration is stopped early.
    start = iterate(0, jnp.cos(jnp.arange(size, dtype=matrix.dtype)))
    eigenvector = jax.lax.fori_loop(0, 20, iterate, start)
    largest = 1.05 * (eigenvector @ matrix @ eigenvector)
    scaled = matrix / jnp.where(largest > 0, largest, 1)
    solver = jaxopt.ProjectedGradient(
        lambda weights, matrix: weights @ matrix @ weights / 2,
        jaxopt.projection.projection_simplex,
        stepsize=1.0,
        maxiter=GRADIENT_STEPS,
        # jaxopt's error is the length of the next step, an absolute value; objectives are often below 1e-4 times P's
        # curvature.
        tol=min(tolerance, 1e-4) * 1e-5,
        acceleration=True,
        implicit_diff=False,
    )
    return solver.run(jnp.full((size,), 1 / size, matrix.dtype), hyperparams_proj=1.0, matrix=scaled).params


def _osqp(matrix: jax.Array, tolerance: float) -> jax.Array:
    """Operator splitting on min x.Px / 2 subject to 1 <= sum x <= 1 and 0 <= x <= 1."""
    jaxopt = _import_jaxopt()
    size = matrix.shape[-1]
    # OSQP's tolerances are absolute, so P is scaled to a mean diagonal entry of 1.
    mean = jnp.trace(matrix) / size
    scaled = matrix / jnp.where(mean > 0, mean, 1)
    constraints = jnp.concatenate([jnp.ones((1, size), matrix.dtype), jnp.eye(size, dtype=matrix.dtype)])
    lower = jnp.zeros((size + 1,), matrix.dtype).at[0].set(1)
    upper = jnp.ones((size + 1,), matrix.dtype)
    solver = jaxopt.BoxOSQP(tol=min(tolerance, 1e-4) * 0.1, maxiter=4000, eq_qp_solve="lu", implicit_diff=False)
    solution = solver.run(
        params_obj=(scaled, jnp.zeros((size,), matrix.dtype)), params_eq=constraints, params_ineq=(lower, upper)
    )
    return solution.params.primal[0]


def _has_jaxopt() -> bool:
    """Whether jaxopt can be imported, without importing it."""
    return importlib.util.find_spec("jaxopt") is not None


def _import_jaxopt() -> Any:
    """Import jaxopt without its deprecation warning; requirements.txt pins its version."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        import jaxopt
        import jaxopt.projection
    return jaxopt
