"""Published accuracies with ours and the causes of large differences, table by table, and what they come to."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from experiments.commands.batch import spec_in_batch
from experiments.commands.paper_table import Entry
from experiments.papers import published, settings
from experiments.papers.published import Published
from experiments.spec.choices import ALWAYS
from lab.causes import Cause
from lab.committed import CommittedRun, ResultStore
from lab.queue.planned import CIFAR10, DATASET, SEEDS

CLOSE = 1.0
"""Largest difference in points that counts as agreement: about the effect of another seed or partition."""

LAST = 10
"""Number of last evaluations whose range is shown."""


VERDICTS = {
    "supported": "cause supported by a run without it",
    "refuted": "supposed cause refuted by a run without it",
    "plausible": "cause plausible",
    "open": "open",
}
"""`Compared.verdict` -> its words."""


class Section(NamedTuple):
    """Table of the page: a paper's table for one dataset and number of clients."""

    paper: str
    table: int
    clients: int
    dataset: str = DATASET

    @property
    def title(self) -> str:
        name = settings.PAPERS[self.paper].tables[self.table][0]
        return f"{settings.PAPERS[self.paper].name}, Table {self.table}: {name}; {self.clients} clients"


SECTIONS = (
    *(Section("fedpac", 1, 20), Section("fedpac", 2, 20), Section("fedpac", 3, 20)),
    *(Section("fedpac_replication", 1, 20), Section("fedpac", 4, 20), Section("fedpac", 5, 20)),
    *(Section("fedpac", 6, 20), Section("fedpac", 10, 20)),
    *(Section("fedpac", 1, 100), Section("fedpac_replication", 1, 100), Section("fedpac", 4, 100)),
    Section("fedpac", 8, 100),
)
CIFAR10_SECTIONS = tuple(
    Section(paper, table, 20, CIFAR10)
    for paper, table in [*(("fedpac", table) for table in (1, 2, 4, 5)), ("fedpac_replication", 1)]
)


class Compared(NamedTuple):
    """A published accuracy with ours.

    Attributes:
      entry: our accuracy and the paper's, by the protocol of the paper's tables.
      trained: our accuracy after local training, in percent; None without a result.
      last: lowest and highest accuracy of the last LAST evaluations of all seeds, in percent; None without a result.
      cause: supposed cause of a large difference; None without one.
      without_cause: accuracy of the run without this cause beside the paper's; None if no run is wanted.
    """

    entry: Entry
    trained: float | None
    last: tuple[float, float] | None
    cause: Cause | None
    without_cause: Entry | None

    @property
    def is_close(self) -> bool | None:
        """Whether the difference is small; None if there is nothing to compare."""
        return is_close(self.entry)

    @property
    def trained_difference(self) -> float | None:
        """Our accuracy after local training minus the paper's; None without a result."""
        published = self.entry.published
        return None if self.trained is None or published is None else self.trained - published

    @property
    def fits_trained(self) -> bool:
        """Whether the difference is large, and that of our accuracy after local training is small."""
        return self.is_close is False and round(abs(self.trained_difference or 0), 2) <= CLOSE

    @property
    def is_beyond(self) -> bool | None:
        """Whether the difference is larger than the interval of our accuracy; None if there is nothing to compare."""
        entry = self.entry
        return None if entry.difference is None or entry.error is None else abs(entry.difference) > entry.error

    @property
    def verdict(self) -> str:
        """What is known of the cause of a large difference: "supported", "refuted", "plausible" or "open"."""
        if self.was_tested:
            return "supported"
        if self.fits_trained or (self.cause is not None and self.was_tested is None):
            return "plausible"
        return "open" if self.cause is None else "refuted"

    @property
    def was_tested(self) -> bool | None:
        """Whether a run without the supposed cause is close to the paper; None without such a run."""
        return None if self.without_cause is None else is_close(self.without_cause)


def is_close(entry: Entry) -> bool | None:
    """Whether our accuracy is within CLOSE of the paper's; None if there is nothing to compare."""
    return None if entry.difference is None else round(abs(entry.difference), 2) <= CLOSE


def apart(rows: Sequence[Compared]) -> str:
    """Differences between two methods by both measures and in the paper; "" unless both have a run."""
    measured = [
        (published + difference, trained, published)
        for one in rows
        if (published := one.entry.published) is not None
        and (difference := one.entry.difference) is not None
        and (trained := one.trained) is not None
    ]
    if len(measured) != 2:
        return ""
    received, trained, published = (f"{second - first:+.2f}" for first, second in zip(*measured, strict=True))
    first, second = (f"`{one.entry.row.method}`" for one in rows)
    return f"{second} minus {first} is {received} received, {trained} trained, and {published} in the paper"


def published_in(section: Section) -> list[Published]:
    """Published accuracies of a section, in the paper's order."""
    where = (section.paper, section.table, section.clients, section.dataset)
    return [row for row in published.load() if (row.paper, row.table, row.clients, row.dataset) == where]


def runs(row: Published, library: ResultStore) -> list[CommittedRun]:
    """Finished runs beside a published accuracy, by seed."""
    found = (library.find(spec_in_batch(row.dataset, row.options, seed)) for seed in SEEDS)
    return [one for one in found if one is not None]


Found: TypeAlias = dict[Section, list[Compared]]
"""Table of the page -> its rows."""


def compared(library: ResultStore, causes: Sequence[Cause], sections: Sequence[Section] = SECTIONS) -> Found:
    """All published accuracies of some tables with ours."""
    return {section: [_compare(row, library, causes) for row in published_in(section)] for section in sections}


def _compare(row: Published, library: ResultStore, causes: Sequence[Cause]) -> Compared:
    there, measure = runs(row, library), settings.PAPERS[row.paper].measure
    received, trained = (Entry(row, there, measure._replace(protocol=name)) for name in ALWAYS)
    ends = [value for one in there for value in one.curve("received")[-LAST:] if value is not None]
    cause = next((cause for cause in causes if cause.row == row), None)
    without = None
    if cause is not None and cause.options:
        run = library.find(spec_in_batch(row.dataset, row.options | cause.options))
        without = Entry(row, [] if run is None else [run], measure)
    return Compared(received, trained.mean, (min(ends), max(ends)) if ends else None, cause, without)


def different(rows: Sequence[Compared]) -> list[Compared]:
    """Of the rows that one run stands for, that which is furthest away."""
    nearest_first = sorted(rows, key=lambda one: abs(one.entry.difference or 0))
    return list({one.entry.row.spec().command(): one for one in nearest_first}.values())


def counts(found: Found) -> list[list[str]]:
    """Rows by what is known of them: FedPAC's, its replication's, and one for each run."""
    every = list(itertools.chain(*found.values()))
    of_replication = [one for one in every if one.entry.row.paper == "fedpac_replication"]
    columns = [[one for one in every if one not in of_replication], of_replication, different(every)]
    names = {f"within {CLOSE:g} point of the paper": lambda one: one.is_close is True}
    for verdict, words in VERDICTS.items():
        names[f"further away, {words}"] = lambda one, verdict=verdict: one.is_close is False and one.verdict == verdict
    names |= {"no finished run yet": lambda one: one.is_close is None, "all": lambda one: True}
    return [[name, *(str(sum(map(fits, rows))) for rows in columns)] for name, fits in names.items()]


def by_trained(rows: Sequence[Compared]) -> dict[str, str]:
    """Rows far from the paper: which are close by `trained`, and which further away; and close ones it loses."""
    far = [one for one in rows if one.is_close is False]
    kinds = {
        "closer": [one for one in far if one.fits_trained],
        "lost": [one for one in rows if one.is_close and abs(one.trained_difference or 0) > CLOSE],
        "further": [one for one in far if abs(one.trained_difference or 0) > abs(one.entry.difference or 0)],
    }
    return {
        kind: ", ".join(
            f"`{one.entry.row.method}` of {one.entry.row.source.replace(',', '')} ({one.trained_difference:+.2f})"
            for one in there
            if one.trained_difference is not None
        )
        for kind, there in kinds.items()
    }
