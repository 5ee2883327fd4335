"""The papers' published accuracies, and which of them a run may be compared with."""

import csv
from pathlib import Path
from typing import Any, NamedTuple

from experiments import presets
from experiments.options import PARTITION_OPTIONS, Options
from experiments.parsing import Request, method_config

FILE = Path(__file__).with_name("paper_results.csv")

SCARCE_SIZE = 50
"""Training examples of each of FedPAC's 1000 clients (C.9), one mini-batch."""

UNSAID = {(6, "hypcluster"), (6, "fedem"), (7, "hypcluster"), (7, "fedem"), (8, "hypcluster"), (8, "fedem")}
"""(table, method) of FedPAC whose number of models the paper leaves open: 3 and 5 in its Table 4."""


class Published(NamedTuple):
    """One accuracy from a table.

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
        """For people: "FedPAC, Table 1"."""
        names = {"fedpac": "FedPAC", "fedas": "FedAS", "fedpac_replication": "FedPAC replication"}
        return f"{names[self.paper]}, Table {self.table}"


def load() -> list[Published]:
    """All published accuracies, in the order of the tables."""
    with FILE.open(newline="") as file:
        return [_published(row) for row in csv.DictReader(file)]


def _published(row: dict[str, Any]) -> Published:
    table, clients, accuracy = int(row["table"]), int(row["clients"]), float(row["accuracy_percent"])
    return Published(**row | {"table": table, "clients": clients, "accuracy_percent": accuracy})


def published(request: Request, *, is_real: bool) -> Published | None:
    """The published accuracy for exactly this setting, or None.

    Only if the data is the real one and everything that bears on the result is as the paper had it: model, rounds,
    sizes, partition, participation and hyper-parameters. A method's switches may be off where a table has that row.

    Args:
      request: what is run.
      is_real: whether the data is the dataset itself.
    """
    setting = _setting(request.options)
    method = _method(request)
    if not is_real or setting is None or method is None or not _as_published(request):
        return None
    names = (method, f"{method} (modified)")
    for row in load():
        same = (row.dataset, row.clients, row.setting) == (request.dataset, request.options.num_clients, setting)
        if same and row.paper.startswith(request.options.preset) and row.method in names:
            return None if row.paper == "fedpac" and (row.table, row.method) in UNSAID else row
    return None


def _setting(options: Options) -> str | None:
    """The setting in the table's words, None where no table has such a one, or none that is described well enough."""
    if options.straggler_fraction > 0 and options.straggler_rate < 1:
        return None
    if options.preset == "fedas":
        if options.partition != "dirichlet" or options.full_last_round or options.shift != "none" or options.augment:
            return None
        return f"dirichlet beta={options.beta} participation={options.participation}"
    # FedPAC's text does not mention augmentation, its released code has it for colour images: its figures are for both.
    words = _fedpac_division(options)
    if words is None or options.participation == 1:
        return words
    # Clients that sit rounds out are evaluated after a last round in which everyone takes part.
    return f"{words} participation={options.participation}" if options.full_last_round else None


def _fedpac_division(options: Options) -> str | None:
    """Partition, sizes and shift in the words of FedPAC's tables, None where it has no such table."""
    # Table 10 names no angles, and its Local-only (78.53, Table 1 has 85.68) tells of another partition than the usual.
    if options.shift == "rotation":
        return None
    usual_sizes = options.size_choices is None
    if options.partition == "pathological":
        words = f"pathological {options.pathological_protocol}"
        return words if usual_sizes and options.shift == "none" else None
    if options.partition == "dirichlet":
        return f"dirichlet beta={options.beta}" if options.shift == "none" else None
    if options.partition != "grouped":
        return None
    words = f"grouped s={options.s:g}"
    if options.shift == "labels":
        # Local-only is to the digit that of Table 1, so Table 3 has its partition, s = 20.
        return "concept shift" if words == "grouped s=20" and usual_sizes else None
    if not usual_sizes:
        return f"{words} sizes {{300,600,1200}}" if _drawn_as_published(options) else None
    return f"{words} size={SCARCE_SIZE}" if options.train_size == SCARCE_SIZE else words


def _drawn_as_published(options: Options) -> bool:
    return options.size_choices is not None and sorted(options.size_choices) == [300, 600, 1200]


def _method(request: Request) -> str | None:
    """The method in the table's words, None if its hyper-parameters are not the paper's."""
    values = presets.values(request.options.preset, request.dataset)
    usual = vars(method_config(request.options.method)())
    usual = {name: values.get(name, value) for name, value in usual.items()}
    words = [request.options.method]
    for name, value in request.hyper_parameters.items():
        if value == usual[name]:
            continue
        if usual[name] is not True:
            return None
        words.append(f"-{name}")
    return " ".join(words)


def _as_published(request: Request) -> bool:
    """Whether model, rounds and sizes are those of the paper."""
    options: dict[str, Any] = vars(request.options)
    values = presets.values(request.options.preset, request.dataset)
    names = ["model", "rounds"]
    if options["partition"] in ("pathological", presets.PRESETS[request.options.preset]["partition"]):
        # What `_setting` puts into words need not be the preset's.
        said = {"s", "beta", "pathological_protocol", "size_choices"}
        if "size" in (_setting(request.options) or ""):
            said.add("train_size")
        names += [name for name in PARTITION_OPTIONS[options["partition"]] if name not in said]
        return all(options[name] == values.get(name, Options.__dataclass_fields__[name].default) for name in names)
    # FedPAC C.8, Dirichlet: the whole dataset by the paper's own protocol.
    whole = options["train_size"] is None and options["test_size"] is None and options["min_size"] is None
    return (
        all(options[name] == values[name] for name in names)
        and whole
        and options["dirichlet_protocol"] == request.options.preset
    )
