"""Primal-dual interior-point method for one quadratic program on the probability simplex."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

MAX_STEPS = 60
"""Maximum number of steps; FedPAC's programs need 15 to 25."""

CENTERING = 0.1
"""Share of the complementarity that a whole step leaves."""


class _Iterate(NamedTuple):
    """Iterate of the interior-point method, in the notation of `minimize_on_simplex`.

    Attributes:
      weights: x [m], positive, summing to 1.
      slacks: z [m], positive: the multipliers of x >= 0.
      step: number of steps taken.
      solved: whether the tolerance is reached, or P is indefinite by rounding and the next factorization fails.
    """

    weights: jax.Array
    slacks: jax.Array
    step: jax.Array
    solved: jax.Array


def minimize_on_simplex(
    matrix: jax.Array, *, tolerance: float = 1e-9, max_steps: int = MAX_STEPS, floor: float = 0.0
) -> jax.Array:
    r"""Minimize x.Px over the simplex {x >= 0, sum x = 1} for one P; `jax.vmap` solves many at once.

    It follows the central path of the optimality conditions

        P x - y 1 - z = 0,    sum x = 1,    x_j z_j = s,    x > 0,  z > 0,    s -> 0,

    with Newton steps toward a tenth of s, each of which needs one Cholesky factorization of P + diag(z / x). It starts
    from equal weights, which are primal and dual feasible. If the minimizer is not unique, the path ends near
    the analytic center of the set of minimizers: a zero matrix and identical clients give equal weights.

    Args:
      matrix: P [m, m], symmetric and positive semidefinite, its largest absolute entry about 1 (or 0). float64
        reaches the tolerance on every matrix of FedPAC; float32 about 1e-3 at m = 300.
      tolerance: the iteration stops when the Frank-Wolfe gap x.Px - min(Px) is at most this share of x.Px.
      max_steps: maximum number of steps.
      floor: lower bound on the objective in the stopping rule, for minima that are zero up to rounding of P.

    Returns:
      x [m], positive, summing to 1 up to rounding.

    Reference:
      Nocedal, Wright, "Numerical Optimization", 2nd edition, 2006, Algorithm 14.2.
    """
    chex.assert_rank(matrix, 2)
    size = matrix.shape[-1]
    precision = jnp.finfo(matrix.dtype).eps

    def step(iterate: _Iterate) -> _Iterate:
        weights, slacks, count, _ = iterate
        gradient = matrix @ weights
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
        solved |= ~jnp.all(jnp.isfinite(change_slacks))
        return _Iterate(
            jnp.where(solved, weights, weights + length * change_weights),
            jnp.where(solved, slacks, slacks + length * change_slacks),
            count + 1,
            solved,
        )

    # Equal weights, with slacks that satisfy the stationarity condition exactly.
    weights = jnp.full((size,), 1 / size, matrix.dtype)
    gradient = matrix @ weights
    slacks = gradient - jnp.min(gradient) + jnp.max(jnp.abs(gradient))
    start = _Iterate(weights, slacks, jnp.int32(0), jnp.bool_(False))
    return jax.lax.while_loop(lambda iterate: ~iterate.solved & (iterate.step < max_steps), step, start).weights


def _longest(position: jax.Array, direction: jax.Array) -> jax.Array:
    """Largest step along `direction` that keeps `position` nonnegative; infinite if every step does."""
    return jnp.min(jnp.where(direction < 0, -position / direction, jnp.inf))
