"""Personal models as learned combinations of the clients' core models (Luo, Wu 2022)."""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import optax

from pfl_jax.base import Cohort, LocalResult, Method, Model, Params, Privacy
from pfl_jax.methods.factories import IDENTITY, method_factory
from pfl_jax.primitives.aggregation import follow_mixture, weighted_mean
from pfl_jax.primitives.fingerprints import WORDS, fingerprint, fingerprint_key, same_fingerprint
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import supervised_loss
from pfl_jax.primitives.tree import choose, gather
from pfl_jax.validation import Count, Epochs, NotNegative, ReadWith

SMALLEST_FACTOR = 1e-3
"""Factor of the regularizer of the relations at the end of its rounds, as in the released code."""


class Peers(NamedTuple):
    """Other clients whose core models a client stores, in S slots.

    Attributes:
      models: core models as last downloaded, leaves [S, ...].
      identities: [S, WORDS], uint32; fingerprints of their data.
      sizes: [S], float32; their numbers of examples, 0 for an empty slot.
    """

    models: Params
    identities: jax.Array
    sizes: jax.Array


class AppleClient(NamedTuple):
    """State of an APPLE client.

    Attributes:
      core: its own core model.
      relations: directed relations p_i [1 + S] to itself and to its peers.
      peers: the peers.
      size: its own number of examples, float32.
      identity: [WORDS], uint32; fingerprint of its own data.
    """

    core: Params
    relations: jax.Array
    peers: Peers
    size: jax.Array
    identity: jax.Array


class AppleMessage(NamedTuple):
    """Message of a client: its core model, its data's fingerprint and its number of examples."""

    core: Params
    identity: jax.Array
    size: jax.Array


class AppleServer(NamedTuple):
    """Initial model, and number of completed rounds (int32 scalar), on which the regularizer depends."""

    initial: Params
    rounds: jax.Array


def size_shares(client: AppleClient) -> jax.Array:
    """Initial relations p_0 [1 + S]: shares of examples among the client and its peers."""
    sizes = jnp.append(client.size, client.peers.sizes)
    return sizes / jnp.maximum(jnp.sum(sizes), 1)


def combine(client: AppleClient) -> Params:
    """Personal model sum_j p_ij w_j of a client and its peers."""
    models = jax.tree.map(lambda own, more: jnp.concatenate([own[None], more]), client.core, client.peers.models)
    return weighted_mean(client.relations, models)


def download(
    key: jax.Array, client: AppleClient, own: jax.Array, messages: AppleMessage, cohort: Cohort
) -> AppleClient:
    """State of a client with the core models of its cohort.

    Models of known peers are replaced. Other clients fill empty slots, in random order; each begins with the relation
    p_0j, and the earlier relations are scaled by the share of examples that is left to them, so that relations equal to
    p_0 remain equal to it.

    Args:
      key: key of the random order.
      client: the client's state.
      own: position of the client in the cohort.
      messages: messages of the cohort, leaves [M, ...].
      cohort: the cohort.
    """
    peers = client.peers
    others = cohort.present & (jnp.arange(cohort.present.shape[0]) != own)
    known = same_fingerprint(peers.identities[:, None], messages.identity) & (peers.sizes > 0)[:, None] & others
    fresh = others & ~jnp.any(known, axis=0)
    # The k-th empty slot gets the k-th new client of a random order, so long as there are both.
    priority = jax.vmap(lambda one: jax.random.uniform(fingerprint_key(key, one)))(messages.identity)
    order = jnp.argsort(jnp.where(fresh, priority, 2.0))
    rank = jnp.cumsum(peers.sizes == 0) - 1
    filled = (peers.sizes == 0) & (rank < jnp.sum(fresh))
    source = jnp.where(filled, order[jnp.clip(rank, 0, others.shape[0] - 1)], jnp.argmax(known, axis=1))
    taken = filled | jnp.any(known, axis=1)
    arrived = Peers(*gather((messages.core, messages.identity, messages.size), source))
    next_client = client._replace(peers=choose(taken, arrived, peers))
    shares = size_shares(next_client)
    new = jnp.append(False, filled)
    left = 1 - jnp.sum(jnp.where(new, shares, 0.0))
    return next_client._replace(relations=jnp.where(new, shares, left * client.relations))


@method_factory(version=2)
def apple(
    model: Model,
    training: LocalTraining = LocalTraining(momentum=0.9),
    *,
    relation_lr: NotNegative = 1e-3,
    mu: Annotated[NotNegative, ReadWith("relation_rounds")] = 0.1,
    relation_rounds: Epochs = 16,
    peers: Count = 11,
) -> Method:
    r"""APPLE: each client learns how much the core model of every other client contributes to its own model.

    A client's model is v_i = sum_j p_ij w_j. In each step on a mini-batch it moves its own core model w_i and its
    relations p_i together:

        w_i by -lr times the gradient of CE(v_i), which is p_ii times the gradient with respect to v_i
        p_i by -relation_lr times the gradient of  CE(v_i) + lambda(r) mu ||p_i - p_0||^2

    p_0j is client j's share of all examples, and lambda(r) = 1e-3^(r / L) in rounds r = 0 ... L - 1, 0 from then on.
    Clients send w_i and download the core models of others. Relations never leave their clients.

    Args:
      training: recipe of local training, for core models and relations; relations have no weight decay.
      relation_lr: learning rate of the relations.
      mu: strength of the regularization of the relations toward the clients' shares of examples.
      relation_rounds: rounds L in which relations are regularized.
      peers: number of other clients whose core models a client stores; at least 1.

    Returns:
      A `Method`. The server keeps the initial model and counts rounds, a client keeps an `AppleClient`, so peers + 1
      models of every client stay in memory. Under `received` a client deploys v_i with the latest core models.
      Trees: server AppleServer(initial: model, rounds: count); client AppleClient(core: model, relations: numbers [12],
      peers: Peers(models: 11 x model, identities: counts [11, 2], sizes: numbers [11]), size: number, identity: counts
      [2]).

    Info:
      relations: [M, 1 + peers], p_i after local training: to the client's own core model, then to its peers' models.

    Reference:
      Luo, Wu. Adapt to Adaptation: Learning Personalization for Cross-Silo Federated Learning. IJCAI 2022. Algorithm 1
      with the exponential loss scheduler. The momentum and the defaults of relation_lr, mu, relation_rounds and peers
      are the released ones, for 12 clients and 160 rounds.

    Deviations:
      In the paper all clients take part in every round, and each stores the core models of all others. Here a client
      meets only the clients of its cohorts: it stores the first `peers` that it meets, each with the latest model that
      it has seen, and p_0 covers these and itself. A client that has met no other trains its core model alone (p_ii =
      1); in the released code all clients download all models before their first training. If fewer downloads are
      allowed, that code draws them by relations. Its regularizer has no factor 1/2, as here; the paper has mu / 2. Core
      models start equal (released: at random). The second and the third full-batch round of three clients agree with
      the released training function (github.com/ljaiverson/pFL-APPLE, commit 8078196) to 1e-6. There, SGD has no weight
      decay; here it has the recipe's. In PFLlib the gradient of a relation is a mean over parameters, and the learning
      rate is multiplied by the number of clients.
    """
    risk = supervised_loss(model)
    steps = {"core": training, "relations": training.phase(relation_lr, weight_decay=0.0)}
    descent = optax.multi_transform(
        {name: recipe.transformation() for name, recipe in steps.items()}, {"core": "core", "relations": "relations"}
    )

    def train(key, server, client, data):
        progress = server.rounds / jnp.maximum(relation_rounds, 1)
        strength = jnp.where(server.rounds < relation_rounds, mu * SMALLEST_FACTOR**progress, 0.0)
        start = size_shares(client)

        def loss(learned, batch, key):
            deviation = jnp.sum(jnp.square(learned["relations"] - start))
            mixed = combine(client._replace(**learned))
            value, statistics = risk(mixed, batch, key)
            own_statistics = follow_mixture(learned["relations"][0], learned["core"], mixed, statistics)
            return value + strength * deviation, own_statistics

        learned = {"core": client.core, "relations": client.relations}
        kept = client._replace(**training.fit(key, learned, data, loss, transformation=descent))
        return LocalResult(kept, AppleMessage(kept.core, client.identity, client.size), combine(kept))

    def aggregate(key, server, clients, messages, cohort):
        positions = jnp.arange(cohort.present.shape[0])
        keys = jax.vmap(fingerprint_key, in_axes=(None, 0))(key, messages.identity)
        info = {"relations": clients.relations}
        # One client after another, because each copies as many models as it has slots.
        clients = jax.lax.map(
            lambda one: download(one[0], one[1], one[2], messages, cohort), (keys, clients, positions)
        )
        return server._replace(rounds=server.rounds + 1), clients, info

    def init_client(key, server, data):
        empty = Peers(
            models=jax.tree.map(lambda leaf: jnp.zeros((peers, *leaf.shape), leaf.dtype), server.initial),
            identities=jnp.zeros((peers, WORDS), jnp.uint32),
            sizes=jnp.zeros(peers),
        )
        relations = jnp.zeros(1 + peers).at[0].set(1.0)
        return AppleClient(server.initial, relations, empty, jnp.sum(data.mask, dtype=jnp.float32), fingerprint(data))

    return Method(
        init_server=lambda key: AppleServer(model.init(key), jnp.zeros((), jnp.int32)),
        init_client=init_client,
        local=train,
        aggregate=aggregate,
        personalize=lambda key, server, client, data: combine(client),
        predict=model.apply,
        download=lambda server, client: client.peers.models,
        privacy=Privacy(training.most_passes, (IDENTITY, "number of examples: sent, and the initial relations")),
    )
