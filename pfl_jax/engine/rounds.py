"""Round engine as pure functions: sample a cohort, gather its states, train, aggregate, scatter the states back.

All random numbers come from the run's key through `fold_in`: client i in round r uses fold_in(fold_in(key, r), i), and
the cohort of round r has a stream of its own. A result therefore does not depend on chunks, on other clients or on
where a run was interrupted, and two methods see the same cohorts.
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

from pfl_jax.base import Cohort, Info, Method, MethodSchedule, Personal, PRNGKey, PyTree, Scores, State, at_round
from pfl_jax.data.federated import FederatedData, OwnClients, client_data
from pfl_jax.engine import attacks, mapping, means
from pfl_jax.engine.attacks import Attackers, training_data
from pfl_jax.engine.cohort import Settings, evaluated_clients, largest_first, sample_cohort
from pfl_jax.engine.programs import kept
from pfl_jax.engine.sharding import PlacedData, map_owned
from pfl_jax.errors import InvalidInput
from pfl_jax.primitives.metrics import no_scores, score
from pfl_jax.primitives.tree import all_finite, choose, gather, scatter
from pfl_jax.streams import EVALUATION, INITIALIZATION, NEWCOMERS, SURVEY

Federation: TypeAlias = FederatedData | PlacedData
"""A federation's data: replicated on every device, or sharded by client."""


class Outcome(NamedTuple):
    """Result of one round besides the next state.

    Attributes:
      cohort: the participating clients; `present` marks those whose message arrived.
      finite: [M], bool: whether a client's state and message after training are free of NaN and infinity. Other clients
        become absent and keep their previous state. Scores do not count: nothing of the test set reaches the training.
      server_finite: bool, the same for the server's next state and for the client states that it computed.
      examples: training examples of the drawn cohort, each counted once; absent clients included.
      info: the method's `Info`; rows are those of `cohort.clients`, in that order. Rows of absent clients are
        meaningless.
    """

    cohort: Cohort
    finite: jax.Array
    server_finite: jax.Array
    examples: jax.Array
    info: Info


class Engine(NamedTuple):
    """Federated training with one method as pure functions, for use under jit, vmap (over seeds, say) or scan.

    Attributes:
      init: (Federation, key) -> State.
      round: (Federation, State, size) -> (State, Outcome); `size`, a Python int, is the number of clients in the
        cohort.
      evaluate: (Federation, State) -> Scores [N] of the model that each client would deploy now (protocol `received`).
      evaluate_new: (Federation, State) -> (received, trained), Scores [N] of clients that never took part: of the model
        they would deploy given the server's state, and of that model after one round of local training.
    """

    init: Callable[[Federation, PRNGKey], State]
    round: Callable[[Federation, State, int], tuple[State, Outcome]]
    evaluate: Callable[[Federation, State], Scores]
    evaluate_new: Callable[[Federation, State], tuple[Scores, Scores]]

    def jit(self, mesh: Mesh | None = None, *, donate: bool = False) -> "Engine":
        """Compiled engine, with one trace per cohort size.

        Args:
          mesh: see `pfl_jax.engine.simulate.run`.
          donate: whether `round` takes over the buffers of its input state, which cannot be used afterwards.
        """
        # Explicit output shardings: the compiler could otherwise choose a new layout of the state each round, and
        # every new layout of the inputs compiles the round again.
        replicated = None if mesh is None else NamedSharding(mesh, PartitionSpec())
        donated = (1,) if donate else ()
        return Engine(
            init=jax.jit(self.init, out_shardings=replicated),
            round=jax.jit(self.round, static_argnums=2, donate_argnums=donated, out_shardings=replicated),
            evaluate=jax.jit(self.evaluate, out_shardings=replicated),
            evaluate_new=jax.jit(self.evaluate_new, out_shardings=replicated),
        )


class Training(NamedTuple):
    """Local training of a cohort, in cohort order.

    Attributes:
      rows: the clients' states after training, leaves [M, ...]; the previous state for a client that diverged.
      messages: leaves [M, ...], () for each `Mean`; zeros for absent clients.
      scores: Scores [M] of the clients' models right after training.
      finite: [M], see `Outcome`.
    """

    rows: PyTree
    messages: PyTree
    scores: Scores
    finite: jax.Array


@dataclass(frozen=True)
class Stages:
    """Stages of a round as pure functions of some clients' states, wherever the states are stored between rounds.

    Attributes:
      method, settings, mesh: see `pfl_jax.engine.simulate.run`.
      keep_sharded: with `PlacedData`, leave mapped results on the devices that own the clients.
      num_labels: number of classes that the labels need, which is checked while tracing; 0 for no check.
    """

    method: Method | MethodSchedule
    settings: Settings
    mesh: Mesh | None = None
    keep_sharded: bool = False
    num_labels: int = 0

    def init_server(self, data: Federation, key: PRNGKey) -> PyTree:
        """The server's state before the first round."""
        method, num_clients = at_round(self.method, 0), data.train_count.shape[0]
        server, survey = method.init_server(fold_in(fold_in(key, INITIALIZATION), num_clients)), method.survey
        if survey is None:
            return server

        def ask_one(shared, client):
            data, server, key, attackers = shared
            message = survey.local(fold_in(key, client), server, training_data(data, client, attackers))
            return means.split(message, jnp.ones((), bool), single=method.server_mean is not None)

        order, attackers = largest_first(data.train_count), self._attackers(data, key)
        shared = (data, server, fold_in(key, SURVEY), attackers)
        rows, sums = self._map_and_sum(data, order)(ask_one, shared, order)
        return survey.aggregate(server, means.join(rows, sums, method.server_mean))

    def init_clients(self, data: Federation, server: PyTree, key: PRNGKey, clients: jax.Array) -> PyTree:
        """States of the clients [B] before the first round, leaves [B, ...]."""
        method = at_round(self.method, 0)

        def init_one(shared, client):
            data, server, key, attackers = shared
            return method.init_client(fold_in(key, client), server, training_data(data, client, attackers))

        return self._map(init_one, (data, server, fold_in(key, INITIALIZATION), self._attackers(data, key)), clients)

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
        """Body of every round: local training and aggregation.

        Args:
          data, server, key, round_index, cohort: inputs of the round.
          rows: the cohort's states, leaves [M, ...].
          scores: Scores [M] of each client's model right after its own last training; clients that diverge keep them.

        Returns:
          The next server state, rows and scores, and the outcome.
        """
        method, round_key = at_round(self.method, round_index), fold_in(key, round_index)

        def train_one(shared, client):
            data, server, round_key, attackers = shared
            index, present, state = client
            own_key = fold_in(round_key, index)
            result = method.local(own_key, server, state, training_data(data, index, attackers))
            message = attacks.sent(own_key, result.message, attackers, index, method, server, state)
            scores = score_client(self._checked(method), result.personal, data, index)
            finite = all_finite((result.client, message))
            messages, terms = means.split(message, present & finite, single=method.server_mean is not None)
            return Training(choose(finite, result.client, state), messages, scores, finite), terms

        # Clients of a chunk have similar sizes if the largest train first.
        sizes = data.train_count[cohort.clients]
        order = largest_first(sizes)
        inputs = gather((cohort.clients, cohort.present, rows), order)
        map_and_sum = self._map_and_sum(data, inputs[0])
        training, sums = map_and_sum(train_one, (data, server, round_key, self._attackers(data, key)), inputs)
        training = in_client_order(order, training)
        present = cohort.present & training.finite
        cohort = dataclasses.replace(cohort, counts=jnp.where(present, cohort.counts, 0), present=present)
        messages = means.join(training.messages, sums, method.server_mean)
        aggregation_key = fold_in(round_key, cohort.num_clients)
        server, rows, info = method.aggregate(aggregation_key, server, training.rows, messages, cohort)
        rows, scores = choose(present, rows, training.rows), choose(training.finite, training.scores, scores)
        return server, rows, scores, Outcome(cohort, training.finite, all_finite((server, rows)), jnp.sum(sizes), info)

    def evaluated(self, data: Federation, key: PRNGKey) -> jax.Array:
        """Clients [B] that are evaluated by `received`, in the order of their evaluation."""
        return evaluated_clients(key, data.train_count, self.settings)

    def evaluate(
        self, data: Federation, server: PyTree, key: PRNGKey, rounds: jax.Array, clients: jax.Array, rows: PyTree
    ) -> Scores:
        """Scores [B] of the models that clients [B] with states `rows` would deploy after `rounds` rounds."""
        method = self._last_method(rounds)

        def evaluate_one(shared, client):
            data, server, key, attackers = shared
            index, state = client
            train = training_data(data, index, attackers)
            personal = method.personalize(fold_in(key, index), server, state, train)
            return score_client(self._checked(method), personal, data, index)

        attackers = self._attackers(data, key)
        return self._map(
            evaluate_one, (data, server, fold_in(fold_in(key, EVALUATION), rounds), attackers), (clients, rows)
        )

    def evaluate_new(self, data: Federation, server: PyTree, key: PRNGKey, rounds: jax.Array) -> tuple[Scores, Scores]:
        """Scores (received, trained) of clients that never took part, see `Engine.evaluate_new`."""
        method = self._last_method(rounds)

        def evaluate_one(shared, index):
            data, server, key = shared
            keys = jax.random.split(fold_in(key, index), 3)
            train, test = (client_data(data, index, split) for split in ("train", "test"))
            state = method.init_client(keys[0], server, train)
            received = method.personalize(keys[1], server, state, train)
            trained = method.local(keys[2], server, state, train).personal
            predict = self._checked(method).predict
            return score(predict, received, test), score(predict, trained, test)

        order = largest_first(data.train_count)
        shared = (data, server, fold_in(fold_in(key, NEWCOMERS), rounds))
        return in_client_order(order, self._map(evaluate_one, shared, order))

    def _attackers(self, data: Federation, key: PRNGKey) -> Attackers | None:
        """Attackers of the run with this key; None if nobody attacks."""
        settings = self.settings
        return attacks.draw(
            key, data.train_count.shape[0], settings.attack, settings.attackers, settings.attack_scale, self.num_labels
        )

    def _checked(self, method: Method) -> Method:
        """Method that raises InvalidInput while it is traced if its model cannot tell all labels apart."""

        def predict(personal, inputs):
            logits = method.predict(personal, inputs)
            if logits.ndim != 2:
                raise InvalidInput(f"predictions must be logits [B, K], not {list(logits.shape)}")
            if logits.shape[1] < self.num_labels:
                raise InvalidInput(
                    f"the model has {logits.shape[1]} classes, and a label is {self.num_labels - 1}: build it for "
                    "dataset.num_classes"
                )
            return logits

        return method._replace(predict=predict)

    def _last_method(self, rounds: jax.Array) -> Method:
        """Method of the last of `rounds` completed rounds; of the first round if there are none."""
        return at_round(self.method, jnp.maximum(rounds - 1, 0))

    def _map_and_sum(self, data: Federation, clients: jax.Array) -> Callable[..., tuple[Any, PyTree]]:
        """`mapping.map_and_sum`, or `map_owned` for sharded data, with the settings of this run, for these clients."""
        chunk = self.settings.chunk
        if chunk == "auto":
            # `run` has chosen by the clients' sizes, which are not known here.
            chunk = 1 if jax.default_backend() == "cpu" else None
        if isinstance(data, PlacedData):
            return partial(map_owned, chunk=chunk, keep_sharded=self.keep_sharded)
        return partial(mapping.map_and_sum, chunk=chunk, mesh=self.mesh, loads=data.train_count[clients])

    def _map(self, fn: Callable[..., Any], shared: tuple[Any, ...], clients: PyTree) -> Any:
        """Results of fn(shared, client) for clients [B]; shared[0] is the data, the first leaf of `clients` ids."""
        map_and_sum = self._map_and_sum(shared[0], jax.tree.leaves(clients)[0])
        rows, _ = map_and_sum(lambda *arguments: (fn(*arguments), ()), shared, clients)
        return rows


def score_client(
    method: Method, personal: Personal, data: FederatedData | OwnClients, client: int | jax.Array
) -> Scores:
    """Scores of a client's model on its test examples and, where the federation has them, validation examples."""
    scores = score(method.predict, personal, client_data(data, client, "test"))
    federation = data.data if isinstance(data, OwnClients) else data
    if federation.validation_count is None:
        return scores
    return scores._replace(validation=score(method.predict, personal, client_data(data, client, "validation")))


def in_client_order(order: jax.Array, rows: PyTree) -> PyTree:
    """Rows [M, ...] in their original order: row order[j] of the result is row j of `rows`."""
    return gather(rows, jnp.argsort(order))


def build(
    method: Method | MethodSchedule, settings: Settings, mesh: Mesh | None = None, *, num_labels: int = 0
) -> Engine:
    """Engine of a method. See `pfl_jax.engine.simulate.run` and `Stages` for the arguments.

    The engine learns the clients' sizes too late to choose `Settings.chunk` by them: "auto" is 1 on a CPU here, and all
    clients at once elsewhere; `pfl_jax.engine.chunking.resolved` makes the choice of `run`.
    """
    stages = Stages(method, settings, mesh, num_labels=num_labels)

    def init(data, key):
        num_clients = data.train_count.shape[0]
        server = stages.init_server(data, key)
        return State(
            server=server,
            clients=stages.init_clients(data, server, key, jnp.arange(num_clients, dtype=jnp.int32)),
            # A separate array for each field: every buffer is donated once.
            trained=jax.tree.map(jnp.array, no_scores(num_clients, validation=data.validation_count is not None)),
            key=key,
            round=jnp.zeros((), jnp.int32),
        )

    def round_(data, state, size):
        cohort = stages.sample(data, state.key, state.round, size)
        all_rows = state.clients, state.trained
        rows = gather(all_rows, cohort.clients)
        server, *rows, outcome = stages.train(data, state.server, state.key, state.round, cohort, *rows)
        clients, trained = scatter(all_rows, cohort.clients, tuple(rows))
        return State(server, clients, trained, state.key, state.round + 1), outcome

    def evaluate(data, state):
        clients = stages.evaluated(data, state.key)
        scores = stages.evaluate(data, state.server, state.key, state.round, clients, gather(state.clients, clients))
        nobody = no_scores(data.train_count.shape[0], validation=data.validation_count is not None)
        return scatter(jax.tree.map(jnp.asarray, nobody), clients, scores)

    def evaluate_new(data, state):
        return stages.evaluate_new(data, state.server, state.key, state.round)

    return Engine(init, round_, evaluate, evaluate_new)


@kept
def build_once(method: Method | MethodSchedule, settings: Settings, mesh: Mesh | None, num_labels: int) -> Engine:
    """Engine of `build`, the same one for the same arguments; the settings are those of `Settings.of_programs`."""
    return build(method, settings, mesh, num_labels=num_labels)
