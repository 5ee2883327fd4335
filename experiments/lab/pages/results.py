"""Text of docs/results.md and of README's table."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from experiments.cli.measures import ALWAYS, Protocol
from experiments.host.console import duration
from experiments.lab import causes
from experiments.lab.benchmark.records import stored
from experiments.lab.causes import Cause
from experiments.lab.pages.compared import (
    CLOSE,
    LAST,
    SECTIONS,
    Compared,
    Released,
    Section,
    compare,
    load_released,
    mean_after,
    published_in,
    runs,
)
from experiments.lab.pages.parts import FIGURES, Made, filled
from experiments.lab.pages.picture import picture
from experiments.lab.queue.field import Comparison, Tuned, comparisons, long_run
from experiments.lab.queue.planned import (
    DATASET,
    FEDAS_BETAS,
    FEDAS_METHODS,
    FEDAS_PARTICIPATIONS,
    SEEDS,
    fedas_run,
    planned_runs,
)
from experiments.papers.settings import MEASURES
from experiments.run import committed
from experiments.run.committed import Library
from experiments.show import tables
from experiments.show.tables import NOTHING, number
from experiments.tables.comparison import Entry

TEMPLATE = Path(__file__).with_name("results.md.jinja")

VERDICTS = {
    "supported": "cause supported by a run without it",
    "refuted": "supposed cause refuted by a run without it",
    "plausible": "cause plausible",
    "open": "open",
}
"""`Compared.verdict` -> its words."""


class Content:
    """Content of the page.

    Args:
      library: the committed results.
      causes: supposed causes of large differences.
      released: accuracies of released code.

    Attributes:
      library, released: as given.
      sections: table of the page -> its rows.
      fields: comparisons of all methods.
      queued, left: number of runs of the queue, and of those without a result.
    """

    def __init__(self, library: Library, causes: Sequence[Cause], released: Sequence[Released]):
        self.library, self.released = library, released
        self.sections = {
            section: [compare(row, library, causes) for row in published_in(section)] for section in SECTIONS
        }
        self.fields = comparisons(library)
        queue = [library.find(run.cell) for run in planned_runs()]
        self.queued, self.left = len(queue), queue.count(None)

    @property
    def rows(self) -> list[Compared]:
        """Rows of all sections."""
        return [row for there in self.sections.values() for row in there]

    @property
    def finished(self) -> dict[Section, list[Compared]]:
        """Tables all of whose rows have a result."""
        return {section: there for section, there in self.sections.items() if all(row.last for row in there)}

    @property
    def single(self) -> list[Compared]:
        """Rows with a result of all other tables."""
        finished = self.finished
        return [row for section, there in self.sections.items() if section not in finished for row in there if row.last]


def made(root: Path) -> Made:
    """The page of a checkout, README's part, and the picture; InvalidInput if a result is damaged."""
    there, readme = root / committed.ROOT.name, root / "README.md"
    content = Content(Library(there), causes.load(DATASET), load_released(there))
    texts = {
        root / "docs/results.md": page(content),
        readme: filled(readme, {"results": f"\n{readme_table(content)}\n"}),
    }
    return Made(texts, {root / FIGURES / "results.svg": picture(content.library)})


def page(content: Content) -> str:
    """Text of docs/results.md."""
    every = list(content.library.named.values())
    made = [((one.commit or "unknown")[:10], one.config["versions"]["jax"], one.config["device"]) for one in every]
    return tables.page(
        TEMPLATE,
        content=content,
        counts=_counts(content),
        close=CLOSE,
        last=LAST,
        heads=["method", "ours", "paper", "difference", f"last {LAST}", "trained", f"cause, beyond {CLOSE:g} point"],
        rows=lambda there: [_row(one) for one in there],
        single=[[f"{one.entry.row.source}; {one.entry.row.clients} clients", *_row(one)] for one in content.single],
        collaboration=_collaboration(content),
        fedas_methods=[f"`{method}`" for method in FEDAS_METHODS],
        fedas=_fedas(content.library),
        fields=[_field(one) for one in content.fields],
        released=[_released(one, content.library) for one in content.released],
        seeds=len(SEEDS),
        runs=len(every),
        duration=duration(sum(one.seconds for one in every)),
        origins=[[f"`{commit}`", *machine, str(many)] for (commit, *machine), many in sorted(Counter(made).items())],
    )


def readme_table(content: Content) -> str:
    """Table of README: all rows of the main table, and what the others come to."""
    there = content.sections[SECTIONS[0]]
    heads = ["method", "ours", "paper", "difference", f"cause, beyond {CLOSE:g} point"]
    rows = [
        [f"`{one.entry.row.method}`", *_numbers(one.entry), one.verdict if one.is_close is False else ""]
        for one in there
    ]
    known = [one for one in content.rows if one.is_close is not None]
    close = sum(one.is_close is True for one in known)
    different = {runs(one.entry.row, content.library)[0].command for one in known}
    seconds = round_seconds()
    return (
        f"On two cores, FedPAC's 200 rounds take {200 * seconds / 60:.0f} minutes "
        f"([{seconds:.2f} s each](docs/performance.md#training)).\n\n"
        f"{tables.markdown(heads, rows, (0, 4))}\n"
        f"{len(known)} of {len(content.rows)} published Fashion-MNIST accuracies have a run, from {len(different)} "
        f"runs; {close} of them are within {CLOSE:g} point.\nA cause is supported if a full run without it is within "
        f"{CLOSE:g} point, and plausible if there is no such run;\nsee [all accuracies](docs/results.md). "
        "A dash: no run of today's code yet.\n"
    )


def round_seconds() -> float:
    """Median time of a FedPAC round with both evaluations, in seconds, as docs/performance.md has it."""
    measured = stored(committed.ROOT / "benchmark.jsonl")["training"].rows
    return next(row["s"] for row in measured if row["work"].startswith("FedPAC round") and row["by"] == "pfl_jax")


def _counts(content: Content) -> list[list[str]]:
    verdicts = Counter(one.verdict for one in content.rows if one.is_close is False)
    counts = {f"within {CLOSE:g} point of the paper": sum(one.is_close is True for one in content.rows)}
    counts |= {f"further away, {VERDICTS[name]}": verdicts[name] for name in VERDICTS}
    counts |= {"no finished run yet": sum(one.is_close is None for one in content.rows)}
    return [[name, str(count)] for name, count in (counts | {"all": len(content.rows)}).items()]


def _row(one: Compared) -> list[str]:
    last = NOTHING if one.last is None else " to ".join(map(number, one.last))
    return [f"`{one.entry.row.method}`", *_numbers(one.entry), last, number(one.trained), _cause(one)]


def _cause(one: Compared) -> str:
    if one.is_close is not False:
        return ""
    if one.cause is None:
        return one.verdict
    text = f"{one.verdict}: {one.cause.cause}"
    if one.without_cause is None:
        return text
    ours, _, difference = _numbers(one.without_cause)
    run = "not run yet" if one.verdict == "plausible" else f"{ours} ({difference})"
    return f"{text} `{' '.join(one.cause.options)}`: {run}."


def _collaboration(content: Content) -> tuple[float, float] | None:
    """What the combination of heads adds to the alignment alone, in points: ours and the paper's (FedPAC, Table 2)."""
    by_method = {one.entry.row.method: one.entry for one in content.sections[SECTIONS[1]]}
    whole, alone = by_method["fedpac"], by_method["fedpac -collaboration"]
    if whole.mean is None or alone.mean is None:
        return None
    return whole.mean - alone.mean, whole.row.accuracy_percent - alone.row.accuracy_percent


def _numbers(entry: Entry) -> list[str]:
    """Our accuracy, the paper's, and the difference."""
    ours = tables.mean_text(list(entry.accuracies.values()))
    return [ours, number(entry.published), number(entry.difference, "+.2f")]


def _fedas(library: Library) -> list[list[str]]:
    """Rows of FedAS's settings that have a run of every method: accuracies by its measure, for each protocol."""
    measure, rows = MEASURES["fedas"], []
    for beta, participation in sorted(itertools.product(FEDAS_BETAS, FEDAS_PARTICIPATIONS)):
        found = [library.find(fedas_run(beta, participation, method).cell) for method in FEDAS_METHODS]
        there = [one for one in found if one is not None]
        if len(there) == len(found):
            cells = [[number(one.accuracy(name, measure.score, measure.average)) for name in ALWAYS] for one in there]
            rows.append([f"{beta:g}", f"{participation:g}", *map(" / ".join, cells)])
    return rows


def _field(one: Comparison) -> dict[str, object]:
    """Comparison of all methods, for the template."""
    field, sample = one.field, long_run(one.block, "fedavg", one.field.rates[0]).cell
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
