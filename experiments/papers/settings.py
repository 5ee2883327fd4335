"""Tables of the papers as plain data: options for the entries of paper_results.csv."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from experiments.spec.choices import Average, Protocol, ReportedRound

_WORDS = {
    "received": "after aggregation (received)",
    "trained": "after local training (trained)",
    "before_aggregation": "between local training and aggregation (before_aggregation)",
    "last": "in the last round",
    "best": "in the best evaluated round",
    "clients": "mean over clients",
    "examples": "pooled over all test examples",
}


class Measure(NamedTuple):
    """Definition of the accuracies in a paper: evaluation protocol, reported round, average over clients or test
    examples."""

    protocol: Protocol
    score: ReportedRound
    average: Average

    def in_words(self, names: Sequence[str] = ("protocol", "score", "average")) -> str:
        """Words for some of its attributes: "after local training (trained), in the last round, mean over clients"."""
        return ", ".join(_WORDS[getattr(self, name)] for name in names)


FEDAS_PROTOCOLS: dict[str, Protocol] = {
    **dict.fromkeys(("fedavg", "fedprox", "fedper", "fedas -alignment -synchronization"), "before_aggregation"),
    **dict.fromkeys(("fedala", "fedavg_ft", "fedprox_ft"), "received"),
}
"""Method of FedAS's tables -> protocol by which the released code evaluates it; FedAS itself, and methods that the code
does not have, are evaluated by `trained`. The first row of Table 4 repeats FedPer's row of Table 3. Fine-tuned models,
as printed, are the models that clients deploy."""

RELEASED_AS = {"fedavg_ft": "fedavg", "fedprox_ft": "fedprox"}
"""Method of FedAS's tables -> method that the released code runs instead: the text fine-tunes the global models of
FedAvg-P and FedProx-P, but the code evaluates each client's model between local training and aggregation."""


_FULL_LAST_ROUND = (
    "All clients take part in the last round; FedPAC states this for 100 clients of its default partition."
)
_MODELS = "FedPAC does not state the number of models of HypCluster and FedEM here; the default is 3."
_UNSTATED = (
    "FedAS does not say which prototypes its FedProto uses; here the global ones, as in FedProto's own paper.",
    "FedAS gives no mu of FedProx: as printed it is 0.01 here, as released 0.1, which the released code has.",
    "FedAS has one learning rate for all methods; FedPAC's head keeps its own 0.1 (--method fedpac --head-lr 0.005).",
)


class Publication(NamedTuple):
    """A paper.

    Attributes:
      name: name for display.
      preset: preset with the default settings of its tables.
      measure: usual definition of its accuracies; the function `measure` gives a single method's.
      tables: number -> title, and notes on details that the paper does not state and the choices made here.
    """

    name: str
    preset: str
    measure: Measure
    tables: dict[int, tuple[str, ...]]


PAPERS: dict[str, Publication] = {
    # "Final test accuracy", in the released code the mean over clients.
    "fedpac": Publication(
        *("FedPAC", "fedpac", Measure("received", "last", "clients")),
        tables={
            1: ("Main comparison (Section 6.2)",),
            2: ("Ablation (Section 6.2)",),
            3: ("Concept shift (Section 6.2)", "FedPAC does not give its label permutations."),
            4: ("Single and multiple global models (C.4)",),
            5: ("FedProto (C.5)",),
            6: ("Clients of different sizes (C.6)", _MODELS),
            7: ("Pathological partition (C.7)", _MODELS),
            8: ("Dirichlet partition (C.8)", _MODELS, _FULL_LAST_ROUND),
            9: ("1000 clients of 50 examples (C.9)", _FULL_LAST_ROUND),
            10: ("Feature skew (C.10)", "FedPAC does not give its angles."),
        },
    ),
    "fedpac_replication": Publication(
        *("FedPAC replication", "fedpac", Measure("received", "last", "clients")),
        tables={1: ("Replication and prototype weights (Section 5)",)},
    ),
    # "The highest top-1 accuracy" (4.1), in the released code over all test examples after every round.
    "fedas": Publication(
        *("FedAS", "fedas", Measure("trained", "best", "examples")),
        tables={
            2: ("CIFAR-100 (Section 4.2)", *_UNSTATED),
            3: ("CIFAR-10 (Section 4.2)", *_UNSTATED),
            4: ("Ablation (Section 4.3)",),
        },
    ),
}

_GROUPED: dict[str, Any] = {"partition": "grouped", "s": 20.0}
_EVERYONE = {"participation": 1.0}


def fedas_setting(beta: float, participation: float) -> dict[str, Any]:
    """Options of FedAS's Dirichlet partition."""
    return {
        "partition": "dirichlet",
        "dirichlet_protocol": "fedas",
        "beta": beta,
        "participation": participation,
    }


def _pathological(protocol: str) -> dict[str, Any]:
    return {"partition": "pathological", "pathological_protocol": protocol, **_EVERYONE}


def _few(participation: float) -> dict[str, Any]:
    return {"participation": participation, "full_last_round": True}


SETTINGS: dict[str, dict[str, Any]] = {
    "grouped s=20": _GROUPED | _EVERYONE,
    "grouped s=20 participation=0.3": _GROUPED | _few(0.3),
    "concept shift": _GROUPED | _EVERYONE | {"shift": "labels"},
    "feature skew (rotation)": _GROUPED | _EVERYONE | {"shift": "rotation"},
    "grouped s=20 sizes {300,600,1200}": _GROUPED | _EVERYONE | {"size_choices": (300, 600, 1200)},
    "grouped s=20 size=50 participation=0.03": _GROUPED | _few(0.03) | {"train_size": 50},
    "pathological random": _pathological("random"),
    "pathological clustered": _pathological("clustered"),
    # The whole dataset, by FedPAC's own protocol.
    "dirichlet beta=1.0 participation=0.3": fedas_setting(1.0, 0.3)
    | _few(0.3)
    | {"dirichlet_protocol": "fedpac", "train_size": None, "test_size": None},
} | {
    f"dirichlet beta={beta} participation={participation}": fedas_setting(beta, participation)
    for beta in (0.1, 0.3, 0.5)
    for participation in (0.2, 0.4, 0.6, 1.0)
}
"""Setting -> its options; all other options have the preset's values."""


class Alias(NamedTuple):
    """Name of a method in METHODS, and options for it."""

    method: str
    options: dict[str, Any]


ALIASES: dict[str, Alias] = {
    "fedpac (replicated)": Alias("fedpac", {}),
    "fedpac_proto (modified)": Alias("fedpac_proto", {}),
    "fedproto": Alias("fedproto_g", {}),
    **{f"hypcluster_{number}": Alias("hypcluster", {"clusters": number}) for number in (3, 5)},
    **{f"{name}_{number}": Alias(name, {"learners": number}) for name in ("fedem", "fedem_ft") for number in (3, 5)},
}
"""Name of a method in a table, where it differs from METHODS -> name in METHODS and options."""

FIXED = frozenset(
    {"method", "preset", "procedure", "num_clients", "participation", "full_last_round", "seed", "out", "resume"}
    | {"partition", "s", "beta", "dirichlet_protocol", "pathological_protocol", "size_choices", "shift"}
    | {"target_accuracy", "clusters", "learners", "alignment", "collaboration", "synchronization"}
)
"""Options that define a cell of a table. Other options can be given for a whole table, which then reports them."""


def method_name(method: str, procedure: str = "") -> str:
    """Name in METHODS of a method of a table, such as "hypcluster" for "hypcluster_3".

    With FedAS's released procedure, RELEASED_AS may replace the method.
    """
    released = RELEASED_AS.get(method, method) if procedure == "release" else method
    return ALIASES[released].method if released in ALIASES else released.split()[0]


def measure(paper: str, method: str, procedure: str = "") -> Measure:
    """Definition of a method's accuracies in a paper: FedAS's released code does not evaluate all methods alike."""
    usual, name = PAPERS[paper].measure, method_name(method, procedure)
    own = FEDAS_PROTOCOLS.get(method if " -" in method else name)
    return usual._replace(protocol=own) if own and paper == "fedas" else usual


def method_options(paper: str, method: str, procedure: str = "") -> dict[str, Any]:
    """Options of a method's run in a paper: its name in METHODS, and a protocol that is measured only on request."""
    protocol = measure(paper, method, procedure).protocol
    requested = {"eval_protocol": protocol} if protocol == "before_aggregation" else {}
    return {"method": method_name(method, procedure), **requested}
