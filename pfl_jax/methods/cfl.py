"""Clusters of clients that split where the clients' changes disagree in direction (Sattler, Müller, Samek 2021)."""

from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from pfl_jax.base import LocalResult, Method, Model, Params, Privacy
from pfl_jax.methods.factories import SIZE, method_factory
from pfl_jax.methods.hypcluster import means_of_clusters
from pfl_jax.methods.pfedgraph import cosines, norms
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import supervised_loss
from pfl_jax.primitives.tree import choose, gather, map_statistics
from pfl_jax.validation import Count, Epochs, NotNegative

Linkage: TypeAlias = Literal["single", "complete"]

SMALLEST = 3
"""Clusters of fewer clients do not split (released code)."""


class CFLServer(NamedTuple):
    """State of the server.

    Attributes:
      models: the clusters' models, leaves [k, ...]; clusters that do not exist yet have initial models.
      used: number of clusters that exist, int32.
      rounds: number of completed rounds, int32.
    """

    models: Params
    used: jax.Array
    rounds: jax.Array


def second_halves(similarity: jax.Array, together: jax.Array, linkage: Linkage) -> jax.Array:
    """Bipartition of every cluster: merge the most similar groups of its clients until two are left.

    With single linkage the largest similarity between clients of the two groups is the smallest possible one
    (Algorithm 1 of the paper); with complete linkage groups are as similar as their least similar clients.

    Args:
      similarity: [M, M], symmetric.
      together: [M, M], bool: whether two clients are in one cluster; symmetric. A client that is not together with
        itself is in no cluster.
      linkage: similarity of two groups of clients: the largest or the smallest similarity of their clients.

    Returns:
      [M], bool: whether a client is in the group without its cluster's first client.
    """
    size = similarity.shape[0]
    joined = jnp.maximum if linkage == "single" else jnp.minimum

    def merge(_, carry):
        similarity, first = carry
        # The row of its first client stands for a group.
        alive = first == jnp.arange(size)
        groups = jnp.sum(together & alive, axis=1)
        allowed = together & alive & alive[:, None] & (groups > 2) & ~jnp.eye(size, dtype=bool)
        best = jnp.argmax(jnp.where(allowed, similarity, -jnp.inf))
        one, other = jnp.minimum(best // size, best % size), jnp.maximum(best // size, best % size)
        row = joined(similarity[one], similarity[other])
        merged = similarity.at[one].set(row).at[:, one].set(row)
        moved = jnp.where(first == other, one, first)
        possible = jnp.any(allowed)
        return jnp.where(possible, merged, similarity), jnp.where(possible, moved, first)

    _, first = jax.lax.fori_loop(0, size, merge, (similarity, jnp.arange(size)))
    return jnp.diagonal(together) & (first != jnp.min(jnp.where(together, first, size), axis=1))


@method_factory
def cfl(
    model: Model,
    training: LocalTraining = LocalTraining(),
    *,
    clusters: Count = 4,
    mean_norm: NotNegative = 0.4,
    largest_norm: NotNegative = 1.6,
    warmup_rounds: Epochs = 20,
    linkage: Linkage = "single",
) -> Method:
    r"""CFL: federated averaging inside clusters, which split in two where their clients disagree.

        D_i = change of client i in E epochs of SGD from its cluster's model w_c;   w_c <- w_c + mean of its D_i
        split cluster c, if  ||mean of its D_i|| < mean_norm  and  max of its ||D_i|| > largest_norm,
        into c_1, c_2 for which the largest cos(D_i, D_j) of clients i in c_1, j in c_2 is smallest

    A small mean of large changes says that the clients' gradients cancel, so that no model suits all of them. All
    clients begin in one cluster; both parts of a split begin with the model before it and their own changes. Means are
    weighted by numbers of examples. With one cluster this is `fedavg`.

    Norms of changes depend on the network, on lr and on the epochs: see `change` and `mean_change` in the Info of a
    run before you choose the thresholds.

    Args:
      training: recipe of local training.
      clusters: largest number of clusters.
      mean_norm: norm of the mean change of a cluster below which it may split.
      largest_norm: norm of the largest change in a cluster above which it may split.
      warmup_rounds: first rounds, in which no cluster splits.
      linkage: `single` as in the equation; `complete` merges groups by their least similar clients (released code).

    Returns:
      A `Method` with a `CFLServer` as server state and the number of its cluster, an int32, as client state.
      Trees: server CFLServer(models: 4 x model, used: count, rounds: count); client count.

    Info:
      cluster: [M], number of each client's cluster after the round.
      similarity: [M, M], the cosines between the clients' changes.
      change: [M], norms of the clients' changes.
      mean_change: [M], norm of the mean change of each client's cluster.

    Reference:
      Sattler, Müller, Samek. Clustered Federated Learning: Model-Agnostic Distributed Multitask Optimization Under
      Privacy Constraints. IEEE Transactions on Neural Networks and Learning Systems 2021.

    Deviations:
      Only the paper's abstract and the released code (github.com/felisat/clustered-federated-learning, commit 23a1c38)
      were available, so the equation of the split is not checked against the paper. There all clients take part in
      every round; here a cohort's clients decide, and clients that are absent from a split stay in the part that keeps
      the number. The number of clusters is bounded, so that the server stores k models and not one for each client. The
      released code averages clients equally, lowers the learning rate by 1 % in every round and uses complete linkage;
      its thresholds 0.4 and 1.6 and its 20 rounds are for ten clients of EMNIST, lr 0.1 and momentum 0.9. Three
      full-batch rounds of six equal clients agree with that code, with a constant learning rate and no momentum: the
      same clusters, and models to 3e-7 of an update.
    """
    loss = supervised_loss(model)

    def train(key, server, client, data):
        params = training.fit(key, gather(server.models, client), data, loss)
        return LocalResult(client=client, message=params, personal=params)

    def aggregate(key, server, clients, messages, cohort):
        changes = jax.tree.map(jnp.subtract, messages, gather(server.models, clients))
        changes = map_statistics(jnp.zeros_like, choose(cohort.present, changes, jax.tree.map(jnp.zeros_like, changes)))
        nothing = jax.tree.map(jnp.zeros_like, server.models)
        means = means_of_clusters(nothing, changes, clients, cohort.weights)
        similarity, lengths, mean_lengths = cosines(changes), norms(changes), norms(means)
        member = (clients == jnp.arange(clusters)[:, None]) & cohort.present
        most = jnp.max(jnp.where(member, lengths, 0.0), axis=1)
        large = jnp.sum(member, axis=1) >= SMALLEST
        splits = (mean_lengths < mean_norm) & (most > largest_norm) & large & (server.rounds >= warmup_rounds)
        number = server.used + jnp.cumsum(splits) - 1
        splits &= number < clusters
        together = (clients[:, None] == clients) & cohort.present & cohort.present[:, None]
        moves = second_halves(similarity, together, linkage) & splits[clients]
        chosen = jnp.where(moves, number[clients], clients).astype(jnp.int32)
        models = means_of_clusters(server.models, messages, chosen, cohort.weights)
        info = {"cluster": chosen, "similarity": similarity, "change": lengths, "mean_change": mean_lengths[clients]}
        used = server.used + jnp.sum(splits, dtype=jnp.int32)
        return CFLServer(models, used, server.rounds + 1), chosen, info

    def init_server(key):
        models = jax.tree.map(lambda leaf: jnp.repeat(leaf[None], clusters, axis=0), model.init(key))
        return CFLServer(models, jnp.ones((), jnp.int32), jnp.zeros((), jnp.int32))

    def current(server, client):
        return gather(server.models, client)

    return Method(
        init_server=init_server,
        init_client=lambda key, server, data: jnp.zeros((), jnp.int32),
        local=train,
        aggregate=aggregate,
        personalize=lambda key, server, client, data: current(server, client),
        predict=model.apply,
        download=current,
        privacy=Privacy(training.most_passes, (SIZE,)),
    )
