"""Execution of runs: a single run, a cell of a table, or several runs that share a program."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from experiments.folder.load import continued, inspect, read_summary
from experiments.folder.run_folder import RunFolder
from experiments.folder.version import ComparedCode, commit_behind
from experiments.host.console import Terminal, print_notice
from experiments.host.distributed import Processes
from experiments.host.jax_config import devices, free_bytes, prepare
from experiments.run import build
from experiments.run.build import Experiment
from experiments.run.data import divide, load_data, on_data, shift_of
from experiments.run.driver import RunDriver
from experiments.run.resume import resumed
from experiments.run.rounds import ActiveRun
from experiments.spec.spec import Spec
from pfl_jax import simulate, sweep
from pfl_jax.base import State
from pfl_jax.data import federated
from pfl_jax.data.sources import Dataset
from pfl_jax.engine.checkpoint import FOLDER, Checkpoints
from pfl_jax.engine.placement import without_inputs
from pfl_jax.engine.simulate import RoundResult
from pfl_jax.errors import InvalidInput
from pfl_jax.primitives.tree import gather


def run(spec: Spec, console: Console | None = None, processes: Processes | None = None) -> dict[str, Any]:
    """Do a run and write its folder; only errors go to stderr.

    Args:
      spec: spec of the run; with `resume`, the run in that folder goes on.
      console: console for notices, progress and results; stdout by default.
      processes: processes that share the run; the first one writes.

    Returns:
      The content of summary.json; in all processes but the first, an empty dictionary.

    Raises:
      InvalidInput: the run cannot be done, cannot go on, or has diverged.
      KeyboardInterrupt: after SIGINT or SIGTERM, with a message on what remains.
    """
    processes = processes or Processes()
    console = console or Terminal(quiet=not processes.is_first)
    with processes.synchronized():
        if "resume" in spec.given:
            spec = resumed(spec)
    prepare(spec)
    return SingleRun([spec], processes).drive(console)[0]


def run_cell(spec: Spec, folder: str | Path, console: Console, compared: ComparedCode = "sources") -> dict[str, Any]:
    """Do a run unless its folder already holds it, finished; return the content of summary.json.

    Raises:
      InvalidInput: the folder has other content or cannot be written, or the run is refused.
      KeyboardInterrupt: after SIGINT; the next call resumes from the run's last checkpoint, if it has one.
    """
    state = inspect(spec, folder, compared)
    if state == "of other code":
        raise InvalidInput(
            f"{folder} holds the run, made by other code{commit_behind(folder)}: give --out another folder"
        )
    if state != "finished":
        try:
            run(continued(spec.in_folder(folder)), console)
        finally:
            # The next cell has other functions, and can reuse this cell's programs only from the disk.
            jax.clear_caches()
    return read_summary(folder)


class SingleRun(RunDriver):
    """A single run, which several processes may share."""

    def build(self, folders: Sequence[RunFolder], console: Console) -> list[ActiveRun]:
        experiment = build.build_experiment(self.specs[0], console, self.processes)
        # All processes agree on it, however full their machines are.
        self.place = experiment.state_place()
        self.place = "host" if self.processes.agree(self.place == "host") else self.place
        return [ActiveRun(experiment, folders[0])]

    def rounds(self, state: State | None, console: Console) -> Iterable[Sequence[simulate.RoundResult]]:
        run = self.runs[0]
        experiment, spec = run.experiment, run.experiment.spec
        results = simulate.run(
            experiment.method,
            experiment.phases or experiment.data,
            experiment.settings,
            jax.random.key(spec.seed),
            state=state,
            mesh=simulate.client_mesh(devices(spec)),
            state_on=self.place,
            state_folder=run.folder.path if self.place == "disk" else None,
            on_nan=spec.on_nan,
            newcomers=experiment.newcomers,
            donate=True,
        )
        return ([result] for result in results)

    def states(self, state: State) -> Iterable[State]:
        return [state]

    def state_of(self, states: list[State]) -> State:
        return states[0]


MEMORY_SHARE = 0.5
"""Share of the free memory that a sweep's runs may take; the rest is for the training of a client."""


def run_together(specs: Sequence[Spec], console: Console) -> None:
    """Do unfinished runs that differ only in seeds and in the method's real-valued hyper-parameters.

    Each run has its folder, `out`. Runs with checkpoints go on together, then the others begin. Runs whose data change
    are done one after another.
    """
    if specs[0].phases is not None:
        # A sweep's program has one federation for all rounds.
        for spec in map(continued, specs):
            run(spec, console)
        return
    prepare(specs[0])
    used = devices(specs[0])
    _, dataset = load_data(specs[0], console)
    specs = [continued(spec) for spec in specs]
    begun, new = ([spec for spec in specs if bool(spec.resume) is resumes] for resumes in (True, False))
    rounds = [{*Checkpoints(Path(str(spec.resume)) / FOLDER).rounds()} for spec in begun]
    # Without a common round, some run went on alone earlier, and each goes on alone.
    parts = [begun] if rounds and set.intersection(*rounds) else [[spec] for spec in begun]
    if new:
        at_once = _runs_at_once(JointRuns(new[:1], dataset, used))
        parts += [new[start : start + at_once] for start in range(0, len(new), at_once)]
    for part in parts:
        JointRuns(part, dataset, used).drive(console)


class JointRuns(RunDriver):
    """Runs that share one program."""

    def __init__(self, specs: Sequence[Spec], dataset: Dataset, used: Sequence[Any]):
        super().__init__(specs)
        self.dataset, self.used = dataset, used
        # A run stays on one device, with all its clients: a sweep divides its runs over the devices.
        specs = [dataclasses.replace(on_data(spec, dataset)[0], devices=1) for spec in specs]
        partitions = [divide(spec, dataset) for spec in specs]
        shift = shift_of(specs[0], dataset)
        data = federated.federate_runs(dataset, partitions, **shift, seeds=[spec.seed for spec in specs])
        self.experiments = [
            build.assemble(spec, dataset, federated.select_run(data, index), parts)
            for index, (spec, parts) in enumerate(zip(specs, partitions, strict=True))
        ]
        self.first = self.experiments[0]
        self.data = data.with_frozen(self.first.data.frozen)

    def build(self, folders: Sequence[RunFolder], console: Console) -> list[ActiveRun]:
        return [ActiveRun(*both) for both in zip(self.experiments, folders, strict=True)]

    def rounds(self, state: State | None, console: Console) -> Iterable[list[RoundResult]]:
        numbers = [experiment.spec.real_numbers() for experiment in self.experiments]
        # Values that do not vary stay constants of the program, which gives the compiler more to simplify.
        varied = [name for name in numbers[0] if len({values[name] for values in numbers}) > 1]
        keys = jnp.stack([jax.random.key(experiment.spec.seed) for experiment in self.experiments])
        for result in sweep.run(
            _factory(self.first),
            self.data,
            self.first.settings,
            keys,
            {name: jnp.asarray([values[name] for values in numbers], jnp.float32) for name in varied},
            states=state,
            mesh=simulate.client_mesh(list(self.used[: len(self.runs)])),
            on_nan=self.first.spec.on_nan,
            donate=True,
        ):
            assert result.ended is not None
            for run, ended in zip(self.runs, result.ended, strict=True):
                if ended and not run.counts.ended and not run.has_ended():
                    run.counts.ended = True
                    print_notice(console, f"round {result.round}: the run in {run.folder.path} has diverged")
            yield [_result_of_run(result, index, ended=run.counts.ended) for index, run in enumerate(self.runs)]

    def states(self, state: State) -> Iterable[State]:
        # One after another: all at once would be another copy of all states.
        return (gather(state, index) for index in range(len(self.runs)))

    def state_of(self, states: list[State]) -> State:
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)


def _runs_at_once(group: JointRuns) -> int:
    """Number of runs that fit into memory together, at least one."""
    data, values = federated.select_run(group.data, 0), group.first.spec.real_numbers()
    needed = sweep.bytes_of_runs(_factory(group.first), data, group.first.settings, values)
    # On CPUs all devices share one memory.
    free = free_bytes(group.used[0]) * (1 if jax.default_backend() == "cpu" else len(group.used))
    return max(1, math.floor(MEMORY_SHARE * free / needed))


def _factory(experiment: Experiment) -> sweep.MakeMethod:
    # `sweep.run` keeps the function and everything that it refers to, so leave out the inputs.
    spec, dataset = experiment.spec, without_inputs(experiment.dataset)
    return lambda **values: build.make_method(spec, dataset, **values)


def _result_of_run(result: RoundResult, index: int, *, ended: bool) -> RoundResult:
    """Result of one run, with the joint state of all runs; a run that has ended by divergence has no more scores."""
    names = ("cohort", "arrived", "finite", "received", "trained", "before_aggregation")
    own = {name: gather(getattr(result, name), index) for name in names}
    if ended:
        scores = {name: own[name] for name in ("received", "trained", "before_aggregation")}
        own |= jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), scores)
        own["finite"] = np.ones_like(own["finite"])
    info = {} if result.received is None or ended else gather(result.info, index)
    return result._replace(**own, info=info, examples=result.examples[index])
