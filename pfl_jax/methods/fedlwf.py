"""Federated averaging with distillation to each client's last model (Usmanova, Portet, Lalanda, Vega 2021)."""

from typing import Annotated

import jax.numpy as jnp

from pfl_jax.base import LocalResult, Method, Model, Privacy
from pfl_jax.methods.factories import SIZE, method_factory, needs_classes
from pfl_jax.methods.fedavg import fedavg
from pfl_jax.methods.fml import divergence
from pfl_jax.methods.moon import MoonClient
from pfl_jax.primitives.aggregation import mean_by_size
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import loss_of_features
from pfl_jax.validation import Fraction, Positive, ReadWith


@method_factory
def fedlwf(
    model: Model,
    training: LocalTraining = LocalTraining(),
    *,
    alpha: Fraction = 0.5,
    temperature: Annotated[Positive, ReadWith("alpha")] = 2.0,
) -> Method:
    """FedLwF (learning without forgetting): FedAvg whose clients stay close to the outputs of their last own models.

        w_i = E epochs of SGD from w on  alpha CE(w_i) + (1 - alpha) mean_x KL(p || q),
        p = softmax(z_last(x) / T),  q = softmax(z(x) / T);   w = sum_i beta_i w_i

    z_last are logits of the model w_i at the end of the client's previous local training. KL(p || q) has the gradients
    of the paper's cross entropy -sum_c p_c log q_c. With alpha = 1, and in a client's first local training, this is
    FedAvg. It is a baseline for federations whose data change.

    Args:
      training: recipe of local training.
      alpha: weight of the labels in the loss; the last model's outputs have weight 1 - alpha.
      temperature: temperature T of both outputs in the second term.

    Returns:
      A `Method` with the global model as server state and as client state its last model, a `MoonClient`.
      Trees: server model; client MoonClient(params: model, trained: flag).

    Reference:
      Usmanova, Portet, Lalanda, Vega. A Distillation-Based Approach Integrating Continual Learning and Federated
      Learning for Pervasive Services. 2021. FLwF, with one teacher. The loss is from Li, Hoiem. Learning without
      Forgetting. ECCV 2016.

    Deviations:
      The teacher is the model of the client's last round, even within a phase; FLwF keeps the model at the end of the
      last task, but methods here do not know when the data change. The first local training has labels alone, since
      there is no last model.
    """
    needs_classes(model, "fedlwf", "it compares probabilities of classes")

    def train(key, server, client, data):
        share = jnp.where(client.trained, alpha, 1.0)

        def loss(params, features, batch):
            logits, last = model.classify(params["head"], features), model.apply(client.params, batch.x)
            labels = model.task.loss(logits, batch.y, batch.mask)
            apart = divergence(logits / temperature, last / temperature, batch.mask)
            return share * labels + (1 - share) * apart

        params = training.fit(key, server, data, loss_of_features(model, loss))
        return LocalResult(MoonClient(params, jnp.ones((), bool)), mean_by_size(params, data), params)

    return fedavg(model, training)._replace(
        init_client=lambda key, server, data: MoonClient(server, jnp.zeros((), bool)),
        local=train,
        privacy=Privacy(training.most_passes, (SIZE,), clients=()),
    )
