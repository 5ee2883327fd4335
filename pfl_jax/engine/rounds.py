"""The round engine: cohort -> gather -> local (map, vmap or devices) -> aggregate -> scatter, as pure functions.

Every random number comes from the run's key through `fold_in`: client i in round r uses
fold_in(fold_in(key, r), i), the cohort of round r from its own stream. So a result depends neither on how the clients
are chunked, nor on other clients, nor on where a run was interrupted; and two methods see the same cohorts.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.random import fold_in
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pfl_jax.base import Cohort, Info, Method, MethodSchedule, PRNGKey, PyTree, Scores, State, at_round
from pfl_jax.data.federated import FederatedData, client_data
from pfl_jax.engine import mapping, means
from pfl_jax.engine.cohort import Settings, sample_cohort
from pfl_jax.engine.sharding import PlacedData, map_owned
from pfl_jax.primitives.metrics import score
from pfl_jax.primitives.tree import all_finite, choose, gather, scatter
from pfl_jax.streams import EVALUATION, INITIALIZATION, NEWCOMERS

Federation: TypeAlias = FederatedData | PlacedData
"""A federation's data, on every device whole or with the clients' owners."""


class Outcome(NamedTuple):
    """Result of one round besides the next state.

    Attributes:
      cohort: the participating clients; `present` marks those whose message arrived.
      finite: [M], bool: whose state, message and loss after training have neither NaN nor infinite values. The others
        are absent from the cohort and stay as they were.
      server_finite: bool, the same of the server's next state and of what it gave to the clients.
      examples: training examples of the drawn cohort, each counted once; absent clients included.
      info: the method's. Rows of absent clients mean nothing.
    """

    cohort: Cohort
    finite: jax.Array
    server_finite: jax.Array
    examples: jax.Array
    info: Info


class Engine(NamedTuple):
    """Federation of a method as pure functions, to be called under jit, vmap (for example over seeds) or scan.

    Attributes:
      init: (Federation, key) -> State.
      round: (Federation, State, size) -> (State, Outcome), with a cohort of `size` clients, a Python int.
      evaluate: (Federation, State) -> Scores [N] of what each client would deploy now: the protocol `received`.
      evaluate_new: (Federation, State) -> (received, trained), Scores [N] of clients that never took part: of what they
        would deploy with the server's state alone, and after local training of one round from there.
    """

    init: Callable[[Federation, PRNGKey], State]
    round: Callable[[Federation, State, int], tuple[State, Outcome]]
    evaluate: Callable[[Federation, State], Scores]
    evaluate_new: Callable[[Federation, State], tuple[Scores, Scores]]

    def jit(self, mesh: Mesh | None = None) -> "Engine":
        """This engine, compiled: one trace per cohort size. `round` donates the buffers of its input state."""
        # On a mesh every device holds the whole state between rounds; left to itself the compiler may lay it out
        # anew each round, and compile the round again for that.
        replicated = None if mesh is None else NamedSharding(mesh, PartitionSpec())
        return Engine(
            init=jax.jit(self.init, out_shardings=replicated),
            round=jax.jit(self.round, static_argnums=2, donate_argnums=1, out_shardings=replicated),
            evaluate=jax.jit(self.evaluate, out_shardings=replicated),
            evaluate_new=jax.jit(self.evaluate_new, out_shardings=replicated),
        )


class Training(NamedTuple):
    """Local training of a cohort, in cohort order.

    Attributes:
      rows: the clients' states after it, leaves [M, ...]; from before it where it diverged.
      messages: leaves [M, ...], () for each `Mean`; zeros for absent clients.
      scores: Scores [M] of their models right after it.
      finite: [M], see `Outcome`.
    """

    rows: PyTree
    messages: PyTree
    scores: Scores
    finite: jax.Array


@dataclass(frozen=True)
class Stages:
    """Stages of a round as pure functions over the rows of some clients, wherever the other rows are stored.

    Attributes:
      method, settings, mesh: see `pfl_jax.engine.simulate.run`.
      apart: where clients belong to devices, those keep what was mapped for themselves.
    """

    method: Method | MethodSchedule
    settings: Settings
    mesh: Mesh | None = None
    apart: bool = False

    def init_server(self, data: Federation, key: PRNGKey) -> PyTree:
        """The server's state before the first round."""
        num_clients = data.train_count.shape[0]
        return at_round(self.method, 0).init_server(fold_in(fold_in(key, INITIALIZATION), num_clients))

    def init_clients(self, data: Federation, server: PyTree, key: PRNGKey, clients: jax.Array) -> PyTree:
        """Rows of the clients [B] before the first round, leaves [B, ...]."""
        method = at_round(self.method, 0)

        def one(shared, client):
            data, server, key = shared
            return method.init_client(fold_in(key, client), server, client_data(data, client, "train"))

        return self._map(one, (data, server, fold_in(key, INITIALIZATION)), clients)

    def sample(self, data: Federation, key: PRNGKey, round_index: jax.Array, size: int) -> Cohort:
        """Cohort of a round."""
        return sample_cohort(key, round_index, data.train_count, size, self.settings)

    def train(
        self,
        data: Federation,
        server: PyTree,
        key: PRNGKey,
        round_index: jax.Array,
        cohort: Cohort,
        rows: PyTree,
        scores: Scores,
    ) -> tuple[PyTree, PyTree, Scores, Outcome]:
        """The body of every round: local training and aggregation.

        Args:
          data, server, key, round_index, cohort: of the round.
          rows: the cohort's states, leaves [M, ...].
          scores: Scores [M] of the models right after a client's own last training; clients that diverge keep theirs.

        Returns:
          The next server state, rows and scores, and the outcome.
        """
        method, round_key = at_round(self.method, round_index), fold_in(key, round_index)

        def one(shared, client):
            data, server, round_key = shared
            index, present, kept = client
            result = method.local(fold_in(round_key, index), server, kept, client_data(data, index, "train"))
            scores = score(method.predict, result.personal, client_data(data, index, "test"))
            finite = all_finite((result.client, result.message, scores.loss))
            messages, terms = means.split(result.message, present & finite)
            return Training(choose(finite, result.client, kept), messages, scores, finite), terms

        map_and_sum = self._map_and_sum(data)
        done, sums = map_and_sum(one, (data, server, round_key), (cohort.clients, cohort.present, rows))
        present = cohort.present & done.finite
        cohort = dataclasses.replace(cohort, counts=jnp.where(present, cohort.counts, 0), present=present)
        messages = means.join(done.messages, sums)
        aggregation_key = fold_in(round_key, cohort.num_clients)
        server, rows, info = method.aggregate(aggregation_key, server, done.rows, messages, cohort)
        rows, scores = choose(present, rows, done.rows), choose(done.finite, done.scores, scores)
        examples = jnp.sum(data.train_count[cohort.clients])
        return server, rows, scores, Outcome(cohort, done.finite, all_finite((server, rows)), examples, info)

    def evaluate(
        self, data: Federation, server: PyTree, key: PRNGKey, rounds: jax.Array, clients: jax.Array, rows: PyTree
    ) -> Scores:
        """Scores [B] of what clients [B] with these rows would deploy after so many rounds."""
        method = self._last(rounds)

        def one(shared, client):
            data, server, key = shared
            index, kept = client
            train = client_data(data, index, "train")
            personal = method.personalize(fold_in(key, index), server, kept, train)
            return score(method.predict, personal, client_data(data, index, "test"))

        return self._map(one, (data, server, fold_in(fold_in(key, EVALUATION), rounds)), (clients, rows))

    def evaluate_new(self, data: Federation, server: PyTree, key: PRNGKey, rounds: jax.Array) -> tuple[Scores, Scores]:
        """Scores (received, trained) of clients that never took part, see `Engine.evaluate_new`."""
        method = self._last(rounds)

        def one(shared, index):
            data, server, key = shared
            keys = jax.random.split(fold_in(key, index), 3)
            train, test = (client_data(data, index, split) for split in ("train", "test"))
            kept = method.init_client(keys[0], server, train)
            received = method.personalize(keys[1], server, kept, train)
            trained = method.local(keys[2], server, kept, train).personal
            return score(method.predict, received, test), score(method.predict, trained, test)

        order = by_size(data)
        return in_place(order, self._map(one, (data, server, fold_in(fold_in(key, NEWCOMERS), rounds)), order))

    def _last(self, rounds: jax.Array) -> Method:
        """The method of the last of so many rounds, of the first before there was any."""
        return at_round(self.method, jnp.maximum(rounds - 1, 0))

    def _map_and_sum(self, data: Federation) -> Callable[..., tuple[Any, PyTree]]:
        """`mapping.map_and_sum`, on the devices that own the clients if there are such."""
        if isinstance(data, PlacedData):
            return partial(map_owned, chunk=self.settings.chunk, apart=self.apart)
        return partial(mapping.map_and_sum, chunk=self.settings.chunk, mesh=self.mesh)

    def _map(self, fn: Callable[..., Any], shared: tuple[Any, ...], clients: PyTree) -> Any:
        """Results of fn(shared, client) for clients [B]; `shared` begins with the data."""
        rows, _ = self._map_and_sum(shared[0])(lambda *arguments: (fn(*arguments), ()), shared, clients)
        return rows


def by_size(data: Federation) -> jax.Array:
    """Ids of all clients [N], largest first, as in a cohort, so that chunks hold clients of similar size."""
    return jnp.argsort(-data.train_count, stable=True).astype(jnp.int32)


def in_place(order: jax.Array, rows: PyTree) -> PyTree:
    """Rows of all clients [N, ...] in this order, sorted by client id."""
    return scatter(jax.tree.map(jnp.zeros_like, rows), order, rows)


def build(method: Method | MethodSchedule, settings: Settings, mesh: Mesh | None = None) -> Engine:
    """Engine of a method. See `pfl_jax.engine.simulate.run` for the arguments."""
    parts = Stages(method, settings, mesh)

    def init(data, key):
        num_clients = data.train_count.shape[0]
        server = parts.init_server(data, key)
        never = jnp.full((num_clients,), jnp.nan, jnp.float32)
        return State(
            server=server,
            clients=parts.init_clients(data, server, key, jnp.arange(num_clients, dtype=jnp.int32)),
            # Arrays of their own: the buffers are given away one by one.
            trained=Scores(*(never + 0 for _ in Scores._fields)),
            key=key,
            round=jnp.zeros((), jnp.int32),
        )

    def round_(data, state, size):
        cohort = parts.sample(data, state.key, state.round, size)
        everyone = state.clients, state.trained
        of_cohort = gather(everyone, cohort.clients)
        server, *of_cohort, outcome = parts.train(data, state.server, state.key, state.round, cohort, *of_cohort)
        clients, trained = scatter(everyone, cohort.clients, tuple(of_cohort))
        return State(server, clients, trained, state.key, state.round + 1), outcome

    def evaluate(data, state):
        order = by_size(data)
        scores = parts.evaluate(data, state.server, state.key, state.round, order, gather(state.clients, order))
        return in_place(order, scores)

    def evaluate_new(data, state):
        return parts.evaluate_new(data, state.server, state.key, state.round)

    return Engine(init, round_, evaluate, evaluate_new)
