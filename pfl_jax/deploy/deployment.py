"""A run as computed by its server and each of its clients, whatever carries the messages between them.

It has the keys and cohorts of `pfl_jax.run`, and equals it up to the rounding of differently compiled programs. The
server holds its state, and each client has a file with its own; messages are arrays by name.
"""

import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial, reduce, wraps
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, Var
from jax.random import fold_in

from pfl_jax.atomic_write import write_binary
from pfl_jax.base import ClientData, Cohort, Method, PRNGKey, PyTree, Scores
from pfl_jax.engine.checkpoint import leaves_by_path, tree_of
from pfl_jax.engine.cohort import Settings, evaluated_clients, sample_cohort
from pfl_jax.engine.communication import Traffic
from pfl_jax.errors import Diverged, InvalidInput
from pfl_jax.frozen import Frozen, use
from pfl_jax.messages import join, split
from pfl_jax.primitives.metrics import no_scores, score
from pfl_jax.primitives.tree import all_finite
from pfl_jax.safe_read import BAD_NPZ, open_npz
from pfl_jax.schedules import MethodSchedule, at_round, mixture
from pfl_jax.streams import EVALUATION, INITIALIZATION

Arrays: TypeAlias = dict[str, np.ndarray]
"""Arrays of a message or a file by name: the path of a leaf in its tree."""

_PATHS: dict[str, Any] = {"simple": True, "separator": "/"}
"""Options of `jax.tree_util.keystr` for paths."""


class Request(NamedTuple):
    """Message of the server to one client.

    Attributes:
      kind: "train" asks for local training, "evaluate" for the scores of the model that the client would deploy.
      round: number of completed rounds.
      arrived: number of the last round, from 1, in which this client's message arrived; 0 for none.
      arrays: the parts of the server's state that clients read.
    """

    kind: Literal["train", "evaluate"]
    round: int
    arrived: int
    arrays: Arrays


Ask: TypeAlias = Callable[[dict[int, Request]], tuple[dict[int, Arrays], Traffic]]
"""Requests by client number -> the answers that arrived, and the bytes sent to clients (down) and back (up)."""


class DeployedRound(NamedTuple):
    """Result of one round at the server.

    Attributes:
      round: number of the round, counted from 1.
      server: the server's state after the round.
      cohort: [M], numbers of the drawn clients, ascending.
      arrived: [M], bool: whether the client's message arrived. Without any, the server's state does not change.
      received: Scores [N] as in `pfl_jax.RoundResult`, NaN for clients that did not answer; None if not evaluated.
      traffic: bytes of all messages of the training of this round, as they were sent.
    """

    round: int
    server: PyTree
    cohort: np.ndarray
    arrived: np.ndarray
    received: Scores | None
    traffic: Traffic


def _program(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled method of a `Deployment`; the model's frozen parameters are an argument of the program."""

    @partial(jax.jit, static_argnums=0)
    def compiled(self: "Deployment", frozen: Frozen | None, *arguments: Any) -> Any:
        with use(None, frozen):
            return function(self, *arguments)

    @wraps(function)
    def call(self: "Deployment", *arguments: Any) -> Any:
        frozen = at_round(self.method, 0).frozen
        # Inside another program, the frozen parameters are its argument.
        return compiled(self, frozen and dataclasses.replace(frozen, values=frozen.read()), *arguments)

    return call


@dataclass(frozen=True, eq=False)
class Deployment:
    """Definition of a run that its server and clients share; each of them makes it from the same program.

    Attributes:
      method: the method, or a schedule, see `pfl_jax.run`.
      settings: rounds, participation, stragglers and evaluations; other failures are not simulated.
      key: the run's key. All participants know it: it hides nothing.
      num_clients: number of clients N.
      example: examples of any client, or their shapes and types with a leading axis n; their values are not read.

    Raises:
      InvalidInput: settings that simulate failures, or a method that cannot be deployed: with a `Method.survey`, or
        whose server reads the clients' states or computes new ones, which are not at the server.
    """

    method: Method | MethodSchedule
    settings: Settings
    key: PRNGKey
    num_clients: int
    example: ClientData

    def __post_init__(self) -> None:
        for name in ("drop_rate", "attackers", "before_aggregation", "timetable", "patience", "select"):
            if getattr(self.settings, name):
                raise InvalidInput(f"{name} is for simulations only: leave it out")
        if mixture(self.method) is not None:
            raise InvalidInput("this method cannot be deployed: its clients have several networks")
        method = at_round(self.method, 0)
        if method.survey is not None:
            raise InvalidInput("this method cannot be deployed: its server asks all clients before the first round")
        if method.hand_over is not None:
            raise InvalidInput("this method cannot be deployed: its clients take turns in each round")
        self._settled_from  # noqa: B018, the check of the server's aggregation

    # Work of the server.

    def rounds(self, ask: Ask) -> Iterator[DeployedRound]:
        """The rounds of the run, at the server.

        Args:
          ask: function that brings requests to clients, see `Ask`. Clients without an answer are absent.

        Raises:
          Diverged: the server's state is NaN or infinite. A client that diverges is absent.
          InvalidInput: an answer of another method.
        """
        server, last = self._first_server(), np.zeros(self.num_clients, int)
        for index in range(self.settings.rounds):
            cohort = self._sample(jnp.int32(index), self.settings.cohort_size(self.num_clients, index))
            clients = np.asarray(cohort.clients)
            answers, traffic = ask(self._requests("train", clients, index, last, server))
            # A client that diverged sends nothing.
            answers = {client: arrays for client, arrays in answers.items() if arrays}
            arrived = np.isin(clients, list(answers))
            server = self._aggregated(server, index, cohort, answers) if answers else server
            if not all_finite(server):
                raise Diverged(index + 1, [])
            last[clients[arrived]] = index + 1
            received = None
            if self.settings.is_evaluated(index + 1):
                chosen = np.asarray(evaluated_clients(self.key, self.num_clients, self.settings))
                answers, _ = ask(self._requests("evaluate", chosen, index + 1, last, server))
                received = self._scores(answers)
            yield DeployedRound(index + 1, server, clients, arrived, received, traffic)

    def _requests(
        self, kind: Literal["train", "evaluate"], clients: np.ndarray, completed: int, last: np.ndarray, server: PyTree
    ) -> dict[int, Request]:
        arrays = dict(itertools.compress(_named((server,)).items(), self._read_by_clients))
        return {int(client): Request(kind, completed, int(last[client]), arrays) for client in clients}

    def _aggregated(self, server: PyTree, index: int, cohort: Cohort, answers: dict[int, Arrays]) -> PyTree:
        """The server's state after the round with this index."""
        clients, message = np.asarray(cohort.clients).tolist(), self._shapes[2]
        expected = (*message, jax.ShapeDtypeStruct((), jnp.int32))
        absent = _zeros(expected)
        parts = [
            _as_tree(expected, answers[client], "an answer") if client in answers else absent for client in clients
        ]
        rows, _, counts = jax.tree.map(lambda *leaves: np.stack(leaves), *parts)
        sums = reduce(partial(jax.tree.map, np.add), [terms for _, terms, _ in parts])
        present = jnp.array([client in answers for client in clients])
        cohort = dataclasses.replace(cohort, counts=jnp.asarray(counts), present=present)
        return self._aggregate(jnp.int32(index), server, rows, sums, cohort)

    def _scores(self, answers: dict[int, Arrays]) -> Scores:
        scores = no_scores(self.num_clients, at_round(self.method, 0).task)
        for client, arrays in answers.items():
            for name, value in arrays.items():
                scores.by_name[name][client] = value  # pyright: ignore[reportIndexIssue]
        return scores

    # Work of a client.

    def answer(self, client: int, request: Request, train: ClientData, test: ClientData, file: Path) -> Arrays:
        """Answer of a client to the server; nothing, if the client diverged.

        Args:
          client: the client's number.
          request: message of the server.
          train, test: the client's examples.
          file: file of the client's state in this run, in an existing folder; it is written after a training. A client
            without this file was never trained.

        Raises:
          InvalidInput: a request of an earlier round than the file's, or a file of another method.
        """
        unread = itertools.compress(_named(_zeros(self._shapes[:1])).items(), map(operator.not_, self._read_by_clients))
        (server,) = _as_tree(self._shapes[:1], dict(unread) | request.arrays, "the request")
        state, last = self._state(client, train, request.arrived, file)
        if request.kind == "evaluate":
            return _named(self._score(server, state, train, test, request.round, client).by_name)
        if last > request.round:
            raise InvalidInput(f"client {client}: round {last} is trained already, and its state is kept")
        state, message, finite = self._train(server, state, train, request.round, client)
        if not finite:
            return {}
        saved = _named((state, np.int32(request.round + 1)))
        write_binary(file, lambda opened: np.savez(opened, allow_pickle=False, **saved))
        return _named((*message, np.sum(train.mask, dtype=np.int32)))

    def _state(self, client: int, train: ClientData, arrived: int, file: Path) -> tuple[PyTree, int]:
        """State of a client, and the round of its last training; 0 if there was none."""
        if not file.exists():
            return self._first_client(train, client), 0
        expected = jax.eval_shape(self._first_client, train, client)
        try:
            with open_npz(file) as stored:
                state, last = _as_tree((expected, jax.ShapeDtypeStruct((), jnp.int32)), dict(stored), "it")
        except BAD_NPZ as error:
            raise InvalidInput(f"{file} is not a state of this client: {error}") from error
        if arrived == last:
            leaves, structure = jax.tree.flatten(state)
            state = jax.tree.unflatten(structure, [leaves[origin] for origin in self._settled_from])
        return state, int(last)

    # Programs.

    @_program
    def _first_server(self) -> PyTree:
        return at_round(self.method, 0).init_server(fold_in(fold_in(self.key, INITIALIZATION), self.num_clients))

    @_program
    def _first_client(self, train: ClientData, client: jax.Array | int) -> PyTree:
        key = fold_in(fold_in(self.key, INITIALIZATION), client)
        return at_round(self.method, 0).init_client(key, self._first_server(), train)

    @partial(jax.jit, static_argnums=(0, 2))
    def _sample(self, index: jax.Array, size: int) -> Cohort:
        return sample_cohort(self.key, index, jnp.ones(self.num_clients, jnp.int32), size, self.settings)

    @_program
    def _train(self, server, state, train: ClientData, index, client) -> tuple[PyTree, PyTree, jax.Array]:
        """A client's next state, the two parts of its message, and whether all of these are finite."""
        method, key = at_round(self.method, index), fold_in(fold_in(self.key, index), client)
        result = method.local(key, server, state, train)
        finite = all_finite((result.client, result.message))
        return result.client, split(result.message, jnp.ones((), bool)), finite

    @_program
    def _score(self, server, state, train: ClientData, test: ClientData, completed, client) -> Scores:
        method = at_round(self.method, jnp.maximum(completed - 1, 0))
        key = fold_in(fold_in(fold_in(self.key, EVALUATION), completed), client)
        personal = method.personalize(key, server, state, train)
        return score(method.predict, personal, test, method.task)

    @_program
    def _aggregate(self, index, server: PyTree, rows: PyTree, sums: PyTree, cohort: Cohort) -> PyTree:
        # Nothing depends on the clients' states: that was checked.
        clients = _zeros(_stacked(self._shapes[1], len(cohort.clients)))
        return self._with_clients(index, server, rows, sums, cohort, clients)[0]

    def _with_clients(self, index, server, rows, sums, cohort: Cohort, clients) -> tuple[PyTree, PyTree]:
        """Aggregation as in the simulation: the server's next state, and the next states of the cohort's clients."""
        key = fold_in(fold_in(self.key, index), self.num_clients)
        server, clients, _ = at_round(self.method, index).aggregate(key, server, clients, join(rows, sums), cohort)
        return server, clients

    # Facts known from shapes alone.

    @cached_property
    def _shapes(self) -> tuple[PyTree, PyTree, tuple[PyTree, PyTree]]:
        """Shapes of the server's state, of a client's state, and of the two parts of a client's message."""
        server, client = jax.eval_shape(self._first_server), jax.eval_shape(self._first_client, self.example, 0)
        return server, client, jax.eval_shape(self._train, server, client, self.example, 0, 0)[1]

    @cached_property
    def _read_by_clients(self) -> list[bool]:
        """For each leaf of the server's state, whether training or evaluation reads it."""

        def both(server, state, examples):
            # Not as compiled functions, which would read all their arguments.
            trained, scored = (type(self).__dict__[name].__wrapped__ for name in ("_train", "_score"))
            return trained(self, server, state, examples, 0, 0), scored(self, server, state, examples, examples, 0, 0)

        server, client, _ = self._shapes
        jaxpr = jax.make_jaxpr(both)(server, client, self.example).jaxpr
        found = _live(jaxpr, jaxpr.outvars)
        return [variable in found for variable in jaxpr.invars[: len(jax.tree.leaves(server))]]

    @cached_property
    def _settled_from(self) -> list[int]:
        """For each leaf of a client's state after a round, the number of the same leaf in its trained state."""
        size, (server, client, (rows, sums)) = self.settings.cohort_size(self.num_clients, 0), self._shapes
        cohort = jax.eval_shape(lambda: self._sample(jnp.int32(0), size))
        rows, clients = _stacked((rows, client), size)
        jaxpr = jax.make_jaxpr(self._with_clients)(0, server, rows, sums, cohort, clients).jaxpr
        number = len(jax.tree.leaves(client))
        inputs, outputs = (part[len(part) - number :] for part in (jaxpr.invars, jaxpr.outvars))
        used = _live(jaxpr, jaxpr.outvars[: len(jaxpr.outvars) - number])
        if not used.isdisjoint(inputs) or not all(out in inputs for out in outputs):
            raise InvalidInput(
                "this method cannot be deployed: its server reads or computes states of clients, which it does not have"
            )
        return [inputs.index(out) for out in outputs]


def _zeros(shapes: PyTree) -> PyTree:
    """Zeros of these shapes and types."""
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)


def _stacked(shapes: PyTree, size: int) -> PyTree:
    """Shapes of `size` trees of these shapes, stacked."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((size, *leaf.shape), leaf.dtype), shapes)


def _named(tree: PyTree) -> Arrays:
    """Leaves of a tree by their paths, as NumPy arrays."""
    return {path: np.asarray(leaf) for path, leaf in leaves_by_path(tree, **_PATHS).items()}


def _as_tree(shapes: PyTree, arrays: Arrays, what: str) -> Any:
    """Tree of these shapes and types from arrays of `_named`; InvalidInput for other arrays, called `what`."""
    return tree_of(arrays, shapes, what, **_PATHS)


def _live(jaxpr: Jaxpr, outputs: Sequence[Any]) -> set[Var]:
    """Variables of a program on which some of its outputs depend; an inner program counts as one operation."""
    found = {out for out in outputs if isinstance(out, Var)}
    for operation in reversed(jaxpr.eqns):
        if not found.isdisjoint(operation.outvars):
            found |= {given for given in operation.invars if isinstance(given, Var)}
    return found
