"""Primal-dual interior-point method for one quadratic program on the probability simplex."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

MAX_STEPS = 60
"""Maximum number of steps; FedPAC's programs need 10 to 20."""


class _Iterate(NamedTuple):
    """Iterate of the interior-point method, in the notation of `minimize_on_simplex`.

    Attributes:
      weights: x [m], positive, summing to 1.
      slacks: z [m], positive: the multipliers of x >= 0.
      multiplier: y, the multiplier of sum x = 1.
      ridge: value added to P's diagonal so that the factorization exists.
      step: number of steps taken.
    """

    weights: jax.Array
    slacks: jax.Array
    multiplier: jax.Array
    ridge: jax.Array
    step: jax.Array


def minimize_on_simplex(
    matrix: jax.Array, *, tolerance: float = 1e-9, max_steps: int = MAX_STEPS, floor: float = 0.0
) -> jax.Array:
    r"""Minimize x.Px over the simplex {x >= 0, sum x = 1} for one P; `jax.vmap` solves many at once.

    It follows the central path of the optimality conditions

        P x - y 1 - z = 0,    sum x = 1,    x_j z_j = s,    x > 0,  z > 0,    s -> 0,

    with Mehrotra's predictor-corrector Newton steps, each of which needs one Cholesky factorization of P + diag(z / x).
    It starts from equal weights, which are primal and dual feasible. If the minimizer is not unique, the path ends near
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
      Nocedal, Wright, "Numerical Optimization", 2nd edition, 2006, Algorithms 14.3 and 16.4.
    """
    chex.assert_rank(matrix, 2)
    precision = jnp.finfo(matrix.dtype).eps

    def unfinished(iterate: _Iterate) -> jax.Array:
        gradient = matrix @ iterate.weights
        objective = iterate.weights @ gradient
        gap = objective - jnp.min(gradient)
        # The second test is for minima of zero, where the gap never falls below a share of the objective.
        solved = (gap <= tolerance * jnp.maximum(objective, floor)) | (iterate.weights @ iterate.slacks <= precision)
        return ~solved & (iterate.step < max_steps)

    return jax.lax.while_loop(unfinished, lambda iterate: _step(matrix, iterate), _start(matrix)).weights


def _start(matrix: jax.Array) -> _Iterate:
    """Equal weights, with slacks that satisfy the stationarity condition exactly."""
    size = matrix.shape[-1]
    weights = jnp.full((size,), 1 / size, matrix.dtype)
    gradient = matrix @ weights
    smallest = jnp.min(gradient)
    margin = jnp.max(gradient) - smallest + jnp.abs(weights @ gradient)
    margin = jnp.where(margin > 0, margin, 1)
    ridge = jnp.asarray(jnp.finfo(matrix.dtype).eps, matrix.dtype)
    return _Iterate(weights, gradient - smallest + margin, smallest - margin, ridge, jnp.int32(0))


def _step(matrix: jax.Array, iterate: _Iterate) -> _Iterate:
    """One predictor-corrector step; where the factorization fails, only the ridge is increased."""
    weights, slacks, multiplier, ridge, step = iterate
    size = matrix.shape[-1]
    one = jnp.ones_like(weights)
    stationarity = matrix @ weights - multiplier - slacks
    system = matrix + jnp.diag(slacks / weights + ridge)
    factor = jnp.linalg.cholesky(system, symmetrize_input=False)

    def solve(right: jax.Array) -> jax.Array:
        return jax.scipy.linalg.cho_solve((factor, True), right)

    def direction(complementarity: jax.Array, solved: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Newton step to x z + complementarity = 0, given the system's solution for its right-hand side."""
        change_multiplier = (1 - jnp.sum(weights) - jnp.sum(solved)) / jnp.sum(solved_one)
        change_weights = solved + change_multiplier * solved_one
        change_slacks = (complementarity - slacks * change_weights) / weights
        return change_weights, change_multiplier, change_slacks

    # Predictor: Newton step toward x z = 0.
    target = -weights * slacks
    both = solve(jnp.stack([target / weights - stationarity, one], axis=-1))
    solved_one = both[:, 1]
    change_weights, _, change_slacks = direction(target, both[:, 0])
    length = jnp.minimum(_longest(weights, change_weights), _longest(slacks, change_slacks))
    centrality = weights @ slacks / size
    predicted = (weights + length * change_weights) @ (slacks + length * change_slacks) / size

    # Corrector: Newton step toward x z = sigma s, with the second-order term of the predictor.
    target = (predicted / centrality) ** 3 * centrality - weights * slacks - change_weights * change_slacks
    change_weights, change_multiplier, change_slacks = direction(target, solve(target / weights - stationarity))
    length = jnp.minimum(_longest(weights, change_weights), _longest(slacks, change_slacks))
    length = jnp.minimum(1, 0.99 * length)

    new_weights = weights + length * change_weights
    new_slacks = slacks + length * change_slacks
    usable = jnp.all(jnp.isfinite(new_weights)) & jnp.all(jnp.isfinite(new_slacks))
    usable &= jnp.all(new_weights > 0) & jnp.all(new_slacks > 0)
    return _Iterate(
        weights=jnp.where(usable, new_weights, weights),
        slacks=jnp.where(usable, new_slacks, slacks),
        multiplier=jnp.where(usable, multiplier + length * change_multiplier, multiplier),
        ridge=jnp.where(usable, ridge, 100 * ridge),
        step=step + 1,
    )


def _longest(position: jax.Array, direction: jax.Array) -> jax.Array:
    """Largest step, at most 1, along `direction` that keeps `position` nonnegative."""
    ratios = jnp.where(direction < 0, -position / jnp.where(direction < 0, direction, -1), jnp.inf)
    return jnp.minimum(1, jnp.min(ratios))
