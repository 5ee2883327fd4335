"""Losses over the real examples of a mini-batch, and penalties on parameters."""

from collections.abc import Callable
from string import ascii_lowercase

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from pfl_jax.base import Backbone, ClientData, KeylessLoss, Model, Params, PyTree, TrainingLoss
from pfl_jax.errors import InvalidInput
from pfl_jax.outputs import cross_entropy, masked_mean
from pfl_jax.primitives.tree import map_statistics
from pfl_jax.validation import check_shapes

ABSENT_CLASS = -1e9
"""Replacement of log 0 in `balanced_softmax`: finite, but below any logit."""


def loss_of_features(
    model: Model,
    value: Callable[[PyTree, jax.Array, ClientData], jax.Array],
    backbone: Callable[[PyTree], Backbone] = lambda params: params["backbone"],
) -> TrainingLoss:
    """Loss of local training as a function of the features, which the model computes in its training mode.

    Args:
      model: the architecture.
      value: (params, features [B, d], ClientData of B examples) -> scalar.
      backbone: params -> the backbone in them.
    """

    def loss(params, batch, key):
        features, statistics = model.training_features(backbone(params), batch, key)
        return value(params, features, batch), statistics

    return loss


def supervised_loss(model: Model, penalty: Callable[[Params], ArrayLike] | None = None) -> TrainingLoss:
    """Loss of ordinary local training: the loss of the model's task, for a whole model on a mini-batch.

    Args:
      model: the architecture.
      penalty: params -> scalar that is added to the loss; None for no penalty.
    """

    def value(params, features, batch):
        risk = model.task.loss(model.classify(params["head"], features), batch.y, batch.mask)
        return risk if penalty is None else risk + penalty(params)

    return loss_of_features(model, value)


def deployed_loss(model: Model) -> KeylessLoss:
    """Loss of a whole model in its deployed mode, not in its training mode.

    Args:
      model: the architecture.

    Returns:
      (params, ClientData of B examples) -> scalar.
    """
    return lambda params, batch: model.task.loss(model.apply(params, batch.x), batch.y, batch.mask)


def negative_log_likelihood(model: Model) -> KeylessLoss:
    """Mean of -log p(y | x) of a whole model in its deployed mode, up to a constant; see `pfl_jax.tasks.Task`.

    Args:
      model: the architecture.

    Returns:
      (params, ClientData of B examples) -> scalar.
    """
    likelihood = model.task.likelihood or model.task.loss
    return lambda params, batch: likelihood(model.apply(params, batch.x), batch.y, batch.mask)


def feature_alignment(features: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean over examples of (1/d) ||f(x) - target||^2 for features and targets [B, d], mask [B].

    FedPAC, Eq. 3, with class centroids as targets; FedAS, Eq. 4, with the previous backbone's embeddings. Targets
    computed from the trained parameters need a jax.lax.stop_gradient. Features [B, T, d] of a sequence count as one
    vector of T d numbers.

    Example:
      >>> import jax.numpy as jnp
      >>> from pfl_jax.primitives import losses
      >>> centroids, labels = jnp.array([[0.0, 0.0], [1.0, 1.0]]), jnp.array([0, 1])
      >>> features = jnp.array([[0.0, 2.0], [1.0, 1.0]])
      >>> print(losses.feature_alignment(features, centroids[labels], jnp.array([True, True])))
      1.0
    """
    _check_alike(features, targets, mask=mask)
    distance = jnp.mean(jnp.square(features - targets), axis=range(1, features.ndim))
    return masked_mean(distance, mask)


def classwise_alignment(
    features: jax.Array, targets: jax.Array, labels: jax.Array, mask: jax.Array, num_classes: int
) -> jax.Array:
    """Sum over classes of the `feature_alignment` of a class's examples in the batch.

        sum over classes k of the batch of  mean over its examples of (1/d) ||f(x) - target||^2

    If the K' classes of a batch are equally frequent, this is K' times the mean over all its examples.

    Args:
      features, targets: [B, d], see `feature_alignment`.
      labels: [B].
      mask: [B], the real examples.
      num_classes: K.

    Example:
      >>> import jax.numpy as jnp
      >>> from pfl_jax.primitives import losses
      >>> features, labels = jnp.array([[0.0, 2.0], [0.0, 0.0], [1.0, 1.0]]), jnp.array([0, 0, 1])
      >>> print(losses.classwise_alignment(features, jnp.zeros((3, 2)), labels, jnp.ones(3, bool), 2))  # 2 / 2 + 1
      2.0
    """
    _check_alike(features, targets, mask=mask, labels=labels)
    distance = jnp.mean(jnp.square(features - targets), axis=-1)
    weights = mask.astype(distance.dtype)
    counts = jnp.zeros(num_classes, weights.dtype).at[labels].add(weights)
    return jnp.sum(distance * weights / jnp.maximum(counts[labels], 1.0))


def balanced_softmax(logits: jax.Array, labels: jax.Array, mask: jax.Array, counts: jax.Array) -> jax.Array:
    """Mean cross entropy of softmax(logits + log counts), which corrects for the client's class sizes.

    A class without examples is left out of the softmax, and its logit gets no gradient. With equal counts this is
    `cross_entropy`.

    Args:
      logits: [B, K].
      labels: [B], only classes that have examples.
      mask: [B], the real examples.
      counts: [K], training examples of each class on this client, or shares.

    Returns:
      A scalar.

    Example:
      >>> import jax.numpy as jnp
      >>> from pfl_jax.primitives import losses
      >>> logits, labels, mask = jnp.zeros((2, 2)), jnp.array([0, 0]), jnp.array([True, True])
      >>> print(f"{losses.balanced_softmax(logits, labels, mask, jnp.array([1, 3])):.3f}")  # -log(1 / 4)
      1.386

    Reference:
      Ren et al. Balanced Meta-Softmax for Long-Tailed Visual Recognition. NeurIPS 2020.
    """
    check_shapes(logits=(logits, "BK"), counts=(counts, "K"), labels=(labels, "B"), mask=(mask, "B"))
    prior = jnp.where(counts > 0, jnp.log(jnp.where(counts > 0, counts, 1)), ABSENT_CLASS)
    return cross_entropy(logits + prior, labels, mask)


def proximal(params: PyTree, anchor: PyTree) -> jax.Array:
    """Proximal penalty (1/2) ||params - anchor||^2 over all leaves but the statistics of batch normalization.

    Example:
      >>> import jax.numpy as jnp
      >>> from pfl_jax.primitives import losses
      >>> print(losses.proximal({"w": jnp.array([1.0, 2.0])}, {"w": jnp.array([1.0, 0.0])}))
      2.0
    """
    if jax.tree.map(jnp.shape, params) != jax.tree.map(jnp.shape, anchor):
        raise InvalidInput("params and anchor have different shapes")
    squares = jax.tree.map(lambda leaf, other: jnp.sum(jnp.square(leaf - other)), params, anchor)
    return 0.5 * jax.tree.reduce(jnp.add, map_statistics(jnp.zeros_like, squares))


def _check_alike(features: jax.Array, targets: jax.Array, **rows: jax.Array) -> None:
    """Raise InvalidInput unless features and targets have the same shape, and all arguments as many rows as these."""
    axes = f"B{ascii_lowercase[: jnp.ndim(features) - 1]}"
    check_shapes(features=(features, axes), targets=(targets, axes), **{name: (one, "B") for name, one in rows.items()})
