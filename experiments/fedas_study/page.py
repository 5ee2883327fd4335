"""docs/fedas.md and its figure, written from the study's records alone: no number is typed."""

import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import NamedTuple

from experiments.config import presets
from experiments.fedas_study import ladder, records
from experiments.fedas_study.ladder import LADDER, PARTICIPATION, SOURCES, Place, Step
from experiments.papers import published
from experiments.plots import drawing
from experiments.plots.pictures import ACCURACY, Lines, Picture, Series, over_seeds
from pfl_jax.atomic_write import cannot_write, write_whole

TEMPLATE = Path(__file__).with_name("page.md")
"""The page's sentences; their numbers come from the records."""

SEEDS = 3
NOTHING = "—"
FIGURE = "fedas-ladder"

FEDPER, FEDPER_BATCHES, PRINTED, *_, RELEASED = LADDER

TITLES = {"cifar100": "CIFAR-100's shape (embedded digit pairs)", "fashion_mnist": "Fashion-MNIST"}

_BOTH = ("as released", "both trained")

COLUMNS = {
    "received": "received",
    "received_of_trained": "received, trained before",
    "trained": "trained",
    "before_aggregation": "before aggregation",
}
"""measure -> its column."""


class Study(NamedTuple):
    """Available records of the study.

    Attributes:
      found: the records of the runs that were made.
    """

    found: dict[Place, records.Record]

    def values(
        self, dataset: str, share: float, step: Step, measure: str, average: str = "pooled", score: str = "best"
    ) -> dict[int, float]:
        """Accuracies in percent, seed -> value, of the available runs."""
        there = {
            seed: self.found[place]
            for seed in range(SEEDS)
            if (place := Place(dataset, share, step, seed)) in self.found
        }
        values = {seed: records.value(record, measure, average, score) for seed, record in there.items()}
        return {seed: value for seed, value in values.items() if value is not None}

    def differences(
        self, dataset: str, share: float, one: tuple[Step, str], other: tuple[Step, str]
    ) -> dict[int, float]:
        """Pooled best accuracy of (step, measure) `one` minus that of `other`, for the seeds that both have."""
        left, right = (self.values(dataset, share, *each) for each in (one, other))
        return {seed: left[seed] - right[seed] for seed in left.keys() & right.keys()}


def load(folder: Path) -> Study:
    """Load all records of the study.

    Raises:
      InvalidInput: one of them cannot be read, or is of another run.
    """
    every = ladder.places(list(SOURCES), PARTICIPATION, SEEDS)
    found = {place: record for place in every if (record := records.read(place, folder)) is not None}
    return Study(found)


def write(folder: Path, path: Path) -> None:
    """Write the page, and its figure as PNG and SVG into figures/ beside it.

    Args:
      folder: of the records.
      path: of the page.

    Raises:
      InvalidInput: something cannot be read or written.
    """
    study = load(folder)
    figures = path.parent / "figures"
    try:
        figures.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(figures, error) from None
    if study.found:
        drawing.save(picture(study), figures, FIGURE)
    write_whole(path, text(study))


def text(study: Study) -> str:
    """Text of the page."""
    total = len(ladder.places(list(SOURCES), PARTICIPATION, SEEDS))
    missing = total - len(study.found)
    request = Place("fashion_mnist", PARTICIPATION[0], RELEASED, 0).cell.request()
    options = request.options
    ladders = []
    for dataset in SOURCES:
        for share in PARTICIPATION:
            ladders += [f"### {TITLES[dataset]}, participation {share:g}", _table(study, dataset, share)]
            ladders += _step_sentences(study, dataset, share)
    values = {
        "paper_lead": _papers_lead(),
        "paper_rounds": presets.PRESETS["fedas"]["rounds"],
        "paper_lr": presets.HYPER_PARAMETERS["fedas"]["lr"],
        "lr": request.hyper_parameters["lr"],
        **{name: getattr(options, name) for name in ("beta", "num_clients", "rounds", "train_size")},
        "state": f"**{missing} of {total} runs are missing**; a dash stands for them."
        if missing
        else "All runs are there.",
        "seeds": SEEDS,
        "figure": f"![The ladder](figures/{FIGURE}.png)" if study.found else "",
        "lead_table": _lead(study),
        "lead_sentences": _lead_sentences(study),
        "ladders": "\n\n".join(ladders),
        "commands": _commands(),
    }
    page = Template(TEMPLATE.read_text()).substitute(values)
    return re.sub(r"\n{3,}", "\n\n", page)


def _papers_lead() -> str:
    """FedAS minus FedPer in the paper's Table 2, from the smallest to the largest."""
    rows = [row for row in published.load() if (row.paper, row.table, row.dataset) == ("fedas", 2, "cifar100")]
    both = {
        name: {row.setting: row.accuracy_percent for row in rows if row.method == name} for name in ("fedas", "fedper")
    }
    leads = [
        both["fedas"][setting] - both["fedper"][setting] for setting in both["fedas"].keys() & both["fedper"].keys()
    ]
    return f"{min(leads):.1f} to {max(leads):.1f}"


def _leads(study: Study, dataset: str, share: float) -> dict[str, dict[int, float]]:
    """Column -> seed -> lead of FedAS as released over FedPer with the same batches."""
    compared = {
        _BOTH[0]: ("trained", "before_aggregation"),
        _BOTH[1]: ("trained", "trained"),
        "both received, trained before": ("received_of_trained", "received_of_trained"),
        "both received": ("received", "received"),
    }
    return {
        name: study.differences(dataset, share, (RELEASED, ours), (FEDPER_BATCHES, theirs))
        for name, (ours, theirs) in compared.items()
    }


def _lead(study: Study) -> str:
    rows: list[list[str]] = []
    names: list[str] = []
    for dataset in SOURCES:
        for share in PARTICIPATION:
            leads = _leads(study, dataset, share)
            names = list(leads)
            rows.append([TITLES[dataset], f"{share:g}", *(_signed(list(lead.values())) for lead in leads.values())])
    return _markdown(["data", "participation", *names], rows)


def _lead_sentences(study: Study) -> str:
    """Sentences on the lead, place by place."""
    lines = []
    for dataset in SOURCES:
        for share in PARTICIPATION:
            leads = _leads(study, dataset, share)
            released, equal = (statistics.fmean(leads[name].values()) if leads[name] else None for name in _BOTH)
            if released is None or equal is None:
                continue
            lines.append(
                f"- {TITLES[dataset]}, participation {share:g}: of {released:+.1f} points as released, "
                f"{released - equal:+.1f} are the measure and {equal:+.1f} the method "
                f"({_spread(list(leads[_BOTH[1]].values()))})."
            )
    return "\n".join(lines)


def _table(study: Study, dataset: str, share: float) -> str:
    rows = []
    for step in LADDER:
        seeds = sorted(seed for seed in range(SEEDS) if Place(dataset, share, step, seed) in study.found)
        cells = []
        for measure in COLUMNS:
            values = list(study.values(dataset, share, step, measure).values())
            change = _change(study, dataset, share, step, measure)
            shown = f"{statistics.fmean(values):.1f}" if values else NOTHING
            cells.append(f"{shown} ({statistics.fmean(change):+.1f})" if change else shown)
        last = list(study.values(dataset, share, step, "trained", "mean", "last").values())
        cells.append(f"{statistics.fmean(last):.1f}" if last else NOTHING)
        rows.append([step.letter, step.title, *cells, ", ".join(map(str, seeds)) or NOTHING])
    heading = ["", "procedure", *COLUMNS.values(), "trained, mean over clients, last round", "seeds"]
    return _markdown(heading, rows)


def _before(step: Step) -> Step | None:
    """Step that a step is compared with; FedPer's two steps lead to FedAS from the first."""
    position = LADDER.index(step)
    if position == 0:
        return None
    return FEDPER if step is PRINTED else LADDER[position - 1]


def _change(study: Study, dataset: str, share: float, step: Step, measure: str) -> list[float]:
    """Change made by a step, for each seed that it shares with the step before."""
    before = _before(step)
    if before is None:
        return []
    return list(study.differences(dataset, share, (step, measure), (before, measure)).values())


def _step_sentences(study: Study, dataset: str, share: float) -> list[str]:
    """Sentences on the choice with the largest effect, and on those with the same sign in all seeds."""
    lines = []
    for measure in ("trained", "received_of_trained", "received"):
        changes = {step: _change(study, dataset, share, step, measure) for step in LADDER[1:]}
        means = {step: statistics.fmean(change) for step, change in changes.items() if change}
        if len(means) < len(LADDER) - 1:
            continue
        most = max(means, key=lambda step: abs(means[step]))
        lines.append(
            f"- By *{COLUMNS[measure]}* the largest change is that of ({most.letter}) {most.title.removeprefix('+ ')}: "
            f"{means[most]:+.1f} ({_spread(changes[most])}); all others stay within "
            f"{max(abs(value) for step, value in means.items() if step is not most):.1f}."
        )
    return ["\n".join(lines)] if lines else []


def _spread(values: Sequence[float]) -> str:
    """Range over seeds, in words."""
    if len(values) < 2:
        return "one seed"
    return f"{min(values):+.1f} to {max(values):+.1f} over {len(values)} seeds"


def _signed(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):+.1f}" if values else NOTHING


def _markdown(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _commands() -> str:
    places = ladder.places(["fashion_mnist"], [0.2], 1, (FEDPER, RELEASED))
    return "\n\n".join(f"    {place.command(Path('runs') / place.name)}" for place in places)


def picture(study: Study) -> Picture:
    """Each measure over the steps, one panel for each dataset and participation with a run."""
    panels = []
    positions = [float(position) for position in range(1, len(LADDER) + 1)]
    for dataset in SOURCES:
        for share in PARTICIPATION:
            series = [_series(study, dataset, share, measure, positions) for measure in COLUMNS]
            if any(one.y for one in series):
                title = f"{TITLES[dataset]}, participation {share:g}"
                panels.append(Lines(title, "rung", f"{ACCURACY}, pooled, best round", series, x_ticks=positions))
    names = "; ".join(f"{number}: {step.title.removeprefix('+ ')}" for number, step in enumerate(LADDER, start=1))
    return Picture("From FedPer to FedAS as released", f"{names}. Bands: range over seeds.", panels, 2)


def _series(study: Study, dataset: str, share: float, measure: str, positions: Sequence[float]) -> Series:
    """A measure over the available steps, over the seeds that all of these have."""
    found = {
        position: values
        for position, step in zip(positions, LADDER, strict=True)
        if (values := study.values(dataset, share, step, measure))
    }
    seeds = set.intersection(*map(set, found.values())) if found else set()
    if not seeds:
        return Series(COLUMNS[measure], [], [])
    rows = [[values[seed] for values in found.values()] for seed in sorted(seeds)]
    return over_seeds(COLUMNS[measure], list(found), rows, is_main=measure == "trained")
