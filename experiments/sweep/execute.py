"""Runs that share a program, trained together: each writes the same folder as `run.run` alone."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from experiments.cli.request import Request
from experiments.folder.load import read_json
from experiments.folder.run_folder import CONFIG, SUMMARY, RunFolder, lock_run, strict_json
from experiments.host.console import print_line, print_notice
from experiments.host.jax_config import devices, prepare
from experiments.host.processes import Processes
from experiments.host.signals import stoppable
from experiments.run import build, outcome
from experiments.run.batch import Job
from experiments.run.build import Experiment
from experiments.run.cached_runs import remove_unfinished
from experiments.run.memory import SHORTAGE, free_bytes, is_kept, is_shortage
from experiments.run.records import check_identity, configuration, headline
from experiments.run.resume import check_data, record_code
from experiments.run.rounds import Counts, Run, run_rounds
from experiments.run.trackers import open_trackers
from pfl_jax import simulate, sweep
from pfl_jax.atomic_write import make_folder, write_text
from pfl_jax.base import State
from pfl_jax.data import federated
from pfl_jax.data.sources import Dataset
from pfl_jax.engine.checkpoint import FOLDER, Checkpoints
from pfl_jax.engine.placement import without_inputs
from pfl_jax.engine.simulate import RoundResult
from pfl_jax.errors import InvalidInput
from pfl_jax.primitives.tree import gather

RUNS = "runs.json"
"""File beside a group's checkpoints with the names of its runs."""

MEMORY_SHARE = 0.5
"""Share of the free memory that a sweep's runs may take; the rest is for the training of a client."""


class Group(NamedTuple):
    """Runs that share one program, their federations (`federated.federate_runs`), and their common checkpoints."""

    runs: Sequence[Run]
    data: federated.FederatedData
    checkpoints: Checkpoints

    @property
    def first(self) -> Experiment:
        """Experiment of the first run."""
        return self.runs[0].experiment


def run(jobs: Sequence[Job], unfinished: Sequence[Job], root: Path, console: Console) -> None:
    """Run the unfinished ones of jobs that differ only in seeds and in the method's real-valued hyper-parameters.

    Their checkpoints are in folders below `root`: an interrupted group resumes from its newest one, with the same runs.
    """
    request = jobs[0].cell.request()
    prepare(request.options)
    used = devices(request.options)
    request, dataset = build.load_data(request, console)
    left = list(unfinished)
    for part in _resumable(jobs, unfinished, root):
        _run(_group(part, request, dataset, root), used, console)
        left = [one for one in left if one not in part]
    if not left:
        return
    group = _group(left, request, dataset, root)
    at_once = _at_once(group, used)
    for start in range(0, len(left), at_once):
        part = left[start : start + at_once]
        _run(group if len(part) == len(left) else _group(part, request, dataset, root), used, console)


def _group(jobs: Sequence[Job], request: Request, dataset: Dataset, root: Path) -> Group:
    """Runs with their data, and the folder of their common checkpoints."""
    requests = [build.on_data(job.cell.request(job.folder), dataset)[0] for job in jobs]
    # A run stays on one device, with all its clients: a sweep divides its runs over the devices.
    requests = [dataclasses.replace(one, options=dataclasses.replace(one.options, devices=1)) for one in requests]
    partitions = [build.divide(one.options, dataset) for one in requests]
    data = federated.federate_runs(
        dataset,
        partitions,
        **build.shift_of(request.options, dataset),
        seeds=[one.options.seed for one in requests],
    )
    runs = []
    for index, (one, job) in enumerate(zip(requests, jobs, strict=True)):
        experiment = build.assemble(one, dataset, federated.select_run(data, index), partitions[index])
        runs.append(Run(experiment, RunFolder(job.folder)))
    names = json.dumps(_names([job.folder for job in jobs], root)).encode()
    place = root / hashlib.sha256(names).hexdigest()[:16]
    data = data.with_frozen(runs[0].experiment.data.frozen)
    return Group(runs, data, Checkpoints(place, keep=request.options.keep_checkpoints))


def _names(folders: Sequence[Path], root: Path) -> list[str]:
    """Names of the runs, independent of the sweep's folder; that of the checkpoints is absolute, these need not be."""
    return [str(folder.absolute().relative_to(root.absolute().parent)) for folder in folders]


def _resumable(jobs: Sequence[Job], unfinished: Sequence[Job], root: Path) -> list[list[Job]]:
    """Runs that resume together from a checkpoint: all that it contains, also if one of them was already finished."""
    known = dict(zip(_names([job.folder for job in jobs], root), jobs, strict=True))
    missing = set(_names([job.folder for job in unfinished], root))
    found = []
    for path in sorted(root.glob(f"*/{RUNS}")):
        folder, names = path.parent, read_json(path)["runs"]
        # A folder that was removed is a run that shall be made again.
        there = set(names) <= known.keys() and all((known[name].folder / CONFIG).exists() for name in names)
        if there and set(names) & missing and Checkpoints(folder).rounds():
            found.append([known[name] for name in names])
            missing -= set(names)
    return found


def _at_once(group: Group, used: Sequence[Any]) -> int:
    """Number of runs that fit into memory, at least one."""
    experiment, data = group.first, federated.select_run(group.data, 0)
    values = experiment.request.real_numbers()
    needed = sweep.bytes_of_runs(_factory(experiment), data, experiment.settings, values)
    # On CPUs all devices share one memory.
    free = free_bytes(used[0]) * (1 if jax.default_backend() == "cpu" else len(used))
    return max(1, math.floor(MEMORY_SHARE * free / needed))


def _factory(experiment: Experiment) -> sweep.MakeMethod:
    # `sweep.run` keeps the function, and with it what the function holds.
    request, dataset = experiment.request, without_inputs(experiment.dataset)
    return lambda **values: build.make_method(request, dataset, **values)


def _run(group: Group, used: Sequence[Any], console: Console) -> None:
    """Run a group to its end, from its checkpoint if there is one."""
    began, runs, claimed = time.perf_counter(), group.runs, []
    notify = functools.partial(print_notice, console)

    def discard() -> str:
        """Remove what is no result, unless the runs can be resumed; what remains, in words."""
        goes_on = bool(group.checkpoints.rounds())
        for folder in claimed if not goes_on else ():
            folder.discard()
        return "interrupted: the same command goes on"

    with contextlib.ExitStack() as held, stoppable(console, discard) as stop:
        try:
            resumes, states = bool(group.checkpoints.rounds()), None
            for one in runs:
                if not resumes:
                    remove_unfinished(one.folder.path)
                    one.folder = RunFolder.claim(one.folder.path, "")
                # Before a file is changed: one of the runs may be at work alone.
                held.enter_context(lock_run(one.folder.path))
                claimed.append(one.folder)
                if not resumes:
                    one.folder.write(CONFIG, configuration(one.experiment) | {"runs_together": len(runs)})
            if resumes:
                states = _restore(group, notify)
                print_line(console, f"{len(runs)} runs go on after round {runs[0].counts.round}")
            words = f"{len(runs)} runs together, the first: " if len(runs) > 1 else ""
            print_line(console, f"{words}{headline(group.first)}")
            for budget in group.first.privacy:
                print_line(console, f"{words}{budget}")
            rest = {"stop": stop, "save": functools.partial(_save, group), "processes": Processes()}
            with contextlib.ExitStack() as tracked:
                for one in runs:
                    opened = open_trackers(one.folder, one.experiment.request.options, configuration(one.experiment))
                    one.track = tracked.enter_context(opened)
                last = run_rounds(runs, _rounds(group, states, used, console), states, console, began=began, **rest)
            for index, one in enumerate(runs):
                _finish(one, last, index, notify)
        except BaseException as error:
            discard()
            if is_shortage(error):
                raise InvalidInput(SHORTAGE) from None
            raise
    # Last: until here all of them could be resumed.
    group.checkpoints.clear()
    with contextlib.suppress(OSError):
        group.checkpoints.folder.parent.rmdir()


def _finish(one: Run, states: State | None, index: int, notify: Callable[[str], None]) -> None:
    """Write a run's final state where that is asked for, its summary, and its curves."""
    options = one.experiment.request.options
    if states is not None and not one.is_finished and is_kept(one.experiment, notify):
        checkpoints = Checkpoints(one.folder.path / FOLDER, options.keep_checkpoints)
        checkpoints.save(gather(states, index), {}, one.record())
    if not one.is_finished:
        one.folder.finish(outcome.summary(one))
    if options.plot:
        from experiments.show.curves import save_curves

        save_curves(one.folder.path)


def _rounds(group: Group, states: State | None, used: Sequence[Any], console: Console) -> Iterator[list[RoundResult]]:
    """Remaining rounds, one by one; the first divergence of each run is reported."""
    first, runs = group.first, group.runs
    numbers = [one.experiment.request.real_numbers() for one in runs]
    # Values that do not vary stay constants of the program, which gives the compiler more to simplify.
    varied = [name for name in numbers[0] if len({values[name] for values in numbers}) > 1]
    keys = jnp.stack([jax.random.key(one.experiment.request.options.seed) for one in runs])
    skips = first.request.options.on_nan == "skip-client"
    for result in sweep.run(
        _factory(first),
        group.data,
        first.settings,
        keys,
        {name: jnp.asarray([values[name] for values in numbers], jnp.float32) for name in varied},
        states=states,
        mesh=simulate.client_mesh(list(used[: len(runs)])),
        donate=True,
    ):
        # Alone, such a run would end here.
        for one, finite in zip(runs, result.finite, strict=True):
            if not (np.any(finite) if skips else np.all(finite)) and not one.counts.ended:
                one.counts.ended = True
                print_notice(console, f"round {result.round}: the run in {one.folder.path} has diverged")
        yield [_of_run(result, index, ended=one.counts.ended) for index, one in enumerate(runs)]


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


def _save(group: Group, states: State) -> None:
    """Write a checkpoint of all runs after a round."""
    # Without the rows that pad the devices' shares.
    own = jax.tree.map(lambda leaf: leaf[: len(group.runs)], states)
    names = _names([one.folder.path for one in group.runs], group.checkpoints.folder.parent)
    make_folder(group.checkpoints.folder)
    write_text(group.checkpoints.folder / RUNS, strict_json({"runs": names}))
    group.checkpoints.save(own, {}, {"runs": [one.record() for one in group.runs]})


def _restore(group: Group, notify: Callable[[str], None]) -> State:
    """Restore all runs from the newest good checkpoint and cut their logs to it; return their states."""
    one = simulate.build(group.first.method, group.first.settings)
    data = federated.select_run(group.data, 0)
    keys = jax.random.split(jax.random.key(0), len(group.runs))
    like = jax.eval_shape(jax.vmap(lambda key: one.init(data, key)), keys)

    def check(record: dict[str, Any]) -> None:
        for index, (stored, of) in enumerate(zip(record["runs"], group.runs, strict=True)):
            # One note for all runs.
            say = notify if index == 0 else lambda _: None
            check_identity(stored["identity"], of.experiment, group.checkpoints.folder, say)

    found = group.checkpoints.newest(like, check)
    if found is None:
        raise InvalidInput(f"there is no checkpoint in {group.checkpoints.folder}: remove this folder")
    # Looks at all of them before it changes one.
    for cut in (False, True):
        for of, stored in zip(group.runs, found.record["runs"], strict=True):
            of.is_finished = (of.folder.path / SUMMARY).exists()
            check_data(of.folder.path, of.experiment.dataset.description)
            if of.is_finished:
                # By itself, with times of its own in its log.
                of.counts = Counts.of(stored["counts"])
                continue
            of.restore(stored, cut=cut)
            if cut:
                of.folder.tidy()
                record_code(of.folder)
    return found.state
