"""Shared head trained with balanced softmax, and personal heads that are added to it (Chen, Chao 2022)."""

from typing import NamedTuple

import jax
import optax

from pfl_jax.base import Head, LocalResult, Method, Model, Params, Privacy
from pfl_jax.methods.factories import SIZE, method_factory, needs_classes
from pfl_jax.primitives.aggregation import mean_by_size
from pfl_jax.primitives.feature_statistics import class_counts
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import balanced_softmax, loss_of_features


class FedRoDModel(NamedTuple):
    """The two predictors of a client.

    Attributes:
      generic: shared backbone theta and generic head phi.
      head: the client's personal head psi_i, on the same features.
    """

    generic: Params
    head: Head


@method_factory
def fedrod(model: Model, training: LocalTraining = LocalTraining()) -> Method:
    """Fed-RoD: a shared model that corrects for class imbalance, and personal heads that fit each client's classes.

    Every step of a client trains both; n_ik is its number of examples of class k, and sg() stops the gradient:

        (theta, phi):  CE(softmax(phi(f(x)) + log n_i), y), the balanced softmax
        psi_i:         CE(softmax(sg(phi(f(x))) + psi_i(sg(f(x)))), y)

    The server averages theta and phi with weights beta; clients keep psi_i and predict phi(f(x)) + psi_i(f(x)).

    Args:
      training: recipe of local training; the shared model and the personal head have separate optimizers, and clip_norm
        limits the norm of each one's gradient.

    Returns:
      A `Method` with the generic model as server state and the personal head as client state.
      Trees: server model; client head.

    Reference:
      Chen, Chao. On Bridging Generic and Personalized Federated Learning for Image Classification. ICLR 2022.
      The algorithm Fed-RoD, with the balanced risk minimization of Ren et al. (2020) and the linear personal head.

    Deviations:
      The variant with personal heads from a hypernetwork is left out. Personal heads start from the initial generic
      head. A class without examples on a client is left out of its balanced softmax (the limit of n_ik to 0), so the
      client does not train the generic head for this class.
    """
    needs_classes(model, "fedrod", "its balanced softmax needs the number of examples of each class")
    # Separate optimizers: the gradient of each part is clipped by its own norm.
    one = training.transformation()
    steps = optax.partition({"shared": one, "personal": one}, FedRoDModel._make(("shared", "personal")))

    def train(key, server, client, data):
        counts = class_counts(data.y, data.mask, model.num_classes)

        def value(params, features, batch):
            generic = model.classify(params.generic["head"], features)
            # The loss of the personal head does not train the shared parameters.
            own = jax.lax.stop_gradient(generic) + model.classify(params.head, jax.lax.stop_gradient(features))
            balanced = balanced_softmax(generic, batch.y, batch.mask, counts)
            return balanced + model.task.loss(own, batch.y, batch.mask)

        loss = loss_of_features(model, value, lambda params: params.generic["backbone"])
        params = training.fit(key, FedRoDModel(server, client), data, loss, transformation=steps)
        return LocalResult(client=params.head, message=mean_by_size(params.generic, data), personal=params)

    def aggregate(key, server, clients, messages, cohort):
        return messages.value, clients, {}

    def predict(personal, inputs):
        features = model.features(personal.generic["backbone"], inputs)
        return model.classify(personal.generic["head"], features) + model.classify(personal.head, features)

    return Method(
        init_server=model.init,
        init_client=lambda key, server, data: server["head"],
        local=train,
        aggregate=aggregate,
        personalize=lambda key, server, client, data: FedRoDModel(server, client),
        predict=predict,
        server_is_mean=True,
        privacy=Privacy(
            training.most_passes,
            (SIZE, "numbers of examples of each class: the loss of the shared head"),
            clients=(),
        ),
    )
