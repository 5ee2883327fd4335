"""Round engine as pure functions: sample a cohort, gather its states, train, aggregate, scatter the states back.

All random numbers come from the run's key through `fold_in`: client i in round r uses fold_in(fold_in(key, r), i), and
the cohort of round r has a stream of its own. A result therefore does not depend on chunks, on other clients or on
where a run was interrupted, and two methods see the same cohorts.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.random import fold_in
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pfl_jax.base import Cohort, Info, Method, MethodSchedule, Personal, PRNGKey, PyTree, Scores, at_round
from pfl_jax.data.federated import FederatedData, client_data
from pfl_jax.engine.cohort import RoundSettings, attackers, evaluated_clients, largest_first, sample_cohort, staleness
from pfl_jax.engine.mapping import in_client_order, map_places, on_every_device
from pfl_jax.engine.store import Federation, Places
from pfl_jax.errors import InvalidInput
from pfl_jax.frozen import use
from pfl_jax.messages import join, split
from pfl_jax.primitives.metrics import no_scores, score
from pfl_jax.primitives.tree import all_finite, choose, gather, scatter
from pfl_jax.streams import EVALUATION, INITIALIZATION, NEWCOMERS, SURVEY
from pfl_jax.wrappers.attacks import attacked
from pfl_jax.wrappers.buffered import stale, with_versions


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
class RoundProgram:
    """Stages of a round as pure functions of some clients' states, wherever the states are stored between rounds.

    Their arguments are data, server, key and rounds (or round_index) of a run; places [D, W] of some clients, with
    their states `rows`, leaves [D, W, ...]; and scores [N] of all clients, into which those of some are written.

    Attributes:
      method, settings, mesh: see `pfl_jax.build`.
    """

    method: Method | MethodSchedule
    settings: RoundSettings
    mesh: Mesh | None = None

    def compiled(self, *, donate: bool) -> SimpleNamespace:
        """The stages, compiled one by one; `donate`: whether `train` takes over the server's state and the scores."""
        # The cohort's rows come in anew for every round. On a mesh they leave in another sharding: nothing to reuse.
        given = (*((1, 2) if donate else ()), *(() if self.mesh else (3,)))
        jit = partial(jax.jit, out_shardings=replicated(self.mesh))
        return SimpleNamespace(
            init_server=jit(self.init_server),
            # The rows stay with the devices that made them.
            init_clients=jax.jit(self.init_clients),
            everyone=jit(self.everyone),
            unscored=jit(self.unscored),
            sample=jit(self.sample, static_argnums=3),
            train=jit(self.train, donate_argnums=given),
            evaluated=jit(self.evaluated),
            evaluate=jit(self.evaluate, donate_argnums=6),
            evaluate_new=jit(self.evaluate_new),
        )

    def init_server(self, data: Federation, key: PRNGKey) -> PyTree:
        """The server's state before the first round."""
        method, num_clients = self._method(0), data.num_clients
        with use(method.frozen, data.frozen):
            server = method.init_server(fold_in(fold_in(key, INITIALIZATION), num_clients))
        survey = method.survey
        if survey is None:
            return server

        def ask_one(own, data, shared, client):
            server, key = shared
            message = own.survey.local(fold_in(key, client), server, client_data(data, client, "train"))
            return split(message, jnp.ones((), bool))

        everyone = self.everyone(data)
        rows, sums = self._map(ask_one, method, data, key, (server, fold_in(key, SURVEY)), everyone)
        rows = in_client_order(everyone.ids, num_clients, rows, data.mesh or self.mesh)
        return survey.aggregate(server, join(rows, sums))

    def everyone(self, data: Federation) -> Places:
        """Places of all clients."""
        _, places = self._places(data, jnp.arange(data.num_clients, dtype=jnp.int32))
        return places

    def unscored(self, data: Federation) -> Scores:
        """Scores [N] of clients that were never scored."""
        task, validated = at_round(self.method, 0).task, data.validation_count is not None
        nobody = no_scores(data.num_clients, task, validation=validated)
        return jax.tree.map(jnp.array, nobody)

    def init_clients(self, data: Federation, server: PyTree, key: PRNGKey, places: Places) -> PyTree:
        """States before the first round of the clients in these places, leaves [D, W, ...]."""
        method = self._method(0)

        def init_one(own, data, shared, client):
            server, key = shared
            return own.init_client(fold_in(key, client), server, client_data(data, client, "train")), ()

        rows, _ = self._map(init_one, method, data, key, (server, fold_in(key, INITIALIZATION)), places)
        return rows

    def sample(self, data: Federation, key: PRNGKey, round_index: jax.Array, size: int) -> tuple[Cohort, Places]:
        """Cohort of a round, and the places of its clients."""
        cohort = sample_cohort(key, round_index, data.train_count, size, self.settings)
        _, places = self._places(data, cohort.clients)
        return cohort, places

    def train(
        self,
        data: Federation,
        server: PyTree,
        trained: Scores,
        rows: PyTree,
        key: PRNGKey,
        round_index: jax.Array,
        cohort: Cohort,
    ) -> tuple[PyTree, Scores, PyTree, Outcome]:
        """Body of every round: local training and aggregation.

        Returns:
          The next server state, the next scores of the clients' models right after their own last training, the
          cohort's next states, leaves [M, ...], and the outcome.
        """
        method, round_key = self._method(round_index), fold_in(key, round_index)

        def train_one(own, data, shared, index, present, late, state):
            server, round_key = shared
            own = own if late is None else stale(own, late)
            result = own.local(fold_in(round_key, index), server, state, client_data(data, index, "train"))
            scores = score_client(method, result.personal, data, index)
            finite = all_finite((result.client, result.message))
            messages, terms = split(result.message, present & finite)
            return Training(choose(finite, result.client, state), messages, scores, finite), terms

        positions, places = self._places(data, cohort.clients)
        rows = (*gather((cohort.present, staleness(round_index, self.settings)), positions), rows)
        training, sums = self._map(train_one, method, data, key, (server, round_key), places, *rows)
        training = in_client_order(positions, len(cohort.clients), training, data.mesh or self.mesh)
        present = cohort.present & training.finite
        examples = jnp.sum(data.train_count[cohort.clients])
        cohort = dataclasses.replace(cohort, counts=jnp.where(present, cohort.counts, 0), present=present)
        messages = join(training.messages, sums)
        aggregation_key = fold_in(round_key, cohort.num_clients)
        server, rows, info = method.aggregate(aggregation_key, server, training.rows, messages, cohort)
        rows = choose(present, rows, training.rows)
        everyone = len(cohort.clients) == data.num_clients
        previous = trained if everyone else gather(trained, cohort.clients)
        scores = choose(training.finite, training.scores, previous)
        trained = scores if everyone else scatter(trained, cohort.clients, scores)
        outcome = Outcome(cohort, training.finite, all_finite((server, rows)), examples, info)
        return server, trained, rows, outcome

    def evaluated(self, data: Federation, key: PRNGKey) -> Places:
        """Places of the clients that are evaluated by `received`."""
        _, places = self._places(data, evaluated_clients(key, data.num_clients, self.settings))
        return places

    def evaluate(
        self,
        data: Federation,
        server: PyTree,
        key: PRNGKey,
        rounds: jax.Array,
        places: Places,
        rows: PyTree,
        scores: Scores,
    ) -> Scores:
        """Scores of the models that clients would deploy after `rounds` rounds, written into `scores`."""
        method = self._last_method(rounds)

        def evaluate_one(own, data, shared, index, state):
            return score_client(method, _deployed(own, data, shared, index, state), data, index), ()

        found, _ = self._map(evaluate_one, method, data, key, (server, key, rounds), places, rows)
        found = on_every_device(found, data.mesh or self.mesh)
        return jax.tree.map(lambda leaf, row: leaf.at[places.ids].set(row, mode="drop"), scores, found)

    def personal(
        self, data: FederatedData, server: PyTree, key: PRNGKey, rounds: jax.Array, client: jax.Array, state: PyTree
    ) -> Personal:
        """Model that a client would deploy after `rounds` rounds, given its state."""
        own = self._of_client(self._last_method(rounds), self.attackers(data, key), data, client)
        return _deployed(own, data, (server, key, rounds), client, state)

    def evaluate_new(self, data: Federation, server: PyTree, key: PRNGKey, rounds: jax.Array) -> tuple[Scores, Scores]:
        """Scores (received, trained) of clients that never took part, see `pfl_jax.Engine.evaluate_new`."""
        method = self._last_method(rounds)

        def evaluate_one(method, data, shared, index):
            server, key = shared
            keys = jax.random.split(fold_in(key, index), 3)
            train, test = (client_data(data, index, split) for split in ("train", "test"))
            state = method.init_client(keys[0], server, train)
            received = method.personalize(keys[1], server, state, train)
            trained = method.local(keys[2], server, state, train).personal
            predict = checked_predict(method, data)
            return tuple(score(predict, personal, test, method.task) for personal in (received, trained)), ()

        everyone = self.everyone(data)
        shared = (server, fold_in(fold_in(key, NEWCOMERS), rounds))
        rows, _ = self._map(evaluate_one, method, data, None, shared, everyone)
        return in_client_order(everyone.ids, data.num_clients, rows, data.mesh or self.mesh)

    def attackers(self, data: Federation, key: PRNGKey) -> jax.Array | None:
        """Attackers of the run with this key, bool [N]; None if nobody attacks."""
        share, num_clients = self.settings.attackers, data.train_count.shape[0]
        return attackers(key, num_clients, share) if round(share * num_clients) else None

    def _of_client(self, method: Method, attacks: jax.Array | None, data: FederatedData, client: jax.Array) -> Method:
        """Method as a client follows it, which is another one for an attacker."""
        if attacks is None or self.settings.attack is None:
            return method
        kind, scale = self.settings.attack, self.settings.attack_scale
        if kind == "labels" and method.task.kind != "classes":
            raise InvalidInput(f"attack labels is for classification, and the model's task is {method.task.name}")
        return attacked(method, kind, attacks[client], scale=scale, num_classes=data.num_classes)

    def _last_method(self, rounds: jax.Array) -> Method:
        """Method of the last of `rounds` completed rounds; of the first round if there are none."""
        return self._method(jnp.maximum(rounds - 1, 0))

    def _method(self, index: int | jax.Array) -> Method:
        """Method of a round, whose server keeps the earlier states with which clients begin."""
        return with_versions(at_round(self.method, index), self.settings.versions)

    def _places(self, data: Federation, clients: jax.Array) -> tuple[jax.Array, Places]:
        """Positions [D, W] in `clients` [M] of the clients in the devices' places, and the places."""
        mesh = data.mesh or self.mesh
        largest = largest_first(data.train_count[clients])
        table = data.places(clients[largest], 1 if mesh is None else mesh.size)
        positions = jnp.append(largest, len(clients))[table]
        ids = jnp.append(clients, data.num_clients)[positions]
        # Every device knows all places: the partitioner would exchange them otherwise.
        positions, ids = on_every_device((positions, ids), mesh)
        return positions, Places(ids, table < len(clients), len(clients))

    def _map(
        self,
        fn: Callable[..., Any],
        method: Method,
        data: Federation,
        key: PRNGKey | None,
        shared: PyTree,
        places: Places,
        *rows: PyTree,
    ) -> tuple[Any, PyTree]:
        """Rows [D, W, ...] and sums of fn(method, data, shared, client, *rows of the client).

        The method is the one that the client follows, as an attacker or not in the run with this key; None if all are
        honest.
        """
        attacks = None if key is None else self.attackers(data, key)

        def one(arguments, client):
            data, shared, attacks = arguments
            data, (index, *rows) = data.on_device(), client
            with use(method.frozen, data.frozen):
                return fn(self._of_client(method, attacks, data, index), data, shared, index, *rows)

        mesh, chunk = data.mesh or self.mesh, self.settings.chunk
        if chunk == "auto":
            # `run` has chosen by the clients' sizes, which are not known here.
            chunk = 1 if jax.default_backend() == "cpu" else None
        if chunk is None:
            chunk = -(-places.size // (1 if mesh is None else mesh.size))
        specs, clients = (data.specs, PartitionSpec(), PartitionSpec()), (places.ids, *rows)
        shared = (data, shared, attacks)
        return map_places(one, shared, clients, places.is_real, chunk=chunk, mesh=mesh, specs=specs)


def _deployed(
    method: Method, data: FederatedData, shared: tuple[PyTree, PRNGKey, jax.Array], client: jax.Array, state: PyTree
) -> Personal:
    """Model that a client with this state would deploy; `shared`: server, key and completed rounds."""
    server, key, rounds = shared
    own_key = fold_in(fold_in(fold_in(key, EVALUATION), rounds), client)
    return method.personalize(own_key, server, state, client_data(data, client, "train"))


def replicated(mesh: Mesh | None) -> NamedSharding | None:
    """Sharding of what all devices have; None without a mesh."""
    return None if mesh is None else NamedSharding(mesh, PartitionSpec())


def checked_predict(method: Method, data: FederatedData) -> Callable[..., jax.Array]:
    """A method's `predict` that raises InvalidInput while it is traced if outputs do not fit the task and the data."""

    def predict(personal, inputs):
        outputs = method.predict(personal, inputs)
        method.task.check(outputs.shape, data.num_classes)
        return outputs

    return predict


def score_client(method: Method, personal: Personal, data: FederatedData, client: int | jax.Array) -> Scores:
    """Scores of a client's model on its test examples and, where the federation has them, validation examples."""
    predict = checked_predict(method, data)
    scores = score(predict, personal, client_data(data, client, "test"), method.task)
    if data.validation_count is None:
        return scores
    validation = score(predict, personal, client_data(data, client, "validation"), method.task)
    return dataclasses.replace(scores, validation=validation)
