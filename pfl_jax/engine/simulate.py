"""Simulation of a federation, round by round."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from pfl_jax.base import Info, Method, PRNGKey, PyTree, Scores, State
from pfl_jax.engine import chunking
from pfl_jax.engine.body import Outcome
from pfl_jax.engine.build import Engine, adopted, build, compiled
from pfl_jax.engine.checks import (
    check_engine,
    check_not_traced,
    check_run,
    explain_misfit,
    typed_key,
    usual_settings,
)
from pfl_jax.engine.cohort import Settings, sample_cohort, stragglers
from pfl_jax.engine.mapping import ClientMesh, client_mesh, replicate
from pfl_jax.engine.remembered import MakeMethod
from pfl_jax.engine.stopping import Patience, without_ended
from pfl_jax.engine.store import Federation, OnDisk, OnHost
from pfl_jax.errors import Diverged, InvalidInput
from pfl_jax.primitives.metrics import before_aggregation
from pfl_jax.schedules import MethodSchedule, at_round
from pfl_jax.validation import check_arguments

__all__ = [
    "Engine",
    "OnNaN",
    "Outcome",
    "RoundResult",
    "Settings",
    "StateOn",
    "build",
    "client_mesh",
    "run",
    "sample_cohort",
    "stragglers",
]


StateOn: TypeAlias = Literal["device", "host", "disk"]
"""Place of the clients' states between rounds."""

OnNaN: TypeAlias = Literal["stop", "skip-client"]
"""Treatment of a client that diverges: end the run with `Diverged`, or leave the client out of the round."""


class RoundResult(NamedTuple):
    """Result of one round; of R runs at once (`pfl_jax.sweep`), arrays have a leading axis R.

    Attributes:
      round: number of the round, counted from 1.
      state: state after the round; with donate=True usable until the next round only. With state_on="host" the clients'
        leaves are NumPy arrays; with several processes, each process has only the rows of its own clients. With "disk"
        they are NumPy arrays of mapped files, into which the next round writes. Of a sweep, rows after the first R pad
        the devices' shares of the runs, here and in `info`.
      info: the method's `Info`, on the device. Rows of clients are those of `cohort`: row j of `info["head_weights"]`
        belongs to client `cohort[j]`. If all clients take part, row i is client i, as in `received` and `trained`.
      cohort: [M], the numbers of the clients that took part, ascending, as NumPy integers.
      arrived: [M], bool: whether the server received the client's message, see `Settings.drop_rate` and `run`'s
        on_nan. Rows of `info` for other clients are meaningless.
      finite: [M], bool: False for clients that were left out because they diverged. All are False in a run of a sweep
        whose server diverged; such a run is continued all the same.
      received: Scores [N] of what every client would deploy now, NaN for clients that `Settings.eval_clients` leaves
        out; None if not evaluated.
      trained: Scores [N] of every client's model right after its own last local training, NaN before the first.
      newcomers: two Scores of clients that never took part, see `Engine.evaluate_new`; None if there are no such
        clients or this round is not evaluated.
      examples: training examples of the cohort, each counted once: int, or a list of R numbers.
      seconds: wall time of the round and its evaluation, including compilation if there was any.
      before_aggregation: Scores [N] of the model that every client had in the middle of this round, see
        `pfl_jax.primitives.metrics.before_aggregation`; None unless `Settings.before_aggregation` asks for it.
      kept: with `Settings.patience` the number of the best evaluated round so far, 0 before the first; None without.
        A run of a sweep whose patience has ended has NaN for all scores of later rounds, while others go on.
    """

    round: int
    state: State
    info: Info
    cohort: np.ndarray
    arrived: np.ndarray
    finite: np.ndarray
    received: Scores | None
    trained: Scores
    newcomers: tuple[Scores, Scores] | None
    examples: Any
    seconds: float
    before_aggregation: Scores | None = None
    kept: Any = None

    def __repr__(self) -> str:
        """Round and means over clients, instead of all numbers."""
        means = [
            f"{protocol} {name} {np.nanmean(values):.4g}"
            for protocol, scores in (("received", self.received), ("trained", self.trained))
            for name, values in ({} if scores is None else scores.by_name).items()
            if np.isfinite(values).any()
        ]
        return f"RoundResult(round {self.round}, {np.shape(self.cohort)[-1]} clients: {', '.join(means)})"

    @property
    def diverged(self) -> np.ndarray:
        """Clients of the cohort of one run that were left out because they diverged."""
        return self.cohort[~self.finite]


@check_arguments
@usual_settings()
def run(
    method: Annotated[Method | MethodSchedule | MakeMethod, 'a method, such as make_method("fedper", model)'],
    data: Annotated[Federation, "a federation, as data.federate makes it"],
    settings: Settings,
    key: Annotated[PRNGKey, "a key, such as jax.random.key(0)"],
    hyper_parameters: Mapping[str, Any] | None = None,
    *,
    state: State | None = None,
    mesh: ClientMesh | None = None,
    state_on: StateOn = "device",
    state_folder: str | Path | None = None,
    on_nan: OnNaN = "stop",
    newcomers: Federation | None = None,
    donate: bool = False,
    engine: Engine | None = None,
    progress: bool = False,
) -> Iterator[RoundResult]:
    """Run a federation and yield a `RoundResult` after each round. The docstring of `pfl_jax` has an example.

    The compiled programs of the last methods are kept: another run of the same method (the same object, not an equal
    one) compiles nothing, whatever the key, the state, the number of rounds or, with `hyper_parameters`, their values.
    It compiles anew where a NumPy array or a number that the method's functions close over has changed. An `engine` of
    your own has such values of its first run; and of an array of float64, which JAX rounds, JAX keeps the first values.

    Args:
      method: the method; the method of several networks that `pfl_jax.mixed` makes; or a schedule, a function from the
        round (counted from 0, traced) to the method of that round, so that real-valued hyper-parameters can change from
        round to round: lambda round: fedavg(model, LocalTraining(lr=optax.cosine_decay_schedule(0.1, 100)(round))).
        Evaluations use the method of the last completed round.
      data: the federation's examples. With `PlacedData` each device holds only the examples of its own clients, in one
        process or several.
      settings: rounds, participation, chunk, evaluation interval.
      key: the run's key. The same key gives the same result.
      hyper_parameters: values for a function of them to a method, which is given in the place of the method, as in
        `pfl_jax.sweep`. Real numbers (float or an array) are inputs of the compiled programs, and other values of them
        compile nothing; whole numbers, texts and what else there is are a part of the programs.
      state: state to continue from, instead of a new one initialized from the key; a state carries its own key.
      mesh: devices to spread the clients over, see `client_mesh`. None uses the default device, or the mesh of
        `PlacedData`.
      state_on: place of the clients' states between rounds. "host", the host's memory, and "disk", a file, move the
        cohort's states to the device for each round, and all clients' states in blocks for each evaluation. The results
        are the same. "disk" is for one process.
      state_folder: existing folder where the files of state_on="disk", which end with the process, take room; None for
        the system's folder of temporary files.
      on_nan: treatment of clients whose state or message becomes NaN or infinite: "stop" ends the run, "skip-client"
        leaves them out of the round as if they had not been drawn. A score that is not finite stays one.
      newcomers: clients that never take part, see `pfl_jax.data.federated.hold_out`. Each evaluation also scores the
        models that the method gives them.
      donate: whether a round takes over the memory of the state before it, so that the state of a `RoundResult` can no
        longer be used once the next round begins. This saves the memory of one state while a round runs, and no time.
        By default the state of every result that you keep stays usable, and takes its memory; with state_on="disk" the
        clients' part of it is always taken over.
      engine: compiled engine of this method and these settings, such as `pfl_jax.build(method, settings).jit()`, from a
        caller who has one. It says where the states are: state_on, state_folder and donate are left out then. None
        builds one.
      progress: whether to show a bar with the rounds and their time, in a terminal or a notebook.

    Raises:
      InvalidInput: arguments of a wrong type or a state of another run, at once; a model that does not fit the data,
        when the first round is traced.
      Diverged: a client diverged (with on_nan="skip-client": all clients of a cohort), or the server's state did; in
        the round where it happened.
    """
    check_not_traced(key, data, state, hyper_parameters)
    key, values = typed_key(key), dict(hyper_parameters or {})
    make: Any = method
    made: Method | MethodSchedule = make if hyper_parameters is None else make(**values)
    check_run(made, data, settings, mesh, state, state_on, state_folder, newcomers)
    if data.mesh is not None and mesh not in (None, data.mesh):
        raise InvalidInput("mesh: the data is on another one already, that of placement.place; leave it out")
    mesh = data.mesh or mesh
    frozen = at_round(made, 0).frozen
    data = data.with_frozen(frozen)
    newcomers = newcomers if newcomers is None else newcomers.with_frozen(frozen)
    # Once, not at each evaluation; clients that belong to devices are there already.
    data = data if data.mesh else replicate(data, mesh)
    newcomers = newcomers if newcomers is None or newcomers.mesh else replicate(newcomers, mesh)
    devices = 1 if mesh is None else mesh.size
    settings = chunking.resolved(settings, made, np.asarray(data.train_count), devices=devices)
    if engine is not None:
        check_engine(engine, made, settings, mesh, state_on, donate=donate)
    else:
        store = None
        if state_on != "device":
            store = OnHost(donate=donate) if state_on == "host" else OnDisk(state_folder)
        engine = compiled(make, made, hyper_parameters, settings, mesh, data, donate=donate, store=store)

    def begin():
        if state is None:
            first = engine.init(data, replicate(key, mesh))
            check_not_traced(first)
        else:
            # The caller's state is never donated.
            rest = replicate(jax.tree.map(jnp.copy, state._replace(clients=())), mesh)
            first = rest._replace(clients=adopted(engine, data, state.clients))
        return committed(first) if mesh is None else first

    explains = partial(explain_misfit, make if values else lambda: made, values, data)
    results = play(engine, data, settings, begin, newcomers, explains, on_nan)
    if not progress:
        return results
    # Imported now: most runs show none.
    from rich.progress import track

    return iter(track(results, "rounds", total=settings.rounds - (0 if state is None else int(state.round))))


def play(
    engine: Engine,
    data: Federation,
    settings: Settings,
    begin: Callable[[], State],
    newcomers: Federation | None,
    explains: Callable[[], Any],
    on_nan: OnNaN | None,
) -> Iterator[RoundResult]:
    """Loop over rounds and their evaluations, of one run or of several whose arrays have a leading axis.

    Args:
      engine: compiled.
      data, settings, newcomers: see `run`.
      begin: function that makes the first state.
      explains: context in which a model that does not fit the data becomes an InvalidInput.
      on_nan: see `run`; None continues whatever diverges.
    """
    with usual_settings():
        with explains():
            state = begin()
        num_clients, completed = state.trained.shape[-1], int(np.ravel(state.round)[0])
    start, received, primary = time.perf_counter(), None, at_round(engine.method, 0).task.primary
    waiting = Patience.begin(state.trained.shape[:-1])
    for index in range(completed, settings.rounds):
        # The caller's own settings hold between rounds.
        with usual_settings():
            number, size = index + 1, settings.cohort_size(num_clients, index)
            evaluated = settings.is_evaluated(number)
            all_train = size == num_clients and on_nan == "stop"
            # Clients outside this cohort are scored with what they received, which the previous evaluation may have.
            if evaluated and settings.before_aggregation and not all_train and received is None:
                received = _on_host(engine.evaluate(data, state))
            with explains():
                state, outcome = engine.round(data, state, size)
            # A number of the method may have been traced.
            check_not_traced(outcome.finite)
            if on_nan is not None:
                _check_finite(number, outcome, on_nan)
            # Copied, because the next round may write into these arrays.
            trained = jax.tree.map(np.array, state.trained)
            before = new = None
            if evaluated and settings.before_aggregation:
                before = _in_the_middle(received, trained, outcome)
            received = _on_host(engine.evaluate(data, state)) if evaluated else None
            if evaluated and newcomers is not None:
                new = _on_host(engine.evaluate_new(newcomers, state))
            ended = waiting.ended
            if received is not None and settings.patience is not None:
                waiting = waiting.after(number, received, primary, settings.patience)
            if np.any(ended):
                received, trained, before = (without_ended(one, ended) for one in (received, trained, before))
            cohort, finite = outcome.cohort, np.asarray(outcome.finite)
            result = RoundResult(
                round=number,
                state=state,
                info=outcome.info,
                cohort=np.asarray(cohort.clients),
                arrived=np.asarray(cohort.present),
                finite=finite & np.asarray(outcome.server_finite)[..., None],
                received=received,
                trained=trained,
                newcomers=new,
                examples=np.asarray(outcome.examples).tolist(),
                seconds=time.perf_counter() - start,
                before_aggregation=before,
                kept=None if settings.patience is None else waiting.kept.tolist(),
            )
        yield result
        if np.all(waiting.ended):
            return
        start = time.perf_counter()


def _in_the_middle(received: Scores | None, trained: Scores, outcome: Outcome) -> Scores:
    """Scores of a round by the protocol `before_aggregation`; `received` are those before it, None if all trained."""
    members = np.zeros(trained.shape, bool)
    np.put_along_axis(members, np.asarray(outcome.cohort.clients), np.asarray(outcome.finite), axis=-1)
    trained = dataclasses.replace(trained, train=None)
    return before_aggregation(trained if received is None else received, trained, members)


def committed(tree: PyTree) -> PyTree:
    """The tree, with its arrays of JAX bound to their device.

    What a round returns is, if it calls exported functions (`pfl_jax.primitives.float64`); JAX would compile the second
    round anew if the first state were not.
    """
    return jax.tree.map(lambda leaf: jax.device_put(leaf, leaf.sharding) if isinstance(leaf, jax.Array) else leaf, tree)


def _on_host(tree: PyTree) -> PyTree:
    return jax.tree.map(np.asarray, tree)


def _check_finite(number: int, outcome: Outcome, on_nan: OnNaN) -> None:
    """Raise Diverged if the run cannot continue after this round."""
    diverged = np.asarray(outcome.cohort.clients)[~np.asarray(outcome.finite)]
    if diverged.size and (on_nan == "stop" or not np.asarray(outcome.cohort.present).any()):
        raise Diverged(number, sorted(diverged.tolist()))
    if not bool(outcome.server_finite):
        raise Diverged(number, [])
