"""FedAS's parameter alignment combined with the channel split of CD2-pFed (Yang et al. 2024, Fig. 6b)."""

import jax.numpy as jnp

from pfl_jax.base import Method, Model, Privacy
from pfl_jax.methods.cd2pfed import decouple_channels, select_entries
from pfl_jax.methods.factories import SIZE, method_factory, needs_classes
from pfl_jax.methods.fedas import FEDAS_TRAINING
from pfl_jax.primitives.features import extract_features
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import feature_alignment, loss_of_features
from pfl_jax.validation import Count, Epochs, Fraction, NotNegative


@method_factory
def fedas_cd2(
    model: Model,
    training: LocalTraining = FEDAS_TRAINING,
    *,
    share: Fraction = 0.5,
    growth_rounds: Epochs = 20,
    lam: NotNegative = 1.0,
    align_lr: NotNegative = 0.01,
    align_batch_size: Count = 16,
    align_epochs: Epochs = 1,
) -> Method:
    r"""CD2-pFed whose clients align the received shared channels with their own previous model before training.

        H_i(x) = embedding of x by client i's previous model, with shared and personal channels
        shared entries <- align_epochs of SGD on (1/d) ||f(x) - H_i(x)||^2, personal entries fixed   (FedAS, Eq. 2-4)

    The rest is as in `cd2pfed`. Clients are weighted by their numbers of examples. With share = 0 and without alignment
    (align_epochs = 0) this is FedAvg.

    Args:
      training: recipe of local training. The alignment uses the same optimizer, without momentum, weight decay and
        augmentation.
      share: share of each layer's channels that is personal after growth_rounds, from 0 to 1.
      growth_rounds: rounds over which the personal share grows from 0 to its final value; 0 for no growth phase.
      lam: strength lambda of the distillation between the two paths.
      align_lr: learning rate of the alignment.
      align_batch_size: examples in a mini-batch of the alignment.
      align_epochs: epochs of the alignment.

    Returns:
      A `Method`; states as in `cd2pfed`. Under `received` a client deploys the aligned model.
      Trees: server CD2Server(params: model, round: count); client CD2Client(params: model, trained: flag).

    Info:
      share: [], share of personal channels in the round.

    Reference:
      Yang, Huang, Ye. FedAS: Bridging Inconsistency in Personalized Federated Learning. CVPR 2024. Section 4.3 and
      Fig. 6b; the defaults are its settings. The split is from Shen, Zhou, Yu. CD2-pFed. CVPR 2022.

    Deviations:
      FedAS gives no equations for this combination. Embeddings come from the whole backbone; the head is not aligned.
      As in `fedas`, the squared distance is divided by the number d of features, the recipe of the alignment is from
      FedAS's released code, and the model that a client sends contains the alignment. Fisher weights are left out
      because the figure adds only the alignment. Clients that were never trained skip the alignment. The unverified
      choices of `cd2pfed` apply here too.
    """
    needs_classes(model, "fedas_cd2", "its two paths learn each other's probabilities of classes")
    # The targets are embeddings of the original images.
    align_training = training.plain(align_lr, batch_size=align_batch_size, epochs=align_epochs, augment=None)

    def align(key, received, personal, last, data, trained):
        targets = extract_features(model, last["backbone"], data)
        fixed, own = received["backbone"], personal["backbone"]

        def distance(backbone, features, batch):
            return feature_alignment(features, batch.y, batch.mask)

        loss = loss_of_features(model, distance, lambda backbone: select_entries(own, fixed, backbone))
        steps = align_training.replace(epochs=jnp.where(trained, align_epochs, 0))
        aligned = steps.fit(key, fixed, data._replace(y=targets), loss)
        # Noise, and optimizers with a weight decay of their own, move entries without a gradient too.
        return {**received, "backbone": select_entries(own, fixed, aligned)}

    method = decouple_channels(model, training, align, share=share, growth_rounds=growth_rounds, lam=lam)
    return method._replace(privacy=Privacy(align_epochs + training.most_passes, (SIZE,), deployment=align_epochs))
