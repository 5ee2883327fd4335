"""Shared backbone with a fixed random head, followed by fine-tuning (Oh, Kim, Yun 2022)."""

from pfl_jax.base import LocalResult, Method, Model
from pfl_jax.methods.factories import method_factory
from pfl_jax.methods.fedavg_ft import fedavg_ft
from pfl_jax.primitives.aggregation import mean_by_size
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import supervised_loss
from pfl_jax.primitives.tree import merge
from pfl_jax.validation import Epochs


@method_factory
def fedbabu(
    model: Model,
    training: LocalTraining = LocalTraining(),
    *,
    finetune_epochs: Epochs | None = None,
) -> Method:
    """FedBABU: clients train the backbone with one fixed random head, and fine-tune the whole model before use.

        theta_i = E epochs of SGD on CE(theta_i, phi) from theta, phi fixed;   theta = sum_i beta_i theta_i
        client i deploys the result of finetune_epochs of SGD on CE from (theta, phi), both trained

    The head phi keeps its initial value on the server. It is not a parameter of the training, so neither gradients nor
    weight decay change it.

    Args:
      training: recipe of local training, and of fine-tuning.
      finetune_epochs: epochs of fine-tuning before a client uses the model; None for as many as in training.

    Returns:
      A `Method` with the shared backbone and the fixed head as server state, and no client state. The model under
      `received` is fine-tuned; the model under `trained` is the backbone after local training, with the fixed head.
      Trees: server model; client nothing.

    Reference:
      Oh, Kim, Yun. FedBABU: Toward Enhanced Representation for Federated Image Classification. ICLR 2022. The training
      procedure of FedBABU.

    Deviations:
      The paper also fine-tunes only the backbone or only the head; here the whole model is fine-tuned, the paper's
      default. The released code averages clients equally, and multiplies the learning rate by 0.1 after half and after
      three quarters of the rounds; here clients are weighted by their numbers of examples, and the recipe has one
      learning rate.
    """

    risk = supervised_loss(model)

    def train(key, server, client, data):
        def loss(backbone, batch, key):
            return risk(merge(backbone, server["head"]), batch, key)

        backbone = training.fit(key, server["backbone"], data, loss)
        return LocalResult(client=(), message=mean_by_size(backbone, data), personal=merge(backbone, server["head"]))

    def aggregate(key, server, clients, messages, cohort):
        return merge(messages.value, server["head"]), clients, {}

    # States, fine-tuning and deployment are as in FedAvg-FT; local training leaves the head out.
    tuned = fedavg_ft(model, training, finetune_epochs=finetune_epochs)
    # The head never changes, so it is not downloaded.
    return tuned._replace(
        local=train,
        aggregate=aggregate,
        download=lambda server, client: server["backbone"],
        privacy=tuned.privacy,
    )
