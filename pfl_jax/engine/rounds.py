"""Round engine as pure functions: sample a cohort, gather its states, train, aggregate, scatter the states back.

All random numbers come from the run's key through `fold_in`: client i in round r uses fold_in(fold_in(key, r), i), and
the cohort of round r has its own stream. A result therefore does not depend on chunks, on other clients or on where a
run was interrupted, and two methods see the same cohorts.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.random import fold_in
from jax.sharding import Mesh, PartitionSpec

from pfl_jax.base import Cohort, Method, Personal, PRNGKey, PyTree, Scores
from pfl_jax.data.federated import FederatedData, client_data
from pfl_jax.engine.asynchronous import stale, with_versions
from pfl_jax.engine.cohort import RoundSettings, attackers, evaluated_clients, largest_first, staleness
from pfl_jax.engine.mapping import Turns, in_client_order, map_in_turn, map_places, on_every_device
from pfl_jax.engine.selection import method_in_cohort, of_present
from pfl_jax.engine.store import BLOCK, Federation, Members, Places
from pfl_jax.frozen import use
from pfl_jax.messages import join, split
from pfl_jax.primitives.metrics import no_scores, score
from pfl_jax.primitives.tree import all_finite, choose, gather
from pfl_jax.schedules import MethodSchedule, at_round, mixture
from pfl_jax.streams import EVALUATION, INITIALIZATION, NEWCOMERS, SURVEY
from pfl_jax.tasks import Score, Task
from pfl_jax.wrappers.attacks import attacked


@dataclass(frozen=True)
class RoundProgram:
    """Round of one network as pure functions of some clients' states, wherever these are stored between rounds.

    Common arguments: data, server, key and rounds (or round_index) of a run; places [D, W] of some clients, with their
    states `rows`, leaves [D, W, ...]; and scores [N] of all clients, into which the scores of some are written.

    Attributes:
      method, settings, mesh: see `pfl_jax.build`.
      network: position of a network of a `Mixed` method: all functions handle only clients with this network. None if
        all clients have the same network.
    """

    method: Method | MethodSchedule
    settings: RoundSettings
    mesh: Mesh | None = None
    network: int | None = None

    def init_server(self, data: Federation, key: PRNGKey) -> PyTree:
        """The server's state before the first round."""
        method, num_clients = self.method_of(0), data.num_clients
        with use(method.frozen, data.frozen):
            server = method.init_server(fold_in(fold_in(key, INITIALIZATION), num_clients))
        if (survey := method.survey) is None:
            return server

        def ask_one(own, data, shared, client):
            server, key = shared
            message = own.survey.local(fold_in(key, client), server, client_data(data, client, "train"))
            return split(message, jnp.ones((), bool))

        everyone = self.everyone(data)
        rows, sums = self._map(ask_one, method, data, key, (server, fold_in(key, SURVEY)), everyone)
        rows = in_client_order(everyone.ids, num_clients, rows, data.mesh or self.mesh)
        return survey.aggregate(server, join(rows, sums))

    def clients(self, data: Federation) -> Federation | Members:
        """The clients in the form that `pfl_jax.engine.store` takes."""
        if (own := self._members(data.num_clients)) is None:
            return data
        return Members(len(own), lambda: np.flatnonzero(np.isin(own, data.own_clients())))

    def rows_of(self, num_clients: int, ids: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
        """Rows of clients in the states of this network's clients; beyond the last row for other networks' clients."""
        own = self._members(num_clients)
        if own is None:
            return ids
        rows = np.full(num_clients + 1, len(own), np.int32)
        rows[own] = np.arange(len(own))
        return jnp.asarray(rows)[jnp.minimum(ids, num_clients)] + jnp.maximum(ids - num_clients, 0)

    def everyone(self, data: Federation) -> Places:
        """Places of all clients."""
        return self.assign_devices(data, jnp.arange(data.num_clients, dtype=jnp.int32))[-1]

    def unscored(self, data: Federation) -> Scores:
        """Scores [N] of clients that were never scored."""
        task, validated = at_round(self.method, 0).task, data.validation_count is not None
        return jax.tree.map(jnp.array, no_scores(data.num_clients, task, validation=validated))

    def untrained(self, data: Federation) -> Scores:
        """Scores [N] of clients that were never trained."""
        losses = no_scores(data.num_clients, _of_loss(at_round(self.method, 0).task))
        return replace(
            self.unscored(data), train=jax.tree.map(jnp.array, losses) if self.settings.reads_losses else None
        )

    def init_clients(self, data: Federation, server: PyTree, key: PRNGKey, places: Places) -> PyTree:
        """States before the first round of the clients in these places, leaves [D, W, ...]."""
        method = self.method_of(0)

        def init_one(own, data, shared, client):
            server, key = shared
            return own.init_client(fold_in(key, client), server, client_data(data, client, "train")), ()

        rows, _ = self._map(init_one, method, data, key, (server, fold_in(key, INITIALIZATION)), places)
        return rows

    def local(
        self, data: Federation, server: PyTree, rows: PyTree, key: PRNGKey, round_index: jax.Array, cohort: Cohort
    ) -> tuple[jax.Array | np.ndarray, jax.Array, PyTree, PyTree, PyTree]:
        """Local training of the clients in a cohort [M] that have this network.

        Returns:
          Positions [W] and places [D, W] as from `assign_devices`; the clients' next states, leaves [D, W, ...], the
          previous one where a client diverged; messages with () for each `Mean`, zeros for absent clients, Scores right
          after training, and whether states and messages are finite; and the sums of the messages.
        """
        method, round_key = self.method_of(round_index), fold_in(key, round_index)

        def train_one(own, data, shared, index, state, present, late):
            server, round_key = shared
            own = method_in_cohort(own if late is None else stale(own, late), cohort, data, index)
            result = own.local(fold_in(round_key, index), server, state, client_data(data, index, "train"))
            scores = _scored(method, data, index, result.personal, training=self.settings.reads_losses)
            finite = all_finite((result.client, result.message))
            messages, terms = split(result.message, present & finite)
            return (choose(finite, result.client, state), (messages, scores, finite)), terms

        own, order, places = self.assign_devices(data, cohort.clients)
        late = staleness(round_index, self.settings)
        turns = None if method.hand_over is None else Turns(_turn("local"), jnp.asarray(order), len(cohort.clients))
        rows = rows, *gather((cohort.present, late), jnp.append(own, len(cohort.clients))[order])
        (states, sent), sums = self._map(train_one, method, data, key, (server, round_key), places, *rows, turns=turns)
        return own, order, states, sent, sums

    def evaluated(self, data: Federation, key: PRNGKey) -> Places:
        """Places of the clients that are evaluated by `received`."""
        return self.assign_devices(data, evaluated_clients(key, data.num_clients, self.settings))[-1]

    @property
    def deploys_in_turn(self) -> bool:
        """Whether clients take turns in evaluations."""
        hand_over = self.method_of(0).hand_over
        return hand_over is not None and hand_over.personalize is not None

    def chains(self, data: Federation) -> list[Places]:
        """Places of all clients in parts of whole chains, for evaluations in which they take turns."""
        own, chain = self._members(data.num_clients), self.settings.usual_size(data.num_clients)
        own, step = np.arange(data.num_clients) if own is None else own, max(1, BLOCK // chain) * chain
        parts = np.split(own, range(step, len(own), step))
        return [self.assign_devices(data, jnp.asarray(part, jnp.int32))[-1] for part in parts]

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
        numbers = self.rows_of(data.num_clients, places.ids)
        found = self._of_deployed(_scored, data, server, key, rounds, places, rows, numbers)
        found = on_every_device(found, data.mesh or self.mesh)
        return jax.tree.map(lambda leaf, row: leaf.at[places.ids].set(row, mode="drop"), scores, found)

    def personal(
        self, data: Federation, server: PyTree, key: PRNGKey, rounds: jax.Array, chain: tuple[PyTree, PyTree, Any]
    ) -> Personal:
        """Model that a client would deploy after `rounds` rounds, see `pfl_jax.engine.body.chain_of`."""
        clients, rows, place = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], chain)
        places = Places(clients, np.ones(clients.shape, bool), clients.size)
        numbers = jnp.arange(clients.size)[None]
        data = data.with_frozen(self.method_of(0).frozen) if data.frozen is None else data
        found = self._of_deployed(lambda *one: one[-1], data, server, key, rounds, places, rows, numbers)
        return gather(gather(found, 0), place[0])

    def _of_deployed(
        self,
        fn: Callable[..., PyTree],
        data: Federation,
        server: PyTree,
        key: PRNGKey,
        rounds: jax.Array,
        places: Places,
        rows: PyTree,
        numbers: jax.Array | np.ndarray,
    ) -> PyTree:
        """Rows [D, W, ...] of fn(method, data, client, model that the client would deploy); `numbers` as in `Turns`."""
        method = self.method_of(jnp.maximum(rounds - 1, 0))

        def deploy(own, data, shared, index, state):
            server, key = shared
            train = client_data(data, index, "train")
            return fn(method, data, index, own.personalize(fold_in(key, index), server, state, train)), ()

        turns = None
        if self.deploys_in_turn:
            turns = Turns(_turn("personalize"), jnp.asarray(numbers), self.settings.usual_size(data.num_clients))
        shared = server, fold_in(fold_in(key, EVALUATION), rounds)
        return self._map(deploy, method, data, key, shared, places, rows, turns=turns)[0]

    def evaluate_new(self, data: Federation, server: PyTree, key: PRNGKey, rounds: jax.Array) -> tuple[Scores, Scores]:
        """Scores (received, trained) of clients that never took part, see `pfl_jax.Engine.evaluate_new`."""
        method = self.method_of(jnp.maximum(rounds - 1, 0))

        def evaluate_one(method, data, shared, index):
            server, key = shared
            keys = jax.random.split(fold_in(key, index), 3)
            train, test = (client_data(data, index, split) for split in ("train", "test"))
            state, begun, hand_over = method.init_client(keys[0], server, train), [server, server], method.hand_over
            if hand_over is not None:
                # Each newcomer has its own cohort.
                pairs = zip((hand_over.personalize, hand_over.local), keys[1:], strict=True)
                begun = [server if pass_on is None else pass_on(one, server, state, train) for pass_on, one in pairs]
            received = method.personalize(keys[1], begun[0], state, train)
            trained = method.local(keys[2], begun[1], state, train).personal
            predict = checked_predict(method, data)
            return tuple(score(predict, personal, test, method.task) for personal in (received, trained)), ()

        everyone, shared = self.everyone(data), (server, fold_in(fold_in(key, NEWCOMERS), rounds))
        rows, _ = self._map(evaluate_one, method, data, None, shared, everyone)
        return in_client_order(everyone.ids, data.num_clients, rows, data.mesh or self.mesh)

    def method_of(self, index: int | jax.Array) -> Method:
        """Method of a round, whose server keeps the earlier states from which clients may begin."""
        return with_versions(of_present(at_round(self.method, index, self.network or 0)), self.settings.versions)

    def _members(self, num_clients: int) -> np.ndarray | None:
        """Clients that have this network, ascending; None if all have the same network."""
        mixed = None if self.network is None else mixture(self.method)
        return None if mixed is None else mixed.members(self.network or 0, num_clients)

    def assign_devices(self, data: Federation, clients: jax.Array) -> tuple[jax.Array | np.ndarray, jax.Array, Places]:
        """Places on the devices for the clients with this network, among `clients` [M], ascending.

        Returns:
          Positions [W] of these clients in `clients`, ascending, M in free places; the devices' places [D, W], as
          indices of those positions, W in free places; and the `Places`.
        """
        members, size = self._members(data.num_clients), len(clients)
        known = members is None or size == data.num_clients
        if members is None:
            own = np.arange(size)
        elif known:
            own = members
        else:
            has = jnp.zeros(data.num_clients, bool).at[members].set(True)
            (own,) = jnp.nonzero(has[clients], size=min(len(members), size), fill_value=size)
        own_ids = clients if members is None else jnp.append(clients, data.num_clients)[own]
        mesh = data.mesh or self.mesh
        largest = largest_first(jnp.append(data.train_count, -1)[own_ids])
        table = data.assign_devices(own_ids[largest], 1 if mesh is None else mesh.size)
        order = jnp.append(largest, len(own))[table]
        ids = jnp.append(own_ids, data.num_clients)[order]
        # Every device computes all places: otherwise the partitioner would exchange them.
        order, ids = on_every_device((order, ids), mesh)
        return own, order, Places(ids, table < len(own) if known else ids < data.num_clients, len(own))

    def _map(
        self,
        fn: Callable[..., Any],
        method: Method,
        data: Federation,
        key: PRNGKey | None,
        shared: PyTree,
        places: Places,
        *rows: PyTree,
        turns: Turns | None = None,
    ) -> tuple[Any, PyTree]:
        """Rows [D, W, ...] and sums of fn(method, data, shared, client, *rows of the client).

        In the run with this key, a client's method is an attacker's or an honest client's; None: all are honest. With
        turns, `shared` begins with the server's state, and each client gets its own instead.
        """
        settings, mesh, is_attacker = self.settings, data.mesh or self.mesh, None
        if key is not None and round(settings.attackers * data.num_clients):
            is_attacker = attackers(key, data.num_clients, settings.attackers)

        def of_client(fn, arguments, client, *handed):
            data, shared, is_attacker = arguments
            data, (index, *rows), own = data.on_device(), client, method
            if is_attacker is not None and settings.attack is not None:
                options = {"scale": settings.attack_scale, "num_classes": data.num_classes}
                own = attacked(method, settings.attack, is_attacker[index], **options)
            with use(method.frozen, data.frozen):
                return fn(own, data, (*handed, *shared[len(handed) :]), index, *rows)

        chunk = settings.chunk[self.network or 0] if isinstance(settings.chunk, tuple) else settings.chunk
        if chunk == "auto":
            # `run` chooses by the clients' sizes, which are not known here.
            chunk = 1 if jax.default_backend() == "cpu" else None
        if chunk is None:
            chunk = -(-places.size // (1 if mesh is None else mesh.size))
        how = {"chunk": chunk, "mesh": mesh, "specs": (data.specs, PartitionSpec(), PartitionSpec())}
        arguments, clients = (data, shared, is_attacker), (places.ids, *rows)
        if turns is None:
            return map_places(partial(of_client, fn), arguments, clients, places.is_real, **how)
        turns = turns._replace(pass_on=partial(of_client, turns.pass_on))
        return map_in_turn(
            *(partial(of_client, fn), turns, arguments, shared[0], clients, places.is_real), size=places.size, **how
        )


def _turn(before: str) -> Callable[..., tuple[PyTree, PyTree]]:
    """Turn of a client before a stage, a field of `HandOver`: the state it then has, and the state it passes on."""

    def take(own, data, shared, index, state, present=True, late=None):
        server, key = shared
        had = getattr(own.hand_over, before)(fold_in(key, index), server, state, client_data(data, index, "train"))
        return had, choose(present & all_finite(had), had, server)

    return take


def checked_predict(method: Method, data: FederatedData) -> Callable[..., jax.Array]:
    """A method's `predict`; while it is traced, it raises InvalidInput if outputs do not fit the task and the data."""

    def predict(personal, inputs):
        outputs = method.predict(personal, inputs)
        method.task.check(outputs.shape, data.num_classes)
        return outputs

    return predict


def _of_loss(task: Task) -> Task:
    """The task with its loss as the only score."""
    return task._replace(scores=(Score("loss", task.loss, False),), kept=lambda outputs, y: outputs)


def _scored(method: Method, data: FederatedData, client: jax.Array, personal: Personal, *, training: bool = False):
    """Scores of a client's model on all of its examples; on training examples only the loss, if it is wanted."""

    def on(split, task):
        return score(checked_predict(method, data), personal, client_data(data, client, split), task)

    scores = on("test", method.task)
    loss = on("train", _of_loss(method.task)) if training else None
    return replace(
        scores, train=loss, validation=None if data.validation_count is None else on("validation", method.task)
    )
