"""Shared backbone with personal heads, trained one after the other (Collins et al. 2021)."""

from typing import Annotated

import jax

from pfl_jax.base import LocalResult, Method, Model, Privacy
from pfl_jax.methods.factories import SIZE, method_factory
from pfl_jax.methods.fedper import fedper
from pfl_jax.primitives.aggregation import mean_by_size
from pfl_jax.primitives.features import extract_features, fit_head
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import supervised_loss
from pfl_jax.primitives.tree import merge
from pfl_jax.validation import Epochs, NotNegative, ReadWith


@method_factory
def fedrep(
    model: Model,
    training: LocalTraining = LocalTraining(),
    *,
    head_lr: Annotated[NotNegative | None, ReadWith("head_epochs")] = None,
    head_epochs: Epochs = 10,
) -> Method:
    """FedRep: each client fits its own head to the received backbone, then the backbone to that head.

        phi_i = head_epochs of SGD on CE from client i's head, theta fixed
        theta_i = E epochs of SGD on CE from theta, phi_i fixed;   theta = sum_i beta_i theta_i

    Args:
      training: recipe of local training of the backbone; also of the head, except for `head_lr` and `head_epochs`.
      head_lr: learning rate of the head; None for the backbone's.
      head_epochs: local epochs of the head in a round, before the backbone's.

    Returns:
      A `Method`. The server keeps the shared backbone and the head that every client starts from; a client
      keeps its head.
      Trees: server model; client head.

    Reference:
      Collins, Hassani, Mokhtari, Shakkottai. Exploiting Shared Representations for Personalized Federated Learning.
      ICML 2021. Algorithm 1.

    Deviations:
      Algorithm 1 takes one step on the backbone; its experiments take epochs. The released code trains the head for ten
      epochs, as here, and the backbone for one epoch on most datasets, where FedPAC's comparison has E = 5 for all
      methods. The head is trained on precomputed features of the original images, so augmentation applies only to the
      epochs of the backbone; code that passes every batch through the network also augments in the head's epochs. In
      the last round of the released code all clients train only their heads, for at least ten epochs on the final
      backbone, and these models are evaluated.
    """
    head_training = training if head_lr is None else training.phase(head_lr)
    head_training = head_training.replace(epochs=head_epochs)
    risk = supervised_loss(model)

    def train(key, server, client, data):
        head_key, backbone_key = jax.random.split(key)
        features = extract_features(model, server["backbone"], data)
        head = fit_head(head_key, model, client, features, data, head_training)

        def backbone_loss(backbone, batch, key):
            return risk(merge(backbone, head), batch, key)

        backbone = training.fit(backbone_key, server["backbone"], data, backbone_loss)
        return LocalResult(client=head, message=mean_by_size(backbone, data), personal=merge(backbone, head))

    # States, aggregation and deployment are as in FedPer; only local training differs.
    privacy = Privacy(head_epochs + training.most_passes, (SIZE,), clients=())
    return fedper(model)._replace(local=train, privacy=privacy)
