"""Text of docs/results.md and of README's table."""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from experiments.config.measures import ALWAYS, Protocol
from experiments.execution.committed import Library
from experiments.papers.settings import MEASURES
from experiments.queue.field import Comparison, Tuned, comparisons, run_job
from experiments.queue.jobs import FEDAS_BETAS, FEDAS_METHODS, FEDAS_PARTICIPATIONS, SEEDS, fedas_cell, jobs
from experiments.results import tables
from experiments.results.tables import number
from experiments.results_page.picture import chosen
from experiments.results_page.places import CLOSE, SECTIONS, Cause, Place, Released, mean_after, places, runs
from experiments.runtime.progress import duration
from experiments.tables.comparison import Entry

TEMPLATE = Path(__file__).with_name("page.md.jinja")


class Content:
    """Content of the page.

    Args:
      library: the committed results.
      causes: known causes of large differences.
      released: accuracies of released code.

    Attributes:
      library, released: as given.
      sections: table of the page -> its places.
      fields: comparisons of all methods.
      queued, left: number of jobs of the queue, and of those without a result.
    """

    def __init__(self, library: Library, causes: Sequence[Cause], released: Sequence[Released]):
        self.library, self.released = library, released
        self.sections = {section: places(section, library, causes) for section in SECTIONS}
        self.fields = comparisons(library)
        queue = [library.find(job.cell) for job in jobs()]
        self.queued, self.left = len(queue), queue.count(None)

    @property
    def places(self) -> list[Place]:
        """Places of all sections."""
        return [place for there in self.sections.values() for place in there]


def page(content: Content) -> str:
    """Text of docs/results.md."""
    every = content.library.all
    made = [((one.commit or "unknown")[:10], one.config["versions"]["jax"], one.config["device"]) for one in every]
    return tables.page(
        TEMPLATE,
        content=content,
        counts=_counts(content),
        close=CLOSE,
        rows=lambda there: [
            [f"`{place.entry.row.method}`", *_numbers(place.entry), number(place.trained), _cause(place)]
            for place in there
        ],
        fedas_methods=[f"`{method}`" for method in FEDAS_METHODS],
        fedas=[
            [f"{beta:g}", f"{share:g}", *(_best(content.library, beta, share, method) for method in FEDAS_METHODS)]
            for beta in FEDAS_BETAS
            for share in FEDAS_PARTICIPATIONS
        ],
        fields=[_field(one) for one in content.fields],
        released=[_released(one, content.library) for one in content.released],
        seeds=len(SEEDS),
        runs=len(every),
        duration=duration(sum(one.seconds for one in every)),
        origins=[[f"`{commit}`", *machine, str(many)] for (commit, *machine), many in sorted(Counter(made).items())],
    )


def readme_table(content: Content) -> str:
    """Table of README."""
    by_row = {place.entry.row: place for place in content.sections[SECTIONS[0]]}
    rows = ([f"`{row.method}`", *_numbers(by_row[row].entry)] for row in chosen())
    known = [place for place in content.places if place.is_close is not None]
    close = sum(place.is_close is True for place in known)
    different = {runs(place.entry.row, content.library)[0].path for place in known}
    return (
        f"{tables.markdown(['method', 'ours', 'paper', 'difference'], rows)}\n"
        f"{len(known)} of the papers' accuracies have a finished run beside them, and {close} of these are within "
        f"{CLOSE:g} point. These are {len(different)}\ndifferent runs: some stand in several tables. [All accuracies]"
        "(docs/results.md), with the causes of larger differences where they are known.\n"
    )


def _counts(content: Content) -> list[list[str]]:
    far = [place for place in content.places if place.is_close is False]
    counts = {
        f"within {CLOSE:g} point of the paper": sum(place.is_close is True for place in content.places),
        "further away, explained": sum(place.cause is not None for place in far),
        "further away, open": sum(place.cause is None for place in far),
        "no finished run yet": sum(place.is_close is None for place in content.places),
        "all": len(content.places),
    }
    return [[name, str(count)] for name, count in counts.items()]


def _cause(place: Place) -> str:
    if place.is_close is not False:
        return ""
    return "open" if place.cause is None else f"{place.cause.cause} `{place.cause.command}`"


def _numbers(entry: Entry) -> list[str]:
    """Our accuracy, the paper's, and the difference."""
    ours = tables.mean_text(list(entry.accuracies.values()))
    return [ours, number(entry.published), number(entry.difference, "+.2f")]


def _best(library: Library, beta: float, participation: float, method: str) -> str:
    """Accuracies of a run by FedAS's measure, for each protocol."""
    found, measure = library.find(fedas_cell(beta, participation, method)), MEASURES["fedas"]
    return " / ".join(
        number(None if found is None else found.accuracy(protocol, measure.score, measure.average))
        for protocol in ALWAYS
    )


def _field(one: Comparison) -> dict[str, object]:
    """Comparison of all methods, for the template."""
    field, sample = one.field, run_job(one.block, "fedavg", one.field.rates[0]).cell
    words = " ".join((*field.words, "--rounds", str(field.rounds)))
    options = sample.request().options
    # Every command line of FIELDS fixes the number of test examples.
    tested = options.num_clients * cast(int, options.test_size)
    is_short = field.search_rounds < field.rounds
    rows = [
        [f"`{each.method}`", each.rate, number(each.validation), *(_accuracy(each, protocol) for protocol in ALWAYS)]
        for each in one.tuned
        if each.results
    ]
    return {
        "one": one,
        "command": f"python -m experiments.{field.dataset} --method METHOD --lr LR {words} --seed 0",
        "heads": [
            "method",
            "learning rate",
            "validation" + (f", round {field.search_rounds}" if is_short else ""),
            *ALWAYS,
        ],
        "is_short": is_short,
        "rows": rows,
        "tested": tested,
        "error": 100 * math.sqrt(0.9 * 0.1 / tested),
    }


def _accuracy(one: Tuned, protocol: Protocol) -> str:
    """Accuracy of a method on test examples in percent, over the seeds."""
    return tables.mean_text([value for each in one.results if (value := each.accuracy(protocol)) is not None])


def _released(released: Released, library: Library) -> dict[str, object]:
    """Released code beside ours, for the template."""
    there, lines = runs(released.row, library), []
    for position, after in enumerate(released.rounds):
        cells = [str(after)]
        for protocol in ALWAYS:
            ours, theirs = mean_after(there, after, protocol), released.accuracies[protocol][position]
            cells += [number(ours), f"{theirs:.1f}", number(None if ours is None else ours - theirs, "+.2f")]
        lines.append(cells)
    heads = ["round", *(f"{protocol}, {what}" for protocol in ALWAYS for what in ("ours", "released", "difference"))]
    return {"row": released.row, "source": released.source, "seeds": len(there), "heads": heads, "lines": lines}
