"""Feature statistics of a client: class counts, class centroids, FedPAC's mean terms and variance.

All functions but `merge_centroids` take one client's labels and mask [n] and features [n, d], and ignore padding. A
label that is not a class raises InvalidInput; within jit, where labels are not known, it counts for no class.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from pfl_jax.base import Mean
from pfl_jax.errors import InvalidInput
from pfl_jax.validation import check_shapes


def class_counts(labels: jax.Array, mask: jax.Array, num_classes: int) -> jax.Array:
    """Number of examples of each class: n_k = sum_l [y_l = k].

    Args:
      labels: y [n], integers from 0 to K - 1; others are refused, but within jit they count for no class.
      mask: [n], bool; the real examples.
      num_classes: K.

    Returns:
      [K], float32.

    Example:
      >>> import jax.numpy as jnp
      >>> from pfl_jax.primitives import feature_statistics
      >>> labels, mask = jnp.array([0, 1, 1, 0]), jnp.array([True, True, True, False])
      >>> print(feature_statistics.class_counts(labels, mask, num_classes=2))
      [1. 2.]
    """
    return jnp.sum(_memberships(labels, mask, num_classes), axis=0)


def class_centroids(
    features: jax.Array, labels: jax.Array, mask: jax.Array, num_classes: int
) -> tuple[jax.Array, jax.Array]:
    r"""Mean feature of each class, c_k = (1/n_k) sum_{l: y_l = k} f(x_l).

    Args:
      features: f(x_l) [n, d].
      labels: y [n], integers from 0 to K - 1; others are refused, but within jit they count for no class.
      mask: [n], bool; the real examples.
      num_classes: K.

    Returns:
      Centroids [K, d], zero for classes without examples, and counts n_k [K].

    Example:
      >>> import jax.numpy as jnp
      >>> from pfl_jax.primitives import feature_statistics
      >>> features = jnp.array([[1.0], [3.0], [5.0], [9.0]])
      >>> labels, mask = jnp.array([0, 1, 1, 0]), jnp.array([True, True, True, False])
      >>> centroids, counts = feature_statistics.class_centroids(features, labels, mask, num_classes=2)
      >>> print(centroids.ravel(), counts)
      [1. 4.] [1. 2.]

    Reference:
      FedPAC, Eq. 17.
    """
    check_shapes(features=(features, "nd"), labels=(labels, "n"), mask=(mask, "n"))
    memberships = _memberships(labels, mask, num_classes)
    counts = jnp.sum(memberships, axis=0)
    sums = jnp.einsum("nk,nd->kd", memberships, features, precision="highest")
    return sums / jnp.maximum(counts, 1)[:, None], counts


def merge_centroids(old: jax.Array, old_counts: jax.Array, cohort: Mean) -> tuple[jax.Array, jax.Array]:
    """Global centroids (FedPAC, Eq. 19): means over the cohort's examples; absent classes keep their old centroids.

    Args:
      old: previous centroids [K, d].
      old_counts: examples of each class in the previous centroids [K].
      cohort: mean of the clients' centroids [K, d], weighted by examples of the class, and the sum of the weights [K].

    Returns:
      Centroids [K, d] and the number of examples in each [K].

    Example:
      >>> import jax.numpy as jnp
      >>> from pfl_jax import Mean
      >>> from pfl_jax.primitives import feature_statistics
      >>> old, old_counts = jnp.array([[5.0], [5.0]]), jnp.array([9.0, 9.0])
      >>> cohort = Mean(jnp.array([[2.0], [0.0]]), jnp.array([4.0, 0.0]))
      >>> centroids, counts = feature_statistics.merge_centroids(old, old_counts, cohort)
      >>> print(centroids.ravel(), counts)  # nobody held the second class
      [2. 5.] [4. 9.]
    """
    held = cohort.weight > 0
    return jnp.where(held[:, None], cohort.value, old), jnp.where(held, cohort.weight, old_counts)


def label_feature_statistics(
    features: jax.Array, labels: jax.Array, mask: jax.Array, num_classes: int
) -> tuple[jax.Array, jax.Array]:
    r"""FedPAC's mean terms and variance, from which the server computes the head weights.

        mu_k = P(k) E[f(x) | y = k],    V = sum_k P(k) E[||f(x)||^2 | y = k] - ||mu_k||^2,

    with the client's empirical distribution P and the identity in place of the feature covariance (Eq. 43). V is
    computed in the equal form sum_k P(k) E[||f(x) - c_k||^2 | y = k] + P(k) (1 - P(k)) ||c_k||^2 with class centroids
    c_k, a sum of nonnegative terms that avoids cancellation between large ones.

    Args:
      features: f(x_l) [n, d].
      labels: y [n], integers from 0 to K - 1; others are refused, but within jit they count for no class.
      mask: [n], bool; the real examples.
      num_classes: K.

    Returns:
      mu [K, d], zero for classes without examples, and the scalar V >= 0, before its division by n (Eq. 46).

    Example:
      >>> import jax.numpy as jnp
      >>> from pfl_jax.primitives import feature_statistics
      >>> features, labels = jnp.array([[1.0], [3.0], [0.0], [0.0]]), jnp.array([0, 0, 1, 1])
      >>> mask = jnp.array([True, True, True, True])
      >>> mu, variance = feature_statistics.label_feature_statistics(features, labels, mask, num_classes=2)
      >>> print(mu.ravel(), variance)
      [1. 0.] 1.5

    Reference:
      FedPAC, Eq. 44 and 46.
    """
    centroids, counts = class_centroids(features, labels, mask, num_classes)
    total = jnp.maximum(jnp.sum(counts), 1)
    share = counts / total
    known = mask & (labels >= 0) & (labels < num_classes)
    within = jnp.sum(jnp.square(features - centroids[labels]), axis=-1)
    between = jnp.sum(share * (1 - share) * jnp.sum(jnp.square(centroids), axis=-1))
    variance = jnp.sum(jnp.where(known, within, 0)) / total + between
    return share[:, None] * centroids, variance


def second_moment(features: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean of f(x) f(x)^T over the examples, the feature covariance of FedPAC (Eq. 37).

    Args:
      features: f(x_l) [n, d].
      mask: [n], bool; the real examples.

    Returns:
      [d, d], zero without examples.

    Example:
      >>> import jax.numpy as jnp
      >>> from pfl_jax.primitives import feature_statistics
      >>> print(feature_statistics.second_moment(jnp.array([[1.0], [3.0], [9.0]]), jnp.array([True, True, False])))
      [[5.]]
    """
    check_shapes(features=(features, "nd"), mask=(mask, "n"))
    real = features * mask[:, None]
    return jnp.einsum("nd,ne->de", real, real, precision="highest") / jnp.maximum(jnp.sum(mask), 1)


def _memberships(labels: jax.Array, mask: jax.Array, num_classes: int) -> jax.Array:
    """One-hot classes of the real examples: float32 [n, K]; InvalidInput for a known label that is not a class."""
    check_shapes(labels=(labels, "n"), mask=(mask, "n"))
    if not any(isinstance(one, Tracer) for one in (labels, mask)):
        real = np.asarray(labels)[np.asarray(mask, bool)]
        if strange := sorted({*real.tolist()} - {*range(num_classes)}):
            raise InvalidInput(f"there is a label {strange[0]}: labels of {num_classes} classes are 0 to K - 1")
    return jax.nn.one_hot(labels, num_classes, dtype=jnp.float32) * mask[:, None]
