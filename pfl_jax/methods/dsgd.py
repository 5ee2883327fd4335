"""Decentralized SGD: clients mix their models with their neighbors' in a graph (Lian et al. 2017)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfl_jax.base import Info, LocalResult, Method, Model, Params, Privacy, PyTree
from pfl_jax.methods.factories import IDENTITY, method_factory
from pfl_jax.methods.fedavg import fedavg
from pfl_jax.primitives.aggregation import mix
from pfl_jax.primitives.fingerprints import fingerprint
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.topology import Topology, consensus_distance, graph_links, is_connected, metropolis_weights


class Peer(NamedTuple):
    """State of a client without a server: its model, and the fingerprint of its data, for its place in the graph."""

    params: Params
    identity: jax.Array


def graph_info(links: jax.Array, models: PyTree, present: jax.Array) -> Info:
    """`Info` of a method without a server: its links, whether they connect all, and how far the models are apart.

    Args:
      links: [M, M], receivers in rows.
      models: the clients' models after mixing, leaves [M, ...].
      present: [M].
    """
    return {
        "links": jnp.sum(links, axis=0),
        "connected": is_connected(links, present).astype(jnp.float32),
        "consensus": consensus_distance(models, present),
    }


@method_factory
def dsgd(model: Model, training: LocalTraining = LocalTraining(), *, topology: Topology = "ring") -> Method:
    """D-SGD: there is no server; each client trains its model and mixes it with its neighbors' models.

        z_i = E epochs of SGD from w_i on CE;   w_i = sum_j W_ij z_j,   W_ij = 1 / (1 + max(deg_i, deg_j))

    over the neighbors j of i in a graph of the present clients, with the rest of the weight on i itself. On the full
    graph all clients have the same weight: with clients of equal sizes this is `fedavg`. Clients that do not take part
    keep their models; a client whose message does not arrive keeps its trained model.

    Args:
      training: recipe of local training.
      topology: graph of a round's clients: ring, torus, exponential, full, erdos_renyi:P, or links between clients by
        number as in "0-1 1-2".

    Returns:
      A `Method`. The server keeps nothing but the initial model, a client a `Peer`.
      Trees: server model; client Peer(params: model, identity: counts [2]).

    Info:
      links: [M], clients to which each client sends its message.
      connected: [], 1 if the round's graph connects all present clients, else 0.
      consensus: [], root mean squared distance of the mixed models to their mean.

    Reference:
      Lian, Zhang, Zhang, Hsieh, Zhang, Liu. Can Decentralized Algorithms Outperform Centralized Algorithms? A Case
      Study for Decentralized Parallel Stochastic Gradient Descent. NeurIPS 2017. Algorithm 1, with its two steps
      exchanged, as the paper allows.

    Deviations:
      Clients take E epochs between two exchanges, as in federated comparisons; the paper takes one step. The paper
      leaves W open: these are Metropolis weights, which are doubly stochastic for every graph.
    """
    base = fedavg(model, training)

    def train(key, server, client, data):
        trained = base.local(key, client.params, (), data).personal
        return LocalResult(client=client._replace(params=trained), message=trained, personal=trained)

    def aggregate(key, server, clients, messages, cohort):
        links = graph_links(topology, key, clients.identity, cohort)
        params = mix(metropolis_weights(links), messages)
        return server, clients._replace(params=params), graph_info(links, params, cohort.present)

    return base._replace(
        init_client=lambda key, server, data: Peer(server, fingerprint(data)),
        local=train,
        aggregate=aggregate,
        personalize=lambda key, server, client, data: client.params,
        download=lambda server, client: (),
        server_is_mean=False,
        privacy=Privacy(training.most_passes, (IDENTITY,)),
    )
