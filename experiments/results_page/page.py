"""Text of docs/results.md and of README's table."""

from collections import Counter
from collections.abc import Iterable, Sequence

from experiments.config.measures import ALWAYS
from experiments.execution.committed import Library
from experiments.queue.jobs import FEDAS_BETAS, FEDAS_METHODS, FEDAS_PARTICIPATIONS, fedas_cell, jobs
from experiments.queue.plan import JobStatus, job_statuses
from experiments.results_page.picture import chosen
from experiments.results_page.places import (
    CLOSE,
    SECTIONS,
    SEEDS,
    Cause,
    Place,
    Released,
    best_mean,
    mean_after,
    places,
    runs,
)
from experiments.runtime.progress import duration
from experiments.tables.comparison import NOTHING, Figure

INTRODUCTION = """\
# Results

Our accuracies beside the papers' in the papers' own settings, all rounds, on Fashion-MNIST: mean accuracy over clients
in percent. "Ours" is `received`, which FedPAC's tables have: what each client deploys after aggregation in the last
round; `trained` is after its own local training in that round. Where several seeds have finished, ± is their standard
deviation, and their number follows in brackets. The difference is ours less the paper's.

This page, the figure and README's table are made from the files in `results/`, one for each finished run with its
command, commit, configuration and evaluations:

    python -m experiments.queue --list        # what is finished and what is left
    python -m experiments.queue               # runs what is left; what finishes is kept in results/
    python -m experiments.results_page        # makes this page anew

![Accuracy over rounds](figures/results.svg)
"""

FEDAS = """\
## FedAS's Dirichlet partitions, 20 clients, all of Fashion-MNIST

FedAS's tables have CIFAR only, so nothing published stands beside these. Best of 40 rounds, received / trained, seed 0.
"""


class Content:
    """Content of the page.

    Args:
      library: the committed results.
      causes: why places are far apart.
      released: what released code reaches.
    """

    def __init__(self, library: Library, causes: Sequence[Cause], released: Sequence[Released]):
        self.library, self.released = library, released
        self.sections = {section: places(section, library, causes) for section in SECTIONS}
        self.jobs: list[JobStatus] = job_statuses(jobs(), library, None)

    @property
    def places(self) -> list[Place]:
        """Places of all sections."""
        return [place for there in self.sections.values() for place in there]


def page(content: Content) -> str:
    """Text of docs/results.md."""
    parts = [INTRODUCTION, *_counts(content)]
    for section, there in content.sections.items():
        parts += [f"## {section.title}\n", _table(there)]
    parts += [FEDAS, _fedas(content.library), *(_released(one, content.library) for one in content.released)]
    return "\n".join([*parts, *_provenance(content.library)])


def readme_table(content: Content) -> str:
    """Table of README."""
    by_row = {place.figure.row: place for place in content.sections[SECTIONS[0]]}
    lines = _markdown(
        ["method", "ours", "paper", "difference"],
        ([f"`{row.method}`", *_numbers(by_row[row].figure)] for row in chosen()),
    )
    return f"{lines}\n{_closeness(content)}\n"


def _counts(content: Content) -> list[str]:
    left = [one for one in content.jobs if not one.is_finished]
    far = [place for place in content.places if place.is_close is False]
    lines = [
        "| places of the papers' tables below | |",
        "| --- | ---: |",
        f"| within {CLOSE:g} point of the paper | {sum(place.is_close is True for place in content.places)} |",
        f"| further away, explained | {sum(place.cause is not None for place in far)} |",
        f"| further away, open | {sum(place.cause is None for place in far)} |",
        f"| no finished run yet | {sum(place.is_close is None for place in content.places)} |",
        f"| all | {len(content.places)} |",
        "",
        f"{len(left)} of {len(content.jobs)} runs of the queue are left.\n",
    ]
    return ["\n".join(lines)]


def _closeness(content: Content) -> str:
    known = [place for place in content.places if place.is_close is not None]
    close = sum(place.is_close is True for place in known)
    return (
        f"Of {len(known)} places of the papers' tables that have a finished run, {close} are within {CLOSE:g} point: "
        "all of them, and\nwhy the others are not, in [docs/results.md](docs/results.md)."
    )


def _table(there: Sequence[Place]) -> str:
    heads = ["method", "ours", "paper", "difference", "trained", f"cause, beyond {CLOSE:g} point"]
    return _markdown(
        heads,
        (
            [f"`{place.figure.row.method}`", *_numbers(place.figure), _number(place.trained), _cause(place)]
            for place in there
        ),
        words=(0, 5),
    )


def _cause(place: Place) -> str:
    if place.is_close is not False:
        return ""
    return "open" if place.cause is None else f"{place.cause.cause} `{place.cause.command}`"


def _numbers(figure: Figure) -> list[str]:
    """Our accuracy, the paper's, and the difference."""
    ours = _number(figure.mean)
    if figure.std is not None:
        ours += f" ± {figure.std:.2f} ({len(figure.accuracies)})"
    difference = NOTHING if figure.difference is None else f"{figure.difference:+.2f}"
    return [ours, _number(figure.published), difference]


def _fedas(library: Library) -> str:
    return _markdown(
        ["beta", "participation", *(f"`{method}`" for method in FEDAS_METHODS)],
        (
            [
                f"{beta:g}",
                f"{participation:g}",
                *(_best(library, beta, participation, method) for method in FEDAS_METHODS),
            ]
            for beta in FEDAS_BETAS
            for participation in FEDAS_PARTICIPATIONS
        ),
    )


def _best(library: Library, beta: float, participation: float, method: str) -> str:
    cell = fedas_cell(beta, participation, method)
    return " / ".join(_number(best_mean(cell, library, protocol, "best")) for protocol in ALWAYS)


def _released(released: Released, library: Library) -> str:
    there = runs(released.row, library)
    lines = []
    for position, number in enumerate(released.rounds):
        cells = [str(number)]
        for protocol in ALWAYS:
            ours, theirs = mean_after(there, number, protocol), released.accuracies[protocol][position]
            difference = NOTHING if ours is None else f"{ours - theirs:+.2f}"
            cells += [_number(ours), f"{theirs:.1f}", difference]
        lines.append(cells)
    heads = ["round", *(f"{protocol}, {what}" for protocol in ALWAYS for what in ("ours", "released", "difference"))]
    return (
        f"## `{released.row.method}` beside its released code\n\n{released.source} "
        f"Ours: {len(there)} of {len(SEEDS)} seeds.\n\n" + _markdown(heads, lines, words=())
    )


def _provenance(library: Library) -> list[str]:
    if not library.all:
        return []
    count = Counter(
        (one.commit or "unknown", one.config["versions"]["jax"], one.config["device"]) for one in library.all
    )
    seconds = duration(sum(one.seconds for one in library.all))
    rows = [[f"`{commit[:10]}`", jax, device, str(many)] for (commit, jax, device), many in sorted(count.items())]
    return [
        f"## Where the runs were made\n\n{len(library.all)} runs, {seconds} in all. The commit is the one that last "
        "changed the library before the run.\n",
        _markdown(["commit", "jax", "devices", "runs"], rows, words=(0, 1, 2)),
    ]


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"


def _markdown(heads: Sequence[str], rows: Iterable[Sequence[str]], words: Sequence[int] = (0,)) -> str:
    """Table in Markdown.

    Args:
      heads: of the columns.
      rows: the places of each.
      words: columns that are words, not numbers.
    """
    under = ["---" if index in words else "---:" for index in range(len(heads))]
    return "".join(f"| {' | '.join(row)} |\n" for row in [heads, under, *rows])
