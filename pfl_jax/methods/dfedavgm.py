"""Decentralized federated averaging, with quantized changes on the links (Sun, Li, Wang 2022)."""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from pfl_jax.base import LocalResult, Method, Model, Params
from pfl_jax.methods.dsgd import dsgd, graph_info
from pfl_jax.methods.factories import method_factory
from pfl_jax.primitives.aggregation import mix
from pfl_jax.primitives.compressors import quantizing_compressor
from pfl_jax.primitives.fingerprints import fingerprint
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.topology import Topology, graph_links, metropolis_weights
from pfl_jax.streams import COMPRESSION
from pfl_jax.validation import Range

EXACT = 32
"""Bits of a number that is sent unchanged."""


class DFedAvgMClient(NamedTuple):
    """State of a client.

    Attributes:
      params: its model w_i.
      start: the model from which its latest local training started.
      identity: fingerprint of its data, which gives its place in the graph.
    """

    params: Params
    start: Params
    identity: jax.Array


@method_factory
def dfedavgm(
    model: Model,
    training: LocalTraining = LocalTraining(),
    *,
    topology: Topology = "ring",
    bits: Annotated[int, Range(2, EXACT)] = EXACT,
) -> Method:
    """DFedAvgM: clients train with momentum and mix models, or quantized changes of them, with their neighbors.

        z_i = E epochs of SGD with heavy-ball momentum from w_i on CE
        w_i <- sum_j W_ij z_j                      with 32 bits, or
        w_i <- w_i + sum_j W_ij Q(z_j - w_j)       with fewer

    W is the matrix of `dsgd`, and Q rounds at random, without bias, to numbers of `bits` bits
    (`pfl_jax.primitives.compressors.quantizing_compressor`).

    Args:
      training: recipe of local training; its momentum is theta of the paper.
      topology: graph of a round's clients, as in `dsgd`.
      bits: bits of a number on a link, from 2 to 32; 32 sends models, fewer send quantized changes.

    Returns:
      A `Method`. The server keeps nothing but the initial model, a client a `DFedAvgMClient`.
      Trees: server model; client DFedAvgMClient(params: model, start: model, identity: counts [2]).

    Info:
      links: [M], clients to which each client sends its message.
      connected: [], 1 if the round's graph connects all present clients, else 0.
      consensus: [], root mean squared distance of the mixed models to their mean.

    Reference:
      Sun, Li, Wang. Decentralized Federated Averaging. IEEE TPAMI 2022. Algorithms 1 (32 bits) and 2.

    Deviations:
      Written from the abstract and the algorithms as other papers and code restate them; the text was not available.
      The levels of Q span each array's largest change, where the paper has a fixed step. Changes alone do not draw
      models together: models that start apart stay apart. The paper does not say what absent clients do: here they keep
      their models.
    """
    base = dsgd(model, training, topology=topology)
    coder = quantizing_compressor(bits)

    def train(key, server, client, data):
        trained = base.local(key, server, client, data).personal
        message = trained
        if bits < EXACT:
            change = jax.tree.map(jnp.subtract, trained, client.params)
            message = coder.decoded(jax.random.fold_in(key, COMPRESSION), change)
        return LocalResult(client._replace(params=trained, start=client.params), message, trained)

    def aggregate(key, server, clients, messages, cohort):
        links = graph_links(topology, key, clients.identity, cohort)
        params = mix(metropolis_weights(links), messages)
        if bits < EXACT:
            params = jax.tree.map(jnp.add, clients.start, params)
        clients = clients._replace(params=params, start=params)
        return server, clients, graph_info(links, params, cohort.present)

    return base._replace(
        init_client=lambda key, server, data: DFedAvgMClient(server, server, fingerprint(data)),
        local=train,
        aggregate=aggregate,
        encoded=coder.encoded if bits < EXACT else None,
        privacy=base.privacy,
    )
