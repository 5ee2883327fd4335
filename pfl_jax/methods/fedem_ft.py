"""FedEM followed by fine-tuning of the shared models on each client."""

from pfl_jax.base import Method, Model
from pfl_jax.methods.factories import method_factory, needs_classes, unchecked
from pfl_jax.methods.fedem import fedem
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.validation import Count, Epochs
from pfl_jax.wrappers.fine_tuning import fine_tuned


@method_factory
def fedem_ft(
    model: Model,
    training: LocalTraining = LocalTraining(),
    *,
    learners: Count = 3,
    finetune_epochs: Epochs | None = None,
) -> Method:
    """FedEM-FT: FedEM whose clients fine-tune the shared models before they use them.

    Training and aggregation are as in FedEM. Fine-tuning is one more local update of FedEM: an E-step, new mixture
    weights pi_i, then `finetune_epochs` epochs of local training of all L models. Clients neither keep nor send the
    fine-tuned models.

    Args:
      training: recipe of local training, and of fine-tuning.
      learners: number L of shared models.
      finetune_epochs: epochs of fine-tuning before a client uses the models; None for as many as in training.

    Returns:
      A `Method`; states as in `fedem`.
      Trees: server 3 x model; client numbers [3].

    Info:
      mixture: [M, L], as in `fedem`.

    Reference:
      The baseline FedEM-FT of Xu, Tong, Huang. Personalized Federated Learning with Feature Alignment and Classifier
      Collaboration. ICLR 2023. Appendix C.4, Table 4; Marfoq et al. 2021 do not fine-tune.

    Deviations:
      FedPAC does not say what its fine-tuning trains; here it trains all L models with FedEM's weighted loss.
    """
    needs_classes(model, "fedem_ft", "its prediction mixes probabilities of classes")
    tuning = training.replace(epochs=training.epochs if finetune_epochs is None else finetune_epochs)
    return fine_tuned(fedem(model, training, learners=learners), unchecked(fedem)(model, tuning, learners=learners))
