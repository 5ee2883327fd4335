"""The engine: one run of a method as four pure functions, wherever the clients' states are stored between rounds."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from pfl_jax.base import Method, PRNGKey, PyTree, Scores, State
from pfl_jax.engine.body import Outcome, round_programs, sample, train
from pfl_jax.engine.cohort import RoundSettings
from pfl_jax.engine.mapping import replicated
from pfl_jax.engine.remembered import ByIdentity, MakeMethod, remembered, values_read
from pfl_jax.engine.store import ClientStore, Federation, Places
from pfl_jax.primitives.tree import choose
from pfl_jax.schedules import MethodSchedule, mixture


class Engine(NamedTuple):
    """Federated training with one method as pure functions, for use under jit, vmap (for example over seeds) or scan.

    Attributes:
      init: (Federation, key) -> State.
      round: (Federation, State, size) -> (State, Outcome); `size`, a Python int, is the number of clients in the
        cohort.
      evaluate: (Federation, State) -> Scores [N] of the model that each client would deploy now (protocol `received`).
      evaluate_new: (Federation, State) -> (received, trained), Scores [N] of clients that never took part: of the model
        they would deploy given the server's state, and of that model after one round of local training.
      method, settings, mesh, store: the arguments of `build`.
    """

    init: Callable[[Federation, PRNGKey], State]
    round: Callable[[Federation, State, int], tuple[State, Outcome]]
    evaluate: Callable[[Federation, State], Scores]
    evaluate_new: Callable[[Federation, State], tuple[Scores, Scores]]
    method: Method | MethodSchedule
    settings: RoundSettings
    mesh: Mesh | None
    store: ClientStore

    def jit(self, mesh: Mesh | None = None, *, donate: bool = False) -> "Engine":
        """Compiled engine, with one trace per cohort size; compiled already if its store is not on the device.

        Args:
          mesh: mesh of data that belongs to devices; None for the mesh given to `build`.
          donate: whether `round` takes over the buffers of its input state, which then cannot be used again.
        """
        if not self.store.is_traced:
            return self
        options = {name: _options(name, 0, mesh or self.mesh, donate=donate) for name in FUNCTIONS}
        return self._replace(**{name: jax.jit(getattr(self, name), **of_name) for name, of_name in options.items()})


FUNCTIONS = ("init", "round", "evaluate", "evaluate_new")
"""Names of an engine's functions."""


def _options(name: str, data: int, mesh: Mesh | None, *, donate: bool) -> dict[str, Any]:
    """Options of `jax.jit` for the function `name` of an engine; `data` is the data's position among its arguments."""
    # Explicit output shardings: the compiler could otherwise choose a new layout of the state each round, and every new
    # layout of the inputs compiles the round again.
    options: dict[str, Any] = {"out_shardings": replicated(mesh)}
    if name == "round":
        options |= {"static_argnums": data + 2, "donate_argnums": (data + 1,) if donate else ()}
    return options


def build(
    method: Method | MethodSchedule,
    settings: RoundSettings,
    mesh: Mesh | None = None,
    *,
    store: ClientStore | None = None,
    donate: bool = False,
) -> Engine:
    """Engine of a method: the functions that `pfl_jax.run` repeats, for your own loop.

    The engine learns the clients' sizes too late to choose `Settings.chunk` by them: here "auto" is 1 on a CPU, and all
    clients at once elsewhere. `pfl_jax.engine.chunking.resolved` makes the same choice as `run`.

    Args:
      method, mesh: see `pfl_jax.run`.
      settings: settings of a run, or only the part that a round depends on.
      store: storage of the clients' states between rounds; None for the device. With another store the functions are
        compiled already and cannot be traced.
      donate: whether `round` may write into the buffers of its input state, for stores that are not on the device; see
        `Engine.jit`.

    Example:
      >>> import jax
      >>> import pfl_jax
      >>> from pfl_jax import LocalTraining, Settings, data, methods, models
      >>> dataset = data.load("digits")
      >>> parts = data.partition.iid(dataset, num_clients=4, train_size=20, test_size=10)
      >>> federation = data.federate(dataset, parts)
      >>> method = methods.fedper(models.mlp(dataset.input_shape, dataset.num_classes), LocalTraining(batch_size=10))
      >>> engine = pfl_jax.build(method, Settings(rounds=2)).jit()
      >>> state = engine.init(federation, jax.random.key(0))
      >>> for _ in range(2):
      ...     state, outcome = engine.round(federation, state, 4)
      >>> int(state.round), engine.evaluate(federation, state)["accuracy"].shape
      (2, (4,))
    """
    if store is not None and not store.is_traced:
        return compiled(method, method, None, settings, mesh, None, donate=donate, store=store)
    programs = round_programs(method, settings, mesh)
    store = ClientStore() if store is None else store
    return _engine(method, settings, mesh, store, programs, partial(sample, programs), partial(train, programs))


def _engine(
    method: Method | MethodSchedule,
    settings: RoundSettings,
    mesh: Mesh | None,
    store: ClientStore,
    programs: Sequence[Any],
    sampled: Callable[..., Any],
    trained_by: Callable[..., Any],
) -> Engine:
    """Engine made of the functions of each network's RoundProgram, and of their `sample` and `train`."""
    one_network = mixture(method) is None

    def evaluated(data: ByIdentity, key: ByIdentity) -> list[Places]:
        return [net.evaluated(data.value, key.value) for net in programs]

    if not store.is_traced:
        # Cached for all rounds of a run: drawing some of very many clients takes longer than a round.
        evaluated = functools.lru_cache(maxsize=1)(evaluated)

    def each(parts):
        """Server or clients of a state, for each network."""
        return (parts,) if one_network else parts

    def together(parts):
        return parts[0] if one_network else tuple(parts)

    def stored(data, net, places):
        """The places, with the rows of their clients in one network's store."""
        return dataclasses.replace(places, ids=net.rows_of(data.num_clients, places.ids))

    def read(data, net, clients, places):
        return store.read(net.clients(data), data.mesh or mesh, clients, stored(data, net, places))

    def init(data, key):
        servers, clients = [net.init_server(data, key) for net in programs], []
        for net, server in zip(programs, servers, strict=True):
            blocks = store.blocks(net.everyone(data))
            rows = ((stored(data, net, places), net.init_clients(data, server, key, places)) for places in blocks)
            clients.append(store.create(net.clients(data), data.mesh or mesh, rows))
        # A separate array for each field: every buffer is donated once.
        unscored, completed = programs[0].untrained(data), jnp.zeros_like(data.train_count[0])
        return State(together(servers), together(clients), unscored, key, completed)

    def round_(data, state, size):
        losses = None if state.trained.train is None else state.trained.train["loss"]
        cohort, drawn = sampled(data, state.key, state.round, size, losses)
        before = list(zip(programs, each(state.clients), strict=True))
        rows = [read(data, *own, places) for own, places in zip(before, drawn, strict=True)]
        servers, trained, written, outcome = trained_by(
            data, each(state.server), state.trained, rows, state.key, state.round, cohort
        )
        after = [
            store.write(net.clients(data), clients, None if ids is None else net.rows_of(data.num_clients, ids), new)
            for (net, clients), (ids, new) in zip(before, written, strict=True)
        ]
        return State(together(servers), together(after), trained, state.key, state.round + 1), outcome

    def evaluate(data, state):
        scores = programs[0].unscored(data)
        states = zip(each(state.server), each(state.clients), strict=True)
        drawn = evaluated(ByIdentity(data), ByIdentity(state.key))
        for net, (server, clients), everyone in zip(programs, states, drawn, strict=True):
            for places in net.chains(data) if net.deploys_in_turn and not store.is_traced else store.blocks(everyone):
                rows = read(data, net, clients, places)
                scores = net.evaluate(data, server, state.key, state.round, places, rows, scores)
        return scores

    def evaluate_new(data, state):
        scores: Any = None
        for net, server in zip(programs, each(state.server), strict=True):
            # There may be fewer newcomers than networks.
            if number := net.clients(data).num_clients:
                found = net.evaluate_new(data, server, state.key, state.round)
                own = net.rows_of(data.num_clients, np.arange(data.num_clients)) < number
                scores = found if scores is None else choose(own, found, scores)
        return scores

    return Engine(init, round_, evaluate, evaluate_new, method, settings, mesh, store)


def adopted(engine: Engine, data: Federation, clients: PyTree) -> PyTree:
    """States of all clients of the data, given from outside, in the engine's store; see `ClientStore.adopt`."""
    mesh, parts = data.mesh or engine.mesh, round_programs(engine.method, engine.settings, engine.mesh)
    if mixture(engine.method) is None:
        return engine.store.adopt(data, mesh, clients)
    return tuple(engine.store.adopt(net.clients(data), mesh, own) for net, own in zip(parts, clients, strict=True))


def compiled(
    method: Method | MethodSchedule | MakeMethod,
    made: Method | MethodSchedule,
    hyper_parameters: Mapping[str, Any] | None,
    settings: RoundSettings,
    mesh: Mesh | None,
    data: Federation | None,
    *,
    donate: bool,
    store: ClientStore | None = None,
    over_runs: Callable[[Callable[..., PyTree]], Callable[..., PyTree]] | None = None,
) -> Engine:
    """Engine that is compiled once for all runs of a method on data of the same shapes.

    Args:
      method, settings, mesh, donate, store: see `build`; with hyper-parameters, `method` is a function of them.
      made: the method, or the method of one run.
      data: the federation, None if it is not known yet. JAX keeps the programs of all shapes as long as a function
        lives; because shapes are a part of the key, functions whose shapes were used long ago make room for others.
      hyper_parameters: see `pfl_jax.run`. Real numbers are inputs of the compiled programs: other values of them
        compile nothing.
      over_runs: makes a function of several runs from that of one run (values, *arguments); hashable. None for one run.
    """
    values = dict(hyper_parameters or {})
    # Real numbers, which are arguments of the programs: closed over by the functions, they would be constants.
    inputs = {
        name: value for name, value in values.items() if isinstance(value, float | np.floating | np.ndarray | jax.Array)
    }
    fixed = None if hyper_parameters is None else tuple(sorted((name, values[name]) for name in values.keys() - inputs))
    shapes = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(data))
    known = ByIdentity(method, values_read((method, settings.select, settings.timetable)))
    functions = _compiled(known, fixed, settings.of_a_round(), mesh, donate, shapes, over_runs, store is None)
    given = {name: partial(function, inputs) for name, function in functions.items()}
    if store is None:
        return Engine(**given, method=made, settings=settings, mesh=mesh, store=ClientStore(donate=donate))
    programs = [
        SimpleNamespace(
            **{name: getattr(one, name) for name in ("clients", "rows_of", "deploys_in_turn")},
            **{name: partial(given[name], index) for name in BY_BLOCK},
        )
        for index, one in enumerate(round_programs(made, settings, mesh))
    ]
    return _engine(made, settings, mesh, store, programs, given["sample"], given["train"])


@remembered
def _compiled(
    method: ByIdentity,
    fixed: tuple[tuple[str, Any], ...] | None,
    settings: RoundSettings,
    mesh: Mesh | None,
    donate: bool,
    shapes: tuple[Any, ...],
    over_runs: Callable[..., Any] | None,
    whole: bool,
) -> dict[str, Callable[..., Any]]:
    """Compiled functions of an engine by name; their first argument is the hyper-parameters that are inputs.

    If the engine is not compiled as a `whole`, they are `sample`, `train`, and the functions BY_BLOCK of a
    RoundProgram, whose second argument is the position of its network.
    """

    def program(name: str, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        def of_values(values, *arguments):
            return function(method.value if fixed is None else method.value(**dict(fixed), **values), *arguments)

        of_values = of_values if over_runs is None else over_runs(of_values)
        # The name that JAX shows where it logs compilations.
        of_values.__name__ = name
        options = {"out_shardings": replicated(mesh)} | options
        return jax.jit(of_values, **options)

    def of_engine(name: str, method: Method | MethodSchedule, *arguments: Any) -> Any:
        return getattr(build(method, settings, mesh), name)(*arguments)

    def of_network(name: str, method: Method | MethodSchedule, index: int, *arguments: Any) -> Any:
        return getattr(round_programs(method, settings, mesh)[index], name)(*arguments)

    def of_round(stage: Callable[..., Any], method: Method | MethodSchedule, *arguments: Any) -> Any:
        return stage(round_programs(method, settings, mesh), *arguments)

    if whole:
        return {
            name: program(name, partial(of_engine, name), **_options(name, 1, mesh, donate=donate))
            for name in FUNCTIONS
        }
    # With `donate`, buffers of server and scores are taken over. The cohort's rows are new in every round and always
    # taken over, except on a mesh, where the results have another sharding and cannot reuse them.
    taken = (*((2, 3) if donate else ()), *(() if mesh else (4,)))
    return {
        "sample": program("sample", partial(of_round, sample), static_argnums=4),
        "train": program("train", partial(of_round, train), donate_argnums=taken),
        **{
            name: program(name, partial(of_network, name), static_argnums=1, **options)
            for name, options in BY_BLOCK.items()
        },
    }


BY_BLOCK: Mapping[str, Mapping[str, Any]] = {
    "init_server": {},
    # The rows stay on the devices that made them.
    "init_clients": {"out_shardings": None},
    "everyone": {},
    "unscored": {},
    "untrained": {},
    "evaluated": {},
    "chains": {},
    # Takes over the buffers of the scores.
    "evaluate": {"donate_argnums": 8},
    "evaluate_new": {},
}
"""Functions of a RoundProgram that are compiled separately where states are not on the device, with their options for
`jax.jit`."""
