"""The certificate of a solution on the probability simplex."""

import jax
import jax.numpy as jnp


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
