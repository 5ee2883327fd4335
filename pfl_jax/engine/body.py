"""Body of a round over the clients of all networks, and its outcome."""

import dataclasses
from collections.abc import Sequence
from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.random import fold_in
from jax.sharding import Mesh

from pfl_jax.base import Cohort, Info, Method, PRNGKey, PyTree, Scores, State
from pfl_jax.engine.cohort import RoundSettings, sample_cohort
from pfl_jax.engine.mapping import in_client_order
from pfl_jax.engine.rounds import RoundProgram
from pfl_jax.engine.store import Federation, Places
from pfl_jax.messages import join
from pfl_jax.primitives.tree import all_finite, choose, gather, scatter
from pfl_jax.schedules import MethodSchedule, mixture


class Outcome(NamedTuple):
    """Result of one round besides the next state.

    Attributes:
      cohort: the participating clients; `present` marks those whose message arrived.
      finite: [M], bool: whether a client's state and message after training are free of NaN and infinity. Other clients
        become absent and keep their previous state. Scores are not checked: no test example affects training.
      server_finite: bool, the same for the server's next state and the client states that the server computed.
      examples: training examples of the drawn cohort, each counted once; absent clients included.
      info: the method's `Info`; rows belong to the clients of `cohort`, in that order. Rows of absent clients are
        meaningless.
    """

    cohort: Cohort
    finite: jax.Array
    server_finite: jax.Array
    examples: jax.Array
    info: Info


def round_programs(
    method: Method | MethodSchedule, settings: RoundSettings, mesh: Mesh | None
) -> tuple[RoundProgram, ...]:
    """One RoundProgram for each network of a method (several for a `Mixed`), with the run's settings and mesh."""
    mixed = mixture(method)
    networks = (None,) if mixed is None else range(len(mixed.methods))
    return tuple(RoundProgram(method, settings, mesh, network) for network in networks)


def chain_of(
    method: Method | MethodSchedule, settings: RoundSettings, state: State, num_clients: int, client: int
) -> tuple[int | None, PyTree, tuple[np.ndarray, PyTree, int]]:
    """States from which a client's model is built, as `RoundProgram.personal` takes them.

    Returns:
      Position of the client's network, None if all have the same; the state of its server; and its chain: the clients
      that take turns in an evaluation (without turns one), their states, and the client's position among them.
    """
    mixed, network, server, clients = mixture(method), None, state.server, state.clients
    members = np.arange(num_clients)
    if mixed is not None:
        network = int(mixed.networks(num_clients)[client])
        server, clients, members = server[network], clients[network], mixed.members(network, num_clients)
    row, program = int(np.searchsorted(members, client)), round_programs(method, settings, None)[network or 0]
    chain = settings.usual_size(num_clients) if program.deploys_in_turn else 1
    rows = np.arange(row - row % chain, min(row - row % chain + chain, len(members)))
    return network, server, (members[rows], gather(clients, rows), row % chain)


def sample(
    programs: Sequence[RoundProgram],
    data: Federation,
    key: PRNGKey,
    round_index: jax.Array,
    size: int,
    losses: jax.Array | None,
) -> tuple[Cohort, tuple[Places, ...]]:
    """Cohort of a round, see `sample_cohort`, and its places for each program."""
    cohort = sample_cohort(key, round_index, data.train_count, size, programs[0].settings, losses, data.active)
    return cohort, tuple(one.assign_devices(data, cohort.clients)[-1] for one in programs)


def train(
    programs: Sequence[RoundProgram],
    data: Federation,
    servers: Sequence[PyTree],
    trained: Scores,
    rows: Sequence[PyTree],
    key: PRNGKey,
    round_index: jax.Array,
    cohort: Cohort,
) -> tuple[list[PyTree], Scores, list[tuple[jax.Array, PyTree]], Outcome]:
    """Body of every round: local training and aggregation.

    `servers` and `rows` are, for each network, the server's state and the states of the clients, leaves [D, W, ...].

    Returns:
      The next server states; the next scores of the clients' models right after their own last training; for each
      network, numbers of the updated clients, ascending, N or more in free places (None for all), and their next
      states; and the outcome.
    """
    mesh, size = data.mesh or programs[0].mesh, len(cohort.clients)
    everyone = size == data.num_clients
    parts = [
        one.local(data, server, own, key, round_index, cohort)
        for one, server, own in zip(programs, servers, rows, strict=True)
    ]
    positions = _joined([jnp.append(own, size)[order] for own, order, *_ in parts])
    sent = _joined([sent for *_, sent, _ in parts])
    messages, scores, finite = in_client_order(positions, size, sent, mesh)
    present = cohort.present & finite
    examples = jnp.sum(data.train_count[cohort.clients])
    cohort = dataclasses.replace(cohort, counts=jnp.where(present, cohort.counts, 0), present=present)
    messages = join(messages, reduce(partial(jax.tree.map, jnp.add), [sums for *_, sums in parts]))
    aggregation_key = fold_in(fold_in(key, round_index), cohort.num_clients)
    after, written, infos = [], [], []
    for one, server, (own, order, states, *_) in zip(programs, servers, parts, strict=True):
        before = in_client_order(order, len(own), states, mesh)
        method = one.method_of(round_index)
        server, clients, info = method.aggregate(aggregation_key, server, before, messages, cohort)
        clients = choose(jnp.append(present, False)[own], clients, before)
        after, infos = [*after, server], [*infos, info]
        # Free places have distinct numbers too, as a scatter needs them.
        ids = jnp.append(cohort.clients, cohort.num_clients)[own]
        ids = jnp.where(ids < cohort.num_clients, ids, cohort.num_clients + jnp.arange(len(own)))
        written.append((None if everyone else ids, clients))
    previous = trained if everyone else gather(trained, cohort.clients)
    scores = choose(finite if data.active is None else finite & data.active[cohort.clients], scores, previous)
    trained = scores if everyone else scatter(trained, cohort.clients, scores)
    outcome = Outcome(cohort, finite, all_finite((after, [rows for _, rows in written])), examples, infos[0])
    return after, trained, written, outcome


def _joined(parts: Sequence[PyTree]) -> PyTree:
    """Rows [D, W, ...] of several networks, side by side in one table."""
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *leaves: jnp.concatenate(leaves, 1), *parts)
