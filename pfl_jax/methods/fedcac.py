"""Parameters shared with everyone or, if they are critical, with similar clients only (Wu et al. 2023)."""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from pfl_jax.base import LocalResult, Method, Model, Params, Privacy, PyTree
from pfl_jax.methods.factories import SIZE, method_factory
from pfl_jax.primitives.aggregation import mix, size_weights, weighted_mean
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import supervised_loss
from pfl_jax.primitives.tree import map_statistics
from pfl_jax.validation import Count, Fraction, ReadWith


class FedCACServer(NamedTuple):
    """Mean model w, which clients have except for their critical parameters, and number of completed rounds (int32)."""

    params: Params
    rounds: jax.Array


class FedCACClient(NamedTuple):
    """State of a client.

    Attributes:
      params: v_i, the mean model of its collaborators in its last round; running statistics of batch normalization are
        the client's own.
      critical: C_i as a tree of bool arrays, True for entries that the client has from `params`: none before its first
        round, afterwards its critical entries and its running statistics.
    """

    params: Params
    critical: PyTree


class FedCACMessage(NamedTuple):
    """Message of a client: its trained model, and which of its entries are critical, a tree of bool arrays."""

    params: Params
    critical: PyTree


def critical_entries(before: PyTree, after: PyTree, share: float | jax.Array) -> PyTree:
    """The entries of every array that are most sensitive to a client's data: the largest |(after - before) after|.

    Args:
      before: params before local training.
      after: params after it.
      share: share of the entries of each array, rounded down. If fewer entries changed, only these are critical; if
        none changed, all entries of the array are. Where the smallest of the share's sensitivities is at most 1e-10,
        all entries that changed are critical.

    Returns:
      A tree of bool arrays. Running statistics of batch normalization are never critical: they are not parameters.

    Reference:
      FedCAC, its sensitivity and the selection in each layer; the rule for entries that did not change is from the
      released code.
    """

    def choose(old, new):
        sensitivity = jnp.abs((new - old) * new)
        count = jnp.floor(share * sensitivity.size + 1e-3).astype(jnp.int32)
        smallest = jnp.sort(sensitivity.ravel())[jnp.clip(sensitivity.size - count, 0, sensitivity.size - 1)]
        least = jnp.min(jnp.where(sensitivity > 1e-20, sensitivity, jnp.inf))
        smallest = jnp.where((smallest <= 1e-10) & jnp.isfinite(least), least, smallest)
        return (sensitivity >= smallest) & (count > 0)

    return map_statistics(jnp.zeros_like, jax.tree.map(choose, before, after))


def with_own_statistics(client: FedCACClient, params: Params) -> FedCACClient:
    """Client state with the running statistics of its trained model `params`, instead of a mean."""
    return FedCACClient(
        map_statistics(lambda _, own: own, client.params, params), map_statistics(jnp.ones_like, client.critical)
    )


def overlaps(critical: PyTree) -> jax.Array:
    """Share of each client's critical entries that are also critical for another client, if both have equally many.

        o_ij = 1 - |C_i xor C_j| / (2 |C_i|)

    Args:
      critical: tree of bool arrays [M, ...].

    Returns:
      o [M, M]; -1 for clients i without critical entries.
    """
    rows = [leaf.reshape(leaf.shape[0], -1).astype(jnp.float32) for leaf in jax.tree.leaves(critical)]
    common = sum(jnp.matmul(row, row.T, precision="highest") for row in rows)
    sizes = jnp.diagonal(common)
    differing = sizes[:, None] + sizes - 2 * common
    return jnp.where(sizes[:, None] > 0, 1 - differing / jnp.maximum(2 * sizes[:, None], 1), -1.0)


def collaborators(overlap: jax.Array, present: jax.Array, progress: float | jax.Array) -> jax.Array:
    """Clients whose critical parameters each client shares: itself, and others with a large overlap.

        o_ij >= mean o + progress (max o - mean o),  with mean and maximum over all pairs of different clients

    Args:
      overlap: o [M, M], see `overlaps`.
      present: [M], bool; absent clients collaborate with nobody.
      progress: t / T in round t = 1, 2, ...; above 1 nobody collaborates unless all overlaps are equal.

    Returns:
      [M, M], bool; row i has client i's collaborators, itself included.
    """
    own = jnp.eye(present.shape[0], dtype=bool)
    pairs = present[:, None] & present & ~own
    mean = jnp.sum(jnp.where(pairs, overlap, 0)) / jnp.maximum(jnp.sum(pairs), 1)
    smallest, largest = jnp.min(jnp.where(pairs, overlap, jnp.inf)), jnp.max(jnp.where(pairs, overlap, -jnp.inf))
    # The mean of equal overlaps differs from them by its rounding.
    threshold = jnp.where(smallest == largest, largest, mean + progress * (largest - mean))
    return own | (pairs & (overlap >= threshold))


@method_factory
def fedcac(
    model: Model,
    training: LocalTraining = LocalTraining(),
    *,
    share: Fraction = 0.5,
    collaboration_rounds: Annotated[Count, ReadWith("share")] = 100,
) -> Method:
    r"""FedCAC: critical parameters are averaged over clients with similar ones, all other parameters over all clients.

        w'_i = E epochs of SGD from w_i;   sensitivity  |(w'_i - w_i) w'_i|  of every parameter
        C_i  = the given share of each array with the largest sensitivity: client i's critical parameters
        w    = sum_i beta_i w'_i;   v_i = mean of w'_j over client i and all j with
               o_ij >= mean o + (t / T) (max o - mean o),   o_ij = 1 - |C_i xor C_j| / (2 |C_i|),   round t = 1, 2, ...
        w_i  = v_i at the parameters of C_i, w at all others

    After T rounds nobody's overlap is large enough, and clients keep their critical parameters to themselves. Clients
    outside a round's cohort keep v_i and C_i (empty before their first round), and get the new w at all other
    parameters. So without critical parameters (share = 0) this is `fedavg` for any participation, except that running
    statistics of batch normalization stay with the clients.

    Args:
      training: recipe of local training.
      share: share of each array's parameters that are critical, from 0 to 1 (tau in the paper).
      collaboration_rounds: number T of rounds over which collaboration on critical parameters ends (beta in the
        paper); at least 1.

    Returns:
      A `Method` with a `FedCACServer` as server state and a `FedCACClient` as client state.
      Trees: server FedCACServer(params: model, rounds: count); client FedCACClient(params: model, critical: model).

    Info:
      overlap: [M, M], the overlaps o.
      collaborators: [M, M], 1 where the row's client shares critical parameters with the column's, otherwise 0.

    Reference:
      Wu, Liu, Niu, Zhu, Tang. Bold but Cautious: Unlocking the Potential of Personalized Federated Learning through
      Cautiously Aggressive Collaboration. ICCV 2023. The equations follow the released code; share = 0.5 and T = 100
      are its values for CIFAR-10 (40 clients, Dirichlet 0.1).

    Deviations:
      In the released code all clients take part in every round. With partial participation, overlaps are computed
      within the round's cohort, and other clients get the current mean as described above; a port in PFLlib does the
      same. As in the released code, the mean over collaborators is unweighted, and every client keeps its own running
      statistics; here these start from the statistics of w in its first round. Compared with that code (kxzxvbk/Fling,
      commit f6c6f1e): three rounds of full batches give the same models to 1e-5.
    """
    loss = supervised_loss(model)

    def current(server, client):
        """The client's model w_i."""
        return jax.tree.map(jnp.where, client.critical, client.params, server.params)

    def train(key, server, client, data):
        start = current(server, client)
        params = training.fit(key, start, data, loss)
        message = FedCACMessage(params, critical_entries(start, params, share))
        return LocalResult(client=with_own_statistics(client, params), message=message, personal=params)

    def aggregate(key, server, clients, messages, cohort):
        overlap = overlaps(messages.critical)
        rounds = server.rounds + 1
        chosen = collaborators(overlap, cohort.present, rounds / collaboration_rounds)
        weights = chosen / jnp.sum(chosen, axis=1, keepdims=True)
        mean = weighted_mean(size_weights(cohort.weights), messages.params)
        clients = FedCACClient(mix(weights, messages.params), messages.critical)
        clients = with_own_statistics(clients, messages.params)
        return FedCACServer(mean, rounds), clients, {"overlap": overlap, "collaborators": chosen.astype(jnp.float32)}

    def init_client(key, server, data):
        return FedCACClient(server.params, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, bool), server.params))

    return Method(
        init_server=lambda key: FedCACServer(model.init(key), jnp.zeros((), jnp.int32)),
        init_client=init_client,
        local=train,
        aggregate=aggregate,
        personalize=lambda key, server, client, data: current(server, client),
        predict=model.apply,
        download=current,
        privacy=Privacy(training.most_passes, (SIZE,)),
    )
