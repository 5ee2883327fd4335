"""Directed push-sum of the backbone under personal heads (Liu et al. 2024)."""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from pfl_jax.base import Head, LocalResult, Method, Model, Privacy
from pfl_jax.methods.factories import IDENTITY, method_factory
from pfl_jax.methods.fedrep import fedrep
from pfl_jax.methods.osgp import Pushed, push
from pfl_jax.primitives.fingerprints import fingerprint
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.topology import Topology
from pfl_jax.primitives.tree import merge
from pfl_jax.validation import Epochs, NotNegative, ReadWith


class DFedPGPClient(NamedTuple):
    """State of a client: the backbone that it pushes, its head, and the fingerprint of its data."""

    pushed: Pushed
    head: Head
    identity: jax.Array


@method_factory
def dfedpgp(
    model: Model,
    training: LocalTraining = LocalTraining(),
    *,
    topology: Topology = "exponential",
    head_lr: Annotated[NotNegative | None, ReadWith("head_epochs")] = None,
    head_epochs: Epochs = 1,
) -> Method:
    """DFedPGP: clients push their backbones along directed links, and keep their heads.

        v_i <- head_epochs of SGD on CE from v_i, with the backbone z_i = u_i / s_i fixed
        u_i <- u_i + (z'_i - z_i),   z'_i = E epochs of SGD on CE from z_i, v_i fixed
        u_i <- sum_j P_ij u_j,   s_i <- sum_j P_ij s_j,   P_ij = 1 / (1 + out-degree of j)

    On the full graph with clients of equal sizes this is `fedrep`.

    Args:
      training: recipe of local training of the backbone; also of the head, except for `head_lr` and `head_epochs`.
      topology: graph of a round's clients, as in `osgp`.
      head_lr: learning rate of the head; None for the backbone's.
      head_epochs: local epochs of the head in a round, before the backbone's.

    Returns:
      A `Method`. The server keeps nothing but the initial model, a client a `DFedPGPClient`.
      Trees: server model; client DFedPGPClient(pushed: Pushed(params: backbone, weight: number), head, identity: counts
      [2]).

    Info:
      links: [M], clients to which each client sends its message.
      connected: [], 1 if each present client reaches all others in the round's graph, else 0.
      consensus: [], root mean squared distance of the backbones z_i to their mean.

    Reference:
      Liu, Shi, Li, Wu, Wang, Shen. Decentralized Directed Collaboration for Personalized Federated Learning. CVPR 2024.
      Algorithm 1.

    Deviations:
      Written from reimplementations in public code, which differ in where the weight s_i enters a step of u_i; neither
      the paper's text nor code of its authors was available. Here u_i takes the steps of z_i, as in `osgp`, which is
      the same for one step. The head is trained on precomputed features, as in `fedrep`.
    """
    base = fedrep(model, training, head_lr=head_lr, head_epochs=head_epochs)

    def train(key, server, client, data):
        result = base.local(key, {"backbone": client.pushed.model}, client.head, data)
        pushed = client.pushed.moved(result.personal["backbone"])
        return LocalResult(client._replace(pushed=pushed, head=result.client), pushed, result.personal)

    def aggregate(key, server, clients, messages, cohort):
        pushed, info = push(topology, key, clients.identity, messages, cohort)
        return server, clients._replace(pushed=pushed), info

    def init_client(key, server, data):
        return DFedPGPClient(Pushed(server["backbone"], jnp.ones(())), server["head"], fingerprint(data))

    return base._replace(
        init_client=init_client,
        local=train,
        aggregate=aggregate,
        personalize=lambda key, server, client, data: merge(client.pushed.model, client.head),
        download=lambda server, client: (),
        server_is_mean=False,
        privacy=Privacy(head_epochs + training.most_passes, (IDENTITY,)),
    )
