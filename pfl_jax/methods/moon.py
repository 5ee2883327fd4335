"""Model-contrastive learning between a client's features and two other models' features (Li, He, Song 2021)."""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import optax

from pfl_jax.base import LocalResult, Method, Model, Params, Privacy
from pfl_jax.methods.factories import SIZE, method_factory, needs_vectors
from pfl_jax.methods.fedavg import fedavg
from pfl_jax.primitives.aggregation import mean_by_size
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import loss_of_features, masked_mean
from pfl_jax.validation import NotNegative, Positive, ReadWith


class MoonClient(NamedTuple):
    """State of a MOON client.

    Attributes:
      params: its model after its previous local training.
      trained: bool scalar; False until the first local training, before which there is no previous model.
    """

    params: Params
    trained: jax.Array


SMALLEST_NORM = 1e-8
"""Lower bound on the norms in a cosine, as in PyTorch."""


def contrastive_loss(
    features: jax.Array, positive: jax.Array, negative: jax.Array, mask: jax.Array, temperature: float | jax.Array
) -> jax.Array:
    """Mean over examples of -log(e^(cos(z, z+) / T) / (e^(cos(z, z+) / T) + e^(cos(z, z-) / T))) (MOON, Eq. 3).

    Args:
      features, positive, negative: z, z+ and z- [B, d]; no gradient flows into z+ and z-.
      mask: [B], the real examples.
      temperature: T.
    """
    near, far = (
        optax.losses.cosine_similarity(features, jax.lax.stop_gradient(other), epsilon=SMALLEST_NORM)
        for other in (positive, negative)
    )
    return masked_mean(jax.nn.softplus((far - near) / temperature), mask)


@method_factory
def moon(
    model: Model,
    training: LocalTraining = LocalTraining(),
    *,
    mu: NotNegative = 1.0,
    temperature: Annotated[Positive, ReadWith("mu")] = 0.5,
) -> Method:
    r"""MOON: FedAvg with a term that draws features toward the global model's and away from the client's previous ones.

        w_i = E epochs of SGD from w on  CE(w_i) + mu mean_x -log( e^(s+ / T) / (e^(s+ / T) + e^(s- / T)) ),
        s+ = cos(z, z_glob),  s- = cos(z, z_prev);   w = sum_i beta_i w_i

    z, z_glob and z_prev are the features of x under w_i, the received model w, and the model w_i at the end of the
    client's previous local training. With mu = 0 this is FedAvg.

    Args:
      training: recipe of local training.
      mu: weight of the contrastive term.
      temperature: temperature T of the contrastive term.

    Returns:
      A `Method` with the global model as server state and a `MoonClient` as client state.
      Trees: server model; client MoonClient(params: model, trained: flag).

    Reference:
      Li, He, Song. Model-Contrastive Federated Learning. CVPR 2021. Algorithm 1. T = 0.5 is the paper's; its best mu
      is 5 on CIFAR-10 and 1 on CIFAR-100 and Tiny-ImageNet, and 1 is the released default.

    Deviations:
      z is the input of the last layer, as in the paper's definition. The paper's networks have a projection of two
      layers before the last one; here the model decides. The contrastive term starts with a client's second local
      training: the paper's Algorithm 1 does not define the previous model for the first one, and the released code
      has no term in the first round. There, a client that is first drawn later has a random model as its previous one.
      Three full-batch rounds of three clients agree with the released training function
      (github.com/QinbinLi/MOON, commit 8fcba3c) to 1e-6.
    """
    needs_vectors(model, "moon", "it compares that vector under three models")

    def train(key, server, client, data):
        strength = mu * client.trained

        def loss(params, features, batch):
            near, far = (model.features(fixed["backbone"], batch.x) for fixed in (server, client.params))
            contrast = contrastive_loss(features, near, far, batch.mask, temperature)
            logits = model.classify(params["head"], features)
            return model.task.loss(logits, batch.y, batch.mask) + strength * contrast

        params = training.fit(key, server, data, loss_of_features(model, loss))
        return LocalResult(MoonClient(params, jnp.ones((), bool)), mean_by_size(params, data), params)

    return fedavg(model, training)._replace(
        init_client=lambda key, server, data: MoonClient(server, jnp.zeros((), bool)),
        local=train,
        privacy=Privacy(training.most_passes, (SIZE,), clients=()),
    )
