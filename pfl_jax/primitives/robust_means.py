"""Statistics of a cohort's vectors that few arbitrary vectors cannot move far, in place of the weighted mean.

All of them take vectors x [M, D] and nonnegative weights w [M]. A weight of zero means that the client is absent, or
has no value here; its vector is not used. If all weights are zero, the result is zero. All of them move with the
vectors: adding a to every x_i adds a to the statistic. So it does not matter whether the vectors are models or their
updates.
"""

import itertools
import math
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp

from pfl_jax.base import Mean, PyTree

Statistic: TypeAlias = Callable[[jax.Array, jax.Array], jax.Array]
"""(x [M, D], w [M]) -> vector [D]."""

ITERATIONS, SMOOTHING = 32, 1e-6
"""Steps of `geometric_median`, and its smallest distance nu, which the paper has too."""

TOLERANCE = 1e-6
"""Share of the total weight that counts as rounding."""


def coordinate_median(x: jax.Array, w: jax.Array) -> jax.Array:
    """Weighted median of every coordinate; for equal weights the usual one (Yin et al. 2018, Definition 1).

    It is the value at which the sorted clients reach half of the total weight; where they reach it exactly, the mean of
    this value and the next. A coordinate follows the attackers only if they have half of the weight.

    Args:
      x: vectors [M, D].
      w: weights [M].

    Example:
      >>> import jax.numpy as jnp
      >>> from pfl_jax.primitives import coordinate_median
      >>> x = jnp.array([[1.0], [2.0], [90.0]])
      >>> print(coordinate_median(x, jnp.ones(3)), coordinate_median(x, jnp.array([1.0, 1.0, 0.0])))
      [2.] [1.5]
    """
    x, _, ends = _sorted(x, w)
    half, rounding = ends[-1] / 2, TOLERANCE * ends[-1]

    def first(reached):
        return jnp.take_along_axis(x, jnp.argmax(reached, axis=0)[None], axis=0)[0]

    middle = (first(ends >= half - rounding) + first(ends > half + rounding)) / 2
    return jnp.where(ends[-1] > 0, middle, 0.0)


def trimmed_mean(x: jax.Array, w: jax.Array, share: float | jax.Array) -> jax.Array:
    """Weighted mean of every coordinate without a share of the weight at each end (Yin et al. 2018, Definition 2).

    A client at the border counts with the part of its weight that remains. For equal weights and a whole number share
    M, the clients between the share M smallest and the share M largest remain.

    Args:
      x: vectors [M, D].
      w: weights [M].
      share: share of the total weight that is left out at each end, at least 0 and below 0.5; 0 is the weighted mean.

    Example:
      >>> import jax.numpy as jnp
      >>> from pfl_jax.primitives import robust_means
      >>> x = jnp.array([[1.0], [2.0], [3.0], [90.0]])
      >>> print(robust_means.trimmed_mean(x, jnp.ones(4), 0.25))
      [2.5]
    """
    x, w, ends = _sorted(x, w)
    total = ends[-1]
    kept = jnp.minimum(ends, (1 - share) * total) - jnp.maximum(ends - w, share * total)
    # Otherwise the rounding of a left-out client's weight would count if the client's vector is large enough.
    kept = jnp.where((w > 0) & (kept > TOLERANCE * total), kept, 0.0)
    divisor = jnp.sum(kept, axis=0)
    return jnp.sum(kept * x, axis=0) / jnp.where(divisor > 0, divisor, 1.0)


def _sorted(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Every coordinate in ascending order [M, D], the weights in that order, and their cumulative sums."""
    order = jnp.argsort(x, axis=0)
    weights = w[order]
    return jnp.take_along_axis(x, order, axis=0), weights, jnp.cumsum(weights, axis=0)


def krum(x: jax.Array, w: jax.Array, share: float, *, several: bool = False) -> jax.Array:
    """Vector nearest to its neighbors: Krum, or the mean of the best ones, Multi-Krum (Blanchard et al. 2017).

    Of m present clients, f = floor(share m) may attack. A client's score is the sum of its squared distances to the
    m - f - 2 nearest other present ones, at least one. Krum is the vector with the smallest score; Multi-Krum is the
    weighted mean of the m - f vectors with the smallest scores. Weights count only in that mean. The paper's guarantee
    needs 2 f + 2 < m.

    Args:
      x: vectors [M, D].
      w: weights [M].
      share: share of the present clients that may attack.
      several: whether this is Multi-Krum.

    Example:
      >>> import jax.numpy as jnp
      >>> from pfl_jax.primitives import robust_means
      >>> x = jnp.array([[1.0], [2.0], [3.5], [90.0], [2.2]])
      >>> print(robust_means.krum(x, jnp.ones(5), 0.2), robust_means.krum(x, jnp.ones(5), 0.4, several=True))
      [2.] [1.7333333]
    """
    present = w > 0
    number = jnp.sum(present)
    # Up to rounding: 0.3 of 10 clients are three.
    attackers = jnp.floor(share * number + 1e-4).astype(jnp.int32)
    squares = jax.lax.map(lambda one: jnp.sum(jnp.square(x - one), axis=1), x)
    others = present[None, :] & ~jnp.eye(len(w), dtype=bool)
    near = jnp.sort(jnp.where(others, squares, jnp.inf), axis=1)
    counted = jnp.arange(len(w)) < jnp.clip(number - attackers - 2, 1, jnp.maximum(number - 1, 0))
    scores = jnp.where(present, jnp.sum(jnp.where(counted, near, 0.0), axis=1), jnp.inf)
    ranks = jnp.argsort(jnp.argsort(scores))
    chosen = jnp.where(present & (ranks < (number - attackers if several else 1)), w if several else 1.0, 0.0)
    total = jnp.sum(chosen)
    # No product: the chosen vector itself, bit for bit.
    mean = jnp.tensordot(chosen / jnp.where(total > 0, total, 1.0), x, axes=1, precision="highest")
    return jnp.where(total > 0, mean if several else x[jnp.argmin(scores)], 0.0)


def geometric_median(x: jax.Array, w: jax.Array) -> jax.Array:
    """Point with the smallest weighted sum of distances, by smoothed Weiszfeld steps (Pillutla et al. 2022).

        z <- sum_i b_i x_i / sum_i b_i,   b_i = w_i / max(nu, ||z - x_i||),   from the weighted mean

    There are ITERATIONS steps, and nu is SMOOTHING (the paper's Algorithm 2; the paper finds a few steps enough in
    practice). The point stays bounded while attackers have less than half of the weight.

    Args:
      x: vectors [M, D].
      w: weights [M].

    Example:
      >>> import jax.numpy as jnp
      >>> from pfl_jax.primitives import robust_means
      >>> x = jnp.array([[0.0, 0.0], [0.0, 2.0], [0.0, -2.0], [0.0, 0.0], [900.0, 0.0]])
      >>> print(abs(robust_means.geometric_median(x, jnp.ones(5))).max() < 1e-3)
      True
    """

    def step(z, _):
        return mean(w / jnp.maximum(SMOOTHING, jnp.linalg.norm(x - z, axis=1))), None

    def mean(b):
        total = jnp.sum(b)
        return jnp.tensordot(b / jnp.where(total > 0, total, 1.0), x, axes=1, precision="highest")

    return jax.lax.scan(step, mean(w), length=ITERATIONS)[0]


def robust_mean(statistic: Statistic, values: PyTree, weights: jax.Array) -> Mean:
    """`Mean` for the server: its value is a statistic of the clients' values, its weight the sum of their weights.

    All arrays of a value are one vector. Where weights lie along the leading axes of the values, such as the examples
    of each class [K] of class means [K, d], each class has its own statistic, over the clients that have a weight for
    this class.

    Args:
      statistic: see `Statistic`.
      values: the clients' values, leaves [M, ...]; finite also for absent clients.
      weights: weights of their `Mean`s, [M, ...]; zero for absent clients.
    """
    leaves, structure = jax.tree.flatten(values)
    number, *axes = weights.shape
    groups = math.prod(axes)
    sizes = [math.prod(leaf.shape[1 + len(axes) :]) for leaf in leaves]
    rows = [leaf.reshape(number, groups, size) for leaf, size in zip(leaves, sizes, strict=True)]
    vectors = jnp.concatenate(rows, axis=2) if rows else jnp.zeros((number, groups, 0))
    found = jax.vmap(statistic, in_axes=(1, 1))(vectors, weights.reshape(number, groups))
    parts = jnp.split(found, [*itertools.accumulate(sizes)][:-1], axis=1)
    shaped = [part.reshape(leaf.shape[1:]) for part, leaf in zip(parts, leaves, strict=False)]
    return Mean(jax.tree.unflatten(structure, shaped), jnp.sum(weights, axis=0))
