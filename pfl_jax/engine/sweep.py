"""Sweeps: several runs in one compiled program, with seeds and real hyper-parameters as a leading axis.

The method is built inside the traced function from one value of each hyper-parameter, so a learning rate or a
regularization strength is an input of the compiled program: runs that differ only in such values compile once. All
arrays have a leading axis for the runs. With a mesh, each device has its own share of the runs and never waits for
another device. The docstring of `run` has an example.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pfl_jax.base import PRNGKey, PyTree, State
from pfl_jax.data.federated import FederatedData
from pfl_jax.engine import chunking, loop, simulate
from pfl_jax.engine.build import compiled
from pfl_jax.engine.checks import check_sweep, explain_misfit, typed_key
from pfl_jax.engine.loop import OnNaN, check_not_traced, usual_settings
from pfl_jax.engine.mapping import AXIS, ClientMesh, map_places, replicate
from pfl_jax.engine.remembered import MakeMethod
from pfl_jax.engine.simulate import RoundResult, Settings
from pfl_jax.primitives.tree import byte_count, gather
from pfl_jax.schedules import at_round
from pfl_jax.validation import Count, check_arguments


class OverRuns(NamedTuple):
    """Transformation of a function of one run into one of R runs, whose arguments and results have a leading axis R.

    In the data, the clients' tables are [R, ...]; the pool of examples is shared by all runs.

    Attributes:
      chunk, mesh: see `run`; here the number of devices must divide the number of runs.
    """

    chunk: int | None
    mesh: Mesh | None

    def __call__(self, run_one: Callable[..., PyTree]) -> Callable[..., PyTree]:
        """Function of R runs for `run_one` (values, data, key or state, *size)."""
        devices = 1 if self.mesh is None else self.mesh.size

        def run_all(values, data, rest, *size):
            pool, own = _split(data)

            def of_share(pool, run):
                own, values, rest = run
                return run_one(values, pool._replace(**own), rest, *size), ()

            shares = jax.tree.map(lambda leaf: leaf.reshape(devices, -1, *leaf.shape[1:]), (own, values, rest))
            is_real = np.ones((devices, len(data.train_count) // devices), bool)
            results, _ = map_places(of_share, pool, shares, is_real, chunk=self.chunk, mesh=self.mesh)
            return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), results)

        return run_all


@check_arguments
@usual_settings()
def run(
    make_method: MakeMethod,
    data: FederatedData,
    settings: Settings,
    keys: PRNGKey,
    hyper_parameters: Mapping[str, jax.Array] | None = None,
    *,
    states: State | None = None,
    chunk: Count | Literal["auto"] | None = "auto",
    mesh: ClientMesh | None = None,
    on_nan: OnNaN = "stop",
    donate: bool = False,
) -> Iterator[RoundResult]:
    """Run R federations of equal shapes together and yield a `RoundResult` [R, ...] after each round.

    Each run equals `pfl_jax.engine.simulate.run` with its key, hyper-parameters and data, up to float32 rounding. A run
    that would end with `Diverged` has no more scores, see `RoundResult.ended`; with `states`, runs that ended before
    have scores again.

    Args:
      make_method: function that is called while tracing, with one traced number for each of `hyper_parameters`. Values
        that change shapes or the number of steps (epochs, batch size) cannot be traced: use one sweep for each. Another
        sweep of the same function (the same object, not an equal one) and the same number of runs compiles nothing.
      data: one federation for all runs, or one for each run from `pfl_jax.data.federate_runs`.
      settings: settings of all runs; `Settings.chunk` is the number of clients under one vmap within a run.
      keys: [R], the runs' keys.
      hyper_parameters: name -> values [R].
      states: states to continue from, leaves [R, ...], instead of new ones; states carry their own keys.
      chunk: runs under one vmap on each device: 1 trains one after another, None all at once; "auto" means 1 for
        convolutions on a CPU, and None otherwise.
      mesh: devices to spread the runs over, see `pfl_jax.client_mesh`; None uses the default device.
      on_nan, donate: see `pfl_jax.engine.simulate.run`.

    Raises:
      InvalidInput: arguments of a wrong type, different numbers of runs, states of another method, or a learning rate,
        momentum or weight decay out of its range, at once; a model that does not fit the data, at the first round.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from pfl_jax import LocalTraining, Settings, data, methods, models, sweep
      >>> dataset = data.load("digits")
      >>> parts = data.partition.iid(dataset, num_clients=4, train_size=20, test_size=10)
      >>> federation = data.federate(dataset, parts)
      >>> model = models.mlp(dataset.input_shape, dataset.num_classes, hidden=(16,))
      >>> def local(lr):
      ...     return methods.local(model, LocalTraining(lr=lr, batch_size=10))
      >>> keys = jax.vmap(jax.random.key)(jnp.array([0, 1, 0]))
      >>> rates = {"lr": jnp.array([0.01, 0.01, 0.1])}
      >>> for result in sweep.run(local, federation, Settings(rounds=1), keys, rates):
      ...     print(result.round, result.received["accuracy"].shape, result.received["accuracy"].mean(axis=1).argmax())
      1 (3, 4) 2
    """
    check_not_traced(keys, data, hyper_parameters, states)
    keys = typed_key(keys, "keys", axes=1)
    values = {name: jnp.asarray(value) for name, value in (hyper_parameters or {}).items()}
    check_sweep(make_method, data, settings, keys, values, states, mesh)
    one = {name: value[0] for name, value in values.items()}
    first, number = make_method(**one), len(keys)
    explains = partial(explain_misfit, make_method, one, data)
    data = data.with_frozen(at_round(first, 0).frozen)
    settings = chunking.resolved(settings, first, np.asarray(data.train_count))
    if chunk == "auto":
        chunk = chunking.most_clients(first)
    # The caller's states are never donated.
    states = jax.tree.map(jnp.copy, states) if donate else states
    data, values, keys, states = _on_devices(mesh, number, data, values, keys, states)
    # A run's results stay on its device, whatever the mesh.
    engine = compiled(make_method, first, values, settings, None, data, donate=donate, over_runs=OverRuns(chunk, mesh))

    def begin():
        first = engine.init(data, keys) if states is None else states
        return simulate.committed(first) if mesh is None else first

    rounds = loop.play(engine, data, settings, begin, None, explains, on_nan)
    return map(partial(_without_padding, number), rounds)


def _without_padding(number: int, result: RoundResult) -> RoundResult:
    """Result without the rows that pad the devices' shares of the runs, except in `state` and `info`."""
    names = ("cohort", "arrived", "finite", "received", "trained", "before_aggregation", "ended")
    own = {name: jax.tree.map(lambda leaf: leaf[:number], getattr(result, name)) for name in names}
    kept = result.kept and result.kept[:number]
    return result._replace(**own, examples=result.examples[:number], kept=kept)


def _on_devices(
    mesh: Mesh | None, number: int, data: FederatedData, *inputs: PyTree
) -> tuple[FederatedData, PyTree, jax.Array, PyTree]:
    """Data with a leading axis of runs, and the other inputs of the runs, spread over the devices of a mesh.

    All devices take the same number of runs; copies of the first runs fill the last shares.
    """
    pool, own = _split(data)
    if data.train_count.ndim == 1:
        own = {name: jnp.broadcast_to(leaf, (number, *leaf.shape)) for name, leaf in own.items()}
    if mesh is not None:
        positions = np.arange(-(-number // mesh.size) * mesh.size) % number
        own, inputs = jax.device_put(gather((own, inputs), positions), NamedSharding(mesh, PartitionSpec(AXIS)))
        pool = replicate(pool, mesh)
    values, keys, states = inputs
    return pool._replace(**own), values, keys, states


def bytes_of_runs(make_method: MakeMethod, data: FederatedData, settings: Settings, values: Mapping[str, float]) -> int:
    """Estimated bytes that each run of a sweep adds, computed from shapes.

    These are two copies of the state (a round writes the next one before it frees the last) and the run's own tables.
    Temporary memory of local training is not included: it is needed once for each device and each run under one vmap.

    Args:
      make_method: see `run`.
      data: data of one run.
      settings: settings of the run.
      values: one value of each hyper-parameter.
    """
    _, own = _split(data)
    method = make_method(**values)
    engine = simulate.build(method, settings)
    state = jax.eval_shape(engine.init, data.with_frozen(at_round(method, 0).frozen), jax.random.key(0))
    return 2 * byte_count(state._replace(key=())) + byte_count(own)


def _split(data: FederatedData) -> tuple[FederatedData, dict[str, jax.Array]]:
    """Pool of examples, shared by all runs, and the per-client arrays."""
    own = data.per_client
    return data._replace(**dict.fromkeys(own)), own
