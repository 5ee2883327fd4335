"""FedProx followed by fine-tuning on each client."""

from pfl_jax.base import Method, Model
from pfl_jax.methods.factories import method_factory, unchecked
from pfl_jax.methods.fedavg import fedavg
from pfl_jax.methods.fedprox import fedprox
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.validation import Epochs, NotNegative
from pfl_jax.wrappers.fine_tuning import fine_tuned


@method_factory
def fedprox_ft(
    model: Model,
    training: LocalTraining = LocalTraining(),
    *,
    mu: NotNegative = 0.01,
    finetune_epochs: Epochs | None = None,
) -> Method:
    """FedProx-FT: FedProx whose clients fine-tune the global model before they use it.

    Training and aggregation are as in FedProx. Fine-tuning is as in FedAvg-FT: `finetune_epochs` epochs of local
    training on cross entropy from the received model, without the proximal term. Clients neither keep nor send the
    fine-tuned model.

    Args:
      training: recipe of local training, and of fine-tuning.
      mu: strength of the proximal term.
      finetune_epochs: epochs of fine-tuning before a client uses the model; None for as many as in training.

    Returns:
      A `Method` with the global model as server state and no client state.
      Trees: server model; client nothing.

    Reference:
      The baseline FedProx-P of Yang, Huang, Ye. FedAS: Bridging Inconsistency in Personalized Federated Learning.
      CVPR 2024.

    Deviations:
      FedAS does not say how its FedProx-P personalizes; here it fine-tunes as FedAvg-FT does.
    """
    tuning = training.replace(epochs=training.epochs if finetune_epochs is None else finetune_epochs)
    return fine_tuned(fedprox(model, training, mu=mu), unchecked(fedavg)(model, tuning))
