"""Minimization of any function on the probability simplex; `pfl_jax.primitives.simplex_qp` is for quadratic ones."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def mirror_descent(
    gradient: Callable[[jax.Array], jax.Array], start: jax.Array, *, lr: float | jax.Array, steps: int
) -> jax.Array:
    r"""Minimize a convex function on the probability simplex by exponentiated gradients, mirror descent with entropy.

        x_j <- x_j exp(-lr g_j) / sum_k x_k exp(-lr g_k),    g = gradient(x)

    Weights stay positive and sum to 1 without a projection. With lr up to 1 / L, where L is the largest absolute entry
    of the second derivatives (2 max |P| for x.Px + q.x), no step increases the function.

    Args:
      gradient: x [..., m] -> gradient [..., m]; rows of a batch are independent points.
      start: first x [..., m], positive; equal weights are the usual one. A weight of 0 stays 0, without derivatives.
      lr: step size.
      steps: number of steps, static.

    Returns:
      The last x [..., m], of the start's type; reverse-mode derivatives go through the steps. NaN where a gradient is
      NaN.

    Example:
      >>> import jax.numpy as jnp
      >>> import numpy as np
      >>> from pfl_jax.primitives import mirror_descent
      >>> variances = jnp.array([1.0, 3.0])
      >>> weights = mirror_descent(lambda x: 2 * variances * x, jnp.full(2, 0.5), lr=0.1, steps=100)
      >>> print(np.asarray(weights).round(3))  # proportional to 1 / variance
      [0.75 0.25]

    Reference:
      Kivinen, Warmuth. Exponentiated Gradient versus Gradient Descent for Linear Predictors. Information and
      Computation 132, 1997. Beck, Teboulle. Mirror descent and nonlinear projected subgradient methods for convex
      optimization. Operations Research Letters 31, 2003.
    """

    def step(_: int, logits: jax.Array) -> jax.Array:
        moved = logits - lr * gradient(jax.nn.softmax(logits))
        return moved.astype(logits.dtype)

    return jax.nn.softmax(jax.lax.fori_loop(0, steps, step, jnp.log(start)))
