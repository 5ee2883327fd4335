"""Queue of the long runs behind docs/results.md, at the lowest process priority.

    python -m lab.queue            # until all are finished; the same command goes on where it was stopped
    python -m lab.queue --dry-run  # what is finished, what is left, and for how long
    python -m lab.queue --only table-1 seeds
    python -m lab.queue --only field     # a comparison of all methods: the search, then what it chooses
    python -m lab.queue --only cifar10 cifar10-fedas --data-dir FOLDER

Ctrl-C or SIGTERM ends the current round and writes a checkpoint; another one is written every 20 rounds, in case the
machine fails. `kill -STOP PID` pauses the queue and `kill -CONT PID` continues it; the pause counts as run time.

The results of a finished run are a line of results/queue/BLOCK.jsonl, to be committed; a run with a line there counts
as finished while the version of its method is the same. Afterwards `lab.pages` makes the pages anew.
"""

import difflib
import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from rich.console import Console

from experiments.cli.parser import Folder
from experiments.commands import batch
from experiments.folder.version import ComparedCode
from experiments.host.console import print_line
from experiments.host.exit_codes import exit_process
from experiments.run.outcome import RunDiverged
from experiments.run.run import run_cell
from experiments.spec.option_notes import Argument
from experiments.spec.spec import Spec
from lab import committed, results
from lab.committed import ResultStore
from lab.queue import field
from lab.queue.planned import BLOCKS, CIFAR10, DATASET, PlannedRun, planned_runs
from pfl_jax.errors import CannotWrite, InvalidInput

NICENESS = 19
CHECKPOINT_EVERY = 20

_BLOCKS = "; ".join(f"{name}: {words}" for name, words in BLOCKS.items())


@dataclass(frozen=True, kw_only=True)
class Queue(batch.Batch):
    """Command line of the queue."""

    only: Annotated[
        tuple[str, ...], Argument("repeated", text=f"Only these blocks ({_BLOCKS}), methods, or BLOCK/METHOD.")
    ] = ()
    data_dir: str | None = None
    """Folder of the files of Fashion-MNIST, by default where Debian has it, and of CIFAR-10."""
    results: Folder = None
    """Folder of the committed results; by default results/."""

    name: ClassVar = "lab.queue"
    accepts_run_options: ClassVar = False
    # As for the committed results, of which these runs become some.
    compared_code: ClassVar[ComparedCode] = "version"

    def check(self) -> None:
        known = {*BLOCKS, *(word for run in self._named.values() for word in run.chosen_by)}
        for word in set(self.only) - known:
            near = ", ".join([*difflib.get_close_matches(word, sorted(known)), "--only BLOCK --dry-run has all in it"])
            raise InvalidInput(f"unknown block or method '{word}' (blocks are {', '.join(BLOCKS)}; near: {near})")

    def default_folder(self) -> Path:
        return Path("runs/queue")

    @property
    def root(self) -> Path:
        """Folder of the committed results."""
        return self.results or committed.ROOT

    @functools.cached_property
    def _named(self) -> dict[str, PlannedRun]:
        """Name -> run, of all runs that may ever be wanted."""
        return {run.name: run for run in (*planned_runs(), *field.possible_runs())}

    def _planned(self, job: batch.Job) -> PlannedRun:
        return self._named[job.folder.relative_to(self.folder).as_posix()]

    @property
    def wanted(self) -> list[PlannedRun]:
        """The wanted runs, as far as they are known."""
        if not self.only:
            # Comparisons of all methods, which are hundreds of runs, only by request.
            return list(planned_runs())
        only, library = set(self.only), ResultStore(self.root)
        compared = [run for block in field.FIELDS for run in field.Comparison(block, library).runs]
        return [run for run in (*planned_runs(), *compared) if only.intersection(run.chosen_by)]

    def jobs(self, console: Console) -> list[batch.Job]:
        if not self.dry_run:
            os.nice(NICENESS)
            print_line(console, f"process {os.getpid()}")
        # A damaged file of results is refused at once, and not run by run.
        self._library()
        return self._jobs()

    def _jobs(self) -> list[batch.Job]:
        return [batch.Job(run.spec, self.folder / run.name, run.title) for run in self.wanted]

    def _on_files(self, spec: Spec) -> Spec:
        """The same run with checkpoints, and never on embedded data."""
        more: dict[str, Any] = {"checkpoint_every": CHECKPOINT_EVERY}
        if spec.dataset in (DATASET, CIFAR10):
            more |= {"source": "files"} | ({} if self.data_dir is None else {"data_dir": self.data_dir})
        return replace(spec, **more, given=spec.given | more.keys())

    def finish(self, console: Console) -> None:
        # Results of a search add runs.
        if any(self.stored(job) is None for job in self._jobs()):
            batch.drive(self, console)

    def _library(self) -> ResultStore:
        # Another process may have finished a run since the last time.
        files = sorted(self.root.glob("queue/*.jsonl"))
        return _store(self.root, tuple((file, file.stat().st_mtime_ns) for file in files))

    def stored(self, job: batch.Job) -> batch.Progress | None:
        """What the committed results say of a finished job; None if it is not among them."""
        if (there := self._library().find(job.spec)) is not None:
            return batch.Progress("finished", 0.0, there.seconds)
        diverged = self._library().has_diverged(self._planned(job).name, job.spec)
        return batch.Progress("diverged", 0.0, 0.0) if diverged else None

    def progress(self, job: batch.Job) -> batch.Progress:
        if (stored := self.stored(job)) is not None:
            return stored
        there = super().progress(job)
        return there if there.seconds is None else batch.Progress("finished, not stored", 0.0)

    def _is_together(self, job: batch.Job) -> bool:
        compared = field.FIELDS.get(self._planned(job).block)
        return compared is not None and compared.together

    def groups(self, jobs: Sequence[batch.Job]) -> list[list[batch.Job]]:
        alone = [[job] for job in jobs if not self._is_together(job)]
        return [*alone, *batch.by_program([job for job in jobs if self._is_together(job)])]

    def run(self, jobs: Sequence[batch.Job], console: Console) -> None:
        run = self._planned(jobs[0])
        try:
            self._train(jobs, console)
        except CannotWrite:
            raise
        except InvalidInput as error:
            if isinstance(error, RunDiverged) and run.block in field.FIELDS:
                # In a comparison, this is the rate's result.
                file = results.store(run, results.divergence(run, error.reason), self.root)
                print_line(console, f"{error}; stored in {file}")
            else:
                print_line(console, f"left out: {error}", style="bold yellow")
        else:
            files = {results.store(self._planned(job), results.distill(job.folder), self.root) for job in jobs}
            print_line(console, f"stored in {', '.join(map(str, files))}")

    def _train(self, jobs: Sequence[batch.Job], console: Console) -> None:
        """Do the runs of a group, unless their folders hold them."""
        if not self._is_together(jobs[0]):
            (job,) = jobs
            run_cell(self._on_files(job.spec), job.folder, console, self.compared_code)
        elif missing := [job for job in jobs if self.inspect(job) != "finished"]:
            # Imported now, so that errors and --help do not wait for it.
            from experiments.run.run import run_together

            run_together([self._on_files(job.spec).in_folder(job.folder) for job in missing], console)


@functools.lru_cache(maxsize=1)
def _store(root: Path, files: tuple[tuple[Path, int], ...]) -> ResultStore:
    """Committed results below `root`, read again when its files, with the times of their last change, are others."""
    return ResultStore(root)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the queue with command-line arguments, by default those of this process; return the exit code."""
    return batch.command(Queue, arguments)


if __name__ == "__main__":
    exit_process(main())
