"""Stochastic gradient push: averages along directed links, by push-sum (Assran et al. 2019)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfl_jax.base import Cohort, Info, LocalResult, Method, Model, Privacy, PRNGKey, PyTree
from pfl_jax.methods.dsgd import graph_info
from pfl_jax.methods.factories import IDENTITY, method_factory
from pfl_jax.methods.fedavg import fedavg
from pfl_jax.primitives.aggregation import mix
from pfl_jax.primitives.fingerprints import fingerprint
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.topology import Topology, graph_links, push_weights


class Pushed(NamedTuple):
    """Values that push-sum passes on: parameters x_i and their weight s_i; x_i / s_i is the client's model."""

    params: PyTree
    weight: jax.Array

    @property
    def model(self) -> PyTree:
        """Parameters of the client's model, also for clients stacked along M; x itself if the weight is zero."""
        weight = jnp.where(self.weight > 0, self.weight, 1.0)
        return jax.tree.map(lambda leaf: leaf / jnp.expand_dims(weight, range(weight.ndim, leaf.ndim)), self.params)

    def moved(self, trained: PyTree) -> "Pushed":
        """The values after local training has turned the model z into `trained`, z': x + (z' - z)."""
        params = jax.tree.map(lambda x, new, old: x + (new - old), self.params, trained, self.model)
        return self._replace(params=params)


class PushClient(NamedTuple):
    """State of a client: the values that it pushes, and the fingerprint of its data, for its place in the graph."""

    pushed: Pushed
    identity: jax.Array


def push(topology: str, key: PRNGKey, identities: jax.Array, messages: Pushed, cohort: Cohort) -> tuple[Pushed, Info]:
    """Push-sum along the directed links of a round: x_i <- sum_j P_ij x_j, s_i <- sum_j P_ij s_j; and its `Info`.

    Args:
      topology: graph of the round's clients.
      key: key of the round.
      identities: fingerprints [M, WORDS].
      messages: values that clients push, stacked along M.
      cohort: clients of the round.
    """
    links = graph_links(topology, key, identities, cohort, directed=True)
    pushed = mix(push_weights(links), messages)
    return pushed, graph_info(links, pushed.model, cohort.present)


@method_factory
def osgp(model: Model, training: LocalTraining = LocalTraining(), *, topology: Topology = "exponential") -> Method:
    """OSGP: clients send their models along directed links; push-sum weights undo the bias of unequal links.

        z_i = x_i / s_i,   x_i <- x_i + (z'_i - z_i),   z'_i = E epochs of SGD from z_i on CE
        x_i <- sum_j P_ij x_j,   s_i <- sum_j P_ij s_j,   P_ij = 1 / (1 + out-degree of j)

    A client deploys z_i; s_i is 1 before the first round. On the full graph with clients of equal sizes this is
    `fedavg`.

    Args:
      training: recipe of local training.
      topology: graph of a round's clients, as in `dsgd`, with links in one direction: of a pair such as "0-1", 0 sends
        to 1.

    Returns:
      A `Method`. The server keeps nothing but the initial model, a client a `PushClient`.
      Trees: server model; client PushClient(pushed: Pushed(params: model, weight: number), identity: counts [2]).

    Info:
      links: [M], clients to which each client sends its message.
      connected: [], 1 if each present client reaches all others in the round's graph, else 0.
      consensus: [], root mean squared distance of the models z_i to their mean.

    Reference:
      Assran, Loizou, Ballas, Rabbat. Stochastic Gradient Push for Distributed Deep Learning. ICML 2019. Algorithm 1
      (SGP); federated comparisons call it OSGP.

    Deviations:
      Clients take E epochs between two exchanges; the paper takes one step. Messages arrive in the round in which they
      are sent: the overlap of communication and computation, which gives OSGP its O, changes when they arrive, and is
      not simulated. On the paper's exponential graph a node sends to one other in a round, in turn; here to all.
    """
    base = fedavg(model, training)

    def train(key, server, client, data):
        trained = base.local(key, client.pushed.model, (), data).personal
        pushed = client.pushed.moved(trained)
        return LocalResult(client=client._replace(pushed=pushed), message=pushed, personal=trained)

    def aggregate(key, server, clients, messages, cohort):
        pushed, info = push(topology, key, clients.identity, messages, cohort)
        return server, clients._replace(pushed=pushed), info

    return base._replace(
        init_client=lambda key, server, data: PushClient(Pushed(server, jnp.ones(())), fingerprint(data)),
        local=train,
        aggregate=aggregate,
        personalize=lambda key, server, client, data: client.pushed.model,
        download=lambda server, client: (),
        server_is_mean=False,
        privacy=Privacy(training.most_passes, (IDENTITY,)),
    )
