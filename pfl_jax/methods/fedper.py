"""A shared backbone under personal heads (Arivazhagan et al. 2019)."""

from pfl_jax.base import LocalResult, Method, Model
from pfl_jax.primitives.aggregation import mean_by_size
from pfl_jax.primitives.local_sgd import fit, sgd
from pfl_jax.primitives.losses import cross_entropy
from pfl_jax.primitives.tree import merge


def fedper(
    model: Model,
    *,
    lr: float = 0.01,
    momentum: float = 0.5,
    weight_decay: float = 5e-4,
    batch_size: int = 50,
    epochs: int = 5,
) -> Method:
    """FedPer: the backbone is averaged, each client keeps its head, both are trained together.

        (theta_i, phi_i) = E epochs of SGD from (theta, phi_i);   theta = sum_i beta_i theta_i

    Args:
      lr: learning rate.
      momentum: momentum of SGD.
      weight_decay: weight decay of SGD.
      batch_size: examples of a mini-batch.
      epochs: local epochs of a round.

    Returns:
      A `Method`. The server keeps the shared backbone and the head that every client starts from; a client
      keeps its head.

    Reference:
      Arivazhagan, Aggarwal, Singh, Choudhary. Federated Learning with Personalization Layers. 2019. The
      algorithms of its client and its server.
    """
    optimizer = sgd(lr, momentum, weight_decay)

    def loss(params, batch):
        return cross_entropy(model.apply(params, batch.x), batch.y, batch.mask)

    def train(key, server, client, data):
        params = merge(server["backbone"], client)
        params = fit(key, params, data, loss, optimizer=optimizer, epochs=epochs, batch_size=batch_size)
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
    )
