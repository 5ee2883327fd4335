"""FedEM whose clients fine-tune the shared models before they use them."""

from pfl_jax.base import Method, Model
from pfl_jax.methods.fedem import fedem


def fedem_ft(
    model: Model,
    *,
    learners: int = 3,
    lr: float = 0.01,
    momentum: float = 0.5,
    weight_decay: float = 5e-4,
    batch_size: int = 50,
    epochs: int = 5,
    finetune_epochs: int | None = None,
) -> Method:
    """FedEM-FT: training and aggregation are FedEM's; a client deploys the received models after local training.

    Fine-tuning is one more local step of FedEM: an E-step, new mixture weights pi_i, then SGD on all M models with
    `finetune_epochs` epochs. Nothing of it is kept or sent.

    Args:
      learners: number M of shared models.
      lr: learning rate, of fine-tuning too.
      momentum: momentum of SGD.
      weight_decay: weight decay of SGD.
      batch_size: examples of a mini-batch.
      epochs: local epochs of a round.
      finetune_epochs: epochs of fine-tuning before a client uses the models; None for as many as `epochs`.

    Returns:
      A `Method`; states as in `fedem`.

    Reference:
      The baseline FedEM-FT of Xu, Tong, Huang. Personalized Federated Learning with Feature Alignment and Classifier
      Collaboration. ICLR 2023. Appendix C.4, Table 4; Marfoq et al. 2021 do not fine-tune.

    Deviations:
      FedPAC does not say what its fine-tuning trains: here it is all M models on FedEM's weighted loss.
    """
    sgd = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "batch_size": batch_size}
    tuning = epochs if finetune_epochs is None else finetune_epochs
    tune = fedem(model, learners=learners, **sgd, epochs=tuning).local

    def personalize(key, server, client, data):
        return tune(key, server, client, data).personal

    return fedem(model, learners=learners, **sgd, epochs=epochs)._replace(personalize=personalize)
