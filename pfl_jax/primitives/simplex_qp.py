"""Batched quadratic programs on the probability simplex."""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp

from pfl_jax.base import PyTree
from pfl_jax.errors import InvalidInput
from pfl_jax.primitives import active_set, interior_point, jaxopt_solvers
from pfl_jax.primitives.float64 import in_float64
from pfl_jax.primitives.frank_wolfe import frank_wolfe_gap
from pfl_jax.primitives.tree import gather

Solver: TypeAlias = Literal["auto", "projected_gradient", "osqp", "interior_point"]
"""Names of the solvers of `solve_simplex_qp`."""

Attempt: TypeAlias = Callable[[jax.Array], tuple[jax.Array, jax.Array]]
"""P [m, m] -> weights [m], and whether they are certain to be the minimizer."""

SMALL = 100
"""Largest program that `solver="auto"` gives to jaxopt. Larger ones the interior-point method solves sooner."""

FEW = 128
"""Coordinates of a restricted program of `solver="auto"`, or a quarter of all where that is more: the clients of one of
FedPAC's five groups fit. They pay from twice as many coordinates on."""

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

    - "auto": for m up to 100 `pfl_jax.primitives.jaxopt_solvers.minimize_on_support`, if jaxopt is installed, that is
      jaxopt.ProjectedGradient for the support and jaxopt.EqualityConstrainedQP on it; for m from 256 on equal weights,
      then `pfl_jax.primitives.active_set`. What has a Frank-Wolfe gap of at most `tolerance` is accepted. All others
      go to the interior-point method.
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
        weights = _solve_batch(matrices, solver, tolerance, floor)
        return weights, jax.vmap(lambda matrix, row: frank_wolfe_gap(matrix, row, floor))(matrices, weights)

    entries = jax.eval_shape(matrix_fn, gather(inputs, 0)).size
    weights, gap = _map_batches(solve, inputs, max(BATCH_ENTRIES // entries, 1))
    return SimplexSolution(weights.astype(dtype), gap.astype(dtype))


def _solve_batch(matrices: jax.Array, solver: Solver, tolerance: float, floor: float) -> jax.Array:
    """Weights [b, m] for normalized float64 matrices [b, m, m]: rows that one attempt misses go to the next one."""
    first, *others = _attempts(solver, matrices.shape[-1], tolerance, floor)
    weights, found = jax.vmap(first)(matrices)
    for attempt in others:
        weights, found = _solve_missed(attempt, matrices, weights, found)
    return weights


def _attempts(solver: Solver, size: int, tolerance: float, floor: float) -> list[Attempt]:
    """What a solver tries, in this order, on programs of this size."""

    def certified(minimize: Callable[[jax.Array], jax.Array]) -> Attempt:
        def attempt(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
            weights = minimize(matrix)
            return weights, frank_wolfe_gap(matrix, weights, floor) <= tolerance

        return attempt

    def few(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
        return active_set.minimize_with_few(matrix, size=max(FEW, size // 4), tolerance=tolerance, floor=floor)

    def interior(matrix: jax.Array) -> jax.Array:
        return interior_point.minimize_on_simplex(matrix, tolerance=min(tolerance, 1e-9), floor=floor)

    if solver == "projected_gradient":
        return [certified(functools.partial(jaxopt_solvers.projected_gradient, tolerance=tolerance))]
    if solver == "osqp":
        return [certified(functools.partial(jaxopt_solvers.osqp, tolerance=tolerance))]
    if solver == "auto" and size <= SMALL and jaxopt_solvers.available():
        return [certified(functools.partial(jaxopt_solvers.minimize_on_support, floor=floor)), certified(interior)]
    if solver == "auto" and size >= 2 * FEW:
        return [certified(lambda matrix: jnp.full_like(matrix[0], 1 / size)), few, certified(interior)]
    return [certified(interior)]


def _solve_missed(
    attempt: Attempt, matrices: jax.Array, weights: jax.Array, found: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Weights [b, m], by an attempt where they are not found yet, and which are now."""

    def replace() -> tuple[jax.Array, jax.Array]:
        attempted, now_found = jax.vmap(attempt)(matrices)
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


def _check_solver(solver: str) -> None:
    if solver not in get_args(Solver):
        raise InvalidInput(f"unknown solver {solver!r}: choose one of {', '.join(get_args(Solver))}")
    if solver in ("projected_gradient", "osqp") and not jaxopt_solvers.available():
        raise InvalidInput(f"solver {solver!r} needs jaxopt: pip install jaxopt, or choose solver 'interior_point'")
