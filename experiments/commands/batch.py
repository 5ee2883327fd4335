"""Commands of many runs: a subclass of `Batch` whose fields are its options; it lists runs and writes the output."""

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

from experiments.cli import command as words_of_a_run
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
    """Progress of a run: its state in words, the share of its rounds that remains, and its run time in seconds, of
    runs together its share; None if it is not finished."""

    words: str
    left: float = 1.0
    seconds: float | None = None


# A table needs each run several times, all its seeds, and reads the same words for many of them.
_spec_of = functools.lru_cache(maxsize=4096)(Spec.of)
read_options = functools.lru_cache(maxsize=1024)(words_of_a_run.read)
"""Options that words give to a run, see `command.read`; the same dictionary for the same words."""


def one_of_many(dataset: str, options: Mapping[str, Any], seed: int = 0) -> Spec:
    """Run of a command of many runs, checked; without its final state, of which many would fill the disk."""
    spec = _spec_of(dataset, **{name: tuple(of) if isinstance(of, list) else of for name, of in options.items()})
    if spec.distributed:
        raise InvalidInput("--distributed is for single runs: a command of many runs has one process")
    keep = spec.keep_state if "keep_state" in spec.given else "never"
    return replace(spec, seed=seed, keep_state=keep, given=spec.given | {"seed"})


def jobs_of_seeds(spec: Spec, seeds: int, folder: Path, title: str, first: int = 0) -> list[Job]:
    """A job for each of so many seeds from the first on, in folders of their own."""
    return [
        Job(replace(spec, seed=seed), folder / f"seed-{seed}", f"{title}, seed {seed}")
        for seed in range(first, first + seeds)
    ]


def of_one_program(jobs: Sequence[Job]) -> list[list[Job]]:
    """Groups of jobs for `run.run_together`: those that differ only in the seed and in the method's real-valued
    hyper-parameters."""
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
    """How today's code is compared with that of a finished run."""

    def check(self) -> None:  # noqa: B027 - a command may leave it out
        """Raise InvalidInput for options that cannot be used."""

    @property
    def all_words(self) -> tuple[str, ...]:
        return self.words

    def options(self, dataset: str, **known: Any) -> dict[str, Any]:
        """Options that every run has; `known` are the options that decide defaults, such as method and preset."""
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
        """Folder of the locks of groups, if several processes share the runs; None if this one has them all."""
        return None

    def claim(self, group: Sequence[Job]) -> contextlib.AbstractContextManager[bool]:
        """Whether this process may run a group, to the end of the context; not if another one runs it."""
        if self.claims is None:
            return contextlib.nullcontext(True)
        names = " ".join(str(job.folder.relative_to(self.folder)) for job in group)
        make_folder(self.claims)
        return claimed(self.claims / digest(names.encode()))

    def run(self, jobs: Sequence[Job], console: Console) -> None:
        """Run the unfinished jobs of one group."""
        # Imported now, so that errors, --help and what is finished do not wait for it.
        from experiments.run.run import run_cell

        for job in jobs:
            run_cell(job.spec, job.folder, console, self.compared_code)

    def inspect(self, job: Job) -> load.State:
        """Content of a job's folder; InvalidInput if it holds something else."""
        return load.inspect(job.spec, job.folder, self.compared_code)

    def progress(self, job: Job) -> Progress:
        """Progress of a job, "round 120 of 200"; InvalidInput if its folder holds something else."""
        state = self.inspect(job)
        if state in ("absent", "of other code"):
            return Progress(state)
        if state == "finished":
            return Progress(state, 0.0, load.read(job.folder).seconds)
        # One that was killed at its start, or that another process clears now, has nothing to read.
        with contextlib.suppress(InvalidInput):
            run = load.read(job.folder)
            # Its rounds are those on its data, which may be embedded.
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
    """Reported protocol; by default the paper's own protocol. before_aggregation is measured only
    on request; such runs also serve the other two, with the same --out."""
    score: ReportedRound | None = None
    """Reported round; by default the paper's choice. The best one is chosen on test examples, as in the
    papers."""
    average: Average | None = None
    """What the mean is over, clients or test examples; by default the paper's choice."""
    procedure: ProcedureName | None = None
    """Of FedAS's tables and figures: as its code was released, or as its paper says; by default release."""

    def check(self) -> None:
        if self.procedure is not None and self.paper != "fedas":
            raise InvalidInput(f"--procedure has no effect: it is for FedAS's runs, not {self.paper}'s")

    def asked(self, measure: Measure) -> Measure:
        """A measure with the requested changes."""
        asked = {"protocol": self.eval_protocol, "score": self.score, "average": self.average}
        return measure._replace(**{name: word for name, word in asked.items() if word})

    @property
    def all_words(self) -> tuple[str, ...]:
        asked = ("--eval-protocol", "before_aggregation") if self.eval_protocol == "before_aggregation" else ()
        return (*self.words, *asked)

    def folder_of(self, number: Any, procedures: Iterable[str], *words: str) -> Path:
        """Folder for each set of options that affect results, so that a trial run does not block the full one.

        The first one of the procedures is the same table or figure, named or not.
        """
        is_usual = self.procedure in (None, *itertools.islice(procedures, 1))
        procedure = () if is_usual else ("--procedure", str(self.procedure))
        without, texts = RESULT_NEUTRAL - {"source"}, texts_of((*words, *self.all_words, *procedure))
        # One protocol of evaluation is measured by request only.
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
    """Run a command of many runs with command-line arguments, None for those of this process; return the exit code."""

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
    jobs, there = batch.jobs(console), dict[Path, Progress]()
    for job in jobs:
        try:
            there[job.folder] = batch.progress(job)
        except InvalidInput as error:
            there[job.folder] = Progress(str(error))
    for group in batch.groups(jobs):
        if len(group) > 1:
            print_line(console, f"{len(group)} runs together:", style="bold")
        for job in group:
            print_line(console, f"{job.spec.command(job.folder)}  # {there[job.folder].words}")
    finished = sum(one.left == 0 for one in there.values())
    time = "" if (left := seconds_left(jobs, there)) is None else f"; about {duration(left)} left"
    print_line(console, f"{len(jobs)} runs, {finished} of them finished{time}")


def drive(batch: Batch, console: Console) -> None:
    """Run the missing runs, then write the command's output; the same command goes on after KeyboardInterrupt."""
    jobs = batch.jobs(console)
    # All folders first, so that a refusal comes before hours of work.
    there = {job.folder: batch.progress(job) for job in jobs}
    print_line(console, f"{_finished(there)} are there, in {batch.folder}")
    if others := [folder for folder, one in there.items() if one.words == "of other code"]:
        raise InvalidInput(
            f"{len(others)} of {len(jobs)} runs in {batch.folder} are of other code than today's"
            f"{commit_behind(others[0])}: another --out makes all anew"
        )
    groups, busy = batch.groups(jobs), list[list[Job]]()
    try:
        while groups:
            busy = []
            for group in groups:
                with batch.claim(group) as is_mine:
                    if is_mine:
                        _run_missing(batch, group, jobs, there, console)
                    else:
                        busy.append(group)
            if len(busy) == len(groups):
                break
            # What other processes had may be free now.
            groups = busy
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(
            f"{stop}; {_finished(there)} are finished and stay in {batch.folder}: the same command goes on"
        ) from None
    if busy:
        print_line(
            console,
            f"{_finished(there)} are finished; other processes have the others: the same command collects "
            "them when all have ended",
        )
        return
    if refused := sum(one.seconds is None for one in there.values()):
        raise InvalidInput(f"{_finished(there)} are finished, {refused} were refused: see above")
    batch.finish(console)


def _finished(there: Mapping[Path, Progress]) -> str:
    """How many are finished: "3 of 10 runs"."""
    return f"{sum(one.seconds is not None for one in there.values())} of {len(there)} runs"


def _run_missing(
    batch: Batch, group: Sequence[Job], jobs: Sequence[Job], there: dict[Path, Progress], console: Console
) -> None:
    """Run the jobs of a group that are not finished; `there` is the progress of all, which is updated."""
    # Another process may have finished some since.
    there |= {job.folder: batch.progress(job) for job in group}
    missing = [job for job in group if there[job.folder].seconds is None]
    if not missing:
        return
    title = f"run {jobs.index(missing[0]) + 1} of {len(jobs)}: {missing[0].title}"
    title += f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    left = seconds_left(jobs, there)
    print_line(console, title + (f"; about {duration(left)} left" if left else ""), style="bold")
    batch.run(missing, console)
    there |= {job.folder: batch.progress(job) for job in missing}
    batch.update()


def seconds_left(jobs: Sequence[Job], there: Mapping[Path, Progress]) -> float | None:
    """Estimated time of all rounds that remain, each as long as the mean one of finished runs; of those in their
    folders if there are some: others may be of another machine. None without one."""
    finished = [job for job in jobs if there[job.folder].seconds]
    finished = [job for job in finished if job.folder.exists()] or finished
    if not finished:
        return None
    seconds = sum(there[job.folder].seconds or 0.0 for job in finished)
    left = sum(job.spec.rounds * there[job.folder].left for job in jobs)
    return left * seconds / sum(job.spec.rounds for job in finished)
