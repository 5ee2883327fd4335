"""Round engine as pure functions: sample a cohort, gather its states, train, aggregate, scatter the states back.

All random numbers come from the run's key through `fold_in`: client i in round r uses fold_in(fold_in(key, r), i), and
the cohort of round r has its own stream. A result therefore does not depend on chunks, on other clients or on where a
run was interrupted, and two methods see the same cohorts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.random import fold_in
from jax.sharding import Mesh, PartitionSpec

from pfl_jax.base import Cohort, Method, Personal, PRNGKey, PyTree, Scores
from pfl_jax.data.federated import FederatedData, client_data
from pfl_jax.engine.asynchronous import stale, with_versions
from pfl_jax.engine.cohort import RoundSettings, attackers, evaluated_clients, largest_first, staleness
from pfl_jax.engine.hand_over import Turns, map_in_turn
from pfl_jax.engine.mapping import in_client_order, map_places, on_every_device
from pfl_jax.engine.scoring import checked_predict, deployed, handed_over, score_client, without_loss
from pfl_jax.engine.selection import method_in_cohort
from pfl_jax.engine.store import BLOCK, Federation, Members, Places
from pfl_jax.errors import InvalidInput
from pfl_jax.frozen import use
from pfl_jax.messages import join, split
from pfl_jax.primitives.metrics import no_scores, score
from pfl_jax.primitives.tree import all_finite, choose, gather
from pfl_jax.schedules import MethodSchedule, at_round, mixture
from pfl_jax.streams import INITIALIZATION, NEWCOMERS, SURVEY
from pfl_jax.wrappers.attacks import attacked


class Trained(NamedTuple):
    """Local training of some clients, or of one, in any order.

    Attributes:
      rows: the clients' states after training; the previous state for a client that diverged.
      sent: results with the same shapes for all networks: messages, with () for each `Mean`, zeros for absent clients;
        Scores of the clients' models right after training; and whether states and messages are finite.
    """

    rows: PyTree
    sent: tuple[PyTree, Scores, jax.Array]


@dataclass(frozen=True)
class RoundProgram:
    """Round of one network as pure functions of some clients' states, wherever these are stored between rounds.

    Common arguments: data, server, key and rounds (or round_index) of a run; places [D, W] of some clients, with their
    states `rows`, leaves [D, W, ...]; and scores [N] of all clients, into which the scores of some are written.

    Attributes:
      method, settings, mesh: see `pfl_jax.build`.
      network: position of a network of a `Mixed` method: all functions except `sample` and `train` handle only clients
        with this network. None if all clients have the same network.
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

    def clients(self, data: Federation) -> Federation | Members:
        """The clients in the form that `pfl_jax.engine.store` takes."""
        own = self._members(data.num_clients)
        return data if own is None else Members(len(own), np.flatnonzero(np.isin(own, data.own_clients())))

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
        return without_loss(self.unscored(data)) if self.settings.reads_losses else self.unscored(data)

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
    ) -> tuple[jax.Array | np.ndarray, jax.Array, Trained, PyTree]:
        """Local training of the clients in a cohort [M] that have this network.

        Returns:
          Positions [W] of these clients in the cohort, ascending, M in free places; the devices' places [D, W], as
          indices of those positions; their training, leaves [D, W, ...]; and the sums of their messages.
        """
        method, round_key, selection = self.method_of(round_index), fold_in(key, round_index), self.settings.selection

        def train_one(own, data, shared, index, present, late, state):
            server, round_key = shared
            own = method_in_cohort(own if late is None else stale(own, late), selection, cohort, data, index)
            result = own.local(fold_in(round_key, index), server, state, client_data(data, index, "train"))
            scores = score_client(method, result.personal, data, index, training=self.settings.reads_losses)
            finite = all_finite((result.client, result.message))
            messages, terms = split(result.message, present & finite)
            return Trained(choose(finite, result.client, state), (messages, scores, finite)), terms

        def pass_one_on(own, data, shared, index, present, late, state):
            server, round_key = shared
            had = own.hand_over.local(fold_in(round_key, index), server, state, client_data(data, index, "train"))
            return had, choose(present & all_finite(had), had, server)

        own, order, places = self.assign_devices(data, cohort.clients)
        late = staleness(round_index, self.settings)
        rows = (*gather((cohort.present, late), jnp.append(own, len(cohort.clients))[order]), rows)
        turns = None if method.hand_over is None else Turns(pass_one_on, jnp.asarray(order), len(cohort.clients))
        training, sums = self._map(train_one, method, data, key, (server, round_key), places, *rows, turns=turns)
        return own, order, training, sums

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
        method = self._last_method(rounds)

        def evaluate_one(own, data, shared, index, state):
            return score_client(method, deployed(own, data, shared, index, state), data, index), ()

        def pass_one_on(own, data, shared, index, state):
            had = handed_over(own, data, shared, index, state)
            return had, choose(all_finite(had), had, shared[0])

        turns = None
        if self.deploys_in_turn:
            numbers = jnp.asarray(self.rows_of(data.num_clients, places.ids))
            turns = Turns(pass_one_on, numbers, self.settings.usual_size(data.num_clients))
        found, _ = self._map(evaluate_one, method, data, key, (server, key, rounds), places, rows, turns=turns)
        found = on_every_device(found, data.mesh or self.mesh)
        return jax.tree.map(lambda leaf, row: leaf.at[places.ids].set(row, mode="drop"), scores, found)

    def personal(
        self, data: FederatedData, server: PyTree, key: PRNGKey, rounds: jax.Array, chain: tuple[PyTree, PyTree, Any]
    ) -> Personal:
        """Model that a client would deploy after `rounds` rounds, see `pfl_jax.engine.body.chain_of`."""
        method, attacks = self._last_method(rounds), self.attackers(data, key)
        clients, states, place = jax.tree.map(jnp.asarray, chain)

        def at_place(of, place, server):
            client, state = gather((clients, states), place)
            return of(self._of_client(method, attacks, data, client), data, (server, key, rounds), client, state)

        if self.deploys_in_turn:

            def pass_on(place, server):
                had = at_place(handed_over, place, server)
                return choose(all_finite(had), had, server)

            server = jax.lax.fori_loop(0, place, pass_on, server)
            server = at_place(handed_over, place, server)
        return at_place(deployed, place, server)

    def evaluate_new(self, data: Federation, server: PyTree, key: PRNGKey, rounds: jax.Array) -> tuple[Scores, Scores]:
        """Scores (received, trained) of clients that never took part, see `pfl_jax.Engine.evaluate_new`."""
        method = self._last_method(rounds)

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

        everyone = self.everyone(data)
        shared = (server, fold_in(fold_in(key, NEWCOMERS), rounds))
        rows, _ = self._map(evaluate_one, method, data, None, shared, everyone)
        return in_client_order(everyone.ids, data.num_clients, rows, data.mesh or self.mesh)

    def attackers(self, data: Federation, key: PRNGKey) -> jax.Array | None:
        """Attackers of the run with this key, bool [N]; None if nobody attacks."""
        share, num_clients = self.settings.attackers, data.train_count.shape[0]
        return attackers(key, num_clients, share) if round(share * num_clients) else None

    def _of_client(self, method: Method, attacks: jax.Array | None, data: FederatedData, client: jax.Array) -> Method:
        """Method as a client follows it; an attacker follows another one."""
        if attacks is None or self.settings.attack is None:
            return method
        kind, scale = self.settings.attack, self.settings.attack_scale
        if kind == "labels" and method.task.kind != "classes":
            raise InvalidInput(f"attack labels is for classification, and the model's task is {method.task.name}")
        return attacked(method, kind, attacks[client], scale=scale, num_classes=data.num_classes)

    def _last_method(self, rounds: jax.Array) -> Method:
        """Method of the last of `rounds` completed rounds; of the first round if none is completed."""
        return self.method_of(jnp.maximum(rounds - 1, 0))

    def method_of(self, index: int | jax.Array) -> Method:
        """Method of a round, whose server keeps the earlier states from which clients may begin."""
        return with_versions(at_round(self.method, index, self.network or 0), self.settings.versions)

    def _members(self, num_clients: int) -> np.ndarray | None:
        """Clients that have this network, ascending; None if all have the same network."""
        mixed = None if self.network is None else mixture(self.method)
        return None if mixed is None else mixed.members(self.network or 0, num_clients)

    def assign_devices(self, data: Federation, clients: jax.Array) -> tuple[jax.Array | np.ndarray, jax.Array, Places]:
        """Places on the devices for those among some clients [M], ascending, that have this network.

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

        The method is the one that the client follows, as an attacker or not in the run with this key; key None: all are
        honest. With turns, `shared` begins with the server's state, and each client gets its own state in its place.
        """
        attacks = None if key is None else self.attackers(data, key)

        def of_client(fn, arguments, client):
            data, shared, attacks = arguments
            data, (index, *rows) = data.on_device(), client
            with use(method.frozen, data.frozen):
                return fn(self._of_client(method, attacks, data, index), data, shared, index, *rows)

        def begun_with(server, arguments):
            data, (_, *shared), attacks = arguments
            return data, (server, *shared), attacks

        mesh, chunk = data.mesh or self.mesh, self.settings.chunk
        if chunk == "auto":
            # `run` chooses by the clients' sizes, which are not known here.
            chunk = 1 if jax.default_backend() == "cpu" else None
        assert not isinstance(chunk, tuple)
        if chunk is None:
            chunk = -(-places.size // (1 if mesh is None else mesh.size))
        how = {"chunk": chunk, "mesh": mesh, "specs": (data.specs, PartitionSpec(), PartitionSpec())}
        arguments, clients = (data, shared, attacks), (places.ids, *rows)
        if turns is None:
            return map_places(partial(of_client, fn), arguments, clients, places.is_real, **how)
        return map_in_turn(
            lambda arguments, client, had: of_client(fn, begun_with(had, arguments), client),
            lambda arguments, got, client: of_client(turns.pass_on, begun_with(got, arguments), client),
            arguments,
            shared[0],
            clients,
            turns.numbers,
            places.is_real,
            chain=turns.chain,
            size=places.size,
            **how,
        )
