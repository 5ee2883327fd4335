"""Losses and scores of a model's outputs, used by `pfl_jax.tasks`; all are in `pfl_jax.primitives` too."""

import chex
import jax
import jax.numpy as jnp
import optax


def masked_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean of values [B] where mask [B] is True; 0 if it is True nowhere.

    Values outside the mask must be finite and get no gradient.

    Example:
      >>> import jax.numpy as jnp
      >>> from pfl_jax.primitives import losses
      >>> print(losses.masked_mean(jnp.array([3.0, 100.0]), jnp.array([True, False])))
      3.0
    """
    chex.assert_equal_shape([values, mask])
    weights = mask.astype(values.dtype)
    return jnp.sum(values * weights) / jnp.maximum(jnp.sum(weights), 1.0)


def cross_entropy(logits: jax.Array, labels: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean cross entropy of logits [B, K] against labels [B] over the real examples of mask [B].

    Example:
      >>> import jax.numpy as jnp
      >>> from pfl_jax.primitives import losses
      >>> logits, labels = jnp.array([[2.0, 0.0], [0.0, 2.0]]), jnp.array([0, 0])
      >>> print(f"{losses.cross_entropy(logits, labels, jnp.array([True, True])):.3f}")  # (0.127 + 2.127) / 2
      1.127
      >>> print(f"{losses.cross_entropy(logits, labels, jnp.array([True, False])):.3f}")
      0.127
    """
    chex.assert_rank([logits, labels, mask], [2, 1, 1])
    return masked_mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels), mask)


def macro_f1(predicted: jax.Array, y: jax.Array, mask: jax.Array, num_classes: int) -> jax.Array:
    """Mean over classes of F1 = 2 TP / (2 TP + FP + FN), for classes that occur among labels or predictions.

    Args:
      predicted, y: [n], classes; K as the prediction for an example without a valid one.
      mask: [n], the examples that count.
      num_classes: K.

    Returns:
      A scalar in [0, 1], equal to scikit-learn's f1_score(average="macro"); NaN without examples.
    """
    classes = jnp.arange(num_classes)
    # Comparisons instead of scatters, which XLA runs example by example on a CPU and takes long to compile.
    is_label, is_predicted = ((given[:, None] == classes) & mask[:, None] for given in (y, predicted))
    true_positives = jnp.sum(is_label & is_predicted, axis=0, dtype=jnp.float32)
    # (TP + FN) + (TP + FP), the denominator of F1.
    total = jnp.sum(is_label, axis=0, dtype=jnp.float32) + jnp.sum(is_predicted, axis=0, dtype=jnp.float32)
    occurs = total > 0
    return jnp.sum(jnp.where(occurs, 2 * true_positives / jnp.where(occurs, total, 1.0), 0.0)) / jnp.sum(occurs)


def macro_auc(scores: jax.Array, y: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean over classes of the area under the ROC curve of one class against all others, see `mean_auc`.

    Args:
      scores: [n, K], higher for more likely classes.
      y: [n], classes.
      mask: [n], the examples that count.
    """
    return mean_auc(scores, y[:, None] == jnp.arange(scores.shape[-1]), mask)


def mean_auc(scores: jax.Array, positive: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean over columns of the area under the ROC curve.

    For one column it is the probability that a random positive example has a higher score than a random other one,
    where ties count half (Mann, Whitney 1947). Columns in which all examples or none are positive have no curve and are
    left out.

    Args:
      scores: [n, K], higher for examples that are more likely positive.
      positive: [n, K], bool.
      mask: [n], the examples that count.

    Returns:
      A scalar in [0, 1], NaN if no column has a curve, or a score is NaN.
    """
    real = mask[:, None]
    positive, other = positive & real, ~positive & real
    # Among equal scores the positive examples come last, then first: the mean of both counts ties half. Padding sorts
    # after everything else, where it changes no rank.
    places = jnp.where(real, jnp.stack([positive, other]), 2).astype(jnp.int32)
    ordered = jnp.broadcast_to(jnp.where(real, scores, jnp.inf), places.shape)
    _, places = jax.lax.sort((ordered, places), dimension=1, num_keys=2)
    is_positive = places == jnp.array([1, 0])[:, None, None]
    positives, others = (jnp.sum(which, axis=0, dtype=jnp.float32) for which in (positive, other))
    ranks = jnp.arange(len(mask), dtype=jnp.float32)[:, None]
    # Sum over the positive examples of their ranks from 0; among themselves, they have positives (positives - 1) / 2.
    beaten = (jnp.sum(jnp.where(is_positive, ranks, 0), axis=(0, 1)) - positives * (positives - 1)) / 2
    pairs = positives * others
    has_curve = pairs > 0
    areas = jnp.where(has_curve, beaten / jnp.where(has_curve, pairs, 1), 0)
    unknown = jnp.any(jnp.isnan(scores) & mask[:, None])
    return jnp.where(unknown, jnp.nan, jnp.sum(areas) / jnp.sum(has_curve))
