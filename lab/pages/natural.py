"""Table of docs/natural.md: FLamby's accuracies on Fed-Heart-Disease beside ours."""

from pathlib import Path

from experiments.show.tables import markdown, number
from lab.committed import ROOT, ResultStore
from lab.pages.parts import filled, mean_text
from lab.queue.field import PROTOCOL, Comparison

FLAMBY = {"local": 72.99, "fedavg": 68.50, "fedavg_ft": 73.51, "fedprox": 68.50, "scaffold": 68.40}
"""Method -> accuracy in FLamby's repository (commit edacf54) in percent: the mean over the hospitals and five seeds of
its CSV files in results/results_benchmark_fed_heart_disease, and of `fedavg_ft` in personalization_example."""


def texts(root: Path) -> dict[Path, str]:
    """The page of a checkout, with its table; InvalidInput if a result is damaged."""
    tuned = {one.method: one.results for one in Comparison("field-heart", ResultStore(root / ROOT.name)).tuned}
    ours = {name: [run.accuracy(PROTOCOL) for run in tuned.get(name, [])] for name in FLAMBY}
    known = {name: [accuracy for accuracy in of if accuracy is not None] for name, of in ours.items()}
    rows = [[f"`{name}`", number(FLAMBY[name]), mean_text(known[name])] for name in FLAMBY]
    page = root / "docs/natural.md"
    return {page: filled(page, {"flamby": markdown(["method", "FLamby", "ours"], rows)})}
