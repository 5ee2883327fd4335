"""Personal backbones with a shared head (Liang et al. 2020)."""

from pfl_jax.base import LocalResult, Method, Model, Privacy
from pfl_jax.methods.factories import SIZE, method_factory
from pfl_jax.primitives.aggregation import mean_by_size
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import supervised_loss
from pfl_jax.primitives.tree import merge


@method_factory
def lg_fedavg(model: Model, training: LocalTraining = LocalTraining()) -> Method:
    """LG-FedAvg: the head is averaged, each client keeps its backbone, both are trained together.

        (theta_i, phi_i) = E epochs of SGD from (theta_i, phi);   phi = sum_i beta_i phi_i

    FedPer with the roles of backbone and head exchanged.

    Args:
      training: recipe of local training.

    Returns:
      A `Method`. The server keeps the shared head and the backbone that every client starts from; a client
      keeps its backbone.
      Trees: server model; client backbone.

    Reference:
      Liang, Liu, Ziyin, Salakhutdinov, Morency. Think Locally, Act Globally: Federated Learning with Local and Global
      Representations. 2020. The algorithm LG-FedAvg, without its adversarial part for fairness.

    Deviations:
      The commands of the released code start from a model trained by FedAvg; here clients start from the same random
      model as all other methods, as in the comparisons of FedPAC and FedAS. The paper does not fix which layers are
      shared; here only the head, as in FedPAC's baseline. The released code averages clients equally, and
      tests each client with its model from the round in which its test accuracy was best.
    """
    loss = supervised_loss(model)

    def train(key, server, client, data):
        params = merge(client, server["head"])
        params = training.fit(key, params, data, loss)
        return LocalResult(client=params["backbone"], message=mean_by_size(params["head"], data), personal=params)

    def aggregate(key, server, clients, messages, cohort):
        return merge(server["backbone"], messages.value), clients, {}

    return Method(
        init_server=model.init,
        init_client=lambda key, server, data: server["backbone"],
        local=train,
        aggregate=aggregate,
        personalize=lambda key, server, client, data: merge(client, server["head"]),
        predict=model.apply,
        # Clients need the initial backbone only before their first round.
        download=lambda server, client: server["head"],
        server_is_mean=True,
        privacy=Privacy(training.most_passes, (SIZE,), clients=()),
    )
