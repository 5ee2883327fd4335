"""Runs that share a program, trained together: each writes the same folder as it would alone."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from experiments.folder.load import read_json
from experiments.folder.run_folder import CONFIG, SUMMARY, RunFolder, lock_run, strict_json
from experiments.host.console import print_line, print_notice
from experiments.host.jax_config import devices, prepare
from experiments.run import build, outcome
from experiments.run.build import Experiment
from experiments.run.cached_runs import remove_unfinished
from experiments.run.memory import free_bytes, is_kept
from experiments.run.records import check_identity, configuration
from experiments.run.resume import check_data, record_code
from experiments.run.rounds import Counts, Run
from experiments.run.run import Work, drive
from experiments.spec import Spec
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


def run(specs: Sequence[Spec], unfinished: Sequence[Spec], root: Path, console: Console) -> None:
    """Do the unfinished ones of runs that differ only in seeds and in the method's real-valued hyper-parameters.

    Each has its folder, `out`. Their checkpoints are in folders below `root`: an interrupted group resumes from its
    newest one, with the same runs.
    """
    prepare(specs[0])
    used = devices(specs[0])
    _, dataset = build.load_data(specs[0], console)
    left = list(unfinished)
    for part in _resumable(specs, unfinished, root):
        drive(Group(part, dataset, root, used), console)
        left = [one for one in left if one not in part]
    if not left:
        return
    group = Group(left, dataset, root, used)
    at_once = _at_once(group)
    for start in range(0, len(left), at_once):
        part = left[start : start + at_once]
        drive(group if len(part) == len(left) else Group(part, dataset, root, used), console)


def _names(folders: Iterable[str | Path | None], root: Path) -> list[str]:
    """Names of runs' folders, independent of the sweep's folder; that of the checkpoints is absolute, these need not
    be."""
    return [str(Path(str(folder)).absolute().relative_to(root.absolute().parent)) for folder in folders]


def _resumable(specs: Sequence[Spec], unfinished: Sequence[Spec], root: Path) -> list[list[Spec]]:
    """Runs that resume together from a checkpoint: all that it contains, also if one of them was already finished."""
    known = dict(zip(_names([one.out for one in specs], root), specs, strict=True))
    missing = set(_names([one.out for one in unfinished], root))
    found = []
    for path in sorted(root.glob(f"*/{RUNS}")):
        folder, names = path.parent, read_json(path)["runs"]
        # A folder that was removed is a run that shall be made again.
        there = set(names) <= known.keys() and all((Path(str(known[name].out)) / CONFIG).exists() for name in names)
        if there and set(names) & missing and Checkpoints(folder).rounds():
            found.append([known[name] for name in names])
            missing -= set(names)
    return found


class Group(Work):
    """Runs that share one program, their federations (`federated.federate_runs`), and their common checkpoints."""

    def __init__(self, specs: Sequence[Spec], dataset: Dataset, root: Path, used: Sequence[Any]):
        on_data = [build.on_data(one, dataset)[0] for one in specs]
        # A run stays on one device, with all its clients: a sweep divides its runs over the devices.
        own = [dataclasses.replace(one, devices=1) for one in on_data]
        partitions = [build.divide(one, dataset) for one in own]
        shift = build.shift_of(own[0], dataset)
        data = federated.federate_runs(dataset, partitions, **shift, seeds=[one.seed for one in own])
        self.runs = []
        for index, (one, parts) in enumerate(zip(own, partitions, strict=True)):
            experiment = build.assemble(one, dataset, federated.select_run(data, index), parts)
            self.runs.append(Run(experiment, RunFolder(str(one.out))))
        self.data = data.with_frozen(self.first.data.frozen)
        names = json.dumps(_names([one.out for one in own], root)).encode()
        self.checkpoints = Checkpoints(root / hashlib.sha256(names).hexdigest()[:16], keep=own[0].keep_checkpoints)
        self.used, self.claimed = used, list[RunFolder]()

    @property
    def first(self) -> Experiment:
        """Experiment of the first run."""
        return self.runs[0].experiment

    def start(self, held: contextlib.ExitStack, console: Console) -> State | None:
        resumes = bool(self.checkpoints.rounds())
        for one in self.runs:
            if not resumes:
                remove_unfinished(one.folder.path)
                one.folder = RunFolder.claim(one.folder.path, "")
            # Before a file is changed: one of the runs may be at work alone.
            held.enter_context(lock_run(one.folder.path))
            self.claimed.append(one.folder)
            if not resumes:
                one.folder.write(CONFIG, configuration(one.experiment) | {"runs_together": len(self.runs)})
        if not resumes:
            return None
        states = self._go_back(console)
        print_line(console, f"{len(self.runs)} runs go on after round {self.runs[0].counts.round}")
        return states

    def _go_back(self, console: Console) -> State:
        """Restore all runs from the newest good checkpoint and cut their logs to it; return their states."""
        one = simulate.build(self.first.method, self.first.settings)
        data = federated.select_run(self.data, 0)
        keys = jax.random.split(jax.random.key(0), len(self.runs))
        like = jax.eval_shape(jax.vmap(lambda key: one.init(data, key)), keys)

        def check(record: dict[str, Any]) -> None:
            for index, (stored, of) in enumerate(zip(record["runs"], self.runs, strict=True)):
                # One note for all runs.
                say = functools.partial(print_notice, console) if index == 0 else lambda _: None
                check_identity(stored["identity"], of.experiment, self.checkpoints.folder, say)

        found = self.checkpoints.newest(like, check)
        if found is None:
            raise InvalidInput(f"there is no checkpoint in {self.checkpoints.folder}: remove this folder")
        # Looks at all of them before it changes one.
        for cut in (False, True):
            for of, stored in zip(self.runs, found.record["runs"], strict=True):
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

    def rounds(self, state: State | None, console: Console) -> Iterable[list[RoundResult]]:
        numbers = [one.experiment.spec.real_numbers() for one in self.runs]
        # Values that do not vary stay constants of the program, which gives the compiler more to simplify.
        varied = [name for name in numbers[0] if len({values[name] for values in numbers}) > 1]
        keys = jnp.stack([jax.random.key(one.experiment.spec.seed) for one in self.runs])
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
            for one, finite in zip(self.runs, result.finite, strict=True):
                if not (np.any(finite) if skips else np.all(finite)) and not one.counts.ended:
                    one.counts.ended = True
                    print_notice(console, f"round {result.round}: the run in {one.folder.path} has diverged")
            yield [_of_run(result, index, ended=one.counts.ended) for index, one in enumerate(self.runs)]

    def save(self, state: State) -> None:
        # Without the rows that pad the devices' shares.
        own, folder = jax.tree.map(lambda leaf: leaf[: len(self.runs)], state), self.checkpoints.folder
        make_folder(folder)
        names = _names([one.folder.path for one in self.runs], folder.parent)
        write_text(folder / RUNS, strict_json({"runs": names}))
        self.checkpoints.save(own, {}, {"runs": [one.record() for one in self.runs]})

    def finish(self, state: State | None, console: Console) -> list[dict[str, Any]]:
        summaries = []
        for index, one in enumerate(self.runs):
            path, spec = one.folder.path, one.experiment.spec
            notify = functools.partial(print_notice, console)
            if state is not None and not one.is_finished and is_kept(one.experiment, notify):
                Checkpoints(path / FOLDER, spec.keep_checkpoints).save(gather(state, index), {}, one.record())
            summaries.append(read_json(path / SUMMARY) if one.is_finished else one.folder.finish(outcome.summary(one)))
            if spec.plot:
                from experiments.show.curves import save_curves

                save_curves(path)
        # Last: until here all of them could be resumed.
        self.checkpoints.clear()
        with contextlib.suppress(OSError):
            self.checkpoints.folder.parent.rmdir()
        return summaries

    def last_words(self) -> str:
        # What is no result goes, unless the runs can be resumed.
        for folder in () if self.checkpoints.rounds() else self.claimed:
            folder.discard()
        return "interrupted: the same command goes on"


def _at_once(group: Group) -> int:
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
