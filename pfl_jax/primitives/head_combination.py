"""Weights by which each client combines the classifier heads of a cohort (FedPAC)."""

import functools

import jax
import jax.numpy as jnp

from pfl_jax.primitives.float64 import in_float64
from pfl_jax.primitives.simplex_qp import SimplexSolution, Solver, map_simplex_qp
from pfl_jax.validation import check_shapes

RIDGE = 1e-3
"""Share of the mean eigenvalue of an empirical covariance matrix that is added to the matrix, which has no inverse if a
client has fewer examples than features, or features that are always zero."""

NEGLIGIBLE_WEIGHT = 1e-3
"""Head weights below this value are set to zero; the others are normalized to sum to 1."""

TOLERANCE = 1e-7
"""Relative gap of the quadratic programs: the weights are accurate to about 1e-3."""


def head_weights(mu: jax.Array, spread: jax.Array, counts: jax.Array, *, solver: Solver = "auto") -> jax.Array:
    r"""Weights of all heads in each client's combined head: rows alpha_i that minimize an estimate of i's test loss.

        alpha_i = argmin over the simplex of  sum_j alpha_j^2 V_j / n_j + ||mu_i - sum_j alpha_j mu_j||^2

    Other clients' heads reduce the variance (first term) and add bias (second term). Given the clients' second moments
    Lambda_j = E[f(x) f(x)^T], the norm is defined by Lambda_i^-1, and V_j = tr(Lambda_i^-1 Lambda_j) - ||mu_j||^2 in
    this norm. Weights below 1e-3 are set to zero, and the row is normalized to sum to 1.

    Args:
      mu: [M, K, d], P(k) E[f(x) | y = k] of each client, see `label_feature_statistics`.
      spread: V [M], before division by n, or Lambda [M, d, d], see `second_moment`.
      counts: n [M], examples of each client; clients without examples get weight zero.
      solver: see `solve_simplex_qp`.

    Returns:
      alpha [M, M], float32, rows on the simplex; differentiable like the weights of `solve_simplex_qp`.

    Example:
      >>> import jax.numpy as jnp
      >>> import numpy as np
      >>> from pfl_jax.primitives import head_weights
      >>> mu = jnp.array([[[0.0, 0.0]], [[0.1, 0.0]], [[0.0, 9.0]]])  # the third client's features differ
      >>> print(np.asarray(head_weights(mu, jnp.ones(3), jnp.array([10, 30, 10]))).round(2))
      [[0.3  0.7  0.  ]
       [0.23 0.77 0.  ]
       [0.   0.   1.  ]]

    Reference:
      FedPAC, Eq. 11 and 46; with second moments Eq. 33, 35, 37 to 39. The threshold is from the released code.
    """
    return solve_head_weights(mu, spread, counts, solver=solver).weights


@functools.partial(jax.jit, static_argnames="solver")
def solve_head_weights(
    mu: jax.Array, spread: jax.Array, counts: jax.Array, *, solver: Solver = "auto"
) -> SimplexSolution:
    """`head_weights`, with the optimality gap [M] of each client's quadratic program.

    Args:
      mu, spread, counts, solver: see `head_weights`.
    """
    axes = "M" if jnp.ndim(spread) == 1 else "Mde"
    check_shapes(mu=(mu, "MKd"), spread=(spread, axes), counts=(counts, "M"))
    solve = _weights_by_variances if spread.ndim == 1 else _weights_by_second_moments
    solution = in_float64(functools.partial(solve, solver=solver))(mu, spread, counts)
    return solution._replace(weights=_drop_negligible(solution.weights))


def _weights_by_variances(mu: jax.Array, variance: jax.Array, counts: jax.Array, *, solver: Solver) -> SimplexSolution:
    # The variances on the diagonal are often 1e-5 times the squared distances, too small for float32.
    means = mu.astype(jnp.float64).reshape(mu.shape[0], -1)
    means = means - jnp.mean(means, axis=0)
    gram = means @ means.T
    norms = jnp.diagonal(gram)
    noise = _noise(variance.astype(jnp.float64), counts, norms)

    def program(row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        # <mu_i - mu_j, mu_i - mu_k> for all j, k from one matrix product for all i, without M matrices [M, M] at once.
        norm, products = row
        matrix = norm - products[:, None] - products + gram + jnp.diag(noise)
        return matrix, jnp.zeros_like(products)

    return map_simplex_qp(program, (norms, gram), jnp.float32, solver=solver, tolerance=TOLERANCE)


def _weights_by_second_moments(
    mu: jax.Array, moments: jax.Array, counts: jax.Array, *, solver: Solver
) -> SimplexSolution:
    mu, moments = mu.astype(jnp.float64), moments.astype(jnp.float64)
    clients, _, features = mu.shape

    def program(row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        own_mu, own_moment = row
        mean_eigenvalue = jnp.trace(own_moment) / features
        ridge = jnp.where(mean_eigenvalue > 0, RIDGE * mean_eigenvalue, 1)
        factor = jnp.linalg.cholesky(own_moment + ridge * jnp.eye(features))
        whitener = jax.scipy.linalg.solve_triangular(factor, jnp.eye(features), lower=True)
        white, apart = mu @ whitener.T, (own_mu - mu) @ whitener.T
        apart = apart.reshape(clients, -1)
        totals = jnp.sum(moments * (whitener.T @ whitener), axis=(1, 2))
        variance = jnp.maximum(totals - jnp.sum(jnp.square(white), axis=(1, 2)), 0)
        bias = apart @ apart.T
        return bias + jnp.diag(_noise(variance, counts, jnp.diagonal(bias))), jnp.zeros_like(variance)

    return map_simplex_qp(program, (mu, moments), jnp.float32, solver=solver, tolerance=TOLERANCE)


def _noise(variance: jax.Array, counts: jax.Array, norms: jax.Array) -> jax.Array:
    """Diagonal V_j / n_j [M] of a program, larger than all else for clients without examples."""
    sizes = counts.astype(jnp.float64)
    noise = variance / jnp.maximum(sizes, 1)
    largest = jnp.max(noise) + jnp.max(norms)
    return jnp.where(sizes > 0, noise, jnp.where(largest > 0, 1e4 * largest, 1))


def _drop_negligible(weights: jax.Array) -> jax.Array:
    """Set weights below 1e-3 to zero and normalize the rows; rows with only such weights keep them."""
    kept = jnp.where(weights < NEGLIGIBLE_WEIGHT, 0, weights)
    kept = jnp.where(jnp.any(kept > 0, axis=-1, keepdims=True), kept, weights)
    return kept / jnp.sum(kept, axis=-1, keepdims=True)
