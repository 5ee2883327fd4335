"""Queue of the long runs behind docs/results.md, by priority, at the lowest process priority.

    python -m experiments.queue                  # until all are finished; the same command goes on where it was stopped
    python -m experiments.queue --list           # what is finished, what is left, and for how long
    python -m experiments.queue --only table-1 seeds
    python -m experiments.queue --collect runs/tables

Ctrl-C or SIGTERM ends the round in hand and writes a checkpoint; one is written every 20 rounds besides, so that a
machine that dies loses little. `kill -STOP PID` pauses the queue, `kill -CONT PID` lets it go on; the pause counts as
time that the run in hand took.

What a finished run leaves is distilled into results/, to be committed: a run whose file is there is finished, on
whatever machine it was. --collect does the same with folders of runs that other commands have finished, such as
those of experiments.tables. Afterwards `python -m experiments.results_page` makes docs/results.md anew.
"""

import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from experiments.commands import batch
from experiments.config.cell import Cell
from experiments.execution import cached_runs, committed
from experiments.execution.committed import Library
from experiments.queue.jobs import BLOCKS, Job, jobs
from experiments.queue.plan import JobStatus, job_statuses, seconds_left
from experiments.results.load import read_config
from experiments.results.run_folder import SUMMARY
from experiments.runtime.progress import duration
from pfl_jax.errors import CannotWrite, InvalidInput

OUT = Path("runs/queue")
NICENESS = 19
CHECKPOINTS = ("--checkpoint-every", "20")


class QueueRequest(NamedTuple):
    """Checked command line.

    Attributes:
      jobs: which runs.
      out: their folder.
      results: folder of the committed results.
      data: options that locate the dataset.
      collect: folders whose finished runs are collected; None runs the queue.
      dry_run: whether nothing is run.
    """

    jobs: list[Job]
    out: Path
    results: Path
    data: tuple[str, ...]
    collect: list[Path] | None
    dry_run: bool


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the queue.

    Args:
      arguments: command-line arguments; by default those of this process.

    Returns:
      The exit code, see `main.exit_code`.
    """
    return batch.command(arguments, parse, _without_running, _run)


def parse(words: Sequence[str]) -> QueueRequest:
    """Check a command line.

    Raises:
      InvalidInput: an unknown option, block or method, or a folder that is not there.
    """
    parser = batch.Parser("experiments.queue", __doc__)
    blocks = "; ".join(f"{name}: {words}" for name, words in BLOCKS.items())
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"only these blocks ({blocks}) or methods")
    parser.add_argument("--list", action="store_true", help="say what is finished and what is left, and run nothing")
    parser.add_argument("--collect", nargs="+", type=Path, metavar="DIR", help="collect the finished runs below DIR")
    parser.add_argument("--data-dir", metavar="DIR", help="of Fashion-MNIST's files; by default where Debian has it")
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR", help="of the runs; by default runs/queue")
    parser.add_argument(
        "--results", type=Path, default=committed.ROOT, metavar="DIR", help="of committed results; by default results/"
    )
    own = parser.parse_args(words)
    every = jobs()
    if own.only is not None:
        batch.choose("block or method", own.only, dict.fromkeys([*BLOCKS, *(job.method for job in every)]))
        every = [job for job in every if {job.block, job.method} & set(own.only)]
    for folder in own.collect or ():
        if not folder.is_dir():
            raise InvalidInput(f"--collect {folder}: there is no such folder")
    data = ("--source", "files", *(() if own.data_dir is None else ("--data-dir", own.data_dir)))
    dry_run = own.list or own.collect is not None
    return QueueRequest(every, own.out.expanduser(), own.results, data, own.collect, dry_run)


def _without_running(request: QueueRequest, console: Console) -> None:
    """Carry out --collect, then --list."""
    if request.collect is not None:
        _collect(request, console)
    found = job_statuses(request.jobs, Library(request.results), request.out)
    for block, title in BLOCKS.items():
        there = [one for one in found if one.job.block == block]
        if there:
            left = seconds_left(there)
            done = sum(one.is_finished for one in there)
            _say(console, f"{block}: {title}; {done} of {len(there)} finished, {_hours(left)} left", style="bold")
        for one in there:
            _say(console, f"  {_hours(one.seconds):>7}  {one.state:<18}  {one.job.label}")
    done = sum(one.is_finished for one in found)
    _say(console, f"{done} of {len(found)} runs are finished; about {_hours(seconds_left(found))} left", style="bold")


def _collect(request: QueueRequest, console: Console) -> None:
    """Store the committed results of the queue's finished runs that are found in folders."""
    library = Library(request.results)
    missing = [job for job in request.jobs if library.find(job.cell) is None]
    for folder in _finished(request.collect or ()):
        job = next((job for job in missing if _holds(job.cell, folder)), None)
        if job is None:
            _say(console, f"{folder}: not of the queue, or there already")
            continue
        missing.remove(job)
        _say(console, f"{folder}: {committed.keep(folder, job.place, request.results)}")


def _finished(roots: Sequence[Path]) -> Iterator[Path]:
    """Folders of finished runs below some folders."""
    for root in roots:
        yield from (path.parent for path in sorted(root.rglob(SUMMARY)))


def _holds(cell: Cell, folder: Path) -> bool:
    """Whether a folder holds the finished run of a cell, on the real dataset."""
    try:
        return cached_runs.inspect(cell, folder) == "finished" and read_config(folder)["data"]["is_real"]
    except InvalidInput:
        return False


def _cell(job: Job, request: QueueRequest) -> Cell:
    """Cell as the queue runs it: with checkpoints, and never on embedded data."""
    return dataclasses.replace(job.cell, arguments=(*job.cell.arguments, *CHECKPOINTS, *request.data))


def _run(request: QueueRequest, console: Console) -> None:
    """Run the unfinished jobs. A job with an error is reported and skipped, so that the others still run."""
    os.nice(NICENESS)
    found = job_statuses(request.jobs, Library(request.results), request.out)
    done, refused = sum(one.is_finished for one in found), 0
    _say(console, f"process {os.getpid()}: {done} of {len(found)} runs are finished")
    try:
        for number, one in enumerate(found, start=1):
            # Another machine may have finished it since.
            if Library(request.results).find(one.job.cell) is not None:
                continue
            left = seconds_left(job_statuses(request.jobs, Library(request.results), request.out))
            title = f"run {number} of {len(found)}: {one.job.label}; about {duration(left)} left for all"
            _say(console, title, style="bold")
            try:
                _run_one(one, request, console)
                done += 1
            except CannotWrite:
                raise
            except InvalidInput as error:
                refused += 1
                _say(console, f"left out: {error}", style="bold yellow")
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(
            f"{stop or 'interrupted'}; {done} of {len(found)} runs are finished: the same command goes on"
        ) from None
    if refused:
        raise InvalidInput(f"{done} of {len(found)} runs are finished, {refused} could not be: see above")
    _say(console, f"all {len(found)} runs are finished, in {request.results}")


def _run_one(one: JobStatus, request: QueueRequest, console: Console) -> None:
    folder = request.out / one.job.place
    cached_runs.run_cell(_cell(one.job, request), folder, console)
    _say(console, f"kept as {committed.keep(folder, one.job.place, request.results)}")


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.2f} h"


def _say(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, soft_wrap=True, highlight=False, markup=False)


if __name__ == "__main__":
    sys.exit(main())
