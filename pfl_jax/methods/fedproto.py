"""Personal models that are aligned to shared class prototypes (Tan et al. 2022)."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfl_jax.base import ClientData, LocalResult, Mean, Method, Model, Params, Privacy, PRNGKey
from pfl_jax.methods.factories import CLASS_MEANS, CLASS_SIZES, method_factory, needs_classes
from pfl_jax.primitives.feature_statistics import class_centroids, merge_centroids
from pfl_jax.primitives.features import extract_features
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import feature_alignment, loss_of_features
from pfl_jax.validation import NotNegative


class Prototypes(NamedTuple):
    """Mean feature of each class.

    Attributes:
      centroids: [K, d], zero for classes without examples.
      counts: [K], number of examples of each class; zero where there is no prototype yet.
    """

    centroids: jax.Array
    counts: jax.Array


class ProtoState(NamedTuple):
    """Model and prototypes, of the server (the initial model of all clients) or of one client."""

    params: Params
    prototypes: Prototypes


def local_step(
    model: Model, training: LocalTraining, lam: float | jax.Array
) -> Callable[[PRNGKey, Params, Prototypes, ClientData], tuple[Params, Prototypes]]:
    """Local update that aligns features to prototypes; classes without a prototype are not aligned.

    Args:
      model: the architecture.
      training: recipe of local training.
      lam: strength lambda of the alignment.

    Returns:
      (key, params, prototypes to align with, data) -> (trained params, the client's own prototypes under them).
    """

    def step(key, params, prototypes, data):
        def loss(params, features, batch):
            has_prototype = prototypes.counts[batch.y] > 0
            # Without a prototype the target is the feature itself: distance and gradient are zero.
            targets = jnp.where(has_prototype[:, None], prototypes.centroids[batch.y], features)
            risk = model.task.loss(model.classify(params["head"], features), batch.y, batch.mask)
            return risk + lam * feature_alignment(features, targets, batch.mask)

        params = training.fit(key, params, data, loss_of_features(model, loss))
        features = extract_features(model, params["backbone"], data)
        return params, Prototypes(*class_centroids(features, data.y, data.mask, model.num_classes))

    return step


def _init(model, key):
    """Initial model of all clients, without prototypes."""
    centroids = jnp.zeros((model.num_classes, model.num_features))
    return ProtoState(model.init(key), Prototypes(centroids, jnp.zeros(model.num_classes)))


@method_factory
def fedproto_g(
    model: Model,
    training: LocalTraining = LocalTraining(),
    *,
    lam: NotNegative = 1.0,
) -> Method:
    r"""FedProto with global prototypes: clients train personal models whose features are aligned to shared class means.

        w_i = E epochs of SGD from the client's previous w_i on  CE + lambda mean_l (1/d) ||f(x_l) - c_{y_l}||^2
        c_ik = mean feature of class k on client i under the trained w_i
        server:  c_k = sum_i n_ik c_ik / sum_i n_ik;  a class without examples in the cohort keeps its prototype

    In the first round there are no prototypes and no alignment. With lambda = 0 this is `local`.

    Args:
      training: recipe of local training.
      lam: strength lambda of the alignment with the prototypes.

    Returns:
      A `Method`. The server keeps a `ProtoState`, the initial model and the global prototypes; a client keeps its
      model.
      Trees: server ProtoState(params: model, prototypes: Prototypes(centroids: numbers [K, d], counts: numbers [K]));
      client model.

    Info:
      counts: [K], the cohort's number of examples of each class.

    Reference:
      Tan, Long, Liu, Zhou, Lu, Jiang, Zhang. FedProto: Federated Prototype Learning across Heterogeneous Clients. AAAI
      2022. Local and global prototypes, and the local objective; the variant is FedProto-G of FedPAC's Table 5.

    Deviations:
      Clients predict with their classifier, as in FedPAC's comparison, not by the nearest prototype. The regularizer
      compares the feature of each example with the prototype, as the released code does, not the mean feature of the
      class. The paper's additional factor 1/|N_j| would shrink the global prototypes; here they are means over examples
      (in the released code, unweighted means over clients). A client computes its prototypes with its trained model;
      the released code takes means of the features that occur in the last local epoch, while the model changes, and
      leaves out incomplete mini-batches. All clients have the same architecture and start from the same model.
    """
    needs_classes(model, "fedproto_g", "its prototypes are mean features of classes")
    step = local_step(model, training, lam)

    def train(key, server, client, data):
        params, own = step(key, client, server.prototypes, data)
        return LocalResult(client=params, message=Mean(*own), personal=params)

    def aggregate(key, server, clients, messages, cohort):
        old = server.prototypes
        merged = Prototypes(*merge_centroids(old.centroids, old.counts, messages))
        return ProtoState(server.params, merged), clients, {"counts": messages.weight}

    return Method(
        init_server=lambda key: _init(model, key),
        init_client=lambda key, server, data: server.params,
        local=train,
        aggregate=aggregate,
        personalize=lambda key, server, client, data: client,
        predict=model.apply,
        download=lambda server, client: server.prototypes,
        trained_from=lambda server, client: None,
        privacy=Privacy(training.most_passes, (CLASS_SIZES, CLASS_MEANS)),
    )


@method_factory
def fedproto_l(
    model: Model,
    training: LocalTraining = LocalTraining(),
    *,
    lam: NotNegative = 1.0,
) -> Method:
    r"""FedProto with local prototypes: as `fedproto_g`, but clients align with their own prototypes and send nothing.

        w_i = E epochs of SGD from the client's previous w_i on  CE + lambda mean_l (1/d) ||f(x_l) - c_{i,y_l}||^2

    where c_ik is the mean feature of class k under the client's previous w_i; there is no alignment in its first round.
    With lambda = 0 this is `local`.

    Args:
      training: recipe of local training.
      lam: strength lambda of the alignment with the client's own prototypes.

    Returns:
      A `Method`. The server keeps the initial model, a client a `ProtoState`: its model and its prototypes.
      Trees: server model; client ProtoState(params: model, prototypes: Prototypes(centroids: numbers [K, d], counts:
      numbers [K])).

    Reference:
      FedProto-L of Xu, Tong, Huang. Personalized Federated Learning with Feature Alignment and Classifier
      Collaboration. ICLR 2023. Appendix C.5, Table 5.

    Deviations:
      FedPAC does not say when local prototypes are computed; here after the client's previous local training.
    """
    needs_classes(model, "fedproto_l", "its prototypes are mean features of classes")
    step = local_step(model, training, lam)

    def train(key, server, client, data):
        params, own = step(key, client.params, client.prototypes, data)
        return LocalResult(client=ProtoState(params, own), message=(), personal=params)

    return Method(
        init_server=model.init,
        init_client=lambda key, server, data: _init(model, key)._replace(params=server),
        local=train,
        aggregate=lambda key, server, clients, messages, cohort: (server, clients, {}),
        personalize=lambda key, server, client, data: client.params,
        predict=model.apply,
        download=lambda server, client: (),
        privacy=Privacy(
            training.most_passes, ("mean feature of each class: kept by the client, targets of its training",)
        ),
    )
