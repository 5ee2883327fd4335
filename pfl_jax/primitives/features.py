"""Features of a client's examples under a fixed backbone, and heads trained on them."""

import jax

from pfl_jax.base import Backbone, ClientData, Head, Model, PRNGKey
from pfl_jax.errors import NO_FEATURES, InvalidInput
from pfl_jax.primitives.examples import map_examples
from pfl_jax.primitives.local_training import LocalTraining


def extract_features(model: Model, backbone: Backbone, data: ClientData) -> jax.Array:
    """Features f(x_l) of a client's examples, in batches.

    Args:
      model: the architecture.
      backbone: parameters of f.
      data: n examples.

    Returns:
      Features [n, d]; rows of padding are arbitrary but finite.

    Raises:
      InvalidInput: the model has no features.
    """
    if not model.num_features:
        raise InvalidInput(NO_FEATURES)
    return map_examples(lambda x: model.features(backbone, x), data.x, data.mask)


def fit_head(
    key: PRNGKey, model: Model, head: Head, features: jax.Array, data: ClientData, training: LocalTraining
) -> Head:
    """Train a head with the task's loss on precomputed features, so that all epochs share one forward pass.

    Args:
      key: key of the order of the examples.
      model: the architecture.
      head: initial head.
      features: [n, d], see `extract_features`.
      data: examples of the features.
      training: recipe of the head's training.
    """

    def loss(head, batch, key):
        return model.task.loss(model.classify(head, batch.x), batch.y, batch.mask)

    # Augmentation is for inputs.
    return training.replace(augment=None).fit(key, head, data._replace(x=features), loss)
