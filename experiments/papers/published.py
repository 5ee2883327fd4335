"""Published accuracies of the papers, and which of them a run may be compared with."""

import contextlib
import csv
from pathlib import Path
from typing import Any, NamedTuple

from experiments.config.cell import Cell
from experiments.config.request import Request, relevant_options
from experiments.papers import settings
from pfl_jax.errors import InvalidInput

FILE = Path(__file__).with_name("paper_results.csv")

MODELS_UNSAID = {(table, method) for table in (6, 7, 8) for method in ("hypcluster", "fedem")}
"""(table, method) of FedPAC whose number of models the paper leaves open: 3 and 5 in its Table 4."""

ANGLES_UNSAID = 10
"""FedPAC's table of rotated images. It names no angles, and its Local-only (78.53 on Fashion-MNIST, where Table 1 has
85.68) indicates another partition than the usual."""


class Published(NamedTuple):
    """One published accuracy of a table.

    Attributes:
      paper: fedpac, fedpac_replication or fedas.
      table: its number there.
      dataset: as `python -m experiments.DATASET` calls it.
      clients: N.
      setting: partition and participation, in words.
      method: a key of METHODS, with "-OPTION" for each option that is switched off.
      accuracy_percent: mean over clients.
    """

    paper: str
    table: int
    dataset: str
    clients: int
    setting: str
    method: str
    accuracy_percent: float

    @property
    def source(self) -> str:
        """Source for people: "FedPAC, Table 1"."""
        return f"{settings.PAPERS[self.paper]}, Table {self.table}"

    @property
    def arguments(self) -> tuple[str, ...]:
        """Command line that repeats it, without seed and results folder."""
        return settings.arguments(self.paper, self.clients, self.setting, self.method)


def load() -> list[Published]:
    """All published accuracies, in the order of the tables."""
    with FILE.open(newline="") as file:
        return [_published(row) for row in csv.DictReader(file)]


def _published(row: dict[str, Any]) -> Published:
    table, clients, accuracy = int(row["table"]), int(row["clients"]), float(row["accuracy_percent"])
    return Published(**row | {"table": table, "clients": clients, "accuracy_percent": accuracy})


def find(request: Request, *, is_real: bool) -> Published | None:
    """Published accuracy for exactly this setting, or None.

    Only if the data is the real one and everything that bears on the result is as the paper had it: model, rounds,
    sizes, partition, participation and hyper-parameters. A method's switches may be off where a table has that row.

    Args:
      request: what is run.
      is_real: whether the data is the dataset itself.
    """
    if not is_real:
        return None
    wanted = _compared_options(request)
    for row in load():
        same = (row.dataset, row.clients) == (request.dataset, request.options.num_clients)
        same = same and settings.PRESET[row.paper] == request.options.preset and _fully_described(row)
        if same and settings.method_name(row.method) == request.options.method:
            # A table may need an option that is not there; it is no row of this run then.
            with contextlib.suppress(InvalidInput):
                if _compared_options(Cell(row.dataset, row.arguments).request()) == wanted:
                    return row
    return None


def _fully_described(row: Published) -> bool:
    """Whether the paper describes the row's setting completely enough for an exact comparison."""
    if row.paper != "fedpac":
        return True
    return row.table != ANGLES_UNSAID and (row.table, row.method) not in MODELS_UNSAID


def _compared_options(request: Request) -> dict[str, Any]:
    """Options that must be as in the paper; it does not report evaluation frequency or float precision."""
    compared = {
        name: value for name, value in relevant_options(request).items() if name not in ("eval_every", "precision")
    }
    if request.options.preset == "fedpac":
        # FedPAC's text does not mention augmentation, its released code has it for color images: its figures are for
        # both.
        del compared["augment"]
    if request.options.size_choices is not None:
        compared["size_choices"] = sorted(request.options.size_choices)
        # Without effect then.
        del compared["train_size"]
    return compared
