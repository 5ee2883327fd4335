"""Shared head that the server trains on class means of the clients' features (Yi et al. 2023)."""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from pfl_jax.base import ClientData, LocalResult, Method, Model, Privacy
from pfl_jax.methods.factories import CLASS_MEANS, CLASS_SIZES, IDENTITY, method_factory, needs_classes
from pfl_jax.methods.lg_fedavg import lg_fedavg
from pfl_jax.primitives.feature_statistics import class_centroids
from pfl_jax.primitives.features import extract_features, fit_head
from pfl_jax.primitives.fingerprints import fingerprint, order_by_fingerprint
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import supervised_loss
from pfl_jax.primitives.tree import gather, merge
from pfl_jax.validation import Count, Epochs, NotNegative, ReadWith


class FedGHMessage(NamedTuple):
    """Message of a FedGH client.

    Attributes:
      centroids: mean feature of each class under the trained backbone [K, d].
      counts: examples of each class [K].
      identity: fingerprint of the client's data, by which the server sorts the cohort.
    """

    centroids: jax.Array
    counts: jax.Array
    identity: jax.Array


@method_factory(version=2)
def fedgh(
    model: Model,
    training: LocalTraining = LocalTraining(),
    *,
    server_lr: Annotated[NotNegative, ReadWith("server_epochs")] = 0.01,
    server_batch_size: Annotated[Count, ReadWith("server_epochs")] = 1,
    server_epochs: Epochs = 1,
) -> Method:
    r"""FedGH: clients keep their own backbones under one head, which the server trains on their class means.

        (theta_i, phi_i) = E epochs of SGD from (theta_i, phi) on CE;   c_ik = mean of f(theta_i, x) over i's class k
        phi <- server_epochs of SGD on CE(phi(c_ik), k), over all clients i of the cohort and classes k that they hold

    A client deploys its theta_i with the server's phi. Backbones never leave their clients, so these may differ.

    Args:
      training: recipe of local training. The server's steps have the same optimizer, without momentum and weight decay.
      server_lr: learning rate of the server.
      server_batch_size: class means in a mini-batch of the server.
      server_epochs: passes of the server over the cohort's class means.

    Returns:
      A `Method`. The server keeps the initial backbone, from which all clients start, and phi; a client theta_i.
      Trees: server model; client backbone.

    Reference:
      Yi, Wang, Liu, Shi, Yu. FedGH: Heterogeneous Federated Learning with Generalized Global Header. ACM MM 2023.
      Algorithm 1. The released learning rate, on CIFAR-10 and CIFAR-100, is 0.01 for clients and server.

    Deviations:
      The server visits the class means in a random order, the released code client after client. In that code
      (github.com/LipingYi/FedGH, commit ff50ac0) the server's optimizer holds the parameters of a client's model
      instead of the header's, so phi never changes; here it does, as in the paper and in PFLlib. In the authors' code,
      class means are means over mini-batches of the batches' means, and gradients are clipped at norm 50. Class means
      are not weighted by their numbers of examples. All clients have the same architecture here. In PFLlib
      (github.com/TsingZ0/PFLlib, commit d832e76) the server and the first client share one head object, so that the
      steps of each move the other's head; with a copy of it, two full-batch rounds of three clients agree to 1e-6.
    """
    needs_classes(model, "fedgh", "its server trains on the mean feature of each class")
    server_training = training.plain(
        server_lr,
        batch_size=server_batch_size,
        epochs=server_epochs,
        augment=None,
        drop_last=False,
        shuffle=True,
        dp_clip=None,
        dp_noise=0.0,
    )
    loss = supervised_loss(model)

    def train(key, server, client, data):
        params = training.fit(key, merge(client, server["head"]), data, loss)
        features = extract_features(model, params["backbone"], data)
        centroids, counts = class_centroids(features, data.y, data.mask, model.num_classes)
        return LocalResult(params["backbone"], FedGHMessage(centroids, counts, fingerprint(data)), params)

    def aggregate(key, server, clients, messages, cohort):
        rows = gather(messages, order_by_fingerprint(messages.identity, cohort.present))
        means = rows.centroids.reshape(-1, model.num_features)
        labels = jnp.tile(jnp.arange(model.num_classes, dtype=jnp.int32), rows.counts.shape[0])
        # Absent clients have counts of zero.
        examples = ClientData(means, labels, rows.counts.reshape(-1) > 0)
        head = fit_head(key, model, server["head"], means, examples, server_training)
        return merge(server["backbone"], head), clients, {}

    # As LG-FedAvg, except for the messages and for the head that the server trains on them.
    return lg_fedavg(model, training)._replace(
        local=train,
        aggregate=aggregate,
        server_is_mean=False,
        privacy=Privacy(training.most_passes, (IDENTITY, CLASS_SIZES, CLASS_MEANS)),
    )
