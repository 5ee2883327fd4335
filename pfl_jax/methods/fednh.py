"""One model whose classifier is a set of class prototypes on the sphere (Dai et al. 2023)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from pfl_jax.base import Backbone, LocalResult, Mean, Method, Model, Privacy
from pfl_jax.messages import NOT_RECEIVED
from pfl_jax.methods.factories import CLASS_MEANS, CLASS_SIZES, SIZE, method_factory, needs_classes
from pfl_jax.primitives.aggregation import mean_by_size
from pfl_jax.primitives.feature_statistics import class_centroids
from pfl_jax.primitives.features import extract_features
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import loss_of_features
from pfl_jax.streams import CLASS_PROTOTYPES
from pfl_jax.validation import Fraction, Positive

TINY = 1e-12
"""Smallest norm by which a vector is divided; shorter ones have no gradient."""


class Trained(NamedTuple):
    """Parts that local training changes: the backbone, and the factor s of the logits, a scalar."""

    backbone: Backbone
    scale: jax.Array


class FedNHModel(NamedTuple):
    """State of the server, and model that a client deploys.

    Attributes:
      trained: backbone and factor of the logits.
      prototypes: W [K, d], rows of length 1.
    """

    trained: Trained
    prototypes: jax.Array


class FedNHMessage(NamedTuple):
    """Message of a client: its trained parts, and the directions of its mean features of each class [K, d]."""

    trained: Mean
    prototypes: Mean


def normalized(rows: jax.Array) -> jax.Array:
    """Rows [n, d] divided by their lengths; zeros stay zeros."""
    return rows / optax.safe_norm(rows, TINY, axis=-1, keepdims=True)


@method_factory
def fednh(
    model: Model,
    training: LocalTraining = LocalTraining(),
    *,
    smoothing: Fraction = 0.9,
    scale: Positive = 20.0,
) -> Method:
    r"""FedNH: one backbone under class prototypes on the sphere, which follow the clients' class means slowly.

        z(x) = f(x) / ||f(x)||,   p(y = k | x) proportional to  exp(s W_k . z(x)),   ||W_k|| = 1
        (theta_i, s_i) = E epochs of SGD from (theta, s) on CE, W fixed
        u_ik = direction of client i's mean z of class k under theta_i
        theta, s = sum_i beta_i (theta_i, s_i);   u_k = direction of sum_i n_ik u_ik
        W_k <- direction of  smoothing W_k + (1 - smoothing) u_k

    The prototypes start at right angles to each other, if there are at most as many classes as features, so that all
    classes are equally far apart, however many clients hold them. A class without examples in the cohort keeps its
    prototype. The model's own head is not used.

    Args:
      training: recipe of local training of the backbone and of s.
      smoothing: share of the old prototypes in the new ones; with 1 they never change.
      scale: initial factor s of the logits, which is trained with the backbone.

    Returns:
      A `Method` with a `FedNHModel` as server state and no client state.
      Trees: server FedNHModel(trained: Trained(backbone, scale: number), prototypes: numbers [K, d]); client nothing.

    Reference:
      Dai, Chen, Li, Heinecke, Sun, Xu. Tackling Data Heterogeneity in Federated Learning with Class Prototypes. AAAI
      2023. smoothing = 0.9 is the released code's; there s begins with 20 under a ResNet and 1 under a small network.

    Deviations:
      Only the paper's introduction and the released code (github.com/Yutong-Dai/FedNH, commit 60c3161) were available;
      the equations follow that code. It averages backbones and s over clients equally, clips gradients at a norm of 10
      and divides the learning rate by 10 after half of the rounds; here clients are weighted by their numbers of
      examples, and the recipe decides. Its options of a fixed s and of prototypes weighted by the confidence of
      predictions are left out. With more classes than features its prototypes do not all have length 1; here they do.
      With clip_norm = 10, three full-batch rounds of six equal clients agree with that code to 2e-7 of an update.
    """
    needs_classes(model, "fednh", "its prototypes are directions of classes")

    def logits(prototypes, factor, features):
        return factor * normalized(features) @ prototypes.T

    def train(key, server, client, data):
        def value(trained, features, batch):
            return model.task.loss(logits(server.prototypes, trained.scale, features), batch.y, batch.mask)

        loss = loss_of_features(model, value, lambda trained: trained.backbone)
        trained = training.fit(key, server.trained, data, loss)
        features = normalized(extract_features(model, trained.backbone, data))
        means, counts = class_centroids(features, data.y, data.mask, model.num_classes)
        message = FedNHMessage(mean_by_size(trained, data), Mean(normalized(means), counts))
        return LocalResult(client=(), message=message, personal=FedNHModel(trained, server.prototypes))

    def aggregate(key, server, clients, messages, cohort):
        trained, prototypes = messages
        moved = normalized(smoothing * server.prototypes + (1 - smoothing) * normalized(prototypes.value))
        kept = jnp.where(prototypes.weight[:, None] > 0, moved, server.prototypes)
        return FedNHModel(trained.value, kept), clients, {}

    def init_server(key):
        shape = (model.num_classes, model.num_features)
        rows = jax.nn.initializers.orthogonal()(jax.random.fold_in(key, CLASS_PROTOTYPES), shape)
        return FedNHModel(Trained(model.init(key)["backbone"], jnp.float32(scale)), normalized(rows))

    return Method(
        init_server=init_server,
        init_client=lambda key, server, data: (),
        local=train,
        aggregate=aggregate,
        personalize=lambda key, server, client, data: server,
        trained_from=lambda server, client: FedNHMessage(server.trained, NOT_RECEIVED),
        predict=lambda personal, inputs: logits(
            personal.prototypes, personal.trained.scale, model.features(personal.trained.backbone, inputs)
        ),
        privacy=Privacy(training.most_passes, (SIZE, CLASS_SIZES, CLASS_MEANS)),
    )
