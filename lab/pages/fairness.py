"""Table of docs/fairness.md: how evenly methods serve the clients of two comparisons."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from experiments.folder.load import StoredRun
from experiments.show.tables import markdown, number
from lab.committed import ROOT, ResultStore
from lab.pages.parts import filled
from lab.queue.field import FIELDS, PROTOCOL, Comparison

BLOCKS = ("field-digits", "field-heart")
METHODS = ("local", "fedavg", "qffl", "afl", "fedavg_ft", "ditto", "apfl", "fedper")
"""Methods of the table: one model for all, those that spread it evenly, and personal ones."""


def gap(run: StoredRun) -> float:
    """Difference between the best and the worst client's accuracy in the last round."""
    scores = [score for score in run.lines[-1][f"{PROTOCOL}_per_client"] if score is not None]
    return max(scores) - min(scores)


MEASURES: dict[str, tuple[Callable[[StoredRun], float], str]] = {
    "mean": (lambda run: run.lines[-1][PROTOCOL]["mean"], ".2f"),
    "worst tenth": (lambda run: run.lines[-1][PROTOCOL]["worst_decile"], ".2f"),
    "gap": (gap, ".2f"),
    "Jain": (lambda run: run.lines[-1][PROTOCOL]["jain"], ".4f"),
}
"""Heading -> the figure of a run, and how it is written."""


def texts(root: Path) -> dict[Path, str]:
    """The page of a checkout, with its table; InvalidInput if a result is damaged."""
    library = ResultStore(root / ROOT.name)
    tuned = {block: {one.method: one.results for one in Comparison(block, library).tuned} for block in BLOCKS}
    rows = [
        [f"`{method}`", *(_cell(tuned[block].get(method, []), name) for block in BLOCKS for name in MEASURES)]
        for method in METHODS
    ]
    headings = [f"{FIELDS[block].dataset}: {name}" for block in BLOCKS for name in MEASURES]
    page = root / "docs/fairness.md"
    return {page: filled(page, {"fairness": markdown(["method", *headings], rows)})}


def _cell(runs: Sequence[StoredRun], name: str) -> str:
    of, form = MEASURES[name]
    return number(statistics.fmean(map(of, runs)) if runs else None, form)
