"""Features of a client's examples under a fixed backbone, and heads trained on them."""

import jax

from pfl_jax.base import Backbone, ClientData, Head, Model, PRNGKey
from pfl_jax.primitives.local_sgd import LocalSGD, map_examples
from pfl_jax.primitives.losses import cross_entropy


def extract_features(model: Model, backbone: Backbone, data: ClientData) -> jax.Array:
    """Features f(x_l) of a client's examples, in batches.

    Args:
      model: the architecture.
      backbone: parameters of f.
      data: n examples.

    Returns:
      [n, d]; rows of padding are arbitrary but finite.
    """
    return map_examples(lambda x: model.features(backbone, x), data.x, data.mask)


def fit_head(key: PRNGKey, model: Model, head: Head, features: jax.Array, data: ClientData, training: LocalSGD) -> Head:
    """Train a head on cross entropy over features of a fixed backbone: one forward pass serves all epochs.

    Args:
      key: orders the examples.
      model: the architecture.
      head: where training starts.
      features: [n, d], see `extract_features`.
      data: the examples that the features are of.
      training: recipe of the head's training.
    """

    def loss(head, batch):
        return cross_entropy(model.classify(head, batch.x), batch.y, batch.mask)

    return training.fit(key, head, data._replace(x=features), loss)
