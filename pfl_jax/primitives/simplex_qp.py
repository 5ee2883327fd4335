"""Batched quadratic programs on the probability simplex."""

import functools
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

Attempt: TypeAlias = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
"""P [m, m], c [m] -> weights [m], and whether they are certain to be the minimizer."""

SMALL = 100
"""Largest program that `solver="auto"` gives to jaxopt. Larger ones the interior-point method solves sooner."""

FEW = 128
"""Coordinates of a restricted program of `solver="auto"`, or a quarter of all where that is more: the clients of one of
FedPAC's five groups fit. They pay from twice as many coordinates on."""

BATCH_ENTRIES = 2**27
"""Entries of the matrices that an accelerator solves at once: 1 GiB in float64, 512 programs of 512 clients."""


class SimplexSolution(NamedTuple):
    """Solutions of min x.Px + q.x over the simplex.

    Attributes:
      weights: x [..., m], nonnegative, summing to 1 up to the rounding of their dtype.
      gap: relative Frank-Wolfe gap [...], a bound on the distance from the optimum; see `frank_wolfe_gap`.
    """

    weights: jax.Array
    gap: jax.Array


def solve_simplex_qp(
    matrices: jax.Array, linear: jax.Array | None = None, *, solver: Solver = "auto", tolerance: float = 1e-4
) -> SimplexSolution:
    r"""Minimize x.Px + q.x subject to x >= 0 and sum x = 1, for every program of a batch.

    It computes in float64 for any dtype of P, also if JAX's 64-bit mode is off, and divides P and q by their largest
    entry, so the weights do not depend on the scale. It may be called inside jit, vmap, scan and grad.

    Solvers:

    - "auto": for m up to 100 "projected_gradient", if jaxopt is installed; for m from 256 on equal weights, then
      `pfl_jax.primitives.simplex_solvers.few_coordinates`. What has a Frank-Wolfe gap of at most `tolerance` is
      accepted. All others go to the interior-point method.
    - "projected_gradient": jaxopt.ProjectedGradient for the support and an exact solve on it, see
      `pfl_jax.primitives.simplex_solvers.projected_gradient`.
    - "osqp": jaxopt.BoxOSQP with LU factorizations; slow for more than a few dozen clients.
    - "interior_point": `pfl_jax.primitives.simplex_solvers.interior_point`, to a gap of 1e-9 or `tolerance`, whichever
      is smaller.

    If the minimizer is not unique (P singular), the result is deterministic and symmetric: clients with equal rows and
    columns get equal weights, and P = 0 gives weights 1/m. The interior-point method ends near the analytic center of
    the minimizers, the other solvers at the minimizer that they reach from equal weights.

    Args:
      matrices: P [..., m, m], positive semidefinite; only the symmetric part is used.
      linear: q [..., m]; None for zero.
      solver: name of a solver, see above.
      tolerance: relative Frank-Wolfe gap to reach. For q = 0, a gap r bounds the distance to the minimizer x* by
        sum_j v_j (x_j - x*_j)^2 <= 2 r x.Px, for any v >= 0 such that P - diag(v) is positive semidefinite. Weights
        accurate to 1e-3 need a gap of about 1e-7.

    Returns:
      Weights [..., m] and gaps [...] in P's dtype, in float32 for a type of lower precision; NaN for a program with NaN
      or infinite entries. The derivatives of the
      weights are those of the minimizer, by the implicit function theorem, where it is unique and no weight is just
      becoming positive. The gaps' are zero.

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
    if matrices.ndim < 2 or matrices.shape[-1] != matrices.shape[-2] or matrices.shape[-1] == 0:
        raise InvalidInput(f"a quadratic program needs square matrices [..., m, m], got shape {matrices.shape}")
    linear = jnp.zeros(matrices.shape[:-1], matrices.dtype) if linear is None else linear
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
        matrices, linear = (leaf.astype(jnp.float64) for leaf in jax.vmap(program_fn)(part))
        # A constant added to q does not change the minimizer.
        linear = (linear - jnp.min(linear, axis=-1, keepdims=True)) / 2
        scale = jnp.maximum(jnp.max(jnp.abs(matrices), axis=(-2, -1)), jnp.max(linear, axis=-1))
        scale = jax.lax.stop_gradient(jnp.where(scale > 0, scale, 1))
        matrices, linear = matrices / scale[:, None, None], linear / scale[:, None]
        matrices = (matrices + matrices.mT) / 2
        weights = _minimizers(matrices, linear, solver, tolerance, floor)
        # Solvers would end at their start, equal weights.
        is_finite = jnp.isfinite(matrices).all((-2, -1)) & jnp.isfinite(linear).all(-1)
        weights = jnp.where(is_finite[:, None], weights, jnp.nan)
        gap = jax.vmap(functools.partial(frank_wolfe_gap, floor=floor))(matrices, linear, weights)
        return weights, jax.lax.stop_gradient(gap)

    entries = jax.eval_shape(program_fn, gather(inputs, 0))[0].size
    weights, gap = _map_batches(solve, inputs, max(BATCH_ENTRIES // entries, 1))
    return SimplexSolution(weights.astype(dtype), gap.astype(dtype))


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4))
def _minimizers(matrices: jax.Array, linear: jax.Array, solver: Solver, tolerance: float, floor: float) -> jax.Array:
    """Weights [b, m] for scaled float64 programs: rows that one attempt misses go to the next one."""
    first, *others = _attempts(solver, matrices.shape[-1], tolerance, floor)
    weights, found = jax.vmap(first)(matrices, linear)
    for attempt in others:
        weights, found = _solve_missed(attempt, matrices, linear, weights, found)
    return weights


@_minimizers.defjvp
def _(solver, tolerance, floor, programs, changes):
    matrices, linear = programs
    weights = _minimizers(matrices, linear, solver, tolerance, floor)
    return weights, jax.vmap(_change_of_minimizer)(matrices, linear, weights, *changes)


def _change_of_minimizer(
    matrix: jax.Array, linear: jax.Array, weights: jax.Array, matrix_change: jax.Array, linear_change: jax.Array
) -> jax.Array:
    """Derivative of the minimizer x by the program: the optimality conditions stay satisfied.

    On the support, where P x + c = y 1 and sum x = 1:    P dx - dy 1 = -(dP x + dc),    sum dx = 0
    """
    gradient = matrix @ weights + linear
    # Of x_j and its multiplier, one is zero, and the other positive.
    support = weights > gradient - jnp.min(gradient)
    return simplex_solvers.change_on_support(matrix, matrix_change @ weights + linear_change, support)


def _attempts(solver: Solver, size: int, tolerance: float, floor: float) -> list[Attempt]:
    """What a solver tries, in this order, on programs of this size."""

    def certified(minimize: Callable[[jax.Array, jax.Array], jax.Array]) -> Attempt:
        def attempt(matrix: jax.Array, linear: jax.Array) -> tuple[jax.Array, jax.Array]:
            weights = minimize(matrix, linear)
            return weights, frank_wolfe_gap(matrix, linear, weights, floor) <= tolerance

        return attempt

    equal = certified(lambda matrix, linear: jnp.full_like(linear, 1 / size))
    gradient = certified(functools.partial(simplex_solvers.projected_gradient, floor=floor))
    osqp = certified(functools.partial(simplex_solvers.osqp, tolerance=tolerance))
    few = functools.partial(simplex_solvers.few_coordinates, size=max(FEW, size // 4), tolerance=tolerance, floor=floor)
    interior = functools.partial(simplex_solvers.interior_point, tolerance=min(tolerance, 1e-9), floor=floor)
    interior = certified(interior)

    if solver == "auto" and size <= SMALL and simplex_solvers.jaxopt_is_installed():
        return [gradient, interior]
    if solver == "auto" and size >= 2 * FEW:
        return [equal, few, interior]
    return {"projected_gradient": [gradient], "osqp": [osqp]}.get(solver, [interior])


def _solve_missed(
    attempt: Attempt, matrices: jax.Array, linear: jax.Array, weights: jax.Array, found: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Weights [b, m], by an attempt where they are not found yet, and which are now."""

    def replace() -> tuple[jax.Array, jax.Array]:
        attempted, now_found = jax.vmap(attempt)(matrices, linear)
        return jnp.where(found[:, None], weights, attempted), found | now_found

    return jax.lax.cond(jnp.all(found), lambda: (weights, found), replace)


def _map_batches(solve: Callable[[PyTree], PyTree], inputs: PyTree, size: int) -> PyTree:
    """Solve the programs of inputs [b, ...], at most `size` at once on an accelerator, one after another on a CPU."""

    def one_by_one(inputs: PyTree) -> PyTree:
        # A batched factorization waits for threads of XLA's pool. Two CPU devices that solve at the same time can use
        # up all threads and deadlock, as happened with 30 matrices on two devices and two cores.
        return jax.lax.map(lambda one: gather(solve(jax.tree.map(lambda leaf: leaf[None], one)), 0), inputs)

    if jax.default_backend() == "cpu":
        return one_by_one(inputs)
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


def _check_solver(solver: Solver) -> None:
    check_value("solver", solver, Solver)
    if solver in ("projected_gradient", "osqp") and not simplex_solvers.jaxopt_is_installed():
        raise InvalidInput(f"solver {solver!r} needs jaxopt: pip install jaxopt, or choose solver 'interior_point'")
