"""Features valved into a shared route, guided by class embeddings, and a personal one (Zhang et al. 2023)."""

from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from pfl_jax.base import Backbone, ClientData, Head, LocalResult, Method, Model, Privacy, PyTree
from pfl_jax.methods.factories import WHOLE_BATCH, method_factory, needs_classes
from pfl_jax.networks.layers import Dense
from pfl_jax.primitives.aggregation import mean_by_size
from pfl_jax.primitives.feature_statistics import class_counts
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import cross_entropy, loss_of_features, proximal
from pfl_jax.streams import CATEGORY_EMBEDDINGS, VALVE
from pfl_jax.validation import NotNegative

TINY = 1e-12
"""Smallest norm by which a vector is divided."""


class Shared(NamedTuple):
    """Parameters that all clients share.

    Attributes:
      backbone: theta.
      embeddings: global category embeddings v [K, d].
      valve: parameters of the conditional valve, see `Valve`.
    """

    backbone: Backbone
    embeddings: jax.Array
    valve: PyTree


class GPFLServer(NamedTuple):
    """Shared parameters, and the initial head of all clients."""

    shared: Shared
    head: Head


class GPFLModel(NamedTuple):
    """Model that a client deploys.

    Attributes:
      backbone: theta.
      scale, shift: 1 + gamma and beta of the valve's personal route [d].
      head: the client's head.
    """

    backbone: Backbone
    scale: jax.Array
    shift: jax.Array
    head: Head


class Valve(nn.Module):
    """Conditional valve: scale 1 + gamma(c) and shift beta(c) of features [d] for a condition c [d].

    gamma and beta are each an affine layer, ReLU and layer normalization.
    """

    @nn.compact
    def __call__(self, condition: jax.Array) -> tuple[jax.Array, jax.Array]:
        def branch(name: str) -> jax.Array:
            hidden = nn.relu(Dense(condition.shape[-1], name=f"{name}_dense")(condition))
            return cast(jax.Array, nn.LayerNorm(1e-5, use_fast_variance=False, name=f"{name}_norm")(hidden))

        return 1 + branch("gamma"), branch("beta")


def open_valve(valve: PyTree, condition: jax.Array) -> Any:
    """Scale and shift [d] of a valve with these parameters, see `Valve`."""
    return Valve().apply({"params": valve}, condition)


def conditions(embeddings: jax.Array, data: ClientData) -> tuple[jax.Array, jax.Array]:
    """Conditions [d] of both routes: mean embedding of all classes (shared), and of a client's examples (personal).

    Args:
      embeddings: v [K, d].
      data: the client's examples.
    """
    counts = class_counts(data.y, data.mask, embeddings.shape[0])
    return jnp.mean(embeddings, axis=0), counts @ embeddings / jnp.maximum(jnp.sum(counts), 1)


def cosine_logits(features: jax.Array, embeddings: jax.Array) -> jax.Array:
    """Cosines [B, K] between features [B, d] and embeddings [K, d]; 0 for features that are zero."""
    lengths = (optax.safe_norm(rows, TINY, axis=-1, keepdims=True) for rows in (features, embeddings))
    left, right = (rows / length for rows, length in zip((features, embeddings), lengths, strict=True))
    return left @ right.T


@method_factory
def gpfl(
    model: Model, training: LocalTraining = LocalTraining(), *, lam: NotNegative = 0.01, mu: NotNegative = 0.1
) -> Method:
    r"""GPFL: a conditional valve turns features into shared ones, near class embeddings, and personal ones.

        z_c(x) = relu(f(x) (1 + gamma(c)) + beta(c)),   gamma and beta from the valve, for a condition c
        shared:    c = g = mean_k v_k;   personal:   c = p_i = sum_k (n_ik / n_i) v_k,   with the received embeddings v
        loss_i = CE(phi_i(z_p(x)), y) + CE(cos(z_g(x), v'), y) + lambda sqrt(sum_l ||z_g(x_l) - v_{y_l}||^2)
                 + mu/2 (||v'||^2 + ||valve||^2)
        theta, v, valve = sum_i beta_i of the clients' trained theta_i, v'_i, valve_i;   heads phi_i stay on the clients

    The third term keeps shared features near the received embedding of their class; its sum is over a mini-batch.

    Args:
      training: recipe of local training of backbone, head, embeddings and valve.
      lam: strength lambda of the distance to the received embeddings.
      mu: weight decay of embeddings and valve, in addition to the recipe's.

    Returns:
      A `Method` with a `GPFLServer` as server state; a client keeps its head.
      Trees: server GPFLServer(shared: Shared(backbone, embeddings: numbers [K, d], valve: 8 arrays), head); client
      head.

    Reference:
      Zhang, Hua, Wang, Song, Xue, Ma, Cao, Guan. GPFL: Simultaneously Learning Global and Personalized Feature
      Information for Personalized Federated Learning. ICCV 2023. The equations follow the released code; lambda = 0.01
      and mu = 0.1 are its values for the CNN on MNIST (20 clients, Dirichlet 0.1, batches of 10, learning rate 0.005
      without momentum and weight decay of the model).

    Deviations:
      In the released code, conditions are zero in the first round, and later come from the client's own trained
      embeddings instead of the global ones that it receives. The distance is the norm over a whole mini-batch, as
      there, so its weight beside the other terms depends on the batch size. mu is a term of the loss, which for SGD is
      weight decay. Compared with that code (commit ed7a7fe), given the conditions of the global embeddings: two rounds
      of full batches give the same models to 1e-5.
    """
    needs_classes(model, "gpfl", "it learns an embedding of each class")

    def train(key, server, client, data):
        received, head = server.shared, client
        generic, personal = conditions(received.embeddings, data)

        def value(params, features, batch):
            shared, head = params

            def route(condition):
                scale, shift = open_valve(shared.valve, condition)
                return nn.relu(features * scale + shift)

            common = route(generic)
            risk = model.task.loss(model.classify(head, route(personal)), batch.y, batch.mask)
            risk += cross_entropy(cosine_logits(common, shared.embeddings), batch.y, batch.mask)
            difference = (common - received.embeddings[batch.y]) * batch.mask[:, None]
            decay = proximal((shared.embeddings, shared.valve), jax.tree.map(jnp.zeros_like, shared[1:]))
            return risk + lam * optax.safe_norm(difference, TINY) + mu * decay

        loss = loss_of_features(model, value, lambda params: params[0].backbone)
        shared, head = training.fit(key, (received, head), data, loss)
        # With the condition of the training, not the condition of the trained embeddings.
        return LocalResult(client=head, message=mean_by_size(shared, data), personal=deploy(shared, head, personal))

    def deploy(shared, head, condition):
        scale, shift = open_valve(shared.valve, condition)
        return GPFLModel(shared.backbone, scale, shift, head)

    def personalize(key, server, client, data):
        return deploy(server.shared, client, conditions(server.shared.embeddings, data)[1])

    def init_server(key):
        size, params = model.num_features, model.init(key)
        embeddings = jax.random.normal(jax.random.fold_in(key, CATEGORY_EMBEDDINGS), (model.num_classes, size))
        valve = Valve().init(jax.random.fold_in(key, VALVE), jnp.zeros(size))["params"]
        return GPFLServer(Shared(params["backbone"], embeddings, valve), params["head"])

    def predict(personal, inputs):
        features = model.features(personal.backbone, inputs)
        return model.classify(personal.head, nn.relu(features * personal.scale + personal.shift))

    return Method(
        init_server=init_server,
        init_client=lambda key, server, data: server.head,
        local=train,
        aggregate=lambda key, server, clients, messages, cohort: (GPFLServer(messages.value, server.head), clients, {}),
        personalize=personalize,
        predict=predict,
        download=lambda server, client: server.shared,
        privacy=Privacy(refused=WHOLE_BATCH, clients=()),
    )
