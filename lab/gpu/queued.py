"""Runs of the queue that are missing, each in a process of its own that `lab.gpu` starts."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from lab import committed
from lab.queue.__main__ import Queue


def missing(out: Path, folder: Path, only: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Block and name of the runs without a result, neither in results/ nor in out, in the queue's order."""
    queue = Queue(only=tuple(only), out=folder, dry_run=True)
    there = {name for file in out.glob("queue/*.jsonl") for name in committed.read(file)}
    unfinished = [
        job.folder.relative_to(folder).as_posix() for job in queue.jobs(Console()) if queue.stored(job) is None
    ]
    blocks = {run.name: run.block for run in queue.wanted}
    return [(blocks[name], name) for name in unfinished if name not in there]


def run(out: str, folder: str, name: str, data: str | None, quick: bool, only: Sequence[str]) -> None:
    """Finish a run with the queue's own options, and store its line in OUT/queue."""
    queue = Queue(only=tuple(only), out=Path(folder), results=Path(out), data_dir=data)
    (job,) = [job for job in queue.jobs(Console()) if job.folder == Path(folder) / name]
    if quick:
        job = job._replace(spec=replace(job.spec, rounds=1))
    queue.run([job], Console())


if __name__ == "__main__":
    run(**json.loads(sys.argv[1]))
