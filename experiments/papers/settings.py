"""Tables of the papers as plain data: command-line options for the entries of paper_results.csv."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

from experiments.choices import Average, Protocol, Score
from experiments.cli.request import IN_PLACE, Request
from experiments.fields import Mark, flag, marked
from experiments.spec import KINDS
from pfl_jax.errors import InvalidInput
from pfl_jax.methods import METHODS

Paper: TypeAlias = Literal["fedpac", "fedpac_replication", "fedas"]
PAPERS = {"fedpac": "FedPAC", "fedpac_replication": "FedPAC replication", "fedas": "FedAS"}
"""paper -> its display name."""

PRESET = {"fedpac": "fedpac", "fedpac_replication": "fedpac", "fedas": "fedas"}
"""paper -> preset with the default settings of its tables."""


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
    score: Score
    average: Average

    def in_words(self, names: Sequence[str] = ("protocol", "score", "average")) -> str:
        """Words for some of its attributes: "after local training (trained), in the last round, mean over clients"."""
        return ", ".join(_WORDS[getattr(self, name)] for name in names)


_FINAL = Measure("received", "last", "clients")

MEASURES: dict[str, Measure] = {
    "fedpac": _FINAL,
    "fedpac_replication": _FINAL,
    "fedas": Measure("trained", "best", "examples"),
}
"""paper -> measure of its tables and figures. FedPAC: "final test accuracy", in the released code the mean over
clients. FedAS: "the highest top-1 accuracy" (4.1), in the released code of the clients' own trained models after every
round, over all test examples."""


_FULL_LAST_ROUND = (
    "All clients take part in the last round; FedPAC states this for 100 clients of its default partition."
)
_MODELS = "FedPAC does not state the number of models of HypCluster and FedEM here; the default is 3."
_PROTOTYPES = "FedAS does not say which prototypes its FedProto uses; here the global ones, as in FedProto's own paper."

TABLES: dict[tuple[str, int], tuple[str, ...]] = {
    ("fedpac", 1): ("Main comparison (Section 6.2)",),
    ("fedpac", 2): ("Ablation (Section 6.2)",),
    ("fedpac", 3): ("Concept shift (Section 6.2)", "FedPAC does not give its label permutations."),
    ("fedpac", 4): ("Single and multiple global models (C.4)",),
    ("fedpac", 5): ("FedProto (C.5)",),
    ("fedpac", 6): ("Clients of different sizes (C.6)", _MODELS),
    ("fedpac", 7): ("Pathological partition (C.7)", _MODELS),
    ("fedpac", 8): ("Dirichlet partition (C.8)", _MODELS, _FULL_LAST_ROUND),
    ("fedpac", 9): ("1000 clients of 50 examples (C.9)", _FULL_LAST_ROUND),
    ("fedpac", 10): ("Feature skew (C.10)", "FedPAC does not give its angles."),
    ("fedpac_replication", 1): ("Replication and prototype weights (Section 5)",),
    ("fedas", 2): ("CIFAR-100 (Section 4.2)", _PROTOTYPES),
    ("fedas", 3): ("CIFAR-10 (Section 4.2)", _PROTOTYPES),
    ("fedas", 4): ("Ablation (Section 4.3)",),
}
"""(paper, number) -> title, and notes: details that the paper does not state, and the choices made here."""

_GROUPED = "--partition grouped --s 20"
_EVERYONE = "--participation 1.0"


class Procedure(NamedTuple):
    """What FedAS's paper prints and its released code does differently, as options of all methods and of its parts."""

    title: str
    batches: str
    alignment: str = ""
    synchronization: str = ""
    in_place: bool = False

    def words(self, method: str) -> tuple[str, ...]:
        """Options of a method of a table."""
        parts = [name for name in ("alignment", "synchronization") if _has(method, name)]
        return tuple(" ".join([self.batches, *(getattr(self, name) for name in parts)]).split())

    def rounds(self, method: str) -> str:
        """Attribute `procedure` of a method's `Request`."""
        return IN_PLACE if self.in_place and _has(method, "alignment") else ""


def _has(method: str, part: str) -> bool:
    """Whether a method of a table is FedAS with this part."""
    return method_name(method) == "fedas" and f"-{part}" not in method.split()


RELEASE = Procedure(
    "as in the released code: all methods take batches in a fixed order without the last incomplete one; FedAS aligns "
    "one backbone in place with class means, summed over classes, and has traces of batch means",
    "--drop-last --no-shuffle",
    "--target class_mean --align-loss class_sum --first-alignment",
    "--reduction batch_means",
    in_place=True,
)
PRINT = Procedure(
    "as printed: all methods take all examples in a new order in every epoch; FedAS aligns each client's own copy of "
    "the backbone with its own embeddings, and has traces of examples",
    "--no-drop-last --shuffle",
    "--target example --align-loss mean --no-first-alignment",
    "--reduction mean",
)
PROCEDURES = {"release": RELEASE, "print": PRINT}
"""Name -> procedure of FedAS's tables. The first is the default: the published accuracies are the released code's, and
so are the measure and the batches of the preset."""


_UNKNOWN_IN_PLACE = {
    *("resume", "keep_state", "held_out_clients", "eval_clients", "drop_rate", "on_nan", "schedule"),
    *("attack", "attackers", "attack_scale", "server_mean", "compress", "device_trace", "buffer", "concurrency"),
    *marked(KINDS, Mark.PROCESSES),
}
"""Options that runs with alignment in place do not have. They do without those that only place or store the work."""


def check_in_place(request: Request) -> None:
    """Raise InvalidInput for an option of FedAS that cannot be used with alignment in place."""
    own = request.hyper_parameters
    if request.options.eval_protocol == "before_aggregation":
        raise InvalidInput(f"{IN_PLACE} measures received and trained")
    if idle := sorted(request.given & _UNKNOWN_IN_PLACE):
        raise InvalidInput(f"{flag(idle[0])} is not an option of {IN_PLACE}")
    if not own["alignment"] or own["manner"] != "serial":
        raise InvalidInput(f"{IN_PLACE} needs --alignment and --manner serial")
    if own["target"] == "global_class_mean":
        raise InvalidInput(f"{IN_PLACE} is with a client's own features: --target example or class_mean")


def fedas_setting(beta: float, participation: float) -> str:
    """Options of FedAS's Dirichlet partition."""
    return f"--partition dirichlet --dirichlet-protocol fedas --beta {beta} --participation {participation}"


SETTINGS: dict[str, str] = {
    "grouped s=20": f"{_GROUPED} {_EVERYONE}",
    "grouped s=20 participation=0.3": f"{_GROUPED} --participation 0.3 --full-last-round",
    "concept shift": f"{_GROUPED} --shift labels {_EVERYONE}",
    "feature skew (rotation)": f"{_GROUPED} --shift rotation {_EVERYONE}",
    "grouped s=20 sizes {300,600,1200}": f"{_GROUPED} --size-choices 300 600 1200 {_EVERYONE}",
    "grouped s=20 size=50 participation=0.03": f"{_GROUPED} --train-size 50 --participation 0.03 --full-last-round",
    "pathological random": f"--partition pathological --pathological-protocol random {_EVERYONE}",
    "pathological clustered": f"--partition pathological --pathological-protocol clustered {_EVERYONE}",
    # The whole dataset, by FedPAC's own protocol.
    "dirichlet beta=1.0 participation=0.3": (
        "--partition dirichlet --dirichlet-protocol fedpac --beta 1.0 --train-size None --test-size None "
        "--participation 0.3 --full-last-round"
    ),
} | {
    f"dirichlet beta={beta} participation={participation}": fedas_setting(beta, participation)
    for beta in (0.1, 0.3, 0.5)
    for participation in (0.2, 0.4, 0.6, 1.0)
}
"""setting -> its options; all other options are those of the preset."""

ALIASES: dict[str, str] = {
    "fedpac (replicated)": "fedpac",
    "fedpac_proto (modified)": "fedpac_proto",
    "fedproto": "fedproto_g",
    "hypcluster_3": "hypcluster --clusters 3",
    "hypcluster_5": "hypcluster --clusters 5",
    "fedem_3": "fedem --learners 3",
    "fedem_5": "fedem --learners 5",
    "fedem_ft_3": "fedem_ft --learners 3",
    "fedem_ft_5": "fedem_ft --learners 5",
}
"""Name of a method in a table, where it differs from METHODS -> name in METHODS and options."""

FIXED = frozenset(
    {"method", "preset", "num_clients", "participation", "full_last_round", "seed", "out", "resume"}
    | {"partition", "s", "beta", "dirichlet_protocol", "pathological_protocol", "size_choices", "shift"}
    | {"target_accuracy", "clusters", "learners", "alignment", "collaboration", "synchronization"}
)
"""Options that define a cell of a table. Other options can be given for a whole table, which then reports them."""


def method_name(method: str) -> str:
    """Name of a method of a table without options, such as "hypcluster" for "hypcluster_3"; perhaps not in METHODS."""
    return ALIASES.get(method, method).split()[0]


def has(method: str) -> bool:
    """Whether a method of a table is implemented."""
    return method_name(method) in METHODS
