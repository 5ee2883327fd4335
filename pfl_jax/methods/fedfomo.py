"""Combination, on each client, of other clients' models that reduce its held-out loss (Zhang et al. 2021)."""

from functools import partial
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from pfl_jax.base import ClientData, Method, Model, Params, Privacy
from pfl_jax.methods.factories import IDENTITY, method_factory
from pfl_jax.methods.fedavg import fedavg
from pfl_jax.primitives.affinity import Affinity, add_affinity, choose_peers, empty_affinity, look_up
from pfl_jax.primitives.aggregation import normalize_weights, weighted_mean
from pfl_jax.primitives.ensembles import example_losses
from pfl_jax.primitives.fingerprints import WORDS, fingerprint, fingerprint_key
from pfl_jax.primitives.holdout import fixed_subset
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import masked_mean, proximal
from pfl_jax.primitives.tree import gather
from pfl_jax.validation import Count, Fraction, NotNegative

Fallback: TypeAlias = Literal["previous", "trained"]
"""Model from which a client continues if no downloaded model is better, see `fedfomo`."""


class FedFomoServer(NamedTuple):
    """Initial model, and number of completed rounds (int32 scalar), on which epsilon depends."""

    initial: Params
    rounds: jax.Array


class FedFomoClient(NamedTuple):
    """State of a FedFomo client.

    Attributes:
      previous: the model from which the client's previous local training started.
      models: models to compare, leaves [D, ...]: the client's own trained model, then D - 1 downloaded ones.
      received: [D], bool; False for models that are missing because there was none to download.
      senders: [D - 1, WORDS], uint32; fingerprints of the data of the clients whose models were downloaded.
      affinity: affinities to other clients.
      identity: [WORDS], uint32; fingerprint of the client's own data.
    """

    previous: Params
    models: Params
    received: jax.Array
    senders: jax.Array
    affinity: Affinity
    identity: jax.Array


class FedFomoMessage(NamedTuple):
    """Message of a client: its trained model, its data's fingerprint, and the weights [1 + D] of its combination."""

    model: Params
    identity: jax.Array
    shares: jax.Array


def combine_models(
    model: Model, client: FedFomoClient, data: ClientData, *, held_out: float, fallback: Fallback
) -> tuple[Params, jax.Array]:
    """Next theta_i, and its weights [1 + D] of the previous theta_i and of the D models.

    Args:
      model: the architecture.
      client: the client's state.
      data: the client's examples.
      held_out, fallback: see `fedfomo`.
    """
    judged = fixed_subset(data.mask, held_out)
    models = jax.tree.map(lambda one, more: jnp.concatenate([one[None], more]), client.previous, client.models)
    losses = example_losses(model, models, data._replace(mask=judged))
    losses = jax.vmap(masked_mean, in_axes=(1, None))(losses, judged)
    distances = jnp.sqrt(2 * jax.vmap(proximal, in_axes=(0, None))(client.models, client.previous))
    better = client.received & (losses[1:] < losses[0]) & (distances > 0)
    weights = jnp.where(better, (losses[0] - losses[1:]) / jnp.where(better, distances, 1.0), 0.0)
    # If no model is better, the fallback model gets weight 1.
    position = jnp.where(client.received[0], 1, 0) if fallback == "trained" else 0
    shares = normalize_weights(jnp.append(0.0, weights).at[position].add(~jnp.any(better)))
    return weighted_mean(shares, models), shares


@method_factory(version=2)
def fedfomo(
    model: Model,
    training: LocalTraining = LocalTraining(),
    *,
    download: Count = 5,
    held_out: Fraction = 0.2,
    epsilon: Fraction = 0.3,
    epsilon_decay: NotNegative = 0.05,
    fallback: Fallback = "previous",
    memory: Count = 100,
) -> Method:
    r"""FedFomo: a client compares D models, and moves toward those with a lower loss on its held-out examples.

        w_ij = max(0, L_i(theta_i) - L_i(theta_j)) / ||theta_j - theta_i||,   normalized to sum to 1 over j
        theta_i <- theta_i + sum_j w_ij (theta_j - theta_i);   p_i <- p_i + w_i;   then E epochs of SGD

    theta_i is the model from which i's previous local training started, L_i the mean cross entropy on held-out
    examples of i that are never trained on, and theta_j are models trained since then: i's own and D - 1 downloaded
    models. If none is better, `fallback` decides. Downloads are chosen by the affinities p_i, epsilon-greedily.

    Args:
      training: recipe of local training.
      download: number D of models that a client compares: its own trained model and D - 1 models of other clients; at
        least 1.
      held_out: share of a client's training examples that are held out to compare models.
      epsilon: probability that a download is chosen at random, in the first round.
      epsilon_decay: decrease of epsilon per round, down to zero.
      fallback: model from which a client continues if no model is better than theta_i. "previous" is theta_i, as in the
        equation and in the released code: local training that raises the held-out loss is undone in every round.
        "trained" is the client's own trained model.
      memory: maximum number of other clients whose affinity a client stores; the smallest affinities are dropped.

    Returns:
      A `Method` with a `FedFomoServer` as server state and a `FedFomoClient` as client state, so D + 1 models of every
      client stay in memory. Under `received` a client deploys its combination.
      Trees: server FedFomoServer(initial: model, rounds: count); client FedFomoClient(previous: model, models: 5 x
      model, received: flags [5], senders: counts [4, 2], affinity: Affinity(peers: counts [100, 2], values: numbers
      [100]), identity: counts [2]).

    Info:
      weights: [M, 1 + D], weights of theta_i, of the own trained model and of the downloaded models in the
        combination from which each client started the round.
      affinity: [M, M], p_ij, by which client i chose its next downloads.

    Reference:
      Zhang, Sapra, Fidler, Yeung, Alvarez. Personalized Federated Learning with First Order Model Optimization.
      ICLR 2021. D = 5 is from FedPAC (Appendix B.3); epsilon, its decay, the held-out share and the baseline theta_i
      ("first_model", the default there) are from the released code.

    Deviations:
      A client downloads right after a round in which it took part, from that round's cohort. In the released code it
      downloads when it next takes part, from the cohort of the round before; with full participation this is the same.
      Here models and p_i are stored on the client, and the server need not keep models of absent clients. A client's
      own model is always one of the D models that are compared, as in the released code, whose commands for five models
      ask for four others. There, epsilon decreases one round earlier: it is 0.25 at the first downloads of trained
      models, here 0.3. With participation below 1 all clients train there for one epoch in round 0. The norm is
      Euclidean (released: by default the sum of absolute values). Affinities add up the normalized weights, so they
      never decrease (released: negative values count too). Clients compare only models of single clients (released:
      also averages over groups from spectral clustering of the affinities, and the mean of those averages). Clients are
      identified by a hash of their data, so that results do not depend on their numbers.
    """
    base = fedavg(model, training)

    combine = partial(combine_models, model, held_out=held_out, fallback=fallback)

    def train(key, server, client, data):
        start, shares = combine(client, data)
        rest = data._replace(mask=data.mask & ~fixed_subset(data.mask, held_out))
        result = base.local(key, start, (), rest)
        kept = client._replace(
            previous=start,
            # Only a client whose message does not arrive keeps these: `aggregate` sets the models of all others.
            models=jax.tree.map(lambda leaf, own: leaf.at[0].set(own), client.models, result.personal),
            received=client.received.at[0].set(True),
            affinity=add_affinity(client.affinity, client.senders, shares[2:]),
        )
        return result._replace(client=kept, message=FedFomoMessage(result.personal, client.identity, shares))

    def aggregate(key, server, clients, messages, cohort):
        models, identities, shares = messages
        own = jnp.eye(identities.shape[0], dtype=bool)
        excluded = own | ~cohort.present
        affinity = jax.vmap(look_up, in_axes=(0, None))(clients.affinity, identities)
        exploring = jnp.clip(epsilon - epsilon_decay * server.rounds, 0.0, 1.0)
        keys = jax.vmap(fingerprint_key, in_axes=(None, 0))(key, identities)
        # Random choices go by rank of size, because they must not depend on the clients' numbers.
        ranked = jnp.argsort(-cohort.counts, stable=True)
        choose_all = jax.vmap(choose_peers, in_axes=(0, 0, 0, None, None))
        chosen, found = choose_all(keys, affinity[:, ranked], excluded[:, ranked], exploring, download - 1)
        chosen = ranked[chosen]
        clients = clients._replace(
            models=gather(models, jnp.column_stack([jnp.arange(own.shape[0]), chosen])),
            received=jnp.pad(found, ((0, 0), (1, 0)), constant_values=True),
            senders=identities[chosen],
        )
        return server._replace(rounds=server.rounds + 1), clients, {"weights": shares, "affinity": affinity}

    def init_client(key, server, data):
        return FedFomoClient(
            previous=server.initial,
            models=jax.tree.map(lambda leaf: jnp.zeros((download, *leaf.shape), leaf.dtype), server.initial),
            received=jnp.zeros(download, bool),
            senders=jnp.zeros((download - 1, WORDS), jnp.uint32),
            affinity=empty_affinity(memory),
            identity=fingerprint(data),
        )

    return base._replace(
        init_server=lambda key: FedFomoServer(model.init(key), jnp.zeros((), jnp.int32)),
        init_client=init_client,
        local=train,
        aggregate=aggregate,
        personalize=lambda key, server, client, data: combine(client, data)[0],
        # The first of the D models is the client's own.
        download=lambda server, client: jax.tree.map(lambda leaf: leaf[1:], client.models),
        server_is_mean=False,
        privacy=Privacy(
            training.most_passes,
            (
                IDENTITY,
                "number of examples: the order in which models are drawn",
                "losses on held-out examples: the weights of the downloaded models, which are sent",
            ),
        ),
    )
