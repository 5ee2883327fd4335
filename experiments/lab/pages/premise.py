"""The part of docs/fedas.md on the weights of stragglers, and its figure, from results/premise.jsonl."""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.lab.fedas_ablation.premise import DATASETS, RUNS, TRACES, Record, Run
from experiments.lab.pages.parts import FIGURES, Made, filled
from experiments.run import committed
from experiments.show import tables
from experiments.show.pictures import Lines, Picture, Series

TEMPLATE = Path(__file__).with_name("premise.md.jinja")
"""Text of the part without its numbers."""

GROUPS = {"online": False, "straggler": True}

WORDS = {
    "example": "examples (as printed)",
    "batch_means": "batches (as released)",
    "model": "labels drawn from the model",
    "size": "number of examples",
}
"""Definition of a trace, or what weighs instead -> its words."""


def made(root: Path) -> Made:
    """The page of a checkout, and its picture if there are runs; InvalidInput if a record cannot be read."""
    found, page = load(root / committed.ROOT.name / "premise.jsonl"), root / "docs/fedas.md"
    if not found:
        return Made({page: filled(page, {"premise": ""})}, {})
    text = tables.page(TEMPLATE, **values(found))
    return Made({page: filled(page, {"premise": f"{text}\n"})}, {root / FIGURES / "fedas-premise.svg": picture(found)})


def load(file: Path) -> dict[Run, Record]:
    """The records of the runs that were made."""
    found = committed.read(file)
    return {run: found[name] for name, run in RUNS.items() if name in found}


def by_group(record: Record, name: str) -> dict[str, list[Any]]:
    """Mean of a value of clients by round, over the cohort's online clients and stragglers; None without any."""
    is_straggler, means = np.array(record["is_straggler"]), {}
    for group, wanted in GROUPS.items():
        rows = [
            np.array(row)[is_straggler[cohort] == wanted]
            for row, cohort in zip(record[name], record["cohort"], strict=True)
        ]
        means[group] = [float(row.mean()) if row.size else None for row in rows]
    return means


def values(found: dict[Run, Record]) -> dict[str, Any]:
    """What the page shows: traces in the last round, in which all clients are, and accuracies after it."""
    traces, accuracies = [], []
    for run, record in found.items():
        for name in TRACES if run.weighed_by == "example" else ():
            online, straggler = (by_group(record, name)[group][-1] for group in GROUPS)
            # Weights are proportional to traces.
            shares = [one / (len(record["is_straggler"]) * np.mean(record[name][-1])) for one in (online, straggler)]
            said = "holds" if straggler < online else "reversed"
            pairs = list(zip(*by_group(record, name).values(), strict=True))
            both = [(other, one) for one, other in pairs if one is not None and other is not None]
            rounds = f"{sum(other < one for other, one in both)} of {len(both)}"
            numbers = [f"{online:.3g}", f"{straggler:.3g}", *(f"{share:.3f}" for share in shares)]
            traces.append([run.dataset, WORDS[name], *numbers, rounds, said])
        stragglers = np.array(record["is_straggler"])
        means = [
            f"{np.mean(np.array(record[protocol])[stragglers == wanted]):.1f}"
            for protocol in ("received", "trained")
            for wanted in GROUPS.values()
        ]
        accuracies.append([run.dataset, WORDS[run.weighed_by], *means])
    return {"traces": traces, "accuracies": accuracies}


def picture(found: dict[Run, Record]) -> Picture:
    """Traces by round of online clients and stragglers, and how much a straggler weighs beside an online client."""
    panels = []
    for dataset in DATASETS:
        record = found.get(Run(dataset, "example"))
        if record is None:
            continue
        rounds, ratios = record["round"], []
        for name in TRACES:
            online, straggler = by_group(record, name).values()
            points = [(n, s / o) for n, o, s in zip(rounds, online, straggler, strict=True) if o and s is not None]
            ratios.append(Series(WORDS[name], *map(list, zip(*points, strict=True)), is_main=name == "example"))
        lines = []
        for group, means in by_group(record, "example").items():
            points = [(n, mean) for n, mean in zip(rounds, means, strict=True) if mean is not None]
            lines.append(Series(group, *map(list, zip(*points, strict=True)), is_main=group == "straggler"))
        panels.append(Lines(dataset, "round", "trace by examples", lines))
        panels.append(Lines(dataset, "round", "weight of a straggler / online client", ratios, least=0))
    caption = (
        "Means over the clients of a round's cohort; weights are proportional to traces. Below 1 stragglers weigh less."
    )
    return Picture("Fisher traces of online clients and stragglers", caption, panels, 2)
