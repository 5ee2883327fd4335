"""Sweeps: runs of one shape together, with seeds and traced hyper-parameters as an axis over whole rounds.

The method is built inside the traced function, from one value of each hyper-parameter, so that a learning rate or a
regularization strength is an input of the compiled program and not a part of it: runs that differ in such values only
are compiled once. The runs lie along the leading axis of everything; with a mesh each device has its own share of them
and never waits for another. `run` has an example.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pfl_jax.base import Info, Method, MethodSchedule, PRNGKey, PyTree, Scores, State
from pfl_jax.data.federated import PER_CLIENT, FederatedData
from pfl_jax.engine import simulate
from pfl_jax.engine.simulate import Outcome, Settings
from pfl_jax.errors import InvalidInput
from pfl_jax.primitives.metrics import before_aggregation
from pfl_jax.primitives.tree import byte_count, gather

MakeMethod: TypeAlias = Callable[..., Method | MethodSchedule]
"""From hyper-parameters, as keyword arguments that may be traced, to the method, see `pfl_jax.run`."""


class SweepResult(NamedTuple):
    """Result of one round of all R runs: `pfl_jax.engine.simulate.RoundResult` with a leading axis R.

    Attributes:
      round: number of the round, counted from 1.
      states: after the round, leaves [R, ...], and behind them what fills up a device's share of the runs. Their
        buffers are given to the next round: copy what you want to keep.
      infos: each run's `Info`, likewise.
      cohorts: [R, M], the clients that took part, as NumPy integers.
      arrived: [R, M], bool: whose message the server had.
      finite: [R], bool: in which runs neither a client nor the server diverged in this round; the others continue.
      received: Scores [R, N] of what every client would deploy now, or None if not evaluated.
      trained: Scores [R, N] of every client's model right after its own last local training, NaN before the first.
      examples: [R], training examples of each cohort, each counted once.
      seconds: wall time of the round of all runs; compilation is in it where a program is new.
      before_aggregation: Scores [R, N], see `pfl_jax.simulate.RoundResult`.
    """

    round: int
    states: State
    infos: Info
    cohorts: np.ndarray
    arrived: np.ndarray
    finite: np.ndarray
    received: Scores | None
    trained: Scores
    examples: np.ndarray
    seconds: float
    before_aggregation: Scores | None = None


class Engine(NamedTuple):
    """Engine of R runs as three compiled functions; `values` are hyper-parameters [R], `states` have leaves [R, ...].

    Attributes:
      init: (FederatedData, values, keys [R]) -> states.
      round: (FederatedData, values, states, size) -> (states, Outcome), leaves [R, ...]; takes over the buffers of the
        states it is given.
      evaluate: (FederatedData, values, states) -> Scores [R, N].
    """

    init: Callable[[FederatedData, Mapping[str, jax.Array], PRNGKey], State]
    round: Callable[[FederatedData, Mapping[str, jax.Array], State, int], tuple[State, Outcome]]
    evaluate: Callable[[FederatedData, Mapping[str, jax.Array], State], Scores]


def build(make_method: MakeMethod, settings: Settings, *, chunk: int | None = 1, mesh: Mesh | None = None) -> Engine:
    """Engine of a sweep.

    Args:
      make_method, settings, chunk: see `run`.
      mesh: likewise; its devices must divide the number of runs.
    """

    def over_runs(one: Callable[..., PyTree]) -> Callable[..., PyTree]:
        """Turn one(data, values, rest) of one run into the same function of all runs."""

        def every(data, values, rest):
            pool, own = _split(data)

            def of_run(pool, run):
                own, values, rest = run
                return one(pool._replace(**own), values, rest)

            def of_device(pool, runs):
                return simulate.map_clients(of_run, pool, runs, chunk=chunk, mesh=None)

            if mesh is not None and mesh.size > 1:
                along = PartitionSpec("clients")
                of_device = jax.shard_map(
                    # As in `simulate.map_clients`: the loops of `fit` carry unsharded values into sharded results.
                    of_device, mesh=mesh, in_specs=(PartitionSpec(), along), out_specs=along, check_vma=False
                )  # fmt: skip
            return of_device(pool, (own, values, rest))

        return every

    def engine(values):
        return simulate.build(make_method(**values), settings)

    init = over_runs(lambda data, values, key: engine(values).init(data, key))
    evaluate = over_runs(lambda data, values, state: engine(values).evaluate(data, state))

    def round_(data, values, states, size):
        return over_runs(lambda data, values, state: engine(values).round(data, state, size))(data, values, states)

    return Engine(jax.jit(init), jax.jit(round_, static_argnums=3, donate_argnums=2), jax.jit(evaluate))


def run(
    make_method: MakeMethod,
    data: FederatedData,
    settings: Settings,
    keys: PRNGKey,
    hyper_parameters: Mapping[str, jax.Array] | None = None,
    *,
    states: State | None = None,
    chunk: int | None = 1,
    mesh: Mesh | None = None,
) -> Iterator[SweepResult]:
    """Run R federations of one shape together and yield a `SweepResult` after each round.

    Each is the run that `pfl_jax.engine.simulate.run` makes of its key, hyper-parameters and data, within float32
    rounding.

    Args:
      make_method: called while tracing, with one traced number for each of `hyper_parameters`. What changes shapes or
        the number of steps (epochs, batch size) cannot be among them: runs that differ in it are sweeps of their own.
      data: of all runs, or for each its own, from `pfl_jax.data.federate_runs`.
      settings: of all runs; its `chunk` counts the clients under one vmap within a run.
      keys: [R], the runs' keys.
      hyper_parameters: name -> values [R].
      states: continue from here, leaves [R, ...], instead of initializing from the keys; states carry their own keys.
      chunk: runs under one vmap on each device: 1 is one after another, None all at once.
      mesh: spread the runs over these devices, see `pfl_jax.client_mesh`; None uses the default device alone.

    Raises:
      InvalidInput: arguments of different numbers of runs.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from pfl_jax import LocalSGD, Settings, data, methods, models, sweep
      >>> dataset = data.load("digits")
      >>> parts = data.partition.iid(dataset.train_y, dataset.test_y, num_clients=4, train_size=20, test_size=10)
      >>> federation = data.federate(dataset, parts)
      >>> model = models.mlp(dataset.input_shape, dataset.num_classes, hidden=(16,))
      >>> def local(lr):
      ...     return methods.local(model, LocalSGD(lr=lr, batch_size=10))
      >>> keys = jax.vmap(jax.random.key)(jnp.array([0, 1, 0]))
      >>> rates = {"lr": jnp.array([0.01, 0.01, 0.1])}
      >>> for result in sweep.run(local, federation, Settings(rounds=1), keys, rates):
      ...     print(result.round, result.received.accuracy.shape, result.received.accuracy.mean(axis=1).argmax())
      1 (3, 4) 2
    """
    values = {name: jnp.asarray(value) for name, value in (hyper_parameters or {}).items()}
    number = _number_of_runs(data, keys, values)
    pool, own = _split(data)
    if data.train_count.ndim == 1:
        own = {name: jnp.broadcast_to(leaf, (number, *leaf.shape)) for name, leaf in own.items()}
    # A round takes its states' buffers over: those that came from outside stay the caller's.
    states = jax.tree.map(jnp.copy, states)
    if mesh is not None:
        # Devices take equal shares: the first run is repeated where they would not.
        places = np.arange(-(-number // mesh.size) * mesh.size)
        runs = gather((own, values, keys, states), np.where(places < number, places, 0))
        own, values, keys, states = jax.device_put(runs, NamedSharding(mesh, PartitionSpec("clients")))
        pool = jax.device_put(pool, NamedSharding(mesh, PartitionSpec()))
    data = pool._replace(**own)
    engine = build(make_method, settings, chunk=chunk, mesh=mesh)
    num_clients = data.train_count.shape[1]
    if states is None:
        states = engine.init(data, values, keys)

    def of_runs(tree):
        """Results on the host, without the runs that pad the devices' shares."""
        return jax.tree.map(lambda leaf: np.asarray(leaf)[:number], tree)

    start, received = time.perf_counter(), None
    for index in range(int(np.asarray(states.round)[0]), settings.rounds):
        evaluated, before = settings.is_evaluated(index + 1), None
        size = settings.cohort_size(num_clients, index)
        if evaluated and settings.before_aggregation and size < num_clients and received is None:
            received = of_runs(engine.evaluate(data, values, states))
        states, outcome = engine.round(data, values, states, size)
        cohorts, trained = of_runs(outcome.cohort.clients), of_runs(states.trained)
        if evaluated and settings.before_aggregation:
            members = np.zeros((number, num_clients), bool)
            np.put_along_axis(members, cohorts, values=True, axis=1)
            before = before_aggregation(trained if received is None else received, trained, members)
        received = of_runs(engine.evaluate(data, values, states)) if evaluated else None
        yield SweepResult(
            round=index + 1,
            states=states,
            infos=outcome.info,
            cohorts=cohorts,
            arrived=of_runs(outcome.cohort.present),
            finite=of_runs(outcome.finite).all(axis=1) & of_runs(outcome.server_finite),
            received=received,
            trained=trained,
            examples=of_runs(outcome.examples),
            seconds=time.perf_counter() - start,
            before_aggregation=before,
        )
        start = time.perf_counter()


def bytes_of_runs(make_method: MakeMethod, data: FederatedData, settings: Settings, values: Mapping[str, float]) -> int:
    """Estimated memory of one more run, before anything is run.

    The state twice (a round writes the next one beside it) and the run's own tables. What a client's training needs
    besides is freed after it, and needed once for each device and each run under one vmap.

    Args:
      make_method: see `run`.
      data: of one run.
      settings: of the run.
      values: one value of each hyper-parameter.
    """
    _, own = _split(data)
    engine = simulate.build(make_method(**values), settings)
    state = jax.eval_shape(engine.init, data, jax.random.key(0))
    return 2 * byte_count(state._replace(key=())) + byte_count(own)


def _split(data: FederatedData) -> tuple[FederatedData, dict[str, jax.Array]]:
    """The pool, shared by all runs, and the arrays of the clients."""
    own = {name: getattr(data, name) for name in PER_CLIENT if getattr(data, name) is not None}
    return data._replace(**dict.fromkeys(own)), own


def _number_of_runs(data: FederatedData, keys: PRNGKey, values: Mapping[str, jax.Array]) -> int:
    """Number of runs R; keys, hyper-parameters and data must agree on it."""
    found = {"keys": keys.shape, **{name: value.shape for name, value in values.items()}}
    if data.train_count.ndim == 2:
        found["data"] = data.train_count.shape[:1]
    wrong = [f"{name} has shape {shape}" for name, shape in found.items() if len(shape) != 1 or shape != keys.shape]
    if wrong:
        raise InvalidInput(f"every run needs one key and one value: keys has shape {keys.shape}, but {wrong[0]}")
    return keys.shape[0]
