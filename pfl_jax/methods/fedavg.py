"""Federated averaging: one global model (McMahan et al. 2017)."""

from pfl_jax.base import LocalResult, Method, Model, Privacy
from pfl_jax.methods.factories import SIZE, method_factory
from pfl_jax.primitives.aggregation import mean_by_size
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import supervised_loss


@method_factory
def fedavg(model: Model, training: LocalTraining = LocalTraining()) -> Method:
    """FedAvg: clients train the received model, the server averages the results.

        w_i = E epochs of SGD from w on client i;   w = sum_i beta_i w_i,  beta_i = n_i / sum_j n_j

    Args:
      training: recipe of local training.

    Returns:
      A `Method` with the global model as server state and no client state.
      Trees: server model; client nothing.

    Reference:
      McMahan, Moore, Ramage, Hampson, Aguera y Arcas. Communication-Efficient Learning of Deep Networks from
      Decentralized Data. AISTATS 2017. Algorithm 1.
    """
    loss = supervised_loss(model)

    def train(key, server, client, data):
        params = training.fit(key, server, data, loss)
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
        server_is_mean=True,
        privacy=Privacy(training.most_passes, (SIZE,), clients=()),
    )
