"""FedAS as its released code runs it: clients align one shared backbone in place, one after another.

In the released code a client aligns the server's own copy of the backbone, and the next client of the cohort receives
what the one before it has left: the last of M clients starts from a backbone with M alignment epochs behind it, each
towards another client. That cannot be said for one client alone, as a method of `pfl_jax` is written, so it is an
engine of its own, on one device. The other choices of the release are options of the method.
"""

import jax
import jax.numpy as jnp

from experiments.run.build import Experiment, make_method
from pfl_jax import simulate
from pfl_jax.base import ClientData, Cohort, Method, PRNGKey, PyTree, State
from pfl_jax.data.federated import client_data
from pfl_jax.engine.body import Outcome
from pfl_jax.engine.build import Engine
from pfl_jax.engine.cohort import Settings, largest_first
from pfl_jax.engine.mapping import add_up
from pfl_jax.engine.rounds import score_client
from pfl_jax.messages import join, split
from pfl_jax.primitives.tree import all_finite, gather, scatter
from pfl_jax.schedules import at_round
from pfl_jax.streams import EVALUATION


def engine_of(experiment: Experiment) -> Engine:
    """Engine of an experiment with FedAS."""
    plain = make_method(experiment.spec, experiment.dataset, alignment=False)
    return engine(at_round(experiment.method, 0), at_round(plain, 0), experiment.settings)


def engine(aligned: Method, plain: Method, settings: Settings) -> Engine:
    """Engine of FedAS with the alignment in place.

    Cohorts, initial models and batches are those of `pfl_jax.run` with the same key: where a cohort has one client, all
    results are. A cohort is in the order of the hand-over. What clients would deploy is evaluated in cohorts of the
    usual size, each of which begins with the server's backbone.

    Args:
      aligned: `pfl_jax.methods.fedas` with the serial alignment towards a client's own features.
      plain: the same without alignment.
      settings: of the run.
    """

    def round_(data, state, size):
        drawn = simulate.sample_cohort(state.key, state.round, data.train_count, size, settings)
        round_key = jax.random.fold_in(state.key, state.round)
        # The key of the aggregation, which FedAS does not use.
        order = jax.random.permutation(jax.random.fold_in(round_key, data.num_clients), size)
        order = largest_first(data.train_count[drawn.clients])[order]
        clients, counts, present = gather((drawn.clients, drawn.counts, drawn.present), order)
        cohort = Cohort(clients, counts, present, data.num_clients)

        def one(backbone, client):
            key = jax.random.fold_in(round_key, client)
            kept, train = gather(state.clients, client), client_data(data, client, "train")
            # Splits the key as the method does within `local`.
            align_key, _ = jax.random.split(key)
            backbone = _received(aligned, align_key, state.server, backbone, kept, train)["backbone"]
            result = plain.local(key, state.server._replace(backbone=backbone), kept, train)
            trained = score_client(plain, result.personal, data, client)
            finite = all_finite((result.client, result.message))
            return backbone, (result.client, split(result.message, jnp.ones((), bool)), trained, finite)

        _, (rows, (messages, terms), trained, finite) = jax.lax.scan(one, state.server.backbone, cohort.clients)
        messages = join(messages, add_up(terms))
        server, rows, info = plain.aggregate(round_key, state.server, rows, messages, cohort)
        outcome = Outcome(cohort, finite, all_finite((server, rows)), jnp.sum(data.train_count[clients]), info)
        clients, trained = scatter((state.clients, state.trained), cohort.clients, (rows, trained))
        return State(server, clients, trained, state.key, state.round + 1), outcome

    def evaluate(data, state):
        key = jax.random.fold_in(jax.random.fold_in(state.key, EVALUATION), state.round)
        order = jax.random.permutation(jax.random.fold_in(key, data.num_clients), data.num_clients)
        size = settings.cohort_size(data.num_clients, 0)

        def one(backbone, place):
            client = order[place]
            start = jax.tree.map(
                lambda first, handed: jnp.where(place % size == 0, first, handed), state.server.backbone, backbone
            )
            kept, train = gather(state.clients, client), client_data(data, client, "train")
            personal = _received(aligned, jax.random.fold_in(key, client), state.server, start, kept, train)
            return personal["backbone"], score_client(aligned, personal, data, client)

        _, scores = jax.lax.scan(one, state.server.backbone, jnp.arange(data.num_clients))
        return jax.tree.map(lambda leaf: leaf[jnp.argsort(order)], scores)

    return simulate.build(aligned, settings)._replace(round=round_, evaluate=evaluate)


def _received(
    aligned: Method, key: PRNGKey, server: PyTree, backbone: PyTree, kept: PyTree, data: ClientData
) -> PyTree:
    """What a client has when it receives this backbone."""
    return aligned.personalize(key, server._replace(backbone=backbone), kept, data)
