"""Commands of many runs: subclasses of `Batch`, which have options as fields, list runs and write the output."""

import abc
import contextlib
import functools
import itertools
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

from rich.console import Console

from experiments.cli import command as run_command
from experiments.cli.parser import Folder, Hidden, parse
from experiments.folder import load
from experiments.folder.run_folder import claimed, digest, lock_folder, slug
from experiments.folder.version import ComparedCode, commit_behind
from experiments.host.console import Terminal, duration, print_line
from experiments.host.exit_codes import exit_code
from experiments.papers.settings import Measure
from experiments.spec.choices import Average, ProcedureName, Protocol, ReportedRound
from experiments.spec.identity import relevant_options
from experiments.spec.option_notes import option_words, texts_of
from experiments.spec.options import RESULT_NEUTRAL
from experiments.spec.spec import Spec
from pfl_jax.atomic_write import make_folder
from pfl_jax.errors import InvalidInput
from pfl_jax.validation import Count


class Job(NamedTuple):
    """One run of a command, the folder of its results, and its name in messages."""

    spec: Spec
    folder: Path
    title: str


class Progress(NamedTuple):
    """Progress of a run: its state in words, the share of its rounds that remains, and its run time in seconds (None
    until it is finished; runs that train together share their time)."""

    words: str
    left: float = 1.0
    seconds: float | None = None


# Cached: a table needs each run several times, and reads the same words for many runs.
_spec_of = functools.lru_cache(maxsize=4096)(Spec.of)
read_options = functools.lru_cache(maxsize=1024)(run_command.read)
"""`command.read` with a cache: the same words give the same dictionary."""


def spec_in_batch(dataset: str, options: Mapping[str, Any], seed: int = 0) -> Spec:
    """Checked run of a command of many runs; by default its final state is not kept, since many would fill the disk."""
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    spec = _spec_of(dataset, **values)
    if spec.distributed:
        raise InvalidInput("--distributed is for single runs: a command of many runs has one process")
    keep = spec.keep_state if "keep_state" in spec.given else "never"
    return replace(spec, seed=seed, keep_state=keep, given=spec.given | {"seed"})


def jobs_of_seeds(spec: Spec, seeds: int, folder: Path, title: str, first: int = 0) -> list[Job]:
    """Jobs with consecutive seeds from `first` on, each in its own folder."""
    return [
        Job(replace(spec, seed=seed), folder / f"seed-{seed}", f"{title}, seed {seed}")
        for seed in range(first, first + seeds)
    ]


def by_program(jobs: Sequence[Job]) -> list[list[Job]]:
    """Groups of jobs for `run.run_together`, which differ only in the seed and in real-valued hyper-parameters."""
    found: dict[str, list[Job]] = {}
    for job in jobs:
        spec = job.spec
        real, relevant = spec.real_numbers(), relevant_options(spec)
        fixed = {name: value for name, value in relevant.items() if name not in real}
        found.setdefault(json.dumps(fixed, sort_keys=True), []).append(job)
    return list(found.values())


@dataclass(frozen=True, kw_only=True)
class Batch(abc.ABC):
    """Command of many runs."""

    out: Folder = None
    """Folder of the runs and of the command's output; by default one in runs/."""
    dry_run: bool = False
    """Print the command and the state of each run, and run nothing."""
    words: Hidden[tuple[str, ...]] = ()
    """Options of every run."""

    name: ClassVar[str]
    """Name of the command after `python -m experiments.`"""
    accepts_run_options: ClassVar[bool] = True
    """Whether all other words are options of the runs."""
    compared_code: ClassVar[ComparedCode] = "sources"
    """Comparison of today's code with a finished run's: by sources or by version."""

    def check(self) -> None:  # noqa: B027 - a command may leave it out
        """Raise InvalidInput for options that cannot be used."""

    @property
    def all_words(self) -> tuple[str, ...]:
        return self.words

    def options(self, dataset: str, **known: Any) -> dict[str, Any]:
        """Options of every run from the words; `known` are options that decide defaults, such as method and preset."""
        return read_options(dataset, self.all_words, **known)

    @abc.abstractmethod
    def default_folder(self) -> Path:
        """Folder of a command without --out."""

    @abc.abstractmethod
    def jobs(self, console: Console) -> list[Job]:
        """All runs in their order."""

    def groups(self, jobs: Sequence[Job]) -> list[list[Job]]:
        return [[job] for job in jobs]

    @property
    def claims(self) -> Path | None:
        """Folder with the locks of groups, if several processes share the runs; otherwise None."""
        return None

    def claim(self, group: Sequence[Job]) -> contextlib.AbstractContextManager[bool]:
        """Context in which this process owns a group; it gives False if another process runs the group."""
        if self.claims is None:
            return contextlib.nullcontext(True)
        names = " ".join(str(job.folder.relative_to(self.folder)) for job in group)
        make_folder(self.claims)
        return claimed(self.claims / digest(names.encode()))

    def run(self, jobs: Sequence[Job], console: Console) -> None:
        """Run the unfinished jobs of one group."""
        # Imported only here, so that errors, --help and finished runs do not wait for it.
        from experiments.run.run import run_cell

        for job in jobs:
            run_cell(job.spec, job.folder, console, self.compared_code)

    def inspect(self, job: Job) -> load.State:
        """State of a job's folder; InvalidInput if the folder holds another run."""
        return load.inspect(job.spec, job.folder, self.compared_code)

    def progress(self, job: Job) -> Progress:
        """Progress of a job, such as "round 120 of 200"; InvalidInput if its folder holds another run."""
        state = self.inspect(job)
        if state in ("absent", "of other code"):
            return Progress(state)
        if state == "finished":
            return Progress(state, 0.0, load.read(job.folder).seconds)
        # A run that was killed at its start, or that another process is clearing, has nothing to read.
        with contextlib.suppress(InvalidInput):
            run = load.read(job.folder)
            # Not the rounds of `job.spec`: embedded data have fewer.
            return Progress(f"round {run.round} of {run.spec.rounds}", 1 - run.round / run.spec.rounds)
        return Progress(f"round 0 of {job.spec.rounds}")

    def update(self) -> None:  # noqa: B027 - a command may leave it out
        """Write the output so far; called after each group of runs."""

    def finish(self, console: Console) -> None:  # noqa: B027 - a command may leave it out
        """Write and print the output of the finished runs."""

    @property
    def folder(self) -> Path:
        return (self.out or self.default_folder()).expanduser()


@dataclass(frozen=True, kw_only=True)
class MeasuredBatch(Batch):
    """Command of a paper's runs."""

    paper: str
    seeds: Count = 1
    """Number of seeds, from 0."""
    eval_protocol: Protocol | None = None
    """Reported protocol; by default the paper's. before_aggregation is measured only on request; with the same --out,
    runs that have it also serve for the other two protocols."""
    score: ReportedRound | None = None
    """Reported round; by default the paper's choice. The best one is chosen on test examples, as in the
    papers."""
    average: Average | None = None
    """Mean over clients or over test examples; by default the paper's choice."""
    procedure: ProcedureName | None = None
    """Variant of FedAS's tables and figures: as in the released code, or as printed; by default release."""

    def check(self) -> None:
        if self.procedure is not None and self.paper != "fedas":
            raise InvalidInput(f"--procedure has no effect: it is for FedAS's runs, not {self.paper}'s")

    def requested(self, measure: Measure) -> Measure:
        """A measure with the requested changes."""
        changes = {"protocol": self.eval_protocol, "score": self.score, "average": self.average}
        return measure._replace(**{name: word for name, word in changes.items() if word})

    @property
    def all_words(self) -> tuple[str, ...]:
        protocol = ("--eval-protocol", "before_aggregation") if self.eval_protocol == "before_aggregation" else ()
        return (*self.words, *protocol)

    def folder_of(self, number: Any, procedures: Iterable[str], *words: str) -> Path:
        """Folder named after the options that affect results, so that a trial run does not block the full one.

        The first of the procedures is the default, and does not change the name.
        """
        is_usual = self.procedure in (None, *itertools.islice(procedures, 1))
        procedure = () if is_usual else ("--procedure", str(self.procedure))
        without, texts = RESULT_NEUTRAL - {"source"}, texts_of((*words, *self.all_words, *procedure))
        # before_aggregation is measured only on request, so it is part of the name.
        kept = {k: text for k, text in texts.items() if k not in without or text == "before_aggregation"}
        name = " ".join([f"{self.paper}-{number}", *option_words(dict(sorted(kept.items())))])
        return Path("runs", self.name, slug(name))


_Batch = TypeVar("_Batch", bound=Batch)


def read(kind: type[_Batch], words: Sequence[str] | None) -> _Batch:
    """Checked command line; InvalidInput if it cannot be used."""
    description = sys.modules[kind.__module__].__doc__
    own, rest = parse(kind, f"experiments.{kind.name}", description, words, more=kind.accepts_run_options)
    batch = replace(own, words=rest)
    batch.check()
    return batch


def command(kind: type[Batch], words: Sequence[str] | None) -> int:
    """Run a command of many runs with command-line arguments, by default this process's; return the exit code."""

    def work() -> None:
        batch, console = read(kind, words), Terminal()
        if batch.dry_run:
            preview(batch, console)
        else:
            with lock_folder(batch.folder, shared=batch.claims is not None):
                drive(batch, console)

    return exit_code(work)


def preview(batch: Batch, console: Console) -> None:
    """Print the command and the state of each run, and how much work remains."""
    jobs, progress = batch.jobs(console), dict[Path, Progress]()
    for job in jobs:
        try:
            progress[job.folder] = batch.progress(job)
        except InvalidInput as error:
            progress[job.folder] = Progress(str(error))
    for group in batch.groups(jobs):
        if len(group) > 1:
            print_line(console, f"{len(group)} runs together:", style="bold")
        for job in group:
            print_line(console, f"{job.spec.command(job.folder)}  # {progress[job.folder].words}")
    finished = sum(one.left == 0 for one in progress.values())
    time = "" if (left := seconds_left(jobs, progress)) is None else f"; about {duration(left)} left"
    print_line(console, f"{len(jobs)} runs, {finished} of them finished{time}")


def drive(batch: Batch, console: Console) -> None:
    """Do the missing runs, then write the command's output; after KeyboardInterrupt, the same command goes on."""
    jobs = batch.jobs(console)
    # All folders first, so that a refusal comes before hours of work.
    progress = {job.folder: batch.progress(job) for job in jobs}
    print_line(console, f"{_finished(progress)} are finished, in {batch.folder}")
    if others := [folder for folder, one in progress.items() if one.words == "of other code"]:
        raise InvalidInput(
            f"{len(others)} of {len(jobs)} runs in {batch.folder} are of other code than today's"
            f"{commit_behind(others[0])}: give another --out to do all runs anew"
        )
    groups, busy = batch.groups(jobs), list[list[Job]]()
    try:
        while groups:
            busy = []
            for group in groups:
                with batch.claim(group) as is_mine:
                    if is_mine:
                        _run_missing(batch, group, jobs, progress, console)
                    else:
                        busy.append(group)
            if len(busy) == len(groups):
                break
            # Groups of other processes may be free now.
            groups = busy
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(
            f"{stop}; {_finished(progress)} are finished and stay in {batch.folder}: the same command goes on"
        ) from None
    if busy:
        print_line(
            console,
            f"{_finished(progress)} are finished; other processes have the rest: repeat the command when all end",
        )
        return
    if refused := sum(one.seconds is None for one in progress.values()):
        raise InvalidInput(f"{_finished(progress)} are finished, {refused} were refused: see above")
    batch.finish(console)


def _finished(progress: Mapping[Path, Progress]) -> str:
    """Number of finished runs in words: "3 of 10 runs"."""
    return f"{sum(one.seconds is not None for one in progress.values())} of {len(progress)} runs"


def _run_missing(
    batch: Batch, group: Sequence[Job], jobs: Sequence[Job], progress: dict[Path, Progress], console: Console
) -> None:
    """Run the unfinished jobs of a group, and update the progress of all jobs."""
    # Another process may have finished some in the meantime.
    progress |= {job.folder: batch.progress(job) for job in group}
    missing = [job for job in group if progress[job.folder].seconds is None]
    if not missing:
        return
    title = f"run {jobs.index(missing[0]) + 1} of {len(jobs)}: {missing[0].title}"
    title += f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    left = seconds_left(jobs, progress)
    print_line(console, title + (f"; about {duration(left)} left" if left else ""), style="bold")
    batch.run(missing, console)
    progress |= {job.folder: batch.progress(job) for job in missing}
    batch.update()


def seconds_left(jobs: Sequence[Job], progress: Mapping[Path, Progress]) -> float | None:
    """Estimated time of all remaining rounds, from the mean round of finished runs; None without a finished run. Runs
    whose folders exist are preferred, since the others may come from another machine."""
    finished = [job for job in jobs if progress[job.folder].seconds]
    finished = [job for job in finished if job.folder.exists()] or finished
    if not finished:
        return None
    seconds = sum(progress[job.folder].seconds or 0.0 for job in finished)
    left = sum(job.spec.rounds * progress[job.folder].left for job in jobs)
    return left * seconds / sum(job.spec.rounds for job in finished)
