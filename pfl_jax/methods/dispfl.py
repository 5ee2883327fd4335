"""Sparse personal models, mixed with the neighbors' models where both have an entry (Dai et al. 2022)."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfl_jax.base import LocalResult, Method, Model, Params, Privacy, PRNGKey, PyTree
from pfl_jax.methods.dsgd import graph_info
from pfl_jax.methods.factories import IDENTITY, method_factory
from pfl_jax.methods.scaffold import mean_gradient
from pfl_jax.primitives.aggregation import mix
from pfl_jax.primitives.fingerprints import fingerprint
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import supervised_loss
from pfl_jax.primitives.topology import Topology, graph_links
from pfl_jax.primitives.tree import map_statistics
from pfl_jax.streams import MASKS
from pfl_jax.validation import AboveZero, Count, Fraction


class DisPFLServer(NamedTuple):
    """Start of all clients: the initial model, and the mask of its entries that they have."""

    params: Params
    mask: PyTree


class DisPFLClient(NamedTuple):
    """State of a client.

    Attributes:
      params: its model w_i, zero outside its mask.
      mask: m_i, which entries it has (bool).
      rounds: number of rounds in which it has trained, int32 scalar.
      identity: fingerprint of its data, which gives its place in the graph.
    """

    params: Params
    mask: PyTree
    rounds: jax.Array
    identity: jax.Array


class DisPFLMessage(NamedTuple):
    """Message of a client: its trained model, and the mask of this training."""

    params: Params
    mask: PyTree


def masked(mask: PyTree, params: PyTree) -> PyTree:
    """Parameters with zeros outside a mask.

    Args:
      mask: a tree of bool arrays.
      params: a tree like it.
    """
    return jax.tree.map(lambda has, leaf: jnp.where(has, leaf, 0.0), mask, params)


def largest(scores: jax.Array, count: jax.Array) -> jax.Array:
    """Mask of the `count` largest entries of an array, bool; of equal entries the first ones."""
    ranks = jnp.argsort(jnp.argsort(-scores.ravel(), stable=True))
    return (ranks < count).reshape(scores.shape)


def layer_densities(params: PyTree, density: float | jax.Array) -> list[jax.Array]:
    """Share of the entries that each array keeps (Erdos-Renyi kernel), so that all together keep `density`.

        d_l = min(1, epsilon r_l),   r_l = (sum of the sizes of l's axes) / (number n_l of its entries)

    Args:
      params: a tree of arrays.
      density: share of all entries.
    """
    leaves = jax.tree.leaves(params)
    sizes = jnp.array([leaf.size for leaf in leaves], jnp.float32)
    ratios = jnp.array([sum(leaf.shape) / leaf.size if leaf.ndim else 1.0 for leaf in leaves])
    order = jnp.argsort(-ratios)
    # For every k: epsilon of the other arrays if the k arrays of largest ratio are whole.
    whole = jnp.cumsum(sizes[order]) - sizes[order]
    rest = jnp.cumsum((ratios * sizes)[order][::-1])[::-1]
    epsilons = (density * jnp.sum(sizes) - whole) / rest
    valid = epsilons * ratios[order] <= 1
    epsilon = jnp.where(jnp.any(valid), epsilons[jnp.argmax(valid)], jnp.inf)
    return list(jnp.minimum(1.0, epsilon * ratios))


def first_mask(key: PRNGKey, params: PyTree, density: float | jax.Array) -> PyTree:
    """Random mask with as many entries of each array as `layer_densities` says, rounded down; all of statistics.

    Args:
      key: random key.
      params: a tree of arrays.
      density: share of all entries.
    """
    leaves, structure = jax.tree.flatten(params)
    keys, densities = jax.random.split(key, len(leaves)), layer_densities(params, density)
    chosen = [
        # The small constant prevents a whole number from being rounded down.
        largest(jax.random.uniform(key, leaf.shape), jnp.floor(share * leaf.size + 1e-3))
        for key, leaf, share in zip(keys, leaves, densities, strict=True)
    ]
    return map_statistics(jnp.ones_like, jax.tree.unflatten(structure, chosen))


def next_mask(mask: PyTree, params: PyTree, gradient: PyTree, rate: float | jax.Array) -> PyTree:
    """Mask with a share of its smallest entries replaced by as many others of largest gradient, array by array.

    Args:
      mask: m_i, a tree of bool arrays.
      params: the trained model.
      gradient: gradient of the loss with respect to all entries.
      rate: share of an array's entries in the mask that leave it, rounded up.
    """

    def one(has, leaf, slope):
        count = jnp.ceil(rate * jnp.sum(has) - 1e-4)
        kept = has & ~largest(jnp.where(has, -jnp.abs(leaf), -jnp.inf), count)
        return kept | largest(jnp.where(kept, -jnp.inf, jnp.abs(slope)), count)

    return map_statistics(jnp.ones_like, jax.tree.map(one, mask, params, gradient))


@method_factory
def dispfl(
    model: Model,
    training: LocalTraining = LocalTraining(),
    *,
    topology: Topology = "ring",
    density: AboveZero = 0.5,
    anneal: Fraction = 0.5,
    anneal_rounds: Count = 500,
) -> Method:
    r"""Dis-PFL: sparse models with personal masks; clients average each entry over the neighbors that have it.

        w'_i = E epochs of SGD from w_i on the entries of m_i
        m'_i = m_i without its smallest |w'_i|, and with as many entries whose gradient of CE at w'_i is largest
        w_i  = m'_i (sum_j w'_j) / (sum_j m_j),  entry by entry over i and its neighbors;  0 where none has the entry

    In each array a share (anneal / 2) (1 + cos(pi t / anneal_rounds)) of the mask's entries is exchanged in round t of
    the client. With density = 1 on the full graph, and clients of equal sizes, this is `fedavg`.

    Args:
      training: recipe of local training.
      topology: graph of a round's clients, as in `dsgd`.
      density: share of the model's entries that each client has; arrays with few entries keep more of them.
      anneal: share of a mask's entries that is exchanged at the beginning, alpha_0 of the paper.
      anneal_rounds: rounds after which masks stay unchanged; in the paper the run's number of rounds.

    Returns:
      A `Method`. The server keeps nothing but the start of all clients, a `DisPFLServer`; a client a `DisPFLClient`.
      Trees: server DisPFLServer(params: model, mask: model); client DisPFLClient(params: model, mask: model, rounds:
      count, identity: counts [2]).

    Info:
      links: [M], clients to which each client sends its message.
      connected: [], 1 if the round's graph connects all present clients, else 0.
      consensus: [], root mean squared distance of the mixed models to their mean.
      overlap: [], share of the entries of some mask that all masks have.

    Reference:
      Dai, Shen, He, Tian, Tao. DisPFL: Towards Communication-Efficient Personalized Federated Learning via
      Decentralized Sparse Training. ICML 2022. Written from the abstract and from what the released code computes
      (github.com/rong-dai/DisPFL, commit e2f47d4), whose defaults are density and anneal.

    Deviations:
      That code (1) draws each client's neighbors anew in every round, differently at both ends of a link; (2) takes the
      gradient of one mini-batch, here of all examples; (3) scales gradients down to a norm of 10, which is `clip_norm`
      here; (4) mixes before training: `received` scores the models after mixing; (5) lets clients that do not
      communicate train on, here they do not take part. Bytes are counted for whole arrays with a byte for each entry of
      the mask; a sparse model would send the share `density` of them. Three full-batch rounds of six clients on the
      full graph agree with that code's functions: the same masks, and models to 6e-8 of an update.
    """
    loss = supervised_loss(model)

    def train(key, server, client, data):
        def sparse_loss(params, batch, key):
            return loss(masked(client.mask, params), batch, key)

        params = masked(client.mask, training.fit(key, client.params, data, sparse_loss))
        gradient = mean_gradient(key, training, loss, params, data)
        progress = jnp.minimum(client.rounds / anneal_rounds, 1.0)
        mask = next_mask(client.mask, params, gradient, anneal / 2 * (1 + jnp.cos(math.pi * progress)))
        after = client._replace(params=masked(mask, params), mask=mask, rounds=client.rounds + 1)
        return LocalResult(client=after, message=DisPFLMessage(params, client.mask), personal=params)

    def aggregate(key, server, clients, messages, cohort):
        links = graph_links(topology, key, clients.identity, cohort)
        near = (links | jnp.eye(len(links), dtype=bool)).astype(jnp.float32)
        owners = mix(near, jax.tree.map(lambda mask: mask.astype(jnp.float32), messages.mask))
        mean = jax.tree.map(lambda total, count: total / jnp.maximum(count, 1), mix(near, messages.params), owners)
        params = masked(clients.mask, mean)
        info = graph_info(links, params, cohort.present) | {"overlap": _overlap(clients.mask, cohort.present)}
        return server, clients._replace(params=params), info

    def init_server(key):
        params = model.init(key)
        return DisPFLServer(params, first_mask(jax.random.fold_in(key, MASKS), params, density))

    def init_client(key, server, data):
        params = masked(server.mask, server.params)
        return DisPFLClient(params, server.mask, jnp.zeros((), jnp.int32), fingerprint(data))

    return Method(
        init_server=init_server,
        init_client=init_client,
        local=train,
        aggregate=aggregate,
        personalize=lambda key, server, client, data: client.params,
        predict=model.apply,
        download=lambda server, client: (),
        privacy=Privacy(
            training.most_passes, (IDENTITY, "gradient over all examples: which entries its mask gains, which is sent")
        ),
    )


def _overlap(masks: PyTree, present: jax.Array) -> jax.Array:
    """Number of entries that all present clients have, divided by the number of entries that any of them has."""

    def counted(mask):
        here = jnp.expand_dims(present, range(1, mask.ndim))
        return jnp.sum(jnp.all(mask | ~here, axis=0)), jnp.sum(jnp.any(mask & here, axis=0))

    counts = [counted(mask) for mask in jax.tree.leaves(masks)]
    return sum(both for both, _ in counts) / jnp.maximum(sum(some for _, some in counts), 1)
