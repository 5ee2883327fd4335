"""docs/fedas.md and its figure, with all numbers from the study's records."""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.cli import presets
from experiments.lab.fedas_ablation import steps
from experiments.lab.fedas_ablation.steps import PARTICIPATION, RUNS, SEEDS, SOURCES, STEPS, AblationRun, Step
from experiments.lab.pages import premise
from experiments.lab.pages.parts import FIGURES, Made
from experiments.papers import published
from experiments.run.committed import ROOT
from experiments.show import tables
from experiments.show.pictures import ACCURACY, Lines, Picture, Series, over_seeds
from experiments.show.tables import number

TEMPLATE = Path(__file__).with_name("fedas.md.jinja")
"""Text of the page without its numbers."""

FIGURE = "fedas-steps"

WHERE = tuple(itertools.product(SOURCES, PARTICIPATION))
"""Each dataset with each participation."""

FEDPER, FEDPER_BATCHES, PRINTED, *_, RELEASED = STEPS

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

    found: dict[AblationRun, steps.Record]

    def values(
        self, dataset: str, share: float, step: Step, measure: str, average: str = "pooled", score: str = "best"
    ) -> dict[int, float]:
        """Accuracies in percent, seed -> value, of the available runs."""
        every = {seed: self.found.get(AblationRun(dataset, share, step, seed)) for seed in SEEDS}
        values = {seed: steps.value(one, measure, average, score) for seed, one in every.items() if one is not None}
        return {seed: value for seed, value in values.items() if value is not None}

    def differences(
        self, dataset: str, share: float, one: tuple[Step, str], other: tuple[Step, str]
    ) -> dict[int, float]:
        """Pooled best accuracy of (step, measure) `one` minus that of `other`, for the seeds that both have."""
        left, right = (self.values(dataset, share, *each) for each in (one, other))
        return {seed: left[seed] - right[seed] for seed in sorted(left.keys() & right.keys())}


def load(file: Path) -> Study:
    """Load all records of the study; InvalidInput if the file cannot be read."""
    return Study({run: record for run in RUNS.values() if (record := steps.read(run, file)) is not None})


def made(root: Path) -> Made:
    """The page of a checkout, and its picture; InvalidInput if a record cannot be read."""
    study = load(root / ROOT.name / "fedas_ablation.jsonl")
    stragglers = premise.load(root / ROOT.name / "premise.jsonl")
    pictures = {root / FIGURES / f"{FIGURE}.svg": picture(study)} if study.found else {}
    if stragglers:
        pictures[root / FIGURES / "fedas-premise.svg"] = premise.picture(stragglers)
    return Made({root / "docs/fedas.md": text(study, stragglers)}, pictures)


def text(study: Study, stragglers: dict[premise.Run, premise.Record]) -> str:
    """Text of the page."""
    first, released = (AblationRun("fashion_mnist", PARTICIPATION[0], step, 0) for step in (FEDPER, RELEASED))
    request = released.cell.request()
    leads = {where: _leads(study, *where) for where in WHERE}
    return tables.page(
        TEMPLATE,
        paper_lead=_papers_lead(),
        paper_rounds=presets.PRESETS["fedas"]["rounds"],
        paper_lr=presets.HYPER_PARAMETERS["fedas"]["lr"],
        lr=request.hyper_parameters["lr"],
        options=request.options,
        there=study.found,
        seeds=len(SEEDS),
        figure=FIGURE,
        lead_columns=list(leads[WHERE[0]]),
        leads=[
            [TITLES[dataset], f"{share:g}", *(number(_mean(lead), "+.1f") for lead in leads[dataset, share].values())]
            for dataset, share in WHERE
            if any(leads[dataset, share].values())
        ],
        splits=[_split(title(*where), leads[where]) for where in WHERE if leads[where][_BOTH[0]]],
        columns=list(COLUMNS.values()),
        studies=[{"title": title(*where), "rows": rows} for where in WHERE if (rows := _rows(study, *where))],
        commands=[first.command, released.command],
        premise=premise.values(stragglers) if stragglers else None,
    )


def title(dataset: str, share: float) -> str:
    """Dataset and participation in words."""
    return f"{TITLES[dataset]}, participation {share:g}"


def _mean(values: Mapping[int, float]) -> float | None:
    """Mean over seeds; None without any."""
    return statistics.fmean(values.values()) if values else None


def _papers_lead() -> str:
    """FedAS minus FedPer in the paper's Table 2, from the smallest to the largest."""
    rows = [row for row in published.load() if (row.paper, row.table, row.dataset) == ("fedas", 2, "cifar100")]
    fedas, fedper = (
        {row.setting: row.accuracy_percent for row in rows if row.method == name} for name in ("fedas", "fedper")
    )
    leads = [fedas[setting] - fedper[setting] for setting in sorted(fedas.keys() & fedper.keys())]
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


def _split(where: str, leads: dict[str, dict[int, float]]) -> dict[str, Any]:
    """Parts of a lead: that of the measure, and that of the method."""
    released, equal = (_mean(leads[name]) for name in _BOTH)
    return {"title": where, "released": released, "equal": equal, "spread": _spread(leads[_BOTH[1]])}


def _rows(study: Study, dataset: str, share: float) -> list[list[str]]:
    """Each step that has a run by each measure, with the change that it makes."""
    rows = []
    for step in STEPS:
        seeds = [seed for seed in SEEDS if AblationRun(dataset, share, step, seed) in study.found]
        if not seeds:
            continue
        cells = []
        for measure in COLUMNS:
            change = _mean(_change(study, dataset, share, step, measure))
            shown = number(_mean(study.values(dataset, share, step, measure)), ".1f")
            cells.append(shown if change is None else f"{shown} ({change:+.1f})")
        last = number(_mean(study.values(dataset, share, step, "trained", "mean", "last")), ".1f")
        rows.append([step.letter, step.title, *cells, last, ", ".join(map(str, seeds))])
    return rows


def _before(step: Step) -> Step | None:
    """Step that a step is compared with; FedPer's two steps lead to FedAS from the first."""
    position = STEPS.index(step)
    if position == 0:
        return None
    return FEDPER if step is PRINTED else STEPS[position - 1]


def _change(study: Study, dataset: str, share: float, step: Step, measure: str) -> dict[int, float]:
    """Change made by a step, for each seed that it shares with the step before."""
    before = _before(step)
    return {} if before is None else study.differences(dataset, share, (step, measure), (before, measure))


def _spread(values: Mapping[int, float]) -> str:
    """Range over seeds, in words."""
    if len(values) < 2:
        return "one seed"
    return f"{min(values.values()):+.1f} to {max(values.values()):+.1f} over {len(values)} seeds"


def picture(study: Study) -> Picture:
    """Each measure over the steps, one panel for each dataset and participation with a run."""
    panels = []
    positions = [float(position) for position in range(1, len(STEPS) + 1)]
    for where in WHERE:
        series = [_series(study, *where, measure, positions) for measure in COLUMNS]
        if any(one.y for one in series):
            letters, y_label = [step.letter for step in STEPS], f"{ACCURACY}, pooled, best round"
            panels.append(Lines(title(*where), "step", y_label, series, x_ticks=positions, x_names=letters))
    names = "; ".join(f"{step.letter}: {step.title}" for step in STEPS)
    bands = "" if all(run.seed == 0 for run in study.found) else " Bands: range over seeds."
    return Picture("From FedPer to FedAS as released", f"{names}.{bands}", panels, 2)


def _series(study: Study, dataset: str, share: float, measure: str, positions: Sequence[float]) -> Series:
    """A measure over the available steps, over the seeds that all of these have."""
    found = {
        position: values
        for position, step in zip(positions, STEPS, strict=True)
        if (values := study.values(dataset, share, step, measure))
    }
    seeds = set.intersection(*map(set, found.values())) if found else set()
    if not seeds:
        return Series(COLUMNS[measure], [], [])
    rows = [[values[seed] for values in found.values()] for seed in sorted(seeds)]
    return over_seeds(COLUMNS[measure], list(found), rows, is_main=measure == "trained")
