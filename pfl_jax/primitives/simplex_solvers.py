"""Solvers of one quadratic program on the probability simplex; `pfl_jax.primitives.simplex_qp` chooses among them.

Each minimizes x.Px / 2 + c.x over {x >= 0, sum x = 1} for P [m, m], symmetric and positive semidefinite, and c [m],
whose smallest entry is 0; the largest absolute entry of both is about 1 (or 0). Both are float64. The gradient is
P x + c. For `floor` see `frank_wolfe_gap`. Only this file imports jaxopt.
"""

import importlib.util
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

GRADIENT_STEPS = 100
"""Steps of projected gradient descent before the first exact solve of `projected_gradient`."""

EXACT_SOLVES = 20
"""Maximum number of exact solves of `projected_gradient`; FedPAC's programs need 1 to 7."""

EXACT_GAP = 1e-12
"""Gap at which `projected_gradient` ends. It tells little about single weights: 1e-7 leaves errors of about 1e-3."""

RIDGE = 1e-12
"""Added to P's diagonal, so that an exact solve exists. The solves are for changes of the weights, so that its effect
vanishes as they converge."""

NEWTON_STEPS = 60
"""Maximum number of steps of `interior_point`; FedPAC's programs need 15 to 25."""

CENTERING = 0.1
"""Share of the complementarity that a whole step of `interior_point` leaves."""


def frank_wolfe_gap(matrix: jax.Array, linear: jax.Array, weights: jax.Array, floor: float) -> jax.Array:
    r"""Relative Frank-Wolfe gap (x.g - min_j g_j) / max(x.g, floor) of a program at x, for its gradient g = P x + c.

    It is zero exactly at the minimizers. For c = 0 it bounds the suboptimality of x: for a gap r and a minimizer x*,
    x*.Px* >= (1 - r)^2 x.Px, because min_j (Px)_j <= x*.Px <= sqrt(x*.Px* x.Px). The floor is for minima of 0, which
    have no relative accuracy because of rounding in P.

    Args:
      matrix: P [m, m].
      linear: c [m].
      weights: x [m] on the simplex.
      floor: positive lower bound on the denominator: the relative rounding error of P's entries.

    Returns:
      Scalar, at least 0.

    Reference:
      Jaggi, "Revisiting Frank-Wolfe: Projection-Free Sparse Convex Optimization", ICML 2013, Eq. 2.
    """
    gradient = matrix @ weights + linear
    objective = weights @ gradient
    return jnp.maximum(objective - jnp.min(gradient), 0) / jnp.maximum(objective, floor)


def jaxopt_is_installed() -> bool:
    """Whether jaxopt is installed. It is not imported."""
    return importlib.util.find_spec("jaxopt") is not None


def _jaxopt() -> Any:
    """Import jaxopt without its deprecation warning; requirements.txt pins its version."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        import jaxopt
        import jaxopt.projection
    return jaxopt


def projected_gradient(matrix: jax.Array, linear: jax.Array, *, floor: float) -> jax.Array:
    r"""Find the support of the minimizer by gradient steps of jaxopt, and solve exactly on this support.

    jaxopt.ProjectedGradient finds most of the support. Then `change_on_support` minimizes over {sum x = 1} on the
    support, weights that become negative leave it, and the most promising coordinate, the smallest entry of the
    gradient, joins it. Ties join together, so that clients that cannot be told apart get equal weights.

    Args:
      matrix: P [m, m].
      linear: c [m].
      floor: see `frank_wolfe_gap`.

    Returns:
      x [m], nonnegative, summing to 1 up to rounding; not finite, or not the minimizer, where P is close to singular.
      The caller has to compute its gap.
    """

    def unfinished(state: tuple[jax.Array, jax.Array]) -> jax.Array:
        weights, step = state
        return (frank_wolfe_gap(matrix, linear, weights, floor) > EXACT_GAP) & (step < EXACT_SOLVES)

    def solve_exactly(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        weights, step = state
        gradient = matrix @ weights + linear
        support = (weights > 0) | (gradient == jnp.min(gradient))
        weights = jnp.maximum(weights + change_on_support(matrix, gradient, support, ridge=RIDGE), 0)
        return weights / jnp.sum(weights), step + 1

    start = _gradient_steps(matrix, linear)
    return jax.lax.while_loop(unfinished, solve_exactly, (start, jnp.int32(0)))[0]


def _gradient_steps(matrix: jax.Array, linear: jax.Array) -> jax.Array:
    """Accelerated projected gradient descent from equal weights."""
    jaxopt = _jaxopt()
    size = matrix.shape[-1]
    # Steps stay in {sum x = 1}, so their length depends only on P's largest curvature within this plane, which the
    # Frobenius norm bounds.
    centered = matrix - jnp.mean(matrix, axis=0)
    curvature = jnp.linalg.norm(centered - jnp.mean(centered, axis=1, keepdims=True))
    curvature = jnp.where(curvature > 0, curvature, 1)
    solver = jaxopt.ProjectedGradient(
        lambda weights, matrix, linear: (weights @ matrix @ weights / 2 + linear @ weights, matrix @ weights + linear),
        jaxopt.projection.projection_simplex,
        value_and_grad=True,
        stepsize=1.0,
        acceleration=True,
        implicit_diff=False,
    )
    program = matrix / curvature, linear / curvature
    start = jnp.full((size,), 1 / size, matrix.dtype)
    # solver.run compiles the first step apart from the others.
    return jax.lax.while_loop(
        lambda step: (step.state.error > 0) & (step.state.iter_num < GRADIENT_STEPS),
        lambda step: solver.update(*step, 1.0, *program),
        jaxopt.OptStep(start, solver.init_state(start, 1.0, *program)),
    ).params


def change_on_support(matrix: jax.Array, gradient: jax.Array, support: jax.Array, *, ridge: float = 0.0) -> jax.Array:
    """Change d [m] of the weights that minimizes d.Pd / 2 + g.d with sum d = 0, on a support; 0 elsewhere.

    On the support, P d + y 1 = -g; the system is solved by an LU factorization.

    Args:
      matrix: P [m, m].
      gradient: g [m].
      support: bool [m].
      ridge: added to P's diagonal.
    """
    inside = jnp.where(support[:, None] & support, matrix, 0) + jnp.diag(jnp.where(support, ridge, 1.0))
    sums = support.astype(matrix.dtype)
    conditions = jnp.block([[inside, sums[:, None]], [sums, jnp.zeros((1, 1))]])
    return jnp.linalg.solve(conditions, jnp.append(jnp.where(support, -gradient, 0), 0.0))[:-1]


def osqp(matrix: jax.Array, linear: jax.Array, *, tolerance: float) -> jax.Array:
    """Minimize subject to 1 <= sum x <= 1 and 0 <= x <= 1 by jaxopt's operator splitting.

    Args:
      matrix: P [m, m].
      linear: c [m].
      tolerance: relative gap to reach.

    Returns:
      x [m], nonnegative, summing to 1 up to rounding.
    """
    size = matrix.shape[-1]
    # OSQP's tolerances are absolute, so P is scaled to a mean diagonal entry of 1.
    mean = jnp.trace(matrix) / size
    mean = jnp.where(mean > 0, mean, 1)
    constraints = jnp.concatenate([jnp.ones((1, size), matrix.dtype), jnp.eye(size, dtype=matrix.dtype)])
    lower = jnp.zeros((size + 1,), matrix.dtype).at[0].set(1)
    upper = jnp.ones((size + 1,), matrix.dtype)
    solver = _jaxopt().BoxOSQP(tol=min(tolerance, 1e-4) * 0.1, maxiter=4000, eq_qp_solve="lu", implicit_diff=False)
    solution = solver.run(params_obj=(matrix / mean, linear / mean), params_eq=constraints, params_ineq=(lower, upper))
    weights = jnp.maximum(solution.params.primal[0], 0)
    return weights / jnp.sum(weights)


class _Interior(NamedTuple):
    """Iterate of `interior_point`: x [m] and z [m], both positive, and whether it is the last."""

    weights: jax.Array
    slacks: jax.Array
    step: jax.Array
    solved: jax.Array


def interior_point(
    matrix: jax.Array,
    linear: jax.Array,
    *,
    tolerance: float = 1e-9,
    floor: float = 0.0,
    needed: jax.Array | bool = True,
) -> jax.Array:
    r"""Minimize by a primal-dual interior-point method.

    It follows the central path of the optimality conditions

        P x + c - y 1 - z = 0,    sum x = 1,    x_j z_j = s,    x > 0,  z > 0,    s -> 0,

    with Newton steps toward a tenth of s, each of which needs one Cholesky factorization of P + diag(z / x). It starts
    from equal weights, which are primal and dual feasible. If the minimizer is not unique, the path ends near
    the analytic center of the set of minimizers: a zero matrix and identical clients give equal weights.

    Args:
      matrix: P [m, m].
      linear: c [m].
      tolerance: the iteration stops when the Frank-Wolfe gap x.g - min(g) is at most this share of x.g.
      floor: lower bound on x.g in the stopping rule, for minima that are zero up to rounding of P.
      needed: bool; where it is False no step is taken, and x stays at equal weights.

    Returns:
      x [m], positive, summing to 1 up to rounding.

    Reference:
      Nocedal, Wright, "Numerical Optimization", 2nd edition, 2006, Algorithm 14.2.
    """
    size = matrix.shape[-1]
    precision = jnp.finfo(matrix.dtype).eps

    def step(iterate: _Interior) -> _Interior:
        weights, slacks, count, _ = iterate
        gradient = matrix @ weights + linear
        objective, complementarity = weights @ gradient, weights @ slacks
        gap = objective - jnp.min(gradient)
        # The second test is for minima of zero, where the gap never falls below a share of the objective.
        solved = (gap <= tolerance * jnp.maximum(objective, floor)) | (complementarity <= precision)

        ratios = slacks / weights
        factor = jnp.linalg.cholesky(matrix + jnp.diag(ratios + precision), symmetrize_input=False)
        target = CENTERING * complementarity / size / weights
        right = jnp.stack([target - gradient, jnp.ones_like(weights)], axis=-1)
        change, one = jax.scipy.linalg.cho_solve((factor, True), right).T
        change_weights = change - jnp.sum(change) / jnp.sum(one) * one
        change_slacks = target - slacks - ratios * change_weights
        length = jnp.minimum(_longest(weights, change_weights), _longest(slacks, change_slacks))
        length = jnp.minimum(1, 0.99 * length)
        # P may be indefinite by rounding, and its factorization fails.
        solved |= ~jnp.all(jnp.isfinite(change_slacks))
        return _Interior(
            jnp.where(solved, weights, weights + length * change_weights),
            jnp.where(solved, slacks, slacks + length * change_slacks),
            count + 1,
            solved,
        )

    # Equal weights, with slacks that satisfy the stationarity condition exactly.
    weights = jnp.full((size,), 1 / size, matrix.dtype)
    gradient = matrix @ weights + linear
    slacks = gradient - jnp.min(gradient) + jnp.max(jnp.abs(gradient))
    start = _Interior(weights, slacks, jnp.int32(0), ~jnp.asarray(needed))
    return jax.lax.while_loop(lambda iterate: ~iterate.solved & (iterate.step < NEWTON_STEPS), step, start).weights


def _longest(position: jax.Array, direction: jax.Array) -> jax.Array:
    """Largest step along `direction` that keeps `position` nonnegative; infinite if every step does."""
    return jnp.min(jnp.where(direction < 0, -position / direction, jnp.inf))
