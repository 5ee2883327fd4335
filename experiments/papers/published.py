"""Published accuracies of the papers, and the search for the accuracy with the same setting as a run."""

import contextlib
import csv
import functools
from pathlib import Path
from typing import Any, NamedTuple

from experiments.papers import settings
from experiments.papers.settings import Measure
from experiments.spec.identity import relevant_options
from experiments.spec.presets import PROCEDURES
from experiments.spec.spec import Spec
from pfl_jax.errors import InvalidInput

FILE = Path(__file__).with_name("paper_results.csv")

MODEL_COUNT_UNSTATED = {(table, method) for table in (6, 7, 8) for method in ("hypcluster", "fedem")}
"""(table, method) for which FedPAC's paper does not state the number of models (3 and 5 in its Table 4)."""

ANGLES_UNSTATED = 10
"""Number of FedPAC's table of rotated images, which does not state the angles. Its accuracy of Local-only (78.53 on
Fashion-MNIST; 85.68 in Table 1) also indicates a different partition."""


class Published(NamedTuple):
    """A published accuracy in percent, mean over clients, of a table.

    Its setting is a key of `settings.SETTINGS`, its procedure one of `presets.PROCEDURES` or "". The method has
    "-OPTION" for each option that is switched off.
    """

    paper: str
    table: int
    dataset: str
    clients: int
    setting: str
    method: str
    accuracy_percent: float
    procedure: str = ""

    @property
    def source(self) -> str:
        """Source for display: "FedPAC, Table 1"."""
        return f"{settings.PAPERS[self.paper].name}, Table {self.table}"

    @property
    def options(self) -> dict[str, Any]:
        """Options of the run that reproduces the accuracy, without the seed."""
        own = settings.ALIASES[self.method].options if self.method in settings.ALIASES else {}
        # "fedpac -alignment" is FedPAC without alignment.
        switches = dict.fromkeys(self.method.split(" -")[1:], False)
        found = {"preset": settings.PAPERS[self.paper].preset, "num_clients": self.clients}
        found |= {**settings.method_options(self.paper, self.method, self.procedure), **own, **switches}
        found |= settings.SETTINGS[self.setting] | ({"procedure": self.procedure} if self.procedure else {})
        if self.measure.score == "best" and self.measure.protocol != "trained":
            # All rounds compete for the best; training itself gives the scores of `trained` in every round.
            found["eval_every"] = 1
        return found

    @functools.lru_cache(maxsize=4096)  # noqa: B019 - rows are few, and a run is compared with all of them.
    def spec(self) -> Spec:
        """Run that reproduces the accuracy; InvalidInput if it is not possible."""
        return Spec.of(self.dataset, **self.options)

    @property
    def measure(self) -> Measure:
        return settings.measure(self.paper, self.method, self.procedure)


def load() -> list[Published]:
    """All published accuracies, in table order; FedAS's are for the first of its procedures."""
    found = []
    with FILE.open(newline="") as file:
        for row in csv.DictReader(file):
            numbers: Any = {"table": int(row["table"]), "clients": int(row["clients"])}
            numbers["accuracy_percent"] = float(row["accuracy_percent"])
            procedure = next(iter(PROCEDURES)) if row["paper"] == "fedas" else ""
            found.append(Published(**row | numbers, procedure=procedure))
    return found


def find(spec: Spec, *, is_real: bool) -> Published | None:
    """Published accuracy for exactly this setting, or None.

    The data must be real, and everything on which the result depends must be as in the paper: model, rounds, sizes,
    partition, participation and hyper-parameters. Switches of a method may be off if a table has such a row. FedAS's
    accuracies belong to both of its procedures.
    """
    if not is_real:
        return None
    rows = load()
    rows += [row._replace(procedure=name) for row in rows if row.procedure for name in [*PROCEDURES][1:]]
    for row in rows:
        same = (row.dataset, row.clients) == (spec.dataset, spec.num_clients)
        same = same and settings.PAPERS[row.paper].preset == spec.preset
        if row.paper == "fedpac" and (row.table == ANGLES_UNSTATED or (row.table, row.method) in MODEL_COUNT_UNSTATED):
            continue
        if same and settings.method_name(row.method, row.procedure) == spec.method:
            # A row whose command line is invalid cannot match.
            with contextlib.suppress(InvalidInput):
                if _compared_options(row.spec(), row.measure) == _compared_options(spec, row.measure):
                    return row
    return None


def _compared_options(spec: Spec, measure: Measure) -> dict[str, Any]:
    """Options that must be as in the paper. No paper states a float precision, and FedPAC states no `eval_every`.

    For accuracies by `trained`, `eval_every` does not matter: training itself gives them in every round.
    """
    compared = relevant_options(spec)
    del compared["precision"]
    if spec.preset == "fedpac" or measure.protocol == "trained":
        del compared["eval_every"]
    if spec.preset == "fedpac":
        # FedPAC's paper does not mention augmentation, which its released code has for color images; a run may be
        # compared with or without it.
        del compared["augment"]
    if spec.size_choices is not None:
        compared["size_choices"] = sorted(spec.size_choices)
    return compared
