"""Local training without communication: the baseline that shows the benefit of federated training."""

from pfl_jax.base import LocalResult, Method, Model, Privacy
from pfl_jax.methods.factories import method_factory
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import supervised_loss


@method_factory
def local(model: Model, training: LocalTraining = LocalTraining()) -> Method:
    """Local-only training: each client trains its own model and sends nothing.

    All clients start from the same random model, as in the papers' comparisons. As with every other method, a client
    trains only in the rounds in which it is part of the cohort.

    Args:
      training: recipe of local training.

    Returns:
      A `Method` with the initial model as server state and the client's own model as its state.
      Trees: server model; client model.
    """
    loss = supervised_loss(model)

    def train(key, server, client, data):
        params = training.fit(key, client, data, loss)
        return LocalResult(client=params, message=(), personal=params)

    return Method(
        init_server=model.init,
        init_client=lambda key, server, data: server,
        local=train,
        aggregate=lambda key, server, clients, messages, cohort: (server, clients, {}),
        personalize=lambda key, server, client, data: client,
        predict=model.apply,
        download=lambda server, client: (),
        privacy=Privacy(training.most_passes),
    )
