"""FedProx, then fine-tuning on each client."""

from pfl_jax.base import Method, Model
from pfl_jax.methods.fedavg_ft import fedavg_ft
from pfl_jax.methods.fedprox import fedprox


def fedprox_ft(
    model: Model,
    *,
    mu: float = 0.01,
    lr: float = 0.01,
    momentum: float = 0.5,
    weight_decay: float = 5e-4,
    batch_size: int = 50,
    epochs: int = 5,
    finetune_epochs: int | None = None,
) -> Method:
    """FedProx-FT: FedProx whose clients fine-tune the global model before they use it.

    Training and aggregation are FedProx's. Fine-tuning is FedAvg-FT's: `finetune_epochs` epochs of SGD on cross
    entropy from the received model, without the proximal term; nothing of it is kept or sent.

    Args:
      mu: strength of the proximal term.
      lr: learning rate, of fine-tuning too.
      momentum: momentum of SGD.
      weight_decay: weight decay of SGD.
      batch_size: examples of a mini-batch.
      epochs: local epochs of a round.
      finetune_epochs: epochs of fine-tuning before a client uses the model; None for as many as `epochs`.

    Returns:
      A `Method` with the global model as server state and no client state.

    Reference:
      The baseline FedProx-P of Yang, Huang, Ye. FedAS: Bridging Inconsistency in Personalized Federated Learning.
      CVPR 2024.

    Deviations:
      FedAS does not say how its FedProx-P personalizes; here as FedAvg-FT does.
    """
    sgd = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "batch_size": batch_size}
    tuned = fedavg_ft(model, **sgd, epochs=epochs, finetune_epochs=finetune_epochs)
    return fedprox(model, mu=mu, **sgd, epochs=epochs)._replace(personalize=tuned.personalize)
