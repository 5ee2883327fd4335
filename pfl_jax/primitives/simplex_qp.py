"""Batched quadratic programs on the probability simplex."""

import functools
import logging
import math
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from pfl_jax.base import PyTree
from pfl_jax.errors import InvalidInput
from pfl_jax.primitives import simplex_solvers
from pfl_jax.primitives.float64 import in_float64
from pfl_jax.primitives.simplex_solvers import frank_wolfe_gap
from pfl_jax.primitives.tree import gather
from pfl_jax.validation import check_value

Solver: TypeAlias = Literal["auto", "projected_gradient", "osqp", "interior_point"]
"""Names of the solvers of `solve_simplex_qp`."""

logger = logging.getLogger(__name__)

MANY = 100
"""Number of programs from which a log record says, while they are traced, that they take their time."""

SECONDS = 2e-7
"""Seconds of one CPU core for each program and each entry of P, measured with 300 clients (docs/performance.md)."""

BATCH_ENTRIES = 2**27
"""Entries of the matrices that an accelerator solves at once: 1 GiB in float64, 512 programs of 512 clients."""


class SimplexSolution(NamedTuple):
    """Solutions of min x.Px + q.x over the simplex.

    Attributes:
      weights: x [..., m], nonnegative, summing to 1 up to the rounding of their dtype.
      gap: relative Frank-Wolfe gap [...], a bound on the distance from the optimum, see `frank_wolfe_gap`; infinite
        where x.Px is not convex on the simplex, and nothing is known of the distance.
    """

    weights: jax.Array
    gap: jax.Array


def solve_simplex_qp(
    matrices: jax.Array, linear: jax.Array | None = None, *, solver: Solver = "auto", tolerance: float = 1e-4
) -> SimplexSolution:
    r"""Minimize x.Px + q.x subject to x >= 0 and sum x = 1, for every program of a batch.

    It computes in float64 for any dtype of P, also if JAX's 64-bit mode is off, and divides P and q by their largest
    entry, so the weights do not depend on the scale. With this mode off, JAX rounds NumPy's float64 to float32 before:
    subtract a number that all entries share, which changes no weights. It may be called inside jit, vmap, scan and
    grad.

    Solvers:

    - "auto": "projected_gradient" for programs that it solves to a Frank-Wolfe gap of at most `tolerance`,
      "interior_point" for all others, and for everything if jaxopt is not installed.
    - "projected_gradient": jaxopt.ProjectedGradient for the support and an exact solve on it, see
      `pfl_jax.primitives.simplex_solvers.projected_gradient`.
    - "osqp": jaxopt.BoxOSQP with LU factorizations; slow for more than a few dozen clients, and the gap may stay far
      above `tolerance`: 1e-2 to 7e-2 with 40 clients and a condition number of 1e5. Check it.
    - "interior_point": `pfl_jax.primitives.simplex_solvers.interior_point`, to a gap of 1e-9 or `tolerance`, whichever
      is smaller.

    If the minimizer is not unique (P singular), the result is deterministic and symmetric: clients with equal rows and
    columns get equal weights (the interior-point method's differ by up to 2e-4), and P = 0 gives weights 1/m. The
    interior-point method ends near the analytic center of the minimizers, the other solvers at the minimizer that they
    reach from equal weights.

    Args:
      matrices: P [..., m, m], positive semidefinite; only the symmetric part is used.
      linear: q [..., m]; None for zero.
      solver: name of a solver, see above.
      tolerance: relative Frank-Wolfe gap to reach. For q = 0, a gap r bounds the distance to the minimizer x* by
        sum_j v_j (x_j - x*_j)^2 <= 2 r x.Px, for any v >= 0 such that P - diag(v) is positive semidefinite. Weights
        accurate to 1e-3 need a gap of about 1e-7.

    Returns:
      Weights [..., m] and gaps [...] in P's dtype, in float32 for a type of lower precision; NaN for a program with NaN
      or infinite entries. The derivatives of the weights are the minimizer's, by the implicit function theorem, where
      it is unique and no weight is just becoming positive. The derivatives of the gaps are zero.

    Raises:
      InvalidInput: the solver is unknown or needs jaxopt, which is not installed; or the shapes do not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> import numpy as np
      >>> from pfl_jax.primitives import solve_simplex_qp
      >>> solution = solve_simplex_qp(jnp.diag(jnp.array([1.0, 3.0])))
      >>> print(np.asarray(solution.weights).round(3))  # proportional to 1 / variance
      [0.75 0.25]
      >>> solution = solve_simplex_qp(jnp.eye(2), jnp.array([0.0, 1.0]))
      >>> print(np.asarray(solution.weights).round(3))  # the point of the simplex nearest to -q / 2
      [0.75 0.25]
    """
    _check_solver(solver)
    matrices = jnp.asarray(matrices)
    if matrices.ndim < 2 or matrices.shape[-1] != matrices.shape[-2] or matrices.shape[-1] == 0:
        raise InvalidInput(f"a quadratic program needs square matrices [..., m, m], got shape {matrices.shape}")
    linear = jnp.zeros(matrices.shape[:-1], matrices.dtype) if linear is None else jnp.asarray(linear)
    if linear.shape != matrices.shape[:-1]:
        raise InvalidInput(f"linear has shape {linear.shape}, matrices of {matrices.shape} need {matrices.shape[:-1]}")
    return _solve(matrices, linear, solver=solver, tolerance=float(tolerance))


@functools.partial(jax.jit, static_argnames=("solver", "tolerance"))
def _solve(matrices: jax.Array, linear: jax.Array, *, solver: Solver, tolerance: float) -> SimplexSolution:
    *batch, size, _ = matrices.shape
    dtype = jnp.result_type(matrices.dtype, jnp.float32)

    def solve(matrices: jax.Array, linear: jax.Array) -> SimplexSolution:
        programs = matrices.reshape(-1, size, size), linear.reshape(-1, size)
        weights, gap = map_simplex_qp(lambda program: program, programs, dtype, solver=solver, tolerance=tolerance)
        return SimplexSolution(weights.reshape(*batch, size), gap.reshape(batch))

    return in_float64(solve)(matrices, linear)


def map_simplex_qp(
    program_fn: Callable[[PyTree], tuple[jax.Array, jax.Array]],
    inputs: PyTree,
    dtype: jnp.dtype | type,
    *,
    solver: Solver = "auto",
    tolerance: float = 1e-4,
) -> SimplexSolution:
    """Solve the programs of `solve_simplex_qp` with (P, q) = program_fn(input), one for each row of `inputs`.

    A program exists only while it is solved: one on a CPU, as many as BATCH_ENTRIES allows on an accelerator. It must
    be called in JAX's 64-bit mode, that is within a function given to `pfl_jax.primitives.float64.in_float64`.

    Args:
      program_fn: row of `inputs` -> P [m, m] and q [m].
      inputs: leaves [b, ...].
      dtype: type of the results.
      solver, tolerance: see `solve_simplex_qp`.

    Returns:
      Weights [b, m] and gaps [b].

    Raises:
      InvalidInput: the solver is unknown or needs jaxopt, which is not installed.
    """
    _check_solver(solver)
    floor = float(jnp.finfo(dtype).eps)

    def solve(row: PyTree) -> tuple[jax.Array, jax.Array]:
        matrix, linear = (leaf.astype(jnp.float64) for leaf in program_fn(row))
        # A constant added to q does not change the minimizer.
        linear = (linear - jnp.min(linear)) / 2
        scale = jnp.maximum(jnp.max(jnp.abs(matrix)), jnp.max(linear))
        scale = jax.lax.stop_gradient(jnp.where(scale > 0, scale, 1))
        matrix, linear = matrix / scale, linear / scale
        matrix = (matrix + matrix.T) / 2
        weights = _minimizer(matrix, linear, solver, tolerance, floor)
        # Solvers would end at their start, equal weights.
        is_finite = jnp.isfinite(matrix).all() & jnp.isfinite(linear).all()
        weights = jnp.where(is_finite, weights, jnp.nan)
        gap = frank_wolfe_gap(matrix, linear, weights, floor)
        return weights, jax.lax.stop_gradient(jnp.where(_is_convex(jax.lax.stop_gradient(matrix), floor), gap, jnp.inf))

    weights, gap = _map_programs(solve, inputs, jax.eval_shape(program_fn, gather(inputs, 0))[0].size)
    return SimplexSolution(weights.astype(dtype), gap.astype(dtype))


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4))
def _minimizer(matrix: jax.Array, linear: jax.Array, solver: Solver, tolerance: float, floor: float) -> jax.Array:
    """Weights [m] for a scaled float64 program."""
    if solver == "osqp":
        return simplex_solvers.osqp(matrix, linear, tolerance=tolerance)
    interior = functools.partial(simplex_solvers.interior_point, tolerance=min(tolerance, 1e-9), floor=floor)
    if solver == "interior_point" or not simplex_solvers.jaxopt_is_installed():
        return interior(matrix, linear)
    weights = simplex_solvers.projected_gradient(matrix, linear, floor=floor)
    if solver == "projected_gradient":
        return weights
    found = frank_wolfe_gap(matrix, linear, weights, floor) <= tolerance
    return jnp.where(found, weights, interior(matrix, linear, needed=~found))


@_minimizer.defjvp
def _(solver, tolerance, floor, program, change):
    """Derivatives of the weights, with which the optimality conditions stay satisfied.

    On the support, where P x + c = y 1 and sum x = 1:    P dx - dy 1 = -(dP x + dc),    sum dx = 0
    """
    matrix, linear = program
    matrix_change, linear_change = change
    weights = _minimizer(matrix, linear, solver, tolerance, floor)
    gradient = matrix @ weights + linear
    # Either x_j or its multiplier is zero, and the other one is positive.
    support = weights > gradient - jnp.min(gradient)
    return weights, simplex_solvers.change_on_support(matrix, matrix_change @ weights + linear_change, support)


def _is_convex(matrix: jax.Array, floor: float) -> jax.Array:
    """Whether x.Px is convex on the simplex, up to rounding of P [m, m]; if not, no gap is a bound."""
    centered = matrix - jnp.mean(matrix, axis=0)
    centered = centered - jnp.mean(centered, axis=1, keepdims=True)
    factor = jnp.linalg.cholesky(centered + len(matrix) * floor * jnp.eye(len(matrix)), symmetrize_input=True)
    # For NaN, which gives no weights either, the gap is NaN.
    return jnp.isfinite(factor).all() | ~jnp.isfinite(matrix).all()


def _map_programs(solve: Callable[[PyTree], PyTree], inputs: PyTree, entries: int) -> PyTree:
    """Solve programs of `entries` entries: one after another on a CPU, many at once on an accelerator."""
    number = len(jax.tree.leaves(inputs)[0])
    if number >= MANY:
        # Logged while JAX traces, before the first round: an exported program (`in_float64`) cannot log.
        programs = f"{number:,} quadratic programs of {math.isqrt(entries):,} variables"
        logger.info("a round solves %s, in some %.1f s of a CPU core", programs, SECONDS * number * entries)
    # A batched factorization waits for threads of XLA's pool. Two CPU devices that solve at the same time can use up
    # all threads and deadlock, as happened with 30 matrices on two devices and two cores.
    one_by_one = functools.partial(jax.lax.map, solve)
    if jax.default_backend() == "cpu":
        return one_by_one(inputs)
    in_batches = functools.partial(jax.lax.map, solve, batch_size=max(BATCH_ENTRIES // entries, 1))
    return jax.lax.platform_dependent(inputs, cpu=one_by_one, default=in_batches)


def _check_solver(solver: Solver) -> None:
    check_value("solver", solver, Solver)
    if solver in ("projected_gradient", "osqp") and not simplex_solvers.jaxopt_is_installed():
        raise InvalidInput(f"solver {solver!r} needs jaxopt: pip install jaxopt, or choose solver 'interior_point'")
