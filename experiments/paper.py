"""The papers' published accuracies, and which of them a run may be compared with."""

import csv
from pathlib import Path
from typing import Any, NamedTuple

from experiments import presets
from experiments.options import PARTITION_OPTIONS, Options
from experiments.parsing import Request, method_config

FILE = Path(__file__).with_name("paper_results.csv")


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
            return row
    return None


def _setting(options: Options) -> str | None:
    """The setting in the table's words, None where no table has such a one."""
    if options.straggler_fraction > 0 and options.straggler_rate < 1:
        return None
    if options.preset == "fedas":
        if options.partition != "dirichlet" or options.full_last_round:
            return None
        return f"dirichlet beta={options.beta} participation={options.participation}"
    if options.partition == "dirichlet":
        words = f"dirichlet beta={options.beta}"
    elif options.partition == "grouped":
        words = f"grouped s={options.s:g}"
    else:
        return None
    if options.participation == 1:
        return words
    # Clients that sit rounds out are evaluated after a last round in which everyone takes part.
    return f"{words} participation={options.participation}" if options.full_last_round else None


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
    if options["partition"] == presets.PRESETS[request.options.preset]["partition"]:
        names += [name for name in PARTITION_OPTIONS[options["partition"]] if name not in ("s", "beta")]
        return all(options[name] == values.get(name, Options.__dataclass_fields__[name].default) for name in names)
    # FedPAC C.8, Dirichlet: the whole dataset by the paper's own protocol.
    whole = options["train_size"] is None and options["test_size"] is None and options["min_size"] is None
    return (
        all(options[name] == values[name] for name in names)
        and whole
        and options["dirichlet_protocol"] == request.options.preset
    )
