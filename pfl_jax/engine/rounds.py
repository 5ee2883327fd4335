"""The round engine: cohort -> gather -> local (map, vmap or devices) -> aggregate -> scatter, as pure functions.

Every random number comes from the run's key through `fold_in`: client i in round r uses
fold_in(fold_in(key, r), i), the cohort of round r a stream of its own. So a result depends neither on how the clients
are chunked, nor on other clients, nor on where a run was interrupted; and two methods see the same cohorts.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pfl_jax.base import Cohort, Info, Method, PRNGKey, PyTree, Scores, State
from pfl_jax.data.federated import FederatedData, client_data
from pfl_jax.engine.cohort import Settings, arriving, sample_cohort
from pfl_jax.engine.mapping import map_clients
from pfl_jax.engine.sharding import PlacedData, map_owned
from pfl_jax.errors import Diverged
from pfl_jax.primitives.metrics import score
from pfl_jax.primitives.tree import all_finite, choose, gather, scatter
from pfl_jax.streams import EVALUATION, INITIALIZATION, NEWCOMERS

Federation: TypeAlias = FederatedData | PlacedData
"""A federation's data, on every device whole or with the clients' owners."""


class Outcome(NamedTuple):
    """What a round has to tell besides the next state.

    Attributes:
      cohort: who took part.
      arrived: [M], bool: whose message the server had. `info` has these clients in its rows, in the cohort's order.
      finite: [M], bool: whose state, message and loss after training have neither NaN nor infinite values.
      server_finite: bool, the same of the server's next state and of what it gave to the clients.
      info: the method's.
    """

    cohort: Cohort
    arrived: jax.Array
    finite: jax.Array
    server_finite: jax.Array
    info: Info


class Engine(NamedTuple):
    """A method's federation as pure functions, to be called under jit, vmap (over seeds, say) or scan.

    Attributes:
      init: (Federation, key) -> State.
      round: (Federation, State, size) -> (State, Outcome), with a cohort of `size` clients, a Python int.
      evaluate: (Federation, State) -> Scores [N] of what each client would deploy now: the protocol `received`.
      adapt: (Federation, State) -> (received, trained), Scores [N] of clients that never took part: of what they
        would deploy with the server's state alone, and after local training of one round from there.
    """

    init: Callable[[Federation, PRNGKey], State]
    round: Callable[[Federation, State, int], tuple[State, Outcome]]
    evaluate: Callable[[Federation, State], Scores]
    adapt: Callable[[Federation, State], tuple[Scores, Scores]]

    def jit(self, mesh: Mesh | None = None) -> "Engine":
        """The same, compiled: one trace per cohort size. `round` takes over the buffers of the state it is given."""
        # On a mesh every device holds the whole state between rounds; left to itself the compiler may lay it out
        # anew each round, and compile the round again for that.
        everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
        return Engine(
            init=jax.jit(self.init, out_shardings=everywhere),
            round=jax.jit(self.round, static_argnums=2, donate_argnums=1, out_shardings=everywhere),
            evaluate=jax.jit(self.evaluate, out_shardings=everywhere),
            adapt=jax.jit(self.adapt, out_shardings=everywhere),
        )


class Work(NamedTuple):
    """What the clients of a cohort have done, in its order.

    Attributes:
      rows: their states after local training, leaves [M, ...].
      messages: leaves [M, ...].
      trained: Scores [M] of their models right after it.
      finite: [M], see `Outcome`.
    """

    rows: PyTree
    messages: PyTree
    trained: Scores
    finite: jax.Array


class Pieces(NamedTuple):
    """What an engine is made of: pure functions over the rows of some clients, wherever the others are kept.

    Attributes:
      start_server: (Federation, key) -> Server.
      start_clients: (Federation, Server, key, clients [B]) -> rows of those clients, leaves [B, ...].
      sample: (Federation, key, round, size) -> Cohort.
      arriving: (key, round, size) -> positions [M'] in a cohort of `size` whose messages arrive.
      work: (Federation, Server, key, round, Cohort, rows [M]) -> Work. Every client's part of a round.
      merge: (Server, key, round, Cohort, positions [M'], rows [M], Work) -> (Server, rows [M], Outcome). The server's
        part, with the messages at these positions; `rows` are those from before the round. Of the other clients
        those that are finite keep their work, the rest stay as they were.
      score: (Federation, Server, key, round, clients [B], rows [B]) -> Scores [B] of what they would deploy now.
      adapt: (Federation, Server, key, round) -> (received, trained), see `Engine`.
    """

    start_server: Callable[[Federation, PRNGKey], PyTree]
    start_clients: Callable[[Federation, PyTree, PRNGKey, jax.Array], PyTree]
    sample: Callable[[Federation, PRNGKey, jax.Array, int], Cohort]
    arriving: Callable[[PRNGKey, jax.Array, int], jax.Array]
    work: Callable[[Federation, PyTree, PRNGKey, jax.Array, Cohort, PyTree], Work]
    merge: Callable[[PyTree, PRNGKey, jax.Array, Cohort, jax.Array, PyTree, Work], tuple[PyTree, PyTree, Outcome]]
    score: Callable[[Federation, PyTree, PRNGKey, jax.Array, jax.Array, PyTree], Scores]
    adapt: Callable[[Federation, PyTree, PRNGKey, jax.Array], tuple[Scores, Scores]]

    def train(
        self, data: Federation, server: PyTree, key: PRNGKey, round_index: jax.Array, cohort: Cohort, rows: PyTree
    ) -> tuple[PyTree, PyTree, Scores, Outcome]:
        """A whole round of a cohort: (Server, rows [M], the trained models' Scores [M], Outcome)."""
        work = self.work(data, server, key, round_index, cohort, rows)
        positions = self.arriving(key, round_index, cohort.clients.shape[0])
        server, rows, outcome = self.merge(server, key, round_index, cohort, positions, rows, work)
        return server, rows, work.trained, outcome


def pieces(method: Method, settings: Settings, mesh: Mesh | None = None, *, apart: bool = False) -> Pieces:
    """The pieces of a method's engine.

    Args:
      method, settings, mesh: see `pfl_jax.engine.simulate.run`.
      apart: where clients belong to devices, those keep what was mapped for themselves.
    """

    def map_all(fn, shared, clients):
        if isinstance(shared[0], PlacedData):
            return map_owned(fn, shared, clients, chunk=settings.chunk, apart=apart)
        return map_clients(fn, shared, clients, chunk=settings.chunk, mesh=mesh)

    def start_server(data, key):
        num_clients = data.train_count.shape[0]
        return method.init_server(jax.random.fold_in(jax.random.fold_in(key, INITIALIZATION), num_clients))

    def start_clients(data, server, key, clients):
        def one(shared, client):
            data, server, key = shared
            return method.init_client(jax.random.fold_in(key, client), server, client_data(data, client, "train"))

        return map_all(one, (data, server, jax.random.fold_in(key, INITIALIZATION)), clients)

    def sample(data, key, round_index, size):
        return sample_cohort(key, round_index, data.train_count, size, settings)

    def work(data, server, key, round_index, cohort, rows):
        def one(shared, client):
            data, server, round_key = shared
            index, kept = client
            key = jax.random.fold_in(round_key, index)
            result = method.local(key, server, kept, client_data(data, index, "train"))
            trained = score(method.predict, result.personal, client_data(data, index, "test"))
            finite = all_finite((result.client, result.message, trained.loss))
            return Work(result.client, result.message, trained, finite)

        return map_all(one, (data, server, jax.random.fold_in(key, round_index)), (cohort.clients, rows))

    def merge(server, key, round_index, cohort, positions, rows, work):
        aggregation_key = jax.random.fold_in(jax.random.fold_in(key, round_index), cohort.num_clients)
        (size,), everyone = cohort.clients.shape, positions.shape == cohort.clients.shape
        present = (
            cohort if everyone else Cohort(cohort.clients[positions], cohort.counts[positions], cohort.num_clients)
        )
        kept, messages = (work.rows, work.messages) if everyone else gather((work.rows, work.messages), positions)
        server, kept, info = method.aggregate(aggregation_key, server, kept, messages, present)
        arrived = jnp.zeros(size, bool).at[positions].set(True)
        if not everyone:
            kept = scatter(choose(work.finite, work.rows, rows), positions, kept)
        return server, kept, Outcome(cohort, arrived, work.finite, all_finite((server, kept)), info)

    def score_clients(data, server, key, round_index, clients, rows):
        key = jax.random.fold_in(jax.random.fold_in(key, EVALUATION), round_index)

        def one(shared, client):
            data, server, key = shared
            index, kept = client
            train = client_data(data, index, "train")
            personal = method.personalize(jax.random.fold_in(key, index), server, kept, train)
            return score(method.predict, personal, client_data(data, index, "test"))

        return map_all(one, (data, server, key), (clients, rows))

    def adapt(data, server, key, round_index):
        key = jax.random.fold_in(jax.random.fold_in(key, NEWCOMERS), round_index)

        def one(shared, index):
            data, server, key = shared
            keys = jax.random.split(jax.random.fold_in(key, index), 3)
            train, test = (client_data(data, index, split) for split in ("train", "test"))
            kept = method.init_client(keys[0], server, train)
            received = method.personalize(keys[1], server, kept, train)
            trained = method.local(keys[2], server, kept, train).personal
            return score(method.predict, received, test), score(method.predict, trained, test)

        order = by_size(data)
        return in_place(order, map_all(one, (data, server, key), order))

    return Pieces(
        start_server, start_clients, sample, partial(arriving, settings=settings), work, merge, score_clients, adapt
    )


def by_size(data: Federation) -> jax.Array:
    """All clients [N], the largest first, as in a cohort: a chunk then holds clients of similar size."""
    return jnp.argsort(-data.train_count, stable=True).astype(jnp.int32)


def in_place(order: jax.Array, rows: PyTree) -> PyTree:
    """Rows of all clients [N, ...], which come in this order, by the clients' numbers."""
    return scatter(jax.tree.map(jnp.zeros_like, rows), order, rows)


def build(method: Method, settings: Settings, mesh: Mesh | None = None) -> Engine:
    """The engine of a method. See `pfl_jax.engine.simulate.run` for the arguments."""
    parts = pieces(method, settings, mesh)

    def init(data, key):
        num_clients = data.train_count.shape[0]
        server = parts.start_server(data, key)
        never = jnp.full((num_clients,), jnp.nan, jnp.float32)
        return State(
            server=server,
            clients=parts.start_clients(data, server, key, jnp.arange(num_clients, dtype=jnp.int32)),
            # Arrays of their own: the buffers are given away one by one.
            trained=Scores(*(never + 0 for _ in Scores._fields)),
            key=key,
            round=jnp.zeros((), jnp.int32),
        )

    def round_(data, state, size):
        cohort = parts.sample(data, state.key, state.round, size)
        rows = gather(state.clients, cohort.clients)
        server, rows, trained, outcome = parts.train(data, state.server, state.key, state.round, cohort, rows)
        return next_state(state, cohort, server, rows, trained), outcome

    def evaluate(data, state):
        order = by_size(data)
        scores = parts.score(data, state.server, state.key, state.round, order, gather(state.clients, order))
        return in_place(order, scores)

    def adapt(data, state):
        return parts.adapt(data, state.server, state.key, state.round)

    return Engine(init, round_, evaluate, adapt)


def train_without_diverged(parts: Pieces, jit: Callable[..., Any]) -> Callable[..., Any]:
    """As `Pieces.train`, but clients whose work is not finite are left out, as if they had not been drawn.

    How many those are is known only after their training: the host looks, and the server's part is compiled for each
    number of clients that are left.

    Args:
      parts: of the engine.
      jit: compiles a function, with jax.jit's keyword arguments.

    Returns:
      A function for calls, not for tracing, with the arguments of `Pieces.train` and the scores [M] of the clients'
      models from before. It raises Diverged where no client is left.
    """
    work, arrive = jit(parts.work), jit(parts.arriving, static_argnums=2)

    @partial(jit, static_argnums=0)
    def merge(num_clients, server, key, round_index, cohort, *rest):
        # As an array the number of clients would be unknown while tracing.
        return parts.merge(server, key, round_index, cohort._replace(num_clients=num_clients), *rest)

    keep = jit(choose)

    def train(data, server, key, round_index, cohort, rows, scores):
        done = work(data, server, key, round_index, cohort, rows)
        finite, positions = np.asarray(done.finite), np.asarray(arrive(key, round_index, cohort.clients.shape[0]))
        positions = positions[finite[positions]]
        if not positions.size:
            raise Diverged(int(round_index) + 1, sorted(np.asarray(cohort.clients)[~finite].tolist()))
        server, rows, outcome = merge(
            data.train_count.shape[0], server, key, round_index, cohort, positions, rows, done
        )
        return server, rows, keep(done.finite, done.trained, scores), outcome

    return train


def build_without_diverged(method: Method, settings: Settings, mesh: Mesh | None = None) -> Engine:
    """An engine that leaves diverged clients out of a round. As `build(...).jit(mesh)`, for calls only."""
    parts, engine = pieces(method, settings, mesh), build(method, settings, mesh).jit(mesh)
    everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    jit = partial(jax.jit, out_shardings=everywhere)
    sample, rows_of, write = jit(parts.sample, static_argnums=3), jit(gather), jit(next_state, donate_argnums=0)
    train = train_without_diverged(parts, jit)

    def round_(data, state, size):
        cohort = sample(data, state.key, state.round, size)
        rows, scores = rows_of((state.clients, state.trained), cohort.clients)
        server, rows, trained, outcome = train(data, state.server, state.key, state.round, cohort, rows, scores)
        return write(state, cohort, server, rows, trained), outcome

    return engine._replace(round=round_)


def next_state(state: State, cohort: Cohort, server: PyTree, rows: PyTree, trained: Scores) -> State:
    """The state after a round that changed the server and the rows [M] of a cohort."""
    return State(
        server=server,
        clients=scatter(state.clients, cohort.clients, rows),
        trained=scatter(state.trained, cohort.clients, trained),
        key=state.key,
        round=state.round + 1,
    )
