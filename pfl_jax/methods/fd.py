"""Distillation from the clients' mean outputs of each class (Jeong et al. 2018)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfl_jax.base import Exact, LocalResult, Method, Model, Params, Privacy
from pfl_jax.methods.factories import CLASS_SIZES, method_factory, needs_classes
from pfl_jax.primitives.feature_statistics import class_centroids
from pfl_jax.primitives.features import extract_features
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import loss_of_features, masked_mean
from pfl_jax.validation import NotNegative


class FDServer(NamedTuple):
    """State of FD's server.

    Attributes:
      params: the initial model of all clients.
      outputs: [K, K], in row k the mean over clients of their mean probabilities for examples of class k.
      holders: [K], number of clients of the last cohort that hold each class.
      round: int32, number of completed rounds.
    """

    params: Params
    outputs: jax.Array
    holders: jax.Array
    round: jax.Array


class FDClient(NamedTuple):
    """State of an FD client.

    Attributes:
      params: its model.
      outputs: [K, K], the outputs that it last sent.
      held: [K], 1 for classes that it holds, 0 for others.
      round: int32, the round whose mean contains these outputs, counted from 1; 0 before.
    """

    params: Params
    outputs: jax.Array
    held: jax.Array
    round: jax.Array


@method_factory
def fd(model: Model, training: LocalTraining = LocalTraining(), *, lam: NotNegative = 1.0) -> Method:
    r"""FD (federated distillation): clients learn from the mean output of the other clients for each class.

        w_i = E epochs of SGD from the client's previous w_i on
              CE(w_i) - lambda mean_l sum_k t_{y_l k} log p_k(x_l),   t_y = mean over the other clients j of p_jy
        p_jy = mean of softmax(logits) of client j's trained model over its examples of class y

    The means are over the clients of the last cohort that hold class y; examples of a class that none of the others
    holds are not distilled. Only the K x K outputs travel. With lambda = 0 this is `local`.

    Args:
      training: recipe of local training.
      lam: strength lambda of the distillation.

    Returns:
      A `Method` with an `FDServer` as server state and an `FDClient` as client state.
      Trees: server FDServer(params: model, outputs: numbers [K, K], holders: numbers [K], round: count); client
      FDClient(params: model, outputs: numbers [K, K], held: numbers [K], round: count).

    Info:
      holders: [K], number of clients of the cohort that hold each class.

    Reference:
      Jeong, Oh, Kim, Park, Bennis, Kim. Communication-Efficient On-Device Machine Learning: Federated Distillation and
      Augmentation under Non-IID Private Data. 2018. Algorithm 1, without its augmentation.

    Deviations:
      Outputs come from the trained model; in the paper they are means over all local steps, while the model moves. In
      the paper all clients take part and hold all classes. In HtFLlib (github.com/TsingZ0/HtFLlib, commit e959261) the
      target of a cross entropy is the mean of raw logits, with the client's own among them; for classes without one it
      is the example's own logits.
    """
    needs_classes(model, "fd", "it averages outputs by class")
    size = model.num_classes

    def teacher(server, client):
        """Mean outputs of the other clients [K, K], and which classes have such outputs [K]."""
        own = jnp.where(client.round == server.round, client.held, 0.0)
        others = server.holders - own
        total = server.outputs * server.holders[:, None] - own[:, None] * client.outputs
        return total / jnp.maximum(others, 1.0)[:, None], others > 0.5

    def train(key, server, client, data):
        targets, known = teacher(server, client)

        def loss(params, features, batch):
            logits = model.classify(params["head"], features)
            cross = -jnp.sum(targets[batch.y] * jax.nn.log_softmax(logits), axis=-1)
            distillation = masked_mean(jnp.where(known[batch.y], cross, 0.0), batch.mask)
            return model.task.loss(logits, batch.y, batch.mask) + lam * distillation

        params = training.fit(key, client.params, data, loss_of_features(model, loss))
        logits = model.classify(params["head"], extract_features(model, params["backbone"], data))
        outputs, counts = class_centroids(jax.nn.softmax(logits), data.y, data.mask, size)
        held = (counts > 0).astype(jnp.float32)
        return LocalResult(client._replace(params=params, outputs=outputs, held=held), Exact(outputs, held), params)

    def aggregate(key, server, clients, messages, cohort):
        number = server.round + 1
        server = FDServer(server.params, messages.value, messages.weight, number)
        sent = jnp.full_like(clients.round, number)
        return server, clients._replace(round=sent), {"holders": messages.weight}

    zeros = jnp.zeros((size, size)), jnp.zeros(size), jnp.zeros((), jnp.int32)
    return Method(
        init_server=lambda key: FDServer(model.init(key), *zeros),
        init_client=lambda key, server, data: FDClient(server.params, *zeros),
        local=train,
        aggregate=aggregate,
        personalize=lambda key, server, client, data: client.params,
        predict=model.apply,
        download=lambda server, client: (server.outputs, server.holders),
        trained_from=lambda server, client: None,
        privacy=Privacy(training.most_passes, (CLASS_SIZES, "mean output for each class: sent")),
    )
