"""A shared backbone under personal heads, trained one after the other (Collins et al. 2021)."""

import jax

from pfl_jax.base import LocalResult, Method, Model
from pfl_jax.methods.fedper import fedper
from pfl_jax.primitives.aggregation import mean_by_size
from pfl_jax.primitives.local_sgd import fit, map_examples, sgd
from pfl_jax.primitives.losses import cross_entropy
from pfl_jax.primitives.tree import merge


def fedrep(
    model: Model,
    *,
    lr: float = 0.01,
    head_lr: float | None = None,
    momentum: float = 0.5,
    weight_decay: float = 5e-4,
    batch_size: int = 50,
    epochs: int = 5,
    head_epochs: int = 10,
) -> Method:
    """FedRep: each client fits its own head to the received backbone, then the backbone to that head.

        phi_i = head_epochs of SGD on CE from client i's head, theta fixed
        theta_i = E epochs of SGD on CE from theta, phi_i fixed;   theta = sum_i beta_i theta_i

    Args:
      lr: learning rate of the backbone.
      head_lr: learning rate of the head; None for that of the backbone.
      momentum: momentum of SGD.
      weight_decay: weight decay of SGD.
      batch_size: examples of a mini-batch.
      epochs: local epochs of the backbone in a round.
      head_epochs: local epochs of the head in a round, before the backbone's.

    Returns:
      A `Method`. The server keeps the shared backbone and the head that every client starts from; a client
      keeps its head.

    Reference:
      Collins, Hassani, Mokhtari, Shakkottai. Exploiting Shared Representations for Personalized Federated Learning.
      ICML 2021. Algorithm 1.

    Deviations:
      Algorithm 1 takes one step on the backbone; its experiments, epochs. The released code has ten epochs of the
      head, kept here, and for most datasets one of the backbone, where FedPAC's comparison has E = 5 for all methods.
      The head trains on features of the images as they are: where training images are augmented, that happens in the
      backbone's epochs alone. Code that passes every batch through the network augments in the head's epochs too.
    """
    head_optimizer = sgd(lr if head_lr is None else head_lr, momentum, weight_decay)
    backbone_optimizer = sgd(lr, momentum, weight_decay)

    def head_loss(head, batch):
        return cross_entropy(model.classify(head, batch.x), batch.y, batch.mask)

    def train(key, server, client, data):
        head_key, backbone_key = jax.random.split(key)
        # The backbone stays as received while the head is trained: one forward pass serves all its epochs.
        extract = lambda x: model.features(server["backbone"], x)  # noqa: E731
        features = map_examples(extract, data.x, data.mask)
        head = fit(
            head_key,
            client,
            data._replace(x=features),
            head_loss,
            optimizer=head_optimizer,
            epochs=head_epochs,
            batch_size=batch_size,
        )

        def backbone_loss(backbone, batch):
            return cross_entropy(model.apply(merge(backbone, head), batch.x), batch.y, batch.mask)

        backbone = fit(
            backbone_key,
            server["backbone"],
            data,
            backbone_loss,
            optimizer=backbone_optimizer,
            epochs=epochs,
            batch_size=batch_size,
        )
        return LocalResult(client=head, message=mean_by_size(backbone, data), personal=merge(backbone, head))

    # What is kept, averaged and deployed is FedPer's; only the training differs.
    return fedper(model)._replace(local=train)
