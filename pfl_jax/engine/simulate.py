"""Simulation of a federation, round by round."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from pfl_jax.base import Info, Method, MethodSchedule, PRNGKey, Scores, State
from pfl_jax.engine import chunking, host_state
from pfl_jax.engine.checks import check_folder, check_run, explained
from pfl_jax.engine.cohort import Settings, sample_cohort, stragglers
from pfl_jax.engine.disk_state import in_memory
from pfl_jax.engine.mapping import client_mesh, map_clients
from pfl_jax.engine.rounds import Engine, Federation, Outcome, build, build_once
from pfl_jax.engine.sharding import PlacedData, num_labels, replicate
from pfl_jax.errors import Diverged, InvalidInput
from pfl_jax.primitives.metrics import before_aggregation

__all__ = [
    "Engine",
    "OnNaN",
    "Outcome",
    "RoundResult",
    "Settings",
    "StateOn",
    "build",
    "client_mesh",
    "map_clients",
    "run",
    "sample_cohort",
    "stragglers",
]


StateOn: TypeAlias = Literal["device", "host", "disk"]
"""Place of the clients' states between rounds."""

OnNaN: TypeAlias = Literal["stop", "skip-client"]
"""Treatment of a client that diverges: end the run with `Diverged`, or leave the client out of the round."""


class RoundResult(NamedTuple):
    """Result of one round.

    Attributes:
      round: number of the round, counted from 1.
      state: state after the round; with donate=True usable until the next round only. With state_on="host" the clients'
        leaves are NumPy arrays; with several processes, each process has only the rows of its own clients
        (`host_state.whole` collects them). With "disk" they are read where they are indexed or made an array of
        (`pfl_jax.engine.disk_state.DiskLeaf`).
      info: the method's `Info`, on the device. Rows of clients are those of `cohort`: row j of `info["head_weights"]`
        belongs to client `cohort[j]`. If all clients take part, row i is client i, as in `received` and `trained`.
      cohort: [M], the numbers of the clients that took part, ascending, as NumPy integers.
      arrived: [M], bool: whether the server received the client's message, see `Settings.drop_rate` and `run`'s
        on_nan. Rows of `info` for other clients are meaningless.
      diverged: the clients of the cohort that were left out because they diverged.
      received: Scores [N] of what every client would deploy now, NaN for clients that `Settings.eval_clients` leaves
        out; None if not evaluated.
      trained: Scores [N] of every client's model right after its own last local training, NaN before the first.
      newcomers: two Scores of clients that never took part: of the model they would deploy given the server's state,
        and of that model after one round of local training. None if there are no such clients or this round is not
        evaluated.
      examples: training examples of the cohort, each counted once.
      seconds: wall time of the round and its evaluation, including compilation if there was any.
      before_aggregation: Scores [N] of the model that every client had in the middle of this round, see
        `pfl_jax.primitives.metrics.before_aggregation`; None unless `Settings.before_aggregation` asks for it.
    """

    round: int
    state: State
    info: Info
    cohort: np.ndarray
    arrived: np.ndarray
    diverged: np.ndarray
    received: Scores | None
    trained: Scores
    newcomers: tuple[Scores, Scores] | None
    examples: int
    seconds: float
    before_aggregation: Scores | None = None


def run(
    method: Method | MethodSchedule,
    data: Federation,
    settings: Settings,
    key: PRNGKey,
    *,
    state: State | None = None,
    mesh: Mesh | None = None,
    state_on: StateOn = "device",
    state_folder: str | Path | None = None,
    on_nan: OnNaN = "stop",
    newcomers: Federation | None = None,
    donate: bool = False,
) -> Iterator[RoundResult]:
    """Run a federation and yield a `RoundResult` after each round. The docstring of `pfl_jax` has an example.

    Another run of the same method, with another key, state or number of rounds, compiles nothing again in the same
    process: make the method once and run it for each seed. The programs of the last four methods and settings, and
    what these methods hold, stay in memory.

    Args:
      method: the method; or a schedule, a function from the round (counted from 0, traced) to the method of that
        round, so that real-valued hyper-parameters can change from round to round:
        lambda round: fedavg(model, LocalSGD(lr=optax.cosine_decay_schedule(0.1, 100)(round))). Evaluations use the
        method of the last completed round.
      data: the federation's examples. With `PlacedData` each device holds only the examples of its own clients, in one
        process or several.
      settings: rounds, participation, chunk, evaluation interval.
      key: the run's key. The same key gives the same result.
      state: state to continue from, instead of a new one initialized from the key; a state carries its own key.
      mesh: devices to spread the clients over, see `client_mesh`. None uses the default device, or the mesh of
        `PlacedData`.
      state_on: place of the clients' states between rounds. "host", the host's memory, and "disk", a file, move the
        cohort's states to the device for each round, and all clients' states in blocks for each evaluation. The results
        are the same. "disk" is for one process.
      state_folder: existing folder for the file of state_on="disk"; an earlier file there is replaced unless `state` is
        stored in it. None takes a temporary file that ends with the process.
      on_nan: treatment of clients whose state or message becomes NaN or infinite: "stop" ends the run, "skip-client"
        leaves them out of the round as if they had not been drawn. A score that is not finite stays one.
      newcomers: clients that never take part, see `pfl_jax.data.federated.hold_out`. Each evaluation also scores the
        models that the method gives them.
      donate: whether a round takes over the memory of the state before it, so that the state of a `RoundResult` can no
        longer be used once the next round begins. By default the state of every result that you keep stays usable, and
        takes its memory. Donating saves the memory of one state while a round runs, and no time: for FedPAC on 20
        clients of 600 examples in Fashion-MNIST's shape 0.2 of 31.7 MB, and ten paired rounds took 0.94 times as long
        without it (median; 0.82 to 1.23), by `python -m experiments.benchmark.donation`.

    Raises:
      InvalidInput: arguments of a wrong type or a state of another run, at once; a model that does not fit the data,
        when the first round is traced.
      Diverged: a client diverged (with on_nan="skip-client": all clients of a cohort), or the server's state did; in
        the round where it happened.
    """
    check_run(
        method, data, settings, key, state=state, mesh=mesh, newcomers=newcomers, state_on=state_on, on_nan=on_nan
    )
    check_folder(state_on, state_folder)
    disk = None if state_on != "disk" else host_state.Disk(None if state_folder is None else Path(state_folder))
    if isinstance(data, PlacedData):
        if mesh not in (None, data.mesh):
            raise InvalidInput("mesh: the data is on another one already, that of placement.place; leave it out")
        mesh = data.mesh
        # Once, not at each evaluation.
        newcomers = newcomers if isinstance(newcomers, PlacedData) else replicate(newcomers, mesh)
    else:
        data, newcomers = replicate((data, newcomers), mesh)
    devices = 1 if mesh is None else mesh.size
    settings = chunking.resolved(settings, method, np.asarray(data.train_count), devices=devices)
    on_host = state_on != "device"
    begin = partial(_start, method, settings, key, state, mesh, on_host=on_host, disk=disk, donate=donate)
    return _rounds(method, data, newcomers, settings, begin, on_nan)


def _rounds(
    method: Method | MethodSchedule,
    data: Federation,
    newcomers: Federation | None,
    settings: Settings,
    begin: Callable[[Federation], tuple[Engine, State]],
    on_nan: OnNaN,
) -> Iterator[RoundResult]:
    """The rounds of `run`, whose engine and first state `begin` makes."""
    num_clients = data.num_clients
    explains = partial(explained, lambda: method, {}, data)
    with explains():
        engine, current = begin(data)
    start, received = time.perf_counter(), None
    for index in range(int(current.round), settings.rounds):
        number, size = index + 1, settings.cohort_size(num_clients, index)
        evaluated = settings.is_evaluated(number)
        all_train = size == num_clients and on_nan == "stop"
        # Clients outside this cohort are scored with what they received, which the previous evaluation may have.
        if evaluated and settings.before_aggregation and not all_train and received is None:
            received = jax.tree.map(np.asarray, engine.evaluate(data, current))
        with explains():
            current, outcome = engine.round(data, current, size)
        cohort, clients = outcome.cohort, np.asarray(outcome.cohort.clients)
        _check_finite(number, clients, outcome, on_nan)
        # Copied, because the next round may write into these arrays.
        trained = jax.tree.map(np.array, current.trained)
        before = None
        if evaluated and settings.before_aggregation:
            members = np.isin(np.arange(num_clients), clients[np.asarray(outcome.finite)])
            before = before_aggregation(trained if received is None else received, trained, members)
        received = new = None
        if evaluated:
            received = jax.tree.map(np.asarray, engine.evaluate(data, current))
            new = None if newcomers is None else jax.tree.map(np.asarray, engine.evaluate_new(newcomers, current))
        yield RoundResult(
            round=number,
            state=current,
            info=outcome.info,
            cohort=clients,
            arrived=np.asarray(cohort.present),
            diverged=clients[~np.asarray(outcome.finite)],
            received=received,
            trained=trained,
            newcomers=new,
            examples=int(outcome.examples),
            seconds=time.perf_counter() - start,
            before_aggregation=before,
        )
        start = time.perf_counter()


def _start(
    method: Method | MethodSchedule,
    settings: Settings,
    key: PRNGKey,
    state: State | None,
    mesh: Mesh | None,
    data: Federation,
    *,
    on_host: bool,
    disk: host_state.Disk | None,
    donate: bool,
) -> tuple[Engine, State]:
    """The compiled engine, and the state before the first round of this run."""
    labels = num_labels(data)
    if on_host:
        engine = host_state.build(method, settings, mesh, disk=disk, donate=donate, num_labels=labels)
    else:
        engine = build_once(method, settings.of_programs(), mesh, labels).jit(mesh, donate=donate)
    if state is None:
        return engine, engine.init(data, replicate(key, mesh))
    if on_host:
        return engine, host_state.copy(state, data, mesh, disk)
    state = state._replace(clients=in_memory(state.clients))
    # The caller's state is never donated.
    return engine, replicate(jax.tree.map(jnp.copy if donate else jnp.asarray, state), mesh)


def _check_finite(number: int, clients: np.ndarray, outcome: Outcome, on_nan: OnNaN) -> None:
    """Raise Diverged if the run cannot continue after this round."""
    diverged = clients[~np.asarray(outcome.finite)]
    if diverged.size and (on_nan == "stop" or not np.asarray(outcome.cohort.present).any()):
        raise Diverged(number, sorted(diverged.tolist()))
    if not bool(outcome.server_finite):
        raise Diverged(number, [])
