"""Each client combines the few models of other clients that lower its own held-out loss (Zhang et al. 2021)."""

from functools import partial
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from pfl_jax.base import ClientData, Method, Model, Params
from pfl_jax.errors import InvalidInput
from pfl_jax.methods.fedavg import fedavg
from pfl_jax.primitives.affinity import Affinity, add_affinity, choose_peers, empty_affinity, look_up
from pfl_jax.primitives.aggregation import normalize, weighted_mean
from pfl_jax.primitives.ensembles import example_losses
from pfl_jax.primitives.fingerprint import fingerprint
from pfl_jax.primitives.holdout import fixed_subset
from pfl_jax.primitives.local_sgd import LocalSGD
from pfl_jax.primitives.losses import masked_mean, proximal
from pfl_jax.primitives.tree import gather

Fallback: TypeAlias = Literal["previous", "trained"]
"""Model that a client goes on from where no other does better, see `fedfomo`."""


class FedFomoServer(NamedTuple):
    """The initial model, and the rounds done so far (int32 scalar), which epsilon falls with."""

    initial: Params
    rounds: jax.Array


class FedFomoClient(NamedTuple):
    """What a FedFomo client keeps; M models are downloaded, its own trained one first.

    Attributes:
      previous: the model that its last local training started from.
      models: what it downloaded after that, leaves [M, ...].
      received: [M], bool; False where there was nothing to download.
      senders: [M - 1], uint32; the fingerprints of the others' data.
      affinity: how much the others have been worth.
    """

    previous: Params
    models: Params
    received: jax.Array
    senders: jax.Array
    affinity: Affinity


class FedFomoMessage(NamedTuple):
    """What a client sends: its trained model, the fingerprint of its data, and the shares [1 + M] it combined with."""

    model: Params
    identity: jax.Array
    shares: jax.Array


def combine_models(
    model: Model, client: FedFomoClient, data: ClientData, *, held_out: float, fallback: Fallback
) -> tuple[Params, jax.Array]:
    """The next theta_i, and the shares [1 + M] of the last one and of the downloaded models in it.

    Args:
      model: the architecture.
      client: what the client keeps.
      data: its examples.
      held_out, fallback: see `fedfomo`.
    """
    judged = fixed_subset(data.mask, held_out)
    models = jax.tree.map(lambda one, more: jnp.concatenate([one[None], more]), client.previous, client.models)
    losses = example_losses(model, models, data._replace(mask=judged))
    losses = jax.vmap(masked_mean, in_axes=(1, None))(losses, judged)
    distances = jnp.sqrt(2 * jax.vmap(proximal, in_axes=(0, None))(client.models, client.previous))
    better = client.received & (losses[1:] < losses[0]) & (distances > 0)
    weights = jnp.where(better, (losses[0] - losses[1:]) / jnp.where(better, distances, 1.0), 0.0)
    # Only where nothing is better does the model to fall back on have its share, the whole.
    place = jnp.where(client.received[0], 1, 0) if fallback == "trained" else 0
    shares = normalize(jnp.append(0.0, weights).at[place].add(~jnp.any(better)))
    return weighted_mean(shares, models), shares


def fedfomo(
    model: Model,
    training: LocalSGD = LocalSGD(),
    *,
    download: int = 5,
    held_out: float = 0.2,
    epsilon: float = 0.3,
    epsilon_decay: float = 0.05,
    fallback: Fallback = "previous",
    memory: int = 100,
) -> Method:
    r"""FedFomo: a client moves toward those of M downloaded models that do better on its held-out examples.

        w_ij = max(0, L_i(theta_i) - L_i(theta_j)) / ||theta_j - theta_i||,   scaled to sum to one over j
        theta_i <- theta_i + sum_j w_ij (theta_j - theta_i);   p_i <- p_i + w_i;   then E epochs of SGD on the rest

    theta_i is the model that i's last training started from, L_i its mean cross entropy on a fixed part of its
    examples that is never trained on, and theta_j the models trained since, its own among them. Where none of them
    does better, theta_i stays, or the own trained model takes its place (`fallback`). The others are chosen by the
    affinities p_i, epsilon-greedily.

    Args:
      training: recipe of local training.
      download: number M of models that a client compares, its own trained one included; at least 1.
      held_out: share of a client's training examples that models are judged on.
      epsilon: probability of a random choice of whom to download from, in the first round.
      epsilon_decay: how much it falls every round, down to zero.
      fallback: what a client goes on from where no model does better than theta_i: "previous" is theta_i, as in the
        equation and in the released code, so that training which only raises the held-out loss is undone, in every
        round anew; "trained" is its own trained model. FedPAC's figure for Fashion-MNIST goes with the latter, see
        docs/results-notes.md.
      memory: other clients whose affinity a client remembers at most; beyond, the smallest are forgotten.

    Returns:
      A `Method` with a `FedFomoServer` as server state and a `FedFomoClient` as client state: M + 1 models for every
      client of the federation stay in memory. What a client deploys under `received` is its combination. Info:
      `weights` [cohort, 1 + M], the shares of theta_i, the own trained model and the others in the combination that
      the round started from; `affinity` [cohort, cohort], the p_ij that the next downloads were chosen by.

    Reference:
      Zhang, Sapra, Fidler, Yeung, Alvarez. Personalized Federated Learning with First Order Model Optimization.
      ICLR 2021. M = 5 is FedPAC's (Appendix B.3); epsilon, its decay, the held-out share and the baseline theta_i (its
      "first_model", the default) are the released code's.

    Deviations:
      A client downloads right after a round that it took part in, from that round's cohort; the released code does so
      when the client next takes part, from the round before, which is the same where everyone always does. Models and
      p_i wait on the client, and the server need not keep models of clients that were away. Its own model is always
      compared too (as in the released code), and counts as one of the M (released: M others beside it). The norm is
      Euclidean (released: sum of absolute values by default). Affinities add up the scaled weights, so they never fall
      (released: also what is below zero). Clients compare single clients' models alone (released: also averages of
      groups, found by spectral clustering of the affinities, and the mean of those averages). Others are known by a
      hash of their data, so that results do not depend on how clients are numbered.
    """
    if download < 1:
        raise InvalidInput(f"download must be at least 1, a client's own model, not {download}")
    if fallback not in ("previous", "trained"):
        raise InvalidInput(f"fallback must be previous or trained, not {fallback!r}")
    base = fedavg(model, training)

    combine = partial(combine_models, model, held_out=held_out, fallback=fallback)

    def train(key, server, client, data):
        start, shares = combine(client, data)
        rest = data._replace(mask=data.mask & ~fixed_subset(data.mask, held_out))
        result = base.local(key, start, (), rest)
        kept = client._replace(previous=start, affinity=add_affinity(client.affinity, client.senders, shares[2:]))
        return result._replace(client=kept, message=FedFomoMessage(result.personal, fingerprint(data), shares))

    def aggregate(key, server, clients, messages, cohort):
        models, identities, shares = messages
        own = jnp.eye(identities.shape[0], dtype=bool)
        excluded = own | ~cohort.present
        affinity = jax.vmap(look_up, in_axes=(0, None))(clients.affinity, identities)
        exploring = jnp.clip(epsilon - epsilon_decay * server.rounds, 0.0, 1.0)
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, identities)
        choose_all = jax.vmap(choose_peers, in_axes=(0, 0, 0, None, None))
        chosen, found = choose_all(keys, affinity, excluded, exploring, download - 1)
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
            senders=jnp.zeros(download - 1, jnp.uint32),
            affinity=empty_affinity(memory),
        )

    return base._replace(
        init_server=lambda key: FedFomoServer(model.init(key), jnp.zeros((), jnp.int32)),
        init_client=init_client,
        local=train,
        aggregate=aggregate,
        personalize=lambda key, server, client, data: combine(client, data)[0],
        # The first is the client's own.
        download=lambda server, client: jax.tree.map(lambda leaf: leaf[1:], client.models),
    )
