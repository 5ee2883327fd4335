"""Shared backbone with personal heads (Arivazhagan et al. 2019)."""

from pfl_jax.base import LocalResult, Method, Model, Privacy
from pfl_jax.methods.factories import SIZE, method_factory
from pfl_jax.primitives.aggregation import mean_by_size
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import supervised_loss
from pfl_jax.primitives.tree import merge


@method_factory
def fedper(model: Model, training: LocalTraining = LocalTraining()) -> Method:
    """FedPer: the backbone is averaged, each client keeps its head, both are trained together.

        (theta_i, phi_i) = E epochs of SGD from (theta, phi_i);   theta = sum_i beta_i theta_i

    Args:
      training: recipe of local training.

    Returns:
      A `Method`. The server keeps the shared backbone and the head that every client starts from; a client
      keeps its head.
      Trees: server model; client head.

    Reference:
      Arivazhagan, Aggarwal, Singh, Choudhary. Federated Learning with Personalization Layers. 2019. The client and
      server algorithms.
    """
    loss = supervised_loss(model)

    def train(key, server, client, data):
        params = merge(server["backbone"], client)
        params = training.fit(key, params, data, loss)
        return LocalResult(client=params["head"], message=mean_by_size(params["backbone"], data), personal=params)

    def aggregate(key, server, clients, messages, cohort):
        return merge(messages.value, server["head"]), clients, {}

    return Method(
        init_server=model.init,
        init_client=lambda key, server, data: server["head"],
        local=train,
        aggregate=aggregate,
        personalize=lambda key, server, client, data: merge(server["backbone"], client),
        predict=model.apply,
        download=lambda server, client: server["backbone"],
        server_is_mean=True,
        privacy=Privacy(training.most_passes, (SIZE,), clients=()),
    )
