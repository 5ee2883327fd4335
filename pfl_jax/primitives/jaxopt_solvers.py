"""Solvers of jaxopt for one quadratic program on the probability simplex. Only this file imports jaxopt."""

import functools
import importlib.util
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from pfl_jax.base import PyTree
from pfl_jax.primitives.frank_wolfe import frank_wolfe_gap

GRADIENT_STEPS = 5000
"""Maximum number of steps of projected gradient descent alone."""

SUPPORT_STEPS = 100
"""Steps of projected gradient descent before the first exact solve of `minimize_on_support`."""

EXACT_SOLVES = 20
"""Maximum number of exact solves of `minimize_on_support`; FedPAC's programs need 1 to 7."""

EXACT_GAP = 1e-12
"""Gap at which `minimize_on_support` ends. The gap tells little of single weights: 1e-7 leaves errors of about 1e-3."""

RIDGE = 1e-12
"""Added to P's diagonal, whose largest entry is about 1, so that an exact solve exists. The solves are for changes of
the weights, so that its effect vanishes as they converge."""


def available() -> bool:
    """Whether jaxopt is installed. It is not imported."""
    return importlib.util.find_spec("jaxopt") is not None


@functools.cache
def _jaxopt() -> Any:
    """Import jaxopt without its deprecation warning; requirements.txt pins its version."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        import jaxopt
        import jaxopt.projection
    return jaxopt


def minimize_on_support(matrix: jax.Array, *, floor: float) -> jax.Array:
    r"""Minimize x.Px over the simplex {x >= 0, sum x = 1}: the support by gradient steps, the weights exactly.

    jaxopt.ProjectedGradient finds most of the support. Then jaxopt.EqualityConstrainedQP minimizes over {sum x = 1} on
    the support, weights that become negative leave it, and the most promising coordinate, the smallest entry of P x,
    joins it. Ties join together, so that clients that cannot be told apart get equal weights.

    Args:
      matrix: P [m, m], symmetric and positive semidefinite, its largest absolute entry about 1 (or 0); float64.
      floor: see `frank_wolfe_gap`.

    Returns:
      x [m], nonnegative, summing to 1 up to rounding; not finite, or not the minimizer, where P is close to singular.
      The caller has to compute its gap.
    """
    jaxopt = _jaxopt()
    program = jaxopt.EqualityConstrainedQP(solve=_solve_densely, implicit_diff_solve=_solve_densely)

    def unfinished(state: tuple[jax.Array, jax.Array]) -> jax.Array:
        weights, step = state
        return (frank_wolfe_gap(matrix, weights, floor) > EXACT_GAP) & (step < EXACT_SOLVES)

    def solve_exactly(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        weights, step = state
        gradient = matrix @ weights
        support = (weights > 0) | (gradient == jnp.min(gradient))
        quadratic = jnp.where(support[:, None] & support, matrix, 0) + jnp.diag(jnp.where(support, RIDGE, 1.0))
        linear = jnp.where(support, gradient, 0)
        constraint = support[None].astype(matrix.dtype), jnp.zeros(1, matrix.dtype)
        change = program.run(params_obj=(quadratic, linear), params_eq=constraint).params.primal
        weights = jnp.maximum(weights + change, 0)
        return weights / jnp.sum(weights), step + 1

    start = _projected_gradient(matrix, SUPPORT_STEPS, 0.0)
    return jax.lax.while_loop(unfinished, solve_exactly, (start, jnp.int32(0)))[0]


def _solve_densely(matvec: Any, target: PyTree, **_: Any) -> PyTree:
    """Solve a symmetric linear system of jaxopt by an LU factorization; its iterative solvers are not exact enough."""
    flat, restore = ravel_pytree(target)
    matrix = jax.vmap(lambda column: ravel_pytree(matvec(restore(column)))[0])(jnp.eye(flat.size, dtype=flat.dtype))
    return restore(jnp.linalg.solve(matrix, flat))


def projected_gradient(matrix: jax.Array, tolerance: float) -> jax.Array:
    """Minimize x.Px over the simplex by accelerated projected gradient descent from equal weights.

    Args:
      matrix: P [m, m], as in `minimize_on_support`.
      tolerance: relative gap to reach.

    Returns:
      x [m].
    """
    # jaxopt's error is the length of the next step, an absolute value; objectives are often below 1e-4 times P's
    # curvature.
    return _projected_gradient(matrix, GRADIENT_STEPS, min(tolerance, 1e-4) * 1e-5)


def _projected_gradient(matrix: jax.Array, steps: int, tolerance: float) -> jax.Array:
    jaxopt = _jaxopt()
    size = matrix.shape[-1]
    # Steps stay in {sum x = 1}, so their length depends only on P's largest curvature within this plane, which the
    # Frobenius norm bounds.
    centered = matrix - jnp.mean(matrix, axis=0)
    largest = jnp.linalg.norm(centered - jnp.mean(centered, axis=1, keepdims=True))
    solver = jaxopt.ProjectedGradient(
        lambda weights, matrix: (weights @ matrix @ weights / 2, matrix @ weights),
        jaxopt.projection.projection_simplex,
        value_and_grad=True,
        stepsize=1.0,
        acceleration=True,
        implicit_diff=False,
    )
    scaled = matrix / jnp.where(largest > 0, largest, 1)
    start = jnp.full((size,), 1 / size, matrix.dtype)
    # solver.run compiles the first step apart from the others.
    return jax.lax.while_loop(
        lambda step: (step.state.error > tolerance) & (step.state.iter_num < steps),
        lambda step: solver.update(*step, 1.0, scaled),
        jaxopt.OptStep(start, solver.init_state(start, 1.0, scaled)),
    ).params


def osqp(matrix: jax.Array, tolerance: float) -> jax.Array:
    """Minimize x.Px / 2 subject to 1 <= sum x <= 1 and 0 <= x <= 1 by operator splitting.

    Args:
      matrix: P [m, m], as in `minimize_on_support`.
      tolerance: relative gap to reach.

    Returns:
      x [m], nonnegative, summing to 1 up to rounding.
    """
    jaxopt = _jaxopt()
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
    weights = jnp.maximum(solution.params.primal[0], 0)
    return weights / jnp.sum(weights)
