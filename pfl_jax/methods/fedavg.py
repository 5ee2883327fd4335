"""Federated averaging: one global model (McMahan et al. 2017)."""

from pfl_jax.base import LocalResult, Method, Model
from pfl_jax.primitives.aggregation import mean_by_size
from pfl_jax.primitives.local_sgd import fit, sgd
from pfl_jax.primitives.losses import cross_entropy


def fedavg(
    model: Model,
    *,
    lr: float = 0.01,
    momentum: float = 0.5,
    weight_decay: float = 5e-4,
    batch_size: int = 50,
    epochs: int = 5,
) -> Method:
    """FedAvg: clients train the received model, the server averages the results.

        w_i = E epochs of SGD from w on client i;   w = sum_i beta_i w_i,  beta_i = n_i / sum_j n_j

    Args:
      lr: learning rate.
      momentum: momentum of SGD.
      weight_decay: weight decay of SGD.
      batch_size: examples of a mini-batch.
      epochs: local epochs of a round.

    Returns:
      A `Method` with the global model as server state and no client state.

    Reference:
      McMahan, Moore, Ramage, Hampson, Aguera y Arcas. Communication-Efficient Learning of Deep Networks from
      Decentralized Data. AISTATS 2017. Algorithm 1.
    """
    optimizer = sgd(lr, momentum, weight_decay)

    def loss(params, batch):
        return cross_entropy(model.apply(params, batch.x), batch.y, batch.mask)

    def train(key, server, client, data):
        params = fit(key, server, data, loss, optimizer=optimizer, epochs=epochs, batch_size=batch_size)
        return LocalResult(client=(), message=mean_by_size(params, data), personal=params)

    def aggregate(key, server, clients, messages, cohort):
        return messages.value, clients, {}

    return Method(
        init_server=model.init,
        init_client=lambda key, server, data: (),
        local=train,
        aggregate=aggregate,
        personalize=lambda key, server, client, data: server,
        predict=model.apply,
    )
