"""Personal models that the server mixes by attention to similar ones (Huang et al. 2021)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfl_jax.base import LocalResult, Method, Model, Params, Privacy
from pfl_jax.methods.factories import method_factory
from pfl_jax.primitives.aggregation import mix
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import proximal, supervised_loss
from pfl_jax.validation import NotNegative, Positive


class FedAMPClient(NamedTuple):
    """State of a FedAMP client.

    Attributes:
      params: its personal model w_i.
      cloud: the model u_i that the server mixed for it after the client's latest round.
    """

    params: Params
    cloud: Params


def attention(models: Params, present: jax.Array, alpha_k: float | jax.Array, sigma: float | jax.Array) -> jax.Array:
    """Weights xi_ij of client j's model in the mixture of client i (FedAMP, Eq. 5): [M, M], rows sum to 1.

        xi_ij = alpha_k exp(-||w_i - w_j||^2 / sigma) / sigma for j other than i;   xi_ii = 1 - sum_j xi_ij

    If a client's weights for others sum to more than 1, they are scaled down to sum to 1.

    Args:
      models: the clients' models, leaves [M, ...].
      present: [M], bool; absent clients have weight 0 for others.
      alpha_k: step size of the mixing.
      sigma: squared distance at which the attention has decreased by a factor e.
    """

    def squared_distances(one: Params) -> jax.Array:
        return 2 * jax.vmap(proximal, in_axes=(0, None))(models, one)

    # From differences, one client after another: models are so close that their inner products would cancel.
    distances = jax.lax.map(squared_distances, models)
    own = jnp.eye(present.shape[0], dtype=bool)
    others = jnp.where(own | ~present, 0.0, alpha_k * jnp.exp(-distances / sigma) / sigma)
    others = others / jnp.maximum(jnp.sum(others, axis=1, keepdims=True), 1.0)
    return jnp.where(own, 1 - jnp.sum(others, axis=1, keepdims=True), others)


@method_factory
def fedamp(
    model: Model,
    training: LocalTraining = LocalTraining(),
    *,
    lam: NotNegative = 1e-3,
    alpha_k: Positive = 10.0,
    sigma: Positive = 100.0,
) -> Method:
    r"""FedAMP: the server sends each client a mixture of all models, in which similar models have more weight.

        u_i = sum_j xi_ij w_j,   xi_ij = alpha_k A'(||w_i - w_j||^2),   A'(x) = exp(-x / sigma) / sigma
        w_i = E epochs of SGD from u_i on  CE(w_i) + (lambda / (2 alpha_k)) ||w_i - u_i||^2

    with xi_ii = 1 minus the other weights. Without attention (alpha_k near 0) and lambda = 0 this is local training.

    Args:
      training: recipe of local training.
      lam: strength lambda of the attention in the objective; the proximal term has the strength lam / alpha_k.
      alpha_k: step size of the mixing. alpha_k / sigma is the weight of a client with an equal model.
      sigma: squared distance of two models at which the weight has decreased by a factor e.

    Returns:
      A `Method`. The server keeps the initial model, a client a `FedAMPClient`. Both evaluation protocols score w_i.
      Trees: server model; client FedAMPClient(params: model, cloud: model).

    Info:
      attention: [M, M], xi_ij: weight of client j's model in u_i.

    Reference:
      Huang, Chu, Zhou, Wang, Liu, Pei, Zhang. Personalized Cross-Silo Federated Learning on Non-IID Data. AAAI 2021.
      Algorithm 1 with A(x) = 1 - exp(-x / sigma).

    Deviations:
      Only the models of a round's cohort are mixed; in the paper all clients take part in every round. The proximal
      point of u_i is approximated by SGD from u_i; the paper does not say where its solver starts. In PFLlib it starts
      from w_i, and the penalty is computed from the parameters' data, so that it has no gradient: for any lambda a
      client trains as in local training, and other clients have no effect. Weights for others are scaled down where
      they sum to more than 1; the paper assumes that they do not. HeurFedAMP is left out. The defaults are not the
      paper's, which could not be verified. An equal model has a weight of 10 %. The weights distinguish models only if
      their squared distances, which depend on the network, are of the order of sigma (see `attention` in the Info).
      Reimplementations also decrease alpha_k during a run. Mixtures of three clients agree with PFLlib's server
      (github.com/TsingZ0/PFLlib, commit d832e76) to 1e-6. The authors have no code on GitHub.
    """

    def train(key, server, client, data):
        loss = supervised_loss(model, lambda params: (lam / alpha_k) * proximal(params, client.cloud))
        params = training.fit(key, client.cloud, data, loss)
        return LocalResult(client=client._replace(params=params), message=params, personal=params)

    def aggregate(key, server, clients, messages, cohort):
        weights = attention(messages, cohort.present, alpha_k, sigma)
        return server, clients._replace(cloud=mix(weights, messages)), {"attention": weights}

    return Method(
        init_server=model.init,
        init_client=lambda key, server, data: FedAMPClient(server, server),
        local=train,
        aggregate=aggregate,
        personalize=lambda key, server, client, data: client.params,
        predict=model.apply,
        download=lambda server, client: client.cloud,
        privacy=Privacy(training.most_passes),
    )
