"""Losses and scores of a model's outputs, which `pfl_jax.tasks` are made of; all are in `pfl_jax.primitives` too."""

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
      predicted, y: [n], classes; K as prediction for an example without one.
      mask: [n], the examples that count.
      num_classes: K.

    Returns:
      A scalar in [0, 1], equal to scikit-learn's f1_score(average="macro"); NaN without examples.
    """
    weight = mask.astype(jnp.float32)
    true_positives = jnp.zeros(num_classes, weight.dtype).at[y].add(jnp.where(predicted == y, weight, 0.0))
    # (TP + FN) + (TP + FP), the denominator of F1.
    total = jnp.zeros(num_classes, weight.dtype).at[y].add(weight).at[predicted].add(weight, mode="drop")
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

    (n,) = mask.shape
    count = jnp.sum(mask, dtype=jnp.int32)
    ranks, edge = jnp.arange(n), jnp.ones(1, bool)

    def area(column, positive):
        # Padding is sorted last, where it changes no rank. Ties: ranks from `below` + 1 to `up_to` have equal scores.
        column = jnp.where(mask, column, jnp.inf)
        ordered, positive = jax.lax.sort((column, positive.astype(jnp.float32)), num_keys=1)
        differs = ordered[1:] != ordered[:-1]
        below = jax.lax.cummax(jnp.where(jnp.concatenate([edge, differs]), ranks, 0))
        up_to = jax.lax.cummin(jnp.where(jnp.concatenate([differs, edge]), ranks + 1, n), reverse=True)
        beaten = jnp.sum(positive * (below + jnp.minimum(up_to, count))) / 2
        positives = jnp.sum(positive)
        pairs = positives * (count - positives)
        return (beaten - positives * positives / 2) / jnp.where(pairs > 0, pairs, jnp.nan)

    areas = jax.vmap(area, in_axes=1)(scores, positive & mask[:, None])
    has_curve = ~jnp.isnan(areas)
    unknown = jnp.any(jnp.isnan(scores) & mask[:, None])
    return jnp.where(unknown, jnp.nan, jnp.sum(jnp.where(has_curve, areas, 0.0)) / jnp.sum(has_curve))
