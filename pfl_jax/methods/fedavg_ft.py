"""Federated averaging followed by fine-tuning on each client, a strong baseline of personalization."""

from pfl_jax.base import Method, Model
from pfl_jax.methods.factories import method_factory, unchecked
from pfl_jax.methods.fedavg import fedavg
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.validation import Epochs
from pfl_jax.wrappers.fine_tuning import fine_tuned


@method_factory
def fedavg_ft(
    model: Model,
    training: LocalTraining = LocalTraining(),
    *,
    finetune_epochs: Epochs | None = None,
) -> Method:
    """FedAvg-FT: FedAvg whose clients fine-tune the global model before they use it.

    Training and aggregation are as in FedAvg. A client deploys the received model after `finetune_epochs` epochs of
    local training; it neither keeps nor sends the fine-tuned model.

    Args:
      training: recipe of local training, and of fine-tuning.
      finetune_epochs: epochs of fine-tuning before a client uses the model; None for as many as in training.

    Returns:
      A `Method` with the global model as server state and no client state.
      Trees: server model; client nothing.

    Reference:
      The baseline FedAvg-FT of Xu, Tong, Huang. Personalized Federated Learning with Feature Alignment and
      Classifier Collaboration. ICLR 2023; FedAvg-P of Yang, Huang, Ye. FedAS. CVPR 2024.
    """
    tuning = training.replace(epochs=training.epochs if finetune_epochs is None else finetune_epochs)
    return fine_tuned(fedavg(model, training), unchecked(fedavg)(model, tuning))
