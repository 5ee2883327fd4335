"""FedPAC with head weights from class prototypes instead of a quadratic program (FedPAC's replication, Eq. 12-13)."""

import jax
import jax.numpy as jnp

from pfl_jax.base import Head, Method, Model
from pfl_jax.methods.fedpac import align_and_combine
from pfl_jax.primitives.local_sgd import LocalSGD
from pfl_jax.primitives.losses import cross_entropy


def prototype_weights(model: Model, heads: Head, centroids: jax.Array, class_counts: jax.Array) -> jax.Array:
    r"""Head weights that favor clients whose class centroids a client's own head classifies well.

        f_ij = CE of client j's centroids through client i's head, mean over the classes that j holds    (Eq. 12)
        alpha_i = softmax over j of -f_ij                                                                (Eq. 13)

    Args:
      model: whose `classify` the heads belong to.
      heads: the clients' heads, leaves [M, ...].
      centroids: the clients' class centroids [M, K, d].
      class_counts: examples behind them [M, K]; a client without any gets no weight.

    Returns:
      alpha [M, M], rows on the simplex.
    """
    clients, classes, num_features = centroids.shape
    held = class_counts > 0
    labels = jnp.arange(classes)

    def row(head: Head) -> jax.Array:
        logits = model.classify(head, centroids.reshape(-1, num_features)).reshape(clients, classes, -1)
        losses = jax.vmap(cross_entropy, in_axes=(0, None, 0))(logits, labels, held)
        return jax.nn.softmax(-jnp.where(jnp.any(held, axis=-1), losses, 1e30))

    # One head after another: all of them at once would hold M * M * K * K logits.
    return jax.lax.map(row, heads)


def fedpac_proto(
    model: Model,
    training: LocalSGD = LocalSGD(),
    *,
    lam: float = 1.0,
    head_lr: float = 0.1,
    head_epochs: int = 1,
    alignment: bool = True,
) -> Method:
    r"""FedPAC with prototype weights: local work and backbone as in `fedpac`, heads combined by `prototype_weights`.

        phi_i = sum_j alpha_ij phi_j,    alpha_i = softmax over j of -CE(centroids of j through phi_i)

    Args:
      training: recipe of local training: of the backbone, and but for `head_lr` and `head_epochs` of the head.
      lam: strength lambda of the feature alignment.
      head_lr: learning rate of the head.
      head_epochs: local epochs of the head in a round, before the backbone's.
      alignment: whether features are aligned to the global class centroids.

    Returns:
      A `Method`; states as in `fedpac`. Info: `head_weights` alpha [M, M] in the cohort's order.

    Reference:
      Ding. ICLR 2023 Personalized Federated Learning with Feature Alignment and Classifier Collaboration (a
      replication of FedPAC). 2025. Eq. 12, 13.

    Deviations:
      Eq. 13 normalizes over the wrong index, which contradicts its own constraint: here each row sums to 1. Eq. 12
      writes client i's centroids where the text feeds the others' into i's head, and names no reduction: here it is
      the mean over the classes that client j holds. Heads and centroids are the round's trained ones.
    """
    return align_and_combine(
        model,
        training,
        training.replace(lr=head_lr, epochs=head_epochs),
        lam if alignment else None,
        summarize=lambda features, data: (),
        weigh=lambda messages, counts: (prototype_weights(model, messages.head, *messages.centroids), {}),
        send_centroids=True,
    )
