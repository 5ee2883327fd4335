"""Comparisons of all methods, each with the learning rate that a search on validation examples chooses.

What a search chooses, and which methods are the best ten, follows from committed results: the list of runs grows as
they come.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from experiments.cli.cell import Cell
from experiments.cli.measures import Protocol
from experiments.cli.own_data import CUSTOM
from experiments.cli.parser import slug
from experiments.folder.load import Result
from experiments.lab.queue.jobs import DATASET, SEEDS, Job
from experiments.lab.results import has_diverged
from experiments.run.committed import Library
from pfl_jax.methods import METHODS

PROTOCOL: Protocol = "received"
"""Protocol by which learning rates and methods are compared."""

BEST = 10
"""Number of methods that are run with all seeds."""


class Field(NamedTuple):
    """Comparison of all methods.

    Attributes:
      title: its heading in the results.
      dataset: name of the experiment.
      words: options of all runs.
      rounds: number of rounds.
      search_rounds: number of rounds in which the learning rates are compared.
      rates: learning rates that are tried for every method.
    """

    title: str
    dataset: str
    words: tuple[str, ...]
    rounds: int
    search_rounds: int
    rates: tuple[str, ...]


_SIX_RATES = ("0.01", "0.02", "0.05", "0.1", "0.2", "0.5")

# A client may diverge at the largest rate: by default that would end the run, and the search would never end.
_EVERY_RATE_ENDS = ("--on-nan", "skip-client")

# docs/results.md says how to make the file. With its digest, the results are found without it.
_LETTERS = ("--data", "letters.csv", "--label", "lettr", "--data-digest", "35716c518063909d", "--normalize")
_LIKE_FASHION_MNIST = (
    *("--partition", "grouped", "--s", "20", "--num-clients", "20", "--train-size", "600", "--test-size", "200"),
    *("--val-fraction", "0.2", *_EVERY_RATE_ENDS),
)

FIELDS = {
    "field-digits": Field("digits", "digits", ("--val-fraction", "0.2"), 40, 40, _SIX_RATES),
    "field-letters": Field("letters, a table", CUSTOM, (*_LETTERS, *_LIKE_FASHION_MNIST), 40, 40, _SIX_RATES),
    "field": Field(
        DATASET,
        DATASET,
        ("--num-clients", "20", "--s", "20", "--val-fraction", "0.1", *_EVERY_RATE_ENDS),
        *(50, 20, ("0.01", "0.03", "0.1")),
    ),
}
"""Block -> its comparison."""

_OWN_STEPS = {"pfedme": ("--momentum", "0")}
"""method -> options of its released code: here no paper gives all methods the same momentum."""


class Tuned(NamedTuple):
    """A method with its learning rate: that of the highest accuracy on validation examples.

    Rates at which all clients diverge are left out, be it in the search or only in the longer run.

    Attributes:
      method: its name.
      rate: the learning rate.
      validation: accuracy in the search in percent.
      results: finished runs with this rate and all rounds, that of seed 0 first.
    """

    method: str
    rate: str
    validation: float
    results: list[Result]


class Comparison:
    """Finished and missing runs of a comparison.

    Args:
      block: a key of FIELDS.
      library: the committed results.

    Attributes:
      block, field: its name, and its value in FIELDS.
      tuned: methods whose search has ended; those with a finished run first, the best on test examples with seed 0
        first.
      jobs: all runs that are known now.
      finished: number of jobs with a result.
      total: number of runs in the end.
    """

    def __init__(self, block: str, library: Library):
        self.block, self.field = block, FIELDS[block]
        # Names of files are enough here: reading the command lines of hundreds of runs takes its time.
        there = {one.path.relative_to(library.root).with_suffix(""): one for one in library.all}
        found = [tuned for method in METHODS if (tuned := self._tuned(method, there, library.root))]
        self.tuned = sorted(found, key=lambda one: -_accuracy(one))
        search = [job for method in METHODS for job in search_jobs(block, method)]
        runs = [run_job(block, one.method, one.rate) for one in found]
        again = []
        if len(found) == len(METHODS) and all(_is_done(job, there, library.root) for job in runs):
            again = [run_job(block, one.method, one.rate, seed) for one in self.tuned[:BEST] for seed in SEEDS[1:]]
        self.jobs = list({job.place: job for job in [*search, *runs, *again]}.values())
        self.finished = sum(_is_done(job, there, library.root) for job in self.jobs)
        searched_apart = len(METHODS) if self.field.search_rounds < self.field.rounds else 0
        self.total = len(search) + searched_apart + BEST * len(SEEDS[1:])

    def _tuned(self, method: str, there: Mapping[Path, Result], root: Path) -> Tuned | None:
        """The method with its learning rate; None until its search has ended."""
        validation = []
        for job in search_jobs(self.block, method):
            if not _is_done(job, there, root):
                return None
            one = there.get(job.place)
            validation.append(0.0 if one is None else one.validation(PROTOCOL) or 0.0)
        ranked = sorted(zip(self.field.rates, validation, strict=True), key=lambda one: -one[1])
        usable = [one for one in ranked if not _has_diverged(run_job(self.block, method, one[0]), root)]
        rate, accuracy = (usable or ranked)[0]
        first, *others = [there.get(run_job(self.block, method, rate, seed).place) for seed in SEEDS]
        results = [] if first is None else [one for one in (first, *others) if one is not None]
        return Tuned(method, rate, accuracy, results)


def _is_done(job: Job, there: Mapping[Path, Result], root: Path) -> bool:
    return job.place in there or _has_diverged(job, root)


def _has_diverged(job: Job, root: Path) -> bool:
    return has_diverged(job.cell, job.place, root)


def _accuracy(one: Tuned) -> float:
    return (one.results[0].accuracy(PROTOCOL) or 0.0) if one.results else -1.0


def search_jobs(block: str, method: str) -> list[Job]:
    """Runs of a method in the search of its learning rate, one for each rate.

    Args:
      block: a key of FIELDS.
      method: a key of METHODS.
    """
    field = FIELDS[block]
    return [_job(block, method, rate, field.search_rounds, SEEDS[0]) for rate in field.rates]


def run_job(block: str, method: str, rate: str, seed: int = SEEDS[0]) -> Job:
    """Run of a method with all rounds.

    Args:
      block: a key of FIELDS.
      method: a key of METHODS.
      rate: the learning rate.
      seed: of the run.
    """
    return _job(block, method, rate, FIELDS[block].rounds, seed)


def _job(block: str, method: str, rate: str, rounds: int, seed: int) -> Job:
    field, name = FIELDS[block], f"{method} lr={rate}"
    if rounds < field.rounds:
        name += " search"
    arguments = ("--method", method, "--lr", rate, *_OWN_STEPS.get(method, ()), *field.words, "--rounds", str(rounds))
    return Job(block, Cell(field.dataset, arguments, seed), name, Path(block, slug(name), f"seed-{seed}"))


def comparisons(library: Library) -> list[Comparison]:
    """All comparisons.

    Args:
      library: the committed results.
    """
    return [Comparison(block, library) for block in FIELDS]


def names() -> set[str]:
    """Names by which the runs of the comparisons can be chosen, see `Job.names`."""
    every = [(block, method, rate) for block, field in FIELDS.items() for method in METHODS for rate in field.rates]
    return {
        name
        for block, method, rate in every
        for job in (*search_jobs(block, method), run_job(block, method, rate))
        for name in job.names
    }
