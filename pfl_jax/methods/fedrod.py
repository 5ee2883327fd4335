"""A generic head trained with balanced softmax and a personal head on top of it (Chen, Chao 2022)."""

from typing import NamedTuple

import jax

from pfl_jax.base import Head, LocalResult, Method, Model, Params
from pfl_jax.primitives.aggregation import mean_by_size
from pfl_jax.primitives.feature_statistics import class_counts
from pfl_jax.primitives.local_sgd import LocalSGD
from pfl_jax.primitives.losses import balanced_softmax, cross_entropy


class FedRoDModel(NamedTuple):
    """One client's two predictors.

    Attributes:
      generic: backbone theta and generic head phi, both shared.
      head: the client's own head psi_i, which reads the same features.
    """

    generic: Params
    head: Head


def fedrod(model: Model, training: LocalSGD = LocalSGD()) -> Method:
    """Fed-RoD: a shared model that ignores the clients' class sizes, and a personal head that makes up for it.

    Every step of a client trains both, with n_ik its examples of class k and sg() what gets no gradient:

        (theta, phi):  CE(softmax(phi(f(x)) + log n_i), y), the balanced softmax
        psi_i:         CE(softmax(sg(phi(f(x))) + psi_i(sg(f(x)))), y)

    theta and phi are averaged by beta, psi_i is kept. A client predicts phi(f(x)) + psi_i(f(x)).

    Args:
      training: recipe of local training.

    Returns:
      A `Method` with the generic model as server state and the client's own head as its state.

    Reference:
      Chen, Chao. On Bridging Generic and Personalized Federated Learning for Image Classification. ICLR 2022.
      The algorithm Fed-RoD, with the balanced risk minimization of Ren et al. (2020) and the linear personal head.

    Deviations:
      The variant whose personal heads come from a hypernetwork is left out. Personal heads start where the generic
      head starts. A class that a client lacks drops out of its balanced softmax, the limit of n_ik to 0, so that the
      client teaches the generic head nothing about it.
    """

    def train(key, server, client, data):
        counts = class_counts(data.y, data.mask, model.num_classes)

        def loss(params, batch):
            features = model.features(params.generic["backbone"], batch.x)
            generic = model.classify(params.generic["head"], features)
            # The personal head learns what the generic logits lack, and moves nothing below it.
            own = jax.lax.stop_gradient(generic) + model.classify(params.head, jax.lax.stop_gradient(features))
            balanced = balanced_softmax(generic, batch.y, batch.mask, counts)
            return balanced + cross_entropy(own, batch.y, batch.mask)

        start = FedRoDModel(server, client)
        params = training.fit(key, start, data, loss)
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
    )
