"""Several global models; each client uses the model that fits its data best (Mansour et al. 2020)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfl_jax.base import LocalResult, Method, Model, Params, Privacy
from pfl_jax.methods.factories import SIZE, method_factory
from pfl_jax.primitives.aggregation import mix, size_weights
from pfl_jax.primitives.ensembles import example_losses, init_models
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import masked_mean, supervised_loss
from pfl_jax.primitives.tree import gather
from pfl_jax.validation import Count


class ClusterMessage(NamedTuple):
    """Message of a client: its trained model, and the index (int32) of the shared model that it started from."""

    model: Params
    cluster: jax.Array


def means_of_clusters(old: Params, models: Params, cluster: jax.Array, counts: jax.Array) -> Params:
    """Mean model of each cluster, over its clients weighted by their sizes; a cluster without clients keeps its model.

    Args:
      old: the clusters' models, leaves [k, ...].
      models: the clients' models, leaves [M, ...].
      cluster: [M], the cluster of each client, from 0 to k - 1.
      counts: [M], examples of each client, 0 for absent ones.
    """
    # [k, M]: row c has the weights of the clients of cluster c, and is zero if there are none.
    shares = jax.nn.one_hot(cluster, jax.tree.leaves(old)[0].shape[0], axis=0) * size_weights(counts)
    total = jnp.sum(shares, axis=1, keepdims=True)
    held = total[:, 0] > 0
    means = mix(shares / jnp.where(total > 0, total, 1.0), models)

    def keep(mean, old):
        return jnp.where(held.reshape(-1, *[1] * (old.ndim - 1)), mean, old)

    return jax.tree.map(keep, means, old)


@method_factory
def hypcluster(
    model: Model,
    training: LocalTraining = LocalTraining(),
    *,
    clusters: Count = 3,
) -> Method:
    r"""HypCluster: k global models; each client trains the model with the smallest loss on its data.

        z_i = argmin over c of  (1/n_i) sum_l CE(w_c; x_l, y_l)
        w'_i = E epochs of SGD from w_{z_i};   w_c = sum over i with z_i = c of  n_i w'_i / sum of their n_i

    A model that no client of the cohort chose does not change. With one model this is FedAvg.

    Args:
      training: recipe of local training.
      clusters: number k of models.

    Returns:
      A `Method` with the models, leaves [k, ...], as server state and no client state: a client chooses anew in every
      round.
      Trees: server 3 x model; client nothing.

    Info:
      cluster: [M], index of the model that each client trained.

    Reference:
      Mansour, Mohri, Ro, Suresh. Three Approaches for Personalization with Applications to Federated Learning. 2020.
      The section on user clustering, algorithm HypCluster; k = 3 and 5 are FedPAC's (Table 4).

    Deviations:
      The algorithm runs several random restarts of the models and keeps the best; here there is one start, from k
      independent random models.
    """
    loss = supervised_loss(model)

    def best_model(server, data):
        losses = example_losses(model, server, data)
        return jnp.argmin(jax.vmap(masked_mean, in_axes=(1, None))(losses, data.mask)).astype(jnp.int32)

    def train(key, server, client, data):
        cluster = best_model(server, data)
        start = gather(server, cluster)
        params = training.fit(key, start, data, loss)
        return LocalResult(client=(), message=ClusterMessage(params, cluster), personal=params)

    def aggregate(key, server, clients, messages, cohort):
        models, chosen = messages
        return means_of_clusters(server, models, chosen, cohort.weights), clients, {"cluster": chosen}

    return Method(
        init_server=lambda key: init_models(model, key, clusters),
        init_client=lambda key, server, data: (),
        local=train,
        aggregate=aggregate,
        personalize=lambda key, server, client, data: gather(server, best_model(server, data)),
        predict=model.apply,
        privacy=Privacy(
            training.most_passes, (SIZE, "losses on the examples: the choice of the shared model, which is sent")
        ),
    )
