"""A shared backbone under one head that is never trained, then fine-tuning (Oh, Kim, Yun 2022)."""

from pfl_jax.base import LocalResult, Method, Model
from pfl_jax.methods.fedavg_ft import fedavg_ft
from pfl_jax.primitives.aggregation import mean_by_size
from pfl_jax.primitives.local_sgd import LocalSGD
from pfl_jax.primitives.losses import supervised_loss
from pfl_jax.primitives.tree import merge


def fedbabu(
    model: Model,
    training: LocalSGD = LocalSGD(),
    *,
    finetune_epochs: int | None = None,
) -> Method:
    """FedBABU: all clients train the backbone under the same random head, and fine-tune everything before use.

        theta_i = E epochs of SGD on CE(theta_i, phi) from theta, phi fixed;   theta = sum_i beta_i theta_i
        client i deploys finetune_epochs of SGD on CE from (theta, phi), both trained

    The head phi keeps its initial value on the server: it is no parameter of the training, so neither gradients nor
    weight decay move it.

    Args:
      training: recipe of local training, and of fine-tuning.
      finetune_epochs: epochs of fine-tuning before a client uses the model; None for as many as in training.

    Returns:
      A `Method` with the shared backbone and the fixed head as server state, and no client state. What a client
      deploys under `received` is fine-tuned; under `trained` it is its backbone after local training with the fixed
      head.

    Reference:
      Oh, Kim, Yun. FedBABU: Toward Enhanced Representation for Federated Image Classification. ICLR 2022. The training
      procedure of FedBABU.

    Deviations:
      None in the training. The paper also fine-tunes the backbone or the head alone; here the whole model, its default.
    """

    risk = supervised_loss(model)

    def train(key, server, client, data):
        def loss(backbone, batch):
            return risk(merge(backbone, server["head"]), batch)

        backbone = training.fit(key, server["backbone"], data, loss)
        return LocalResult(client=(), message=mean_by_size(backbone, data), personal=merge(backbone, server["head"]))

    def aggregate(key, server, clients, messages, cohort):
        return merge(messages.value, server["head"]), clients, {}

    # What is kept, fine-tuned and deployed is FedAvg-FT's; the training leaves the head out.
    tuned = fedavg_ft(model, training, finetune_epochs=finetune_epochs)
    # The head is the same in all rounds.
    return tuned._replace(local=train, aggregate=aggregate, download=lambda server, client: server["backbone"])
