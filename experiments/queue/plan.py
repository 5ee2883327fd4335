"""State of the queue: finished jobs, and the estimated time of the rest."""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.execution.cached_runs import inspect
from experiments.execution.committed import Committed, Library
from experiments.figures.runs import examples_visited
from experiments.queue.jobs import Job
from experiments.results.load import read_metrics
from experiments.results.run_folder import METRICS, SUMMARY
from pfl_jax.errors import InvalidInput

EXAMPLES_PER_SECOND = {"fedpac_cnn": 12_000.0, "fedavg_cnn": 8_000.0}
"""Network -> training examples per second on two quiet cores, until a run with it has finished."""


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


def job_statuses(jobs: Sequence[Job], library: Library, out: Path | None) -> list[JobStatus]:
    """State of each job.

    Args:
      jobs: which.
      library: the committed results.
      out: folder of the runs; None looks at the committed results alone.
    """
    kept = [(job, library.find(job.cell)) for job in jobs]
    speeds = _Speeds((job, one) for job, one in kept if one is not None)
    return [_standing(job, one, None if out is None else out / job.place, speeds) for job, one in kept]


def seconds_left(found: Iterable[JobStatus]) -> float:
    """Estimated seconds of all unfinished jobs."""
    return sum(one.seconds for one in found if not one.is_finished)


def _standing(job: Job, kept: Committed | None, folder: Path | None, speeds: "_Speeds") -> JobStatus:
    if kept is not None:
        return JobStatus(job, kept, "finished", kept.seconds)
    seconds, rounds = speeds.seconds(job), job.cell.request().options.rounds
    try:
        if folder is None or inspect(job.cell, folder) == "absent":
            return JobStatus(job, None, "not begun", seconds)
        # Its file is missing still: it is collected when the queue comes to it.
        if (folder / SUMMARY).exists():
            return JobStatus(job, None, "finished, not collected", 0.0)
        lines = read_metrics(folder) if (folder / METRICS).exists() else []
        done = lines[-1]["round"] if lines else 0
        return JobStatus(job, None, f"round {done} of {rounds}", seconds * (1 - done / rounds))
    except InvalidInput as error:
        return JobStatus(job, None, str(error), seconds)


class _Speeds:
    """Training examples per second of finished jobs: with the same method and network, else with the network."""

    def __init__(self, finished: Iterable[tuple[Job, Committed]]):
        self._seen: dict[tuple[str, ...], list[float]] = {}
        for job, kept in finished:
            speed = examples_visited(job.cell.request()) / kept.seconds
            for kind in _similar_jobs(job):
                self._seen.setdefault(kind, []).append(speed)

    def seconds(self, job: Job) -> float:
        """Estimated seconds of a job."""
        request = job.cell.request()
        seen = next((self._seen[kind] for kind in _similar_jobs(job) if kind in self._seen), None)
        speed = EXAMPLES_PER_SECOND[request.options.model] if seen is None else statistics.median(seen)
        return examples_visited(request) / speed


def _similar_jobs(job: Job) -> list[tuple[str, ...]]:
    """Groups of jobs of similar speed, the most similar first."""
    return [(job.cell.request().options.model, job.method), (job.cell.request().options.model,)]
