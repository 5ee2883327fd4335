"""Federated averaging, then fine-tuning on each client: a simple personalization that is hard to beat."""

from pfl_jax.base import Method, Model
from pfl_jax.methods.fedavg import fedavg


def fedavg_ft(
    model: Model,
    *,
    lr: float = 0.01,
    momentum: float = 0.5,
    weight_decay: float = 5e-4,
    batch_size: int = 50,
    epochs: int = 5,
    finetune_epochs: int | None = None,
) -> Method:
    """FedAvg-FT: FedAvg whose clients fine-tune the global model before they use it.

    Training and aggregation are FedAvg's. What a client deploys is the received model after `finetune_epochs`
    epochs of its own SGD; nothing of it is kept or sent.

    Args:
      lr: learning rate, of fine-tuning too.
      momentum: momentum of SGD.
      weight_decay: weight decay of SGD.
      batch_size: examples of a mini-batch.
      epochs: local epochs of a round.
      finetune_epochs: epochs of fine-tuning before a client uses the model; None for as many as `epochs`.

    Returns:
      A `Method` with the global model as server state and no client state.

    Reference:
      The baseline FedAvg-FT of Xu, Tong, Huang. Personalized Federated Learning with Feature Alignment and
      Classifier Collaboration. ICLR 2023; FedAvg-P of Yang, Huang, Ye. FedAS. CVPR 2024.
    """
    sgd = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "batch_size": batch_size}
    tune = fedavg(model, **sgd, epochs=epochs if finetune_epochs is None else finetune_epochs).local

    def personalize(key, server, client, data):
        return tune(key, server, client, data).personal

    return fedavg(model, **sgd, epochs=epochs)._replace(personalize=personalize)
