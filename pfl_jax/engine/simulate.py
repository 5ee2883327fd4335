"""Simulation of a federation, round by round."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from pfl_jax.base import Method, PRNGKey, PyTree, State
from pfl_jax.data.phases import Phases
from pfl_jax.engine import chunking
from pfl_jax.engine.body import Outcome
from pfl_jax.engine.build import Engine, adopted, build, compiled
from pfl_jax.engine.checks import (
    check_engine,
    check_run,
    explain_misfit,
    typed_key,
)
from pfl_jax.engine.cohort import Settings, sample_cohort, stragglers
from pfl_jax.engine.loop import OnNaN, RoundResult, check_not_traced, play, usual_settings
from pfl_jax.engine.mapping import ClientMesh, client_mesh, note_idle_cores, replicate
from pfl_jax.engine.remembered import MakeMethod
from pfl_jax.engine.store import Federation, OnDisk, OnHost
from pfl_jax.errors import InvalidInput
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
"""Storage of the clients' states between rounds."""


@check_arguments
@usual_settings()
def run(
    method: Annotated[Method | MethodSchedule | MakeMethod, 'a method, such as make_method("fedper", model)'],
    data: Annotated[Federation | Phases, "a federation, as data.federate makes it"],
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
    If a NumPy array or a number that the method's functions close over has changed, the run compiles anew. An `engine`
    of your own keeps such values from its first run. JAX keeps the first values of a float64 array, which it rounds.

    Args:
      method: the method; the method of several networks that `pfl_jax.mixed` makes; or a schedule, a function from the
        round (counted from 0, traced) to the method of that round, so that real-valued hyper-parameters can change from
        round to round: lambda round: fedavg(model, LocalTraining(lr=optax.cosine_decay_schedule(0.1, 100)(round))).
        Evaluations use the method of the last completed round.
      data: the federation's examples. With `PlacedData` each device holds only the examples of its own clients, in one
        process or several. With `Phases` the data change in the course of the run.
      settings: rounds, participation, chunk, evaluation interval.
      key: the run's key. The same key gives the same result.
      hyper_parameters: hyper-parameters by name; `method` is then a function of them that gives a method, as in
        `pfl_jax.sweep`. Real numbers (float or an array) are inputs of the compiled programs, so other values compile
        nothing; all other values, such as whole numbers and texts, are constants of the programs.
      state: state to continue from, instead of a new one initialized from the key; a state carries its own key.
      mesh: devices to spread the clients over, see `client_mesh`. None uses the default device, or the mesh of
        `PlacedData`. A CPU is one device, however many cores it has, unless the variable JAX_NUM_CPU_DEVICES sets a
        number; a log record says so once if cores are idle.
      state_on: storage of the clients' states between rounds. "host", the host's memory, and "disk", a file, move the
        cohort's states to the device for each round, and all clients' states in blocks for each evaluation. The results
        are the same. "disk" is for one process.
      state_folder: existing folder for the files of state_on="disk", which are removed when the process ends; None for
        the system's folder of temporary files.
      on_nan: treatment of clients whose state or message becomes NaN or infinite: "stop" ends the run, "skip-client"
        leaves them out of the round as if they had not been drawn. A score that is not finite stays so.
      newcomers: clients that never take part, see `pfl_jax.data.federated.hold_out`. Each evaluation also scores the
        models that the method gives these clients.
      donate: whether a round takes over the memory of the previous state, so that the state of a `RoundResult` can no
        longer be used once the next round begins. This saves the memory of one state while a round runs, and no time.
        By default the state of every result that you keep stays usable, and takes its memory; with state_on="disk" the
        clients' part of it is always taken over.
      engine: your own compiled engine of this method and these settings, such as
        `pfl_jax.build(method, settings).jit()`. It fixes where the states are: leave out state_on, state_folder and
        donate. None builds an engine.
      progress: whether to show a bar with the rounds and their time, in a terminal or a notebook.

    Raises:
      InvalidInput: arguments of a wrong type or a state of another run, at once; a model that does not fit the data,
        when the first round is traced.
      Diverged: a client diverged (with on_nan="skip-client": all clients of a cohort), or the server's state did; in
        the round where it happened.
    """
    check_not_traced(key, data, state, hyper_parameters)
    key, values = typed_key(key), dict(hyper_parameters or {})
    phases, federation = (data, data.first) if isinstance(data, Phases) else (None, data)
    make: Any = method
    made: Method | MethodSchedule = make if hyper_parameters is None else make(**values)
    check_run(made, federation, settings, mesh, state, state_on, state_folder, newcomers)
    _check_phases(phases, settings, newcomers)
    if federation.mesh is not None and mesh not in (None, federation.mesh):
        raise InvalidInput("mesh: the data is already on the mesh of placement.place; leave mesh out")
    mesh = federation.mesh or mesh
    if mesh is None and federation.num_clients > 1:
        note_idle_cores()
    frozen = at_round(made, 0).frozen

    def moved(data):
        # Moved once, not at each evaluation; data of clients that belong to devices are on them already.
        data = data.with_frozen(frozen)
        return data if data.mesh else replicate(data, mesh)

    federation, newcomers = moved(federation), None if newcomers is None else moved(newcomers)
    phases = None if phases is None else replace(phases, parts=tuple(map(moved, phases.parts)), first=federation)
    devices = 1 if mesh is None else mesh.size
    settings = chunking.resolved(settings, made, np.asarray(federation.train_count), devices=devices)
    if engine is not None:
        check_engine(engine, made, settings, mesh, state_on, donate=donate)
    else:
        store = None
        if state_on != "device":
            store = OnHost(donate=donate) if state_on == "host" else OnDisk(state_folder)
        engine = compiled(make, made, hyper_parameters, settings, mesh, federation, donate=donate, store=store)

    def begin():
        if state is None:
            first = engine.init(federation, replicate(key, mesh))
            check_not_traced(first)
        else:
            # The caller's state is never donated.
            rest = replicate(jax.tree.map(jnp.copy, state._replace(clients=())), mesh)
            first = rest._replace(clients=adopted(engine, federation, state.clients))
        return committed(first) if mesh is None else first

    explains = partial(explain_misfit, make if values else lambda: made, values, federation)
    results = play(engine, federation, settings, begin, newcomers, explains, on_nan, phases)
    if not progress:
        return results
    # Imported only here: most runs show no bar.
    from rich.progress import track

    return iter(track(results, "rounds", total=settings.rounds - (0 if state is None else int(state.round))))


def _check_phases(phases: Phases | None, settings: Settings, newcomers: Federation | None) -> None:
    """Raise InvalidInput for what cannot be measured on data that change."""
    if phases is None:
        return
    if settings.patience is not None:
        raise InvalidInput("patience compares rounds by the same examples, but in phases the examples change")
    if newcomers is not None:
        raise InvalidInput("newcomers cannot be given with phases: hold clients out as a phase in which they join")
    if settings.rounds <= phases.starts[-1]:
        raise InvalidInput(f"rounds is {settings.rounds}, and the last phase begins after {phases.starts[-1]} rounds")


def committed(tree: PyTree) -> PyTree:
    """The tree, with its JAX arrays bound to their device.

    The result of a round is bound already if the round calls exported functions (`pfl_jax.primitives.float64`). If the
    first state were not, JAX would compile the second round anew.
    """
    return jax.tree.map(lambda leaf: jax.device_put(leaf, leaf.sharding) if isinstance(leaf, jax.Array) else leaf, tree)
