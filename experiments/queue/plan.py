"""State of the queue: finished jobs, and the estimated time of the rest."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.execution.cached_runs import inspect
from experiments.execution.committed import Committed, Library
from experiments.execution.estimate import Speeds
from experiments.queue.jobs import Job
from experiments.results.load import read_metrics
from experiments.results.run_folder import METRICS, SUMMARY
from pfl_jax.errors import InvalidInput


class JobStatus(NamedTuple):
    """State of a job.

    Attributes:
      job: which.
      kept: its committed result, which makes it a finished one.
      state: "finished", "not begun", "round 120 of 200", or why it cannot be run.
      seconds: that it will still take, or has taken if it is finished.
    """

    job: Job
    kept: Committed | None
    state: str
    seconds: float

    @property
    def is_finished(self) -> bool:
        return self.kept is not None


def job_statuses(jobs: Sequence[Job], library: Library, out: Path) -> list[JobStatus]:
    """State of each job.

    Args:
      jobs: which.
      library: the committed results.
      out: folder of the runs.
    """
    kept, speeds = [(job, library.find(job.cell)) for job in jobs], Speeds()
    for job, one in kept:
        speeds.add(job.cell.request(), 0.0 if one is None else one.seconds)
    return [_status(job, one, out / job.place, speeds.seconds(job.cell.request())) for job, one in kept]


def seconds_left(found: Iterable[JobStatus]) -> float:
    """Estimated seconds of all unfinished jobs."""
    return sum(one.seconds for one in found if not one.is_finished)


def _status(job: Job, kept: Committed | None, folder: Path, seconds: float) -> JobStatus:
    if kept is not None:
        return JobStatus(job, kept, "finished", kept.seconds)
    rounds = job.cell.request().options.rounds
    try:
        if inspect(job.cell, folder) == "absent":
            return JobStatus(job, None, "not begun", seconds)
        # Its file is missing still: it is collected when the queue comes to it.
        if (folder / SUMMARY).exists():
            return JobStatus(job, None, "finished, not collected", 0.0)
        lines = read_metrics(folder) if (folder / METRICS).exists() else []
        done = lines[-1]["round"] if lines else 0
        return JobStatus(job, None, f"round {done} of {rounds}", seconds * (1 - done / rounds))
    except InvalidInput as error:
        return JobStatus(job, None, str(error), seconds)
