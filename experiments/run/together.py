"""Runs that share a program, trained together: each writes the same folder as it would alone."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from experiments.folder.load import continued
from experiments.folder.run_folder import RunFolder
from experiments.host.console import print_notice
from experiments.host.jax_config import devices, prepare
from experiments.run import build
from experiments.run.build import Experiment
from experiments.run.memory import free_bytes
from experiments.run.rounds import ActiveRun
from experiments.run.run import RunDriver, drive
from experiments.run.run import run as run_alone
from experiments.spec.spec import Spec
from pfl_jax import simulate, sweep
from pfl_jax.base import State
from pfl_jax.data import federated
from pfl_jax.data.sources import Dataset
from pfl_jax.engine.checkpoint import FOLDER, Checkpoints
from pfl_jax.engine.placement import without_inputs
from pfl_jax.engine.simulate import RoundResult
from pfl_jax.primitives.tree import gather

MEMORY_SHARE = 0.5
"""Share of the free memory that a sweep's runs may take; the rest is for the training of a client."""


def run(specs: Sequence[Spec], console: Console) -> None:
    """Do unfinished runs that differ only in seeds and in the method's real-valued hyper-parameters.

    Each has its folder, `out`; runs with checkpoints go on together, and then the others begin. Runs whose data change
    go one after another.
    """
    if specs[0].phases is not None:
        # A sweep's program has one federation for all rounds.
        for spec in map(continued, specs):
            run_alone(spec, console)
        return
    prepare(specs[0])
    used = devices(specs[0])
    _, dataset = build.load_data(specs[0], console)
    specs = [continued(spec) for spec in specs]
    begun, new = ([spec for spec in specs if bool(spec.resume) is resumes] for resumes in (True, False))
    rounds = [{*Checkpoints(Path(str(spec.resume)) / FOLDER).rounds()} for spec in begun]
    # Without a common round, one of them went on by itself.
    parts = [begun] if rounds and set.intersection(*rounds) else [[spec] for spec in begun]
    if new:
        at_once = _at_once(Together(new[:1], dataset, used))
        parts += [new[start : start + at_once] for start in range(0, len(new), at_once)]
    for part in parts:
        drive(Together(part, dataset, used), console)


class Together(RunDriver):
    """Runs that share one program."""

    def __init__(self, specs: Sequence[Spec], dataset: Dataset, used: Sequence[Any]):
        super().__init__(specs)
        self.dataset, self.used = dataset, used
        on_data = [build.on_data(spec, dataset)[0] for spec in specs]
        # A run stays on one device, with all its clients: a sweep divides its runs over the devices.
        specs = [dataclasses.replace(spec, devices=1) for spec in on_data]
        partitions = [build.divide(spec, dataset) for spec in specs]
        shift = build.shift_of(specs[0], dataset)
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
        skips = self.first.spec.on_nan == "skip-client"
        for result in sweep.run(
            _factory(self.first),
            self.data,
            self.first.settings,
            keys,
            {name: jnp.asarray([values[name] for values in numbers], jnp.float32) for name in varied},
            states=state,
            mesh=simulate.client_mesh(list(self.used[: len(self.runs)])),
            donate=True,
        ):
            # Alone, such a run would end here.
            for run, finite in zip(self.runs, result.finite, strict=True):
                if not (np.any(finite) if skips else np.all(finite)) and not run.counts.ended and not run.has_ended():
                    run.counts.ended = True
                    print_notice(console, f"round {result.round}: the run in {run.folder.path} has diverged")
            yield [_of_run(result, index, ended=run.counts.ended) for index, run in enumerate(self.runs)]

    def states(self, state: State) -> Iterable[State]:
        # One after another: all at once would be another copy of all states.
        return (gather(state, index) for index in range(len(self.runs)))

    def state_of(self, states: list[State]) -> State:
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)


def _at_once(group: Together) -> int:
    """Number of runs that fit into memory, at least one."""
    data, values = federated.select_run(group.data, 0), group.first.spec.real_numbers()
    needed = sweep.bytes_of_runs(_factory(group.first), data, group.first.settings, values)
    # On CPUs all devices share one memory.
    free = free_bytes(group.used[0]) * (1 if jax.default_backend() == "cpu" else len(group.used))
    return max(1, math.floor(MEMORY_SHARE * free / needed))


def _factory(experiment: Experiment) -> sweep.MakeMethod:
    # `sweep.run` keeps the function, and with it what the function holds.
    spec, dataset = experiment.spec, without_inputs(experiment.dataset)
    return lambda **values: build.make_method(spec, dataset, **values)


def _of_run(result: RoundResult, index: int, *, ended: bool) -> RoundResult:
    """Result of one run, with the state of all; one that has diverged has no scores any more."""
    names = ("cohort", "arrived", "finite", "received", "trained", "before_aggregation")
    own = {name: gather(getattr(result, name), index) for name in names}
    if ended:
        scores = {name: own[name] for name in ("received", "trained", "before_aggregation")}
        own |= jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), scores)
        own["finite"] = np.ones_like(own["finite"])
    info = {} if result.received is None or ended else gather(result.info, index)
    return result._replace(**own, info=info, examples=result.examples[index])
