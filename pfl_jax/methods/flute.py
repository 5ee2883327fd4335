"""Shared backbone under personal heads that clients and server draw toward a simplex (Liu, Shen, Yang 2024)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from pfl_jax.base import Head, LocalResult, Mean, Method, Model, Privacy
from pfl_jax.messages import NOT_RECEIVED
from pfl_jax.methods.factories import SIZE, method_factory, needs_classes
from pfl_jax.methods.fedper import fedper
from pfl_jax.primitives.aggregation import mean_by_size
from pfl_jax.primitives.feature_statistics import class_counts
from pfl_jax.primitives.features import extract_features
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import loss_of_features, masked_mean
from pfl_jax.primitives.tree import merge
from pfl_jax.validation import Epochs, NotNegative

TINY = 1e-12
"""Norms below this have no gradient."""


class FluteMessage(NamedTuple):
    """Message of a client: its backbone, whose mean the server needs, its head, and which classes it holds [K],
    1 or 0.
    """

    backbone: Mean
    head: Head
    held: jax.Array


def distance_to_simplex(kernel: jax.Array, held: jax.Array) -> jax.Array:
    """Distance of a head's weights from a simplex, in which any two classes have the same angle.

        || G / ||G|| - (I - 1 1' / K) / sqrt(K - 1) * u u' ||,  G = H' H,  with Frobenius norms and elementwise *

    Args:
      kernel: H [d, K], a column for each class; zeros have no gradient.
      held: u [K], 1 for classes that the client holds, 0 for others, whose columns are drawn toward zero.

    Returns:
      A scalar.
    """
    size = held.shape[0]
    gram = jnp.matmul(kernel.T, kernel, precision="highest")
    simplex = (jnp.eye(size) - 1 / size) / jnp.sqrt(size - 1) * jnp.outer(held, held)
    return optax.safe_norm(gram / optax.safe_norm(gram, TINY) - simplex, TINY)


@method_factory
def flute(
    model: Model,
    training: LocalTraining = LocalTraining(),
    *,
    lam: NotNegative = 0.25,
    head_penalty: NotNegative = 0.0025,
    feature_penalty: NotNegative = 0.005,
    head_epochs: Epochs = 9,
    server_lr: NotNegative = 0.5,
) -> Method:
    r"""FLUTE: personal heads under a shared backbone, whose weights clients and server draw toward a simplex.

        R(phi_i) = lambda D(phi_i) + head_penalty ||H_i||^2,   D = `distance_to_simplex` of the head's weights H_i
        phi_i = head_epochs of SGD on CE + R(phi_i) from client i's head, theta fixed
        (theta_i, phi_i) = E epochs of SGD on CE + R(phi_i) + feature_penalty mean_l ||f(x_l)||^2 from (theta, phi_i)
        server:  theta = sum_i beta_i theta_i;   phi_i <- phi_i - server_lr grad (1/M) sum_j D(phi_j)

    Without the penalties, the head's epochs and the server's step this is `fedper`.

    D is a norm, which has a kink where it is zero. A head that has reached its simplex, such as the head of a client
    with few classes, moves to and fro across it in steps of lr lam. There rounding grows from step to step (a
    thousandfold in two rounds of the tests' tiny problem), so that two machines agree on such a head only up to the
    length of these steps. With a smaller lam or lr the steps are smaller, and fewer heads reach the simplex.

    Args:
      training: recipe of local training of the whole model; also of the head, except for `head_epochs`.
      lam: strength lambda of the distance to the simplex in local training.
      head_penalty: strength of the squared length of the head's weights.
      feature_penalty: strength of the mean squared length of the features.
      head_epochs: local epochs of the head alone in a round, before the whole model's.
      server_lr: learning rate of the server's step on the heads.

    Returns:
      A `Method`. The server keeps the shared backbone and the head that every client starts from; a client its head.
      Trees: server model; client head.

    Info:
      distance: [M], D of each client's head before the server's step.

    Reference:
      Liu, Shen, Yang. Federated Representation Learning in the Under-Parameterized Regime. ICML 2024: its version for
      classification. Defaults are from the released code, which has 10 examples in a mini-batch.

    Deviations:
      Only the paper's abstract and the released code (github.com/RenpuLiu/flute, commit 14dd19d) were available; the
      equations follow that code. There the squared length of the features, times 0.0005, is a sum over the mini-batch
      of 10 examples; here it is a mean. There clients are averaged equally, momentum goes on from the head's epochs to
      the whole model's epochs, biases have no weight decay, and clients train only their heads in a last round. The
      head's epochs use features of the original images, as in `fedrep`. H_i is computed from the head's outputs without
      its bias, for heads of any form. Three full-batch rounds of that code's client and server updates, without
      momentum and weight decay, agree to 7e-6 of an update.
    """
    needs_classes(model, "flute", "its heads are drawn toward the same angle between any two classes")
    head_training = training.replace(epochs=head_epochs, augment=None)

    def kernel_of(head):
        """Weights [d, K] of a linear head."""
        size = model.num_features
        return model.classify(head, jnp.eye(size)) - model.classify(head, jnp.zeros((1, size)))

    def train(key, server, client, data):
        head_key, key = jax.random.split(key)
        held = (class_counts(data.y, data.mask, model.num_classes) > 0).astype(jnp.float32)

        def regularized(head, features, batch):
            kernel = kernel_of(head)
            risk = model.task.loss(model.classify(head, features), batch.y, batch.mask)
            return risk + lam * distance_to_simplex(kernel, held) + head_penalty * jnp.sum(jnp.square(kernel))

        def value(params, features, batch):
            lengths = jnp.sum(jnp.square(features), axis=-1)
            return regularized(params["head"], features, batch) + feature_penalty * masked_mean(lengths, batch.mask)

        rows = data._replace(x=extract_features(model, server["backbone"], data))
        head = head_training.fit(head_key, client, rows, lambda head, batch, key: regularized(head, batch.x, batch))
        params = training.fit(key, merge(server["backbone"], head), data, loss_of_features(model, value))
        message = FluteMessage(mean_by_size(params["backbone"], data), params["head"], held)
        return LocalResult(params["head"], message, params)

    def aggregate(key, server, clients, messages, cohort):
        def distance(head, held):
            return distance_to_simplex(kernel_of(head), held)

        distances, slopes = jax.vmap(jax.value_and_grad(distance))(messages.head, messages.held)
        step = server_lr / jnp.maximum(jnp.sum(cohort.present), 1)
        heads = jax.tree.map(lambda leaf, slope: leaf - step * slope, messages.head, slopes)
        return merge(messages.backbone.value, server["head"]), heads, {"distance": distances}

    return fedper(model)._replace(
        local=train,
        aggregate=aggregate,
        download=lambda server, client: (server["backbone"], client),
        trained_from=lambda server, client: FluteMessage(server["backbone"], NOT_RECEIVED, NOT_RECEIVED),
        server_is_mean=False,
        privacy=Privacy(
            head_epochs + training.most_passes,
            (SIZE, "which classes it holds: sent, and in its loss"),
            clients=("head: sent", "which classes it holds: sent"),
        ),
    )
