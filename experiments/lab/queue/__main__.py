"""Queue of the long runs behind the pages on results, privacy and robustness, at the lowest process priority.

    python -m experiments.lab.queue            # until all are finished; the same command goes on where it was stopped
    python -m experiments.lab.queue --list     # what is finished, what is left, and for how long
    python -m experiments.lab.queue --only table-1 seeds
    python -m experiments.lab.queue --only field     # a comparison of all methods: the search, then what it chooses
    python -m experiments.lab.queue --collect runs/tables
    python -m experiments.lab.queue --only field-digits --collect runs/sweeps

Ctrl-C or SIGTERM ends the current round and writes a checkpoint; another one is written every 20 rounds, in case the
machine fails. `kill -STOP PID` pauses the queue and `kill -CONT PID` continues it; the pause counts as run time.

The results of a finished run are written to results/, to be committed; a run with a file there counts as finished while
the version of its method is the same.
--collect does the same with finished runs of other commands, such as experiments.tables. Afterwards
`experiments.lab.pages` makes the pages anew.
"""

import difflib
import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

import tyro
from rich.console import Console

from experiments.cli.cell import Cell
from experiments.cli.exit_codes import leave
from experiments.cli.parser import Folder, Names, Switch, flat
from experiments.folder.load import Result, read_config
from experiments.folder.run_folder import SUMMARY
from experiments.folder.version import Trust
from experiments.host.console import print_line
from experiments.lab import results
from experiments.lab.queue import field
from experiments.lab.queue.jobs import BLOCKS, DATASET, Job, jobs
from experiments.run import batch, cached_runs, committed
from experiments.run.committed import Library
from experiments.run.outcome import RunDiverged
from pfl_jax.errors import InvalidInput

NICENESS = 19
CHECKPOINTS = ("--checkpoint-every", "20")

_BLOCKS = "; ".join(f"{name}: {words}" for name, words in BLOCKS.items())


@dataclass(frozen=True, kw_only=True)
class Queue(batch.Batch):
    """Command line of the queue."""

    only: Annotated[Names, tyro.conf.arg(help=f"Only these blocks ({_BLOCKS}), methods, or BLOCK/METHOD.")] = ()
    listing: Annotated[Switch, tyro.conf.arg(name="list")] = False
    """Print what is finished and what remains, and run nothing."""
    collect: Names = ()
    """Collect the finished runs below these folders, and run nothing."""
    data_dir: str | None = None
    """Folder of Fashion-MNIST's files; by default where Debian has it."""
    results: Folder = None
    """Folder of the committed results; by default results/."""
    accept_other_code: tyro.conf.Suppress[bool] = False

    name: ClassVar = "lab.queue"
    accepts_run_options: ClassVar = False
    skips_refused: ClassVar = True

    def check(self) -> None:
        known = {*BLOCKS, *(name for job in jobs() for name in job.names), *field.names()}
        for name in set(flat(self.only)) - known:
            near = ", ".join([*difflib.get_close_matches(name, sorted(known)), "--only BLOCK --list has all in it"])
            raise InvalidInput(f"unknown block or method '{name}' (blocks are {', '.join(BLOCKS)}; near: {near})")
        for folder in flat(self.collect):
            if not Path(folder).is_dir():
                raise InvalidInput(f"--collect {folder}: there is no such folder")

    def default_folder(self) -> Path:
        return Path("runs/queue")

    @property
    def trust(self) -> Trust:
        # As for the committed results, of which these runs become some.
        return "version"

    @property
    def only_previews(self) -> bool:
        return self.dry_run or self.listing or bool(self.collect)

    @property
    def root(self) -> Path:
        """Folder of the committed results."""
        return self.results or committed.ROOT

    @property
    def entries(self) -> list[Job]:
        """The wanted entries of the queue, as far as they are known."""
        if not self.only:
            # Comparisons of all methods, which are hundreds of runs, only by request.
            return jobs()
        only = set(flat(self.only))
        compared = [job for one in field.comparisons(Library(self.root)) for job in one.jobs]
        return [job for job in (*jobs(), *compared) if only.intersection(job.names)]

    def jobs(self, console: Console) -> list[batch.Job]:
        if not self.only_previews:
            os.nice(NICENESS)
            print_line(console, f"process {os.getpid()}")
        return [batch.Job(job.cell, self.folder / job.place, job.label) for job in self.entries]

    @functools.cached_property
    def _previewed(self) -> Library:
        return Library(self.root)

    def _cell(self, job: batch.Job) -> Cell:
        """Cell of a job with checkpoints, and never on embedded data."""
        data = ("--source", "files", *(() if self.data_dir is None else ("--data-dir", self.data_dir)))
        if job.cell.dataset != DATASET:
            data = ()
        return replace(job.cell, arguments=(*job.cell.arguments, *CHECKPOINTS, *data))

    def command(self, job: batch.Job) -> str:
        return self._cell(job).command(job.folder)

    def has_more(self, jobs: Sequence[batch.Job]) -> bool:
        # Not their number: in place of a rate that diverged there is another one.
        return not {self.folder / entry.place for entry in self.entries} <= {job.folder for job in jobs}

    def committed_result(self, job: batch.Job) -> Result | None:
        # Read again each time: another machine may have finished it. A preview has the results of one moment.
        library = self._previewed if self.only_previews else Library(self.root)
        return library.find(job.cell)

    def seconds(self, job: batch.Job) -> float | None:
        kept = self.committed_result(job)
        if kept is not None:
            return kept.seconds
        return 0.0 if self._has_diverged(job) else None

    def _has_diverged(self, job: batch.Job) -> bool:
        return results.has_diverged(job.cell, job.folder.relative_to(self.folder), self.root)

    def state(self, job: batch.Job) -> tuple[str, float]:
        state, share = super().state(job)
        if self.committed_result(job) is not None:
            return "finished", 0.0
        if self._has_diverged(job):
            return "diverged", 0.0
        return ("finished, not collected" if state == "finished" else state), share

    def run(self, jobs: Sequence[batch.Job], console: Console) -> None:
        for job in jobs:
            place = job.folder.relative_to(self.folder)
            try:
                cached_runs.run_cell(self._cell(job), job.folder, console, trust=self.trust)
            except RunDiverged as error:
                if place.parts[0] not in field.FIELDS:
                    raise
                # In a comparison, this is the rate's result.
                path = results.keep_divergence(job.cell, error.reason, place, self.root)
                print_line(console, f"{error}; kept as {path}")
                continue
            print_line(console, f"kept as {results.keep(job.folder, place, self.root)}")

    def finish(self, console: Console) -> None:
        print_line(console, f"all runs are finished, in {self.root}")

    def preview(self, console: Console) -> None:
        if self.dry_run:
            super().preview(console)
            return
        if self.collect:
            self._collect(console)
        jobs = self.jobs(console)
        left = self.left(jobs)
        found = [
            (entry.block, self.seconds(job), remaining, f"{self.state(job)[0]:<18}  {job.title}")
            for entry, job, remaining in zip(self.entries, jobs, left, strict=True)
        ]
        for block, title in BLOCKS.items():
            there = [one for one in found if one[0] == block]
            if there:
                done, hours = sum(taken is not None for _, taken, *_ in there), _hours(sum(one[2] for one in there))
                print_line(console, f"{block}: {title}; {done} of {len(there)} finished, {hours} left", style="bold")
            for _, taken, remaining, text in there:
                print_line(console, f"  {_hours(remaining if taken is None else taken):>7}  {text}")
        done = sum(taken is not None for _, taken, *_ in found)
        print_line(console, f"{done} of {len(found)} runs are finished; about {_hours(sum(left))} left", style="bold")

    def _collect(self, console: Console) -> None:
        """Store the committed results of the queue's finished runs that are found in folders."""
        folders = [path.parent for root in flat(self.collect) for path in sorted(Path(root).rglob(SUMMARY))]
        jobs = None
        # A search that is collected says which runs are wanted next.
        while folders and jobs != (jobs := self.entries):
            library, others = Library(self.root), []
            missing = [job for job in jobs if library.find(job.cell) is None]
            for folder in folders:
                job = next((job for job in missing if self._holds(job.cell, folder)), None)
                if job is None:
                    others.append(folder)
                    continue
                missing.remove(job)
                print_line(console, f"{folder}: {results.keep(folder, job.place, self.root)}")
            folders = others
        for folder in folders:
            print_line(console, f"{folder}: not of the queue, of another version of its method, or there already")

    def _holds(self, cell: Cell, folder: Path) -> bool:
        """Whether a folder holds the finished run of a cell, on the real dataset."""
        try:
            state = cached_runs.inspect(cell, folder, self.trust)
            return state == "finished" and read_config(folder)["data"]["is_real"]
        except InvalidInput:
            return False


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.2f} h"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the queue with command-line arguments, by default those of this process; return the exit code."""
    return batch.command(Queue, arguments)


if __name__ == "__main__":
    leave(main())
