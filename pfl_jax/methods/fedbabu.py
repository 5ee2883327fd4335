"""A shared backbone under one head that is never trained, then fine-tuning (Oh, Kim, Yun 2022)."""

from pfl_jax.base import LocalResult, Method, Model
from pfl_jax.methods.fedavg_ft import fedavg_ft
from pfl_jax.primitives.aggregation import mean_by_size
from pfl_jax.primitives.local_sgd import fit, sgd
from pfl_jax.primitives.losses import cross_entropy
from pfl_jax.primitives.tree import merge


def fedbabu(
    model: Model,
    *,
    lr: float = 0.01,
    momentum: float = 0.5,
    weight_decay: float = 5e-4,
    batch_size: int = 50,
    epochs: int = 5,
    finetune_epochs: int | None = None,
) -> Method:
    """FedBABU: all clients train the backbone under the same random head, and fine-tune everything before use.

        theta_i = E epochs of SGD on CE(theta_i, phi) from theta, phi fixed;   theta = sum_i beta_i theta_i
        client i deploys finetune_epochs of SGD on CE from (theta, phi), both trained

    The head phi keeps its initial value on the server: it is no parameter of the training, so neither gradients nor
    weight decay move it.

    Args:
      lr: learning rate, of fine-tuning too.
      momentum: momentum of SGD.
      weight_decay: weight decay of SGD.
      batch_size: examples of a mini-batch.
      epochs: local epochs of a round.
      finetune_epochs: epochs of fine-tuning before a client uses the model; None for as many as `epochs`.

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
    optimizer = sgd(lr, momentum, weight_decay)

    def train(key, server, client, data):
        def loss(backbone, batch):
            return cross_entropy(model.apply(merge(backbone, server["head"]), batch.x), batch.y, batch.mask)

        backbone = fit(key, server["backbone"], data, loss, optimizer=optimizer, epochs=epochs, batch_size=batch_size)
        return LocalResult(client=(), message=mean_by_size(backbone, data), personal=merge(backbone, server["head"]))

    def aggregate(key, server, clients, messages, cohort):
        return merge(messages.value, server["head"]), clients, {}

    # What is kept, fine-tuned and deployed is FedAvg-FT's; the training leaves the head out.
    tuned = fedavg_ft(
        model,
        lr=lr,
        momentum=momentum,
        weight_decay=weight_decay,
        batch_size=batch_size,
        epochs=epochs,
        finetune_epochs=finetune_epochs,
    )
    # The head is the same in all rounds.
    return tuned._replace(local=train, aggregate=aggregate, download=lambda server, client: server["backbone"])
