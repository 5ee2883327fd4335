"""Comparison of all methods, each with the learning rate of its best run on validation examples."""

from typing import NamedTuple

from experiments.config.measures import ALWAYS, Protocol
from experiments.execution.committed import Library
from experiments.queue.jobs import FIELDS, SEEDS, field_jobs
from experiments.results.load import Result
from experiments.results.tables import number, over_seeds
from pfl_jax.methods import METHODS

PROTOCOL = "received"
"""Protocol by which learning rates are compared."""


class Tuned(NamedTuple):
    """A method's run with the learning rate of the highest accuracy on validation examples.

    Attributes:
      method: its name.
      rate: the learning rate.
      results: its runs, that of seed 0 first.
    """

    method: str
    rate: str
    results: list[Result]

    @property
    def validation(self) -> float:
        """Accuracy of the run with seed 0 on validation examples in percent."""
        return self.results[0].validation(PROTOCOL) or 0.0

    def accuracy(self, protocol: Protocol) -> str:
        """Accuracy on test examples in percent, as text, over the seeds."""
        return over_seeds([value for one in self.results if (value := one.accuracy(protocol)) is not None])


class Comparison(NamedTuple):
    """A block of FIELDS with what is finished of it.

    Attributes:
      block: its name.
      tuned: methods with runs of all learning rates, the best on test examples with seed 0 first.
      finished: number of finished runs.
      all: number of runs.
    """

    block: str
    tuned: list[Tuned]
    finished: int
    all: int

    @property
    def rows(self) -> list[list[str]]:
        """Lines of the table: method, learning rate, accuracies in percent."""
        return [
            [f"`{one.method}`", one.rate, number(one.validation), *(one.accuracy(protocol) for protocol in ALWAYS)]
            for one in self.tuned
        ]


def comparisons(library: Library) -> list[Comparison]:
    """All comparisons.

    Args:
      library: the committed results.
    """
    return [_comparison(block, library) for block in FIELDS]


def _comparison(block: str, library: Library) -> Comparison:
    tuned, finished = [], 0
    # Names of files are enough here: reading the command lines of hundreds of runs takes its time.
    by_place = {one.path.relative_to(library.root).with_suffix(""): one for one in library.all}
    for method in METHODS:
        jobs = field_jobs(block, method)
        there = [(rate, by_place.get(job.place)) for rate, job in zip(FIELDS[block].rates, jobs, strict=True)]
        known = [Tuned(method, rate, [result]) for rate, result in there if result is not None]
        finished += len(known)
        if len(known) == len(jobs):
            chosen = max(known, key=lambda one: one.validation)
            position = FIELDS[block].rates.index(chosen.rate)
            again = [by_place.get(field_jobs(block, method, seed)[position].place) for seed in SEEDS[1:]]
            tuned.append(chosen._replace(results=chosen.results + [one for one in again if one is not None]))
    tuned.sort(key=lambda one: -(one.results[0].accuracy(PROTOCOL) or 0.0))
    return Comparison(block, tuned, finished, len(METHODS) * len(FIELDS[block].rates))
