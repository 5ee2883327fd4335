"""Commands of many runs: a subclass of `Batch` whose fields are its options; it lists runs and writes the output."""

import abc
import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

from rich.console import Console

from experiments.choices import Average, ProcedureName, Protocol, ReportedRound
from experiments.cli.command import RunCommand
from experiments.cli.parser import Folder, Hidden, parse
from experiments.fields import Mark, marked, option_words, texts_of
from experiments.folder import cached, stored_runs
from experiments.folder.committed import ROOT
from experiments.folder.load import Run
from experiments.folder.run_folder import CONFIG, lock_folder, slug
from experiments.folder.version import Trust
from experiments.host.console import Terminal, duration, print_line
from experiments.host.exit_codes import exit_code
from experiments.identity import relevant_options
from experiments.options import KINDS, RESULT_NEUTRAL
from experiments.papers import settings
from experiments.papers.settings import Measure
from pfl_jax.errors import InvalidInput
from pfl_jax.validation import Count


class Job(NamedTuple):
    """One run of a command: its command line, the folder of its results, and its name in messages."""

    cell: RunCommand
    folder: Path
    title: str


def jobs_of_seeds(command: RunCommand, seeds: int, folder: Path, title: str, first: int = 0) -> list[Job]:
    """A job for each of so many seeds from the first on, in folders of their own."""
    return [
        Job(replace(command, seed=seed), folder / f"seed-{seed}", f"{title}, seed {seed}")
        for seed in range(first, first + seeds)
    ]


def of_one_program(jobs: Sequence[Job]) -> list[list[Job]]:
    """Groups of jobs for `experiments.run.together`: those that differ only in the seed and in the method's real-valued
    hyper-parameters."""
    found: dict[str, list[Job]] = {}
    for job in jobs:
        spec = job.cell.spec()
        real, relevant = spec.real_numbers(), relevant_options(spec)
        fixed = {name: value for name, value in relevant.items() if name not in real}
        if spec.kind_of_rounds:
            # Of clients one after another, and not of several runs.
            fixed |= {"seed": spec.seed, **real}
        if any(getattr(spec, name) is not None for name in marked(KINDS, Mark.TIMED)):
            fixed["seed"] = spec.seed
        found.setdefault(json.dumps(fixed, sort_keys=True), []).append(job)
    return list(found.values())


@dataclass(frozen=True, kw_only=True)
class Batch(abc.ABC):
    """Command of many runs."""

    out: Folder = None
    """Folder of the runs and of the command's output; by default one in runs/."""
    dry_run: bool = False
    """Print the command and the state of each run, and run nothing."""
    accept_other_code: bool = False
    """Also use runs that other code made, and resume them; otherwise they are refused."""
    words: Hidden[tuple[str, ...]] = ()
    """Options of every run."""

    name: ClassVar[str]
    """Name of the command after `python -m experiments.`"""
    accepts_run_options: ClassVar[bool] = True
    """Whether all other words are options of the runs."""

    def check(self) -> None:  # noqa: B027 - a command may leave it out
        """Raise InvalidInput for options that cannot be used."""

    @abc.abstractmethod
    def default_folder(self) -> Path:
        """Folder of a command without --out."""

    @abc.abstractmethod
    def jobs(self, console: Console) -> list[Job]:
        """All runs in their order."""

    def groups(self, jobs: Sequence[Job]) -> list[list[Job]]:
        """Groups of jobs that are run together."""
        return [[job] for job in jobs]

    is_shared: ClassVar[bool] = False
    """Whether several processes share the folder: each claims the groups that it runs."""

    def claim(self, group: Sequence[Job]) -> contextlib.AbstractContextManager[bool]:
        """Whether this process may run a group, to the end of the context; not if another one runs it."""
        return contextlib.nullcontext(True)

    def run(self, jobs: Sequence[Job], console: Console) -> None:
        """Run the unfinished jobs of one group."""
        # Imported now, so that errors, --help and what is finished do not wait for it.
        from experiments.run.run import run_cell

        for job in jobs:
            run_cell(job.cell.spec(), job.folder, console, trust=self.trust)

    def inspect(self, job: Job) -> cached.State:
        """Content of a job's folder; InvalidInput if it holds something else."""
        return cached.inspect(job.cell.spec(), job.folder, self.trust)

    def committed_result(self, job: Job) -> Run | None:
        """Committed result of a job, in place of its folder; None without one."""
        return None

    def seconds(self, job: Job) -> float | None:
        """Run time of a finished job in seconds, its share of that of runs together; None if it is not finished."""
        if self.inspect(job) == "finished":
            return stored_runs.read(job.folder).seconds
        kept = self.committed_result(job)
        return None if kept is None else kept.seconds

    def state(self, job: Job) -> tuple[str, float]:
        """State of a job in words, such as "round 120 of 200", and the share of its rounds that remains."""
        try:
            state, kept = self.inspect(job), self.committed_result(job)
            if kept is not None:
                return f"finished, in {kept.path}", 0.0
            if state != "unfinished":
                return state, float(state != "finished")
            if not (job.folder / CONFIG).exists():
                return f"round 0 of {job.cell.spec().rounds}", 1.0
            run = stored_runs.read(job.folder)
            # Its rounds are those on its data, which may be embedded.
            return f"round {run.round} of {run.spec.rounds}", 1 - run.round / run.spec.rounds
        except InvalidInput as error:
            return str(error), 1.0

    def update(self) -> None:  # noqa: B027 - a command may leave it out
        """Write the output so far; called after each group of runs."""

    def finish(self, console: Console) -> None:  # noqa: B027 - a command may leave it out
        """Write and print the output of the finished runs."""

    @property
    def trust(self) -> Trust:
        """Code whose runs count."""
        return "all" if self.accept_other_code else "sources"

    @property
    def folder(self) -> Path:
        """Folder of the runs."""
        return (self.out or self.default_folder()).expanduser()

    def preview(self, console: Console) -> None:
        """Print the command and the state of each run, and how much work remains."""
        jobs = self.jobs(console)
        for group in self.groups(jobs):
            if len(group) > 1:
                print_line(console, f"{len(group)} runs together:", style="bold")
            for job in group:
                print_line(console, f"{job.cell.command(job.folder)}  # {self.state(job)[0]}")
        shares, left = [self.state(job)[1] for job in jobs], self.left(jobs)
        time = "" if left is None else f"; about {duration(sum(left))} left"
        print_line(console, f"{len(jobs)} runs, {shares.count(0.0)} of them finished{time}")

    def left(self, jobs: Sequence[Job]) -> list[float] | None:
        """Estimated remaining seconds of each job; None before one is finished."""
        done = {}
        for job in jobs:
            with contextlib.suppress(InvalidInput):
                done[job.folder] = self.seconds(job) or 0.0
        seconds = seconds_of_a_round(jobs, done)
        if seconds is None:
            return None
        return [seconds * job.cell.spec().rounds * self.state(job)[1] for job in jobs]


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

    @property
    def measure(self) -> Measure:
        """Definition of the accuracy: the paper's, with the requested changes."""
        return self.asked(settings.PAPERS[self.paper].measure)

    def asked(self, measure: Measure) -> Measure:
        """A measure with the requested changes."""
        asked = {"protocol": self.eval_protocol, "score": self.score, "average": self.average}
        return measure._replace(**{name: word for name, word in asked.items() if word})

    def check_procedure(self) -> None:
        """Raise InvalidInput for a procedure of another paper's runs."""
        if self.procedure is not None and self.paper != "fedas":
            raise InvalidInput(f"--procedure has no effect: it is for FedAS's runs, not {self.paper}'s")

    @property
    def all_words(self) -> tuple[str, ...]:
        """Words for every run."""
        asked = ("--eval-protocol", "before_aggregation") if self.eval_protocol == "before_aggregation" else ()
        return (*self.words, *asked)


def folder_name(name: str, number: Any, words: Sequence[str]) -> str:
    """Folder for each set of options that affect results, so that a trial run does not block the full one."""
    without = RESULT_NEUTRAL - {"source"}
    # One protocol of evaluation is measured by request only.
    texts = {k: text for k, text in texts_of(words).items() if k not in without or text == "before_aggregation"}
    return slug(" ".join([f"{name}-{number}", *option_words(dict(sorted(texts.items())))]))


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
            batch.preview(console)
        else:
            with lock_folder(batch.folder, shared=batch.is_shared):
                drive(batch, console)

    return exit_code(work)


def drive(batch: Batch, console: Console) -> None:
    """Run the missing runs, then write the command's output; the same command goes on after KeyboardInterrupt."""
    jobs = batch.jobs(console)
    # All folders first, so that a refusal comes before hours of work.
    done = {job.folder: seconds for job in jobs if (seconds := batch.seconds(job)) is not None}
    elsewhere = sum(job.folder in done and not job.folder.exists() for job in jobs)
    print_line(
        console,
        f"{len(done)} of {len(jobs)} runs are there, in {batch.folder}"
        + (f" and {ROOT.name} ({elsewhere})" if elsewhere else ""),
    )
    if others := sum(job.folder not in done and batch.inspect(job) == "of other code" for job in jobs):
        raise InvalidInput(
            f"{others} of {len(jobs)} runs in {batch.folder} are of other code than today's: --accept-other-code uses "
            "them, and another --out makes all anew"
        )
    groups, busy = batch.groups(jobs), list[list[Job]]()
    try:
        while groups:
            busy = []
            for group in groups:
                with batch.claim(group) as is_mine:
                    if is_mine:
                        _run_missing(batch, group, jobs, done, console)
                    else:
                        busy.append(group)
            if len(busy) == len(groups):
                break
            # What other processes had may be free now.
            groups = busy
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(
            f"{stop}; {len(done)} of {len(jobs)} runs are finished and stay in {batch.folder}: the same command goes on"
        ) from None
    if busy:
        print_line(
            console,
            f"{len(done)} of {len(jobs)} runs are finished; other processes have the others: the same command collects "
            "them when all have ended",
        )
        return
    if refused := sum(job.folder not in done for job in jobs):
        raise InvalidInput(f"{len(done)} of {len(jobs)} runs are finished, {refused} were refused: see above")
    batch.finish(console)


def _run_missing(
    batch: Batch, group: Sequence[Job], jobs: Sequence[Job], done: dict[Path, float], console: Console
) -> None:
    """Run the jobs of a group that are not finished, and add their seconds to `done`."""
    # Another process may have finished some since.
    done |= {job.folder: seconds for job in group if (seconds := batch.seconds(job)) is not None}
    missing = [job for job in group if job.folder not in done]
    if not missing:
        return
    seconds = seconds_of_a_round(jobs, done)
    rounds = sum(job.cell.spec().rounds for job in jobs if job.folder not in done)
    title = f"run {jobs.index(missing[0]) + 1} of {len(jobs)}: {missing[0].title}"
    title += f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    print_line(console, title + (f"; about {duration(seconds * rounds)} left" if seconds else ""), style="bold")
    batch.run(missing, console)
    done |= {job.folder: seconds for job in missing if (seconds := batch.seconds(job)) is not None}
    batch.update()


def seconds_of_a_round(jobs: Sequence[Job], done: Mapping[Path, float]) -> float | None:
    """Mean time of a round of finished runs, of those in their folders if there are some: others may be of another
    machine; None without one."""
    finished = [job for job in jobs if done.get(job.folder)]
    finished = [job for job in finished if job.folder.exists()] or finished
    rounds = sum(job.cell.spec().rounds for job in finished)
    return sum(done[job.folder] for job in finished) / rounds if rounds else None
