"""Given options without effect, and names of options in other tools."""

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from experiments.config.options import PARTITION_OPTIONS, Options, flag, reads_pixel_normalization

Values: TypeAlias = dict[str, Any]


def _off(switch: str) -> Callable[[Values], str]:
    return lambda values: "" if values[switch] else f"--no-{switch}"


def _fedas_lam(values: Values) -> str:
    if not values["alignment"]:
        return "--no-alignment"
    return "" if values["manner"] == "parallel" else "--manner serial: only the parallel manner reads it"


def _fedas_serial(values: Values) -> str:
    if not values["alignment"]:
        return "--no-alignment"
    return "" if values["manner"] == "serial" else "--manner parallel, which aligns while it trains"


def _first_alignment(values: Values) -> str:
    if not values["alignment"]:
        return "--no-alignment"
    return "--target global_class_mean" if values["target"] == "global_class_mean" else ""


UNREAD: dict[str, dict[str, Callable[[Values], str]]] = {
    "fedpac": {"lam": _off("alignment"), **dict.fromkeys(("covariance", "solver"), _off("collaboration"))},
    "fedpac_proto": {"lam": _off("alignment")},
    "fedas": {
        "lam": _fedas_lam,
        **dict.fromkeys(("align_lr", "align_batch_size", "align_epochs"), _fedas_serial),
        **dict.fromkeys(("manner", "target", "align_loss"), _off("alignment")),
        "first_alignment": _first_alignment,
        **dict.fromkeys(("normalization", "reduction"), _off("synchronization")),
    },
    "knn_per": {"held_out": lambda values: "" if values["mixing"] == "auto" else f"--mixing {values['mixing']}"},
    "fedala": {
        name: lambda values: "" if values["layers"] and values["ala_lr"] else "--ala-lr 0"
        for name in ("share", "ala_epochs", "threshold")
    },
    "per_fedavg": {
        "delta": lambda values: "" if values["meta_gradient"] == "hessian_free" else "--meta-gradient first_order"
    },
    "apple": {"mu": lambda values: "" if values["relation_rounds"] else "--relation-rounds 0"},
    "fedgh": {
        name: lambda values: "" if values["server_epochs"] else "--server-epochs 0"
        for name in ("server_lr", "server_batch_size")
    },
    "moon": {"temperature": lambda values: "" if values["mu"] else "--mu 0"},
    "fedcac": {"collaboration_rounds": lambda values: "" if values["share"] else "--share 0"},
    "fedtgp": {
        name: lambda values: "" if values["server_epochs"] else "--server-epochs 0"
        for name in ("server_lr", "server_batch_size")
    },
    "fedrep": {"head_lr": lambda values: "" if values["head_epochs"] else "--head-epochs 0"},
}
"""Method -> hyper-parameter -> the options with which it is not read, for people; "" where it is."""

SYNONYMS = {
    "algorithm": "method",
    "alg": "method",
    "global_rounds": "rounds",
    "global_epoch": "rounds",
    "comm_rounds": "rounds",
    "local_epochs": "epochs",
    "local_epoch": "epochs",
    "local_learning_rate": "lr",
    "learning_rate": "lr",
    "join_ratio": "participation",
    "client_activate_rate": "participation",
    "frac": "participation",
    "client_num": "num_clients",
    "num_users": "num_clients",
    "client_drop_rate": "drop_rate",
    "eval_gap": "eval_every",
    "test_interval": "eval_every",
    "lbs": "batch_size",
    "local_batch_size": "batch_size",
    "alpha": "beta",
    "dirichlet_alpha": "beta",
    "gpu": "devices",
    "device": "devices",
    "save_folder_name": "out",
}
"""Names of options in PFLlib, FL-bench and similar code -> those here."""


def unread_by_wrappers(values: Values) -> dict[str, str]:
    """Hyper-parameters of `ServerOptimizer` and `ClientPrivacy` that these do not read -> the value that is the reason.

    Args:
      values: hyper-parameters of any method.
    """
    # In the order of the recipes' fields.
    rule, unread = values.get("server_optimizer", "of its own"), {}
    if rule is None:
        unread = dict.fromkeys(("server_lr", "server_momentum", "server_tau"), "--server-optimizer None")
    elif rule == "sgd":
        unread = {"server_tau": "--server-optimizer sgd"}
    return unread | ({"client_noise": "--client-clip None"} if values.get("client_clip", 0) is None else {})


def unread_attack(options: Options) -> dict[str, str]:
    """Options of attacks that are not read with these values -> why not, for people."""
    if options.attack is None or not options.attackers:
        why = "without --attack" if options.attack is None else "without --attackers"
        return dict.fromkeys(("attack", "attackers", "attack_scale"), why)
    return {"attack_scale": "with --attack labels"} if options.attack == "labels" else {}


def unread_draws(options: Options) -> dict[str, str]:
    """Options of the draw of cohorts that are not read with these values -> why not, for people."""
    if options.participation == 1:
        # Nobody is drawn where all take part.
        return dict.fromkeys(("straggler_fraction", "straggler_rate", "full_last_round"), "with --participation 1")
    return {} if options.straggler_fraction else {"straggler_rate": "without --straggler-fraction"}


_ALIKE = "both papers' settings normalize alike"
_NORMALIZED = {"custom": "--normalize normalizes"}


def ineffective_options(dataset: str, options: Options, given: frozenset[str], backend: str) -> list[str]:
    """Notes about given options that have no effect on this dataset, partition, optimizer or backend (JAX's name)."""
    partition_options = {name for names in PARTITION_OPTIONS.values() for name in names}
    unused = sorted((partition_options & given) - set(PARTITION_OPTIONS[options.partition]))
    notes = [f"{flag(name)} has no effect with --partition {options.partition}" for name in unused]
    if "train_size" in given and options.size_choices is not None and "size_choices" not in unused:
        notes.append("--train-size has no effect with --size-choices")
    # --attackers 0 does what it says.
    whys = unread_attack(options) | unread_draws(options)
    unread = {name: why for name, why in whys.items() if name in given - {"attackers"}}
    notes += [f"{flag(name)} has no effect {why}" for name, why in unread.items()]
    if "momentum" in given and options.optimizer != "sgd":
        notes.append(f"--momentum has no effect with --optimizer {options.optimizer}, which has its own")
    if backend == "cpu" and options.precision != "float32":
        notes.append(f"--precision {options.precision} has no effect on a CPU, which computes in float32")
    if "dp_delta" in given and options.dp_clip is None and "client_clip" not in given:
        notes.append("--dp-delta has no effect without --dp-clip or --client-clip")
    if "eval_clients" in given and (options.eval_clients or 0) >= options.num_clients - options.held_out_clients:
        notes.append(f"--eval-clients {options.eval_clients} has no effect with {options.num_clients} clients")
    if "pixel_normalization" in given and not reads_pixel_normalization(dataset):
        notes.append(f"--pixel-normalization has no effect on {dataset}, which {_NORMALIZED.get(dataset, _ALIKE)}")
    return notes


def reasons_unread(method: str, values: Values) -> dict[str, str]:
    """Hyper-parameters that the method does not read with these values, and the value that is the reason.

    Args:
      method: its name.
      values: all its hyper-parameters.
    """
    rules = UNREAD.get(method, {})
    reasons = {name: rules[name](values) for name in sorted(values.keys() & rules.keys())} | unread_by_wrappers(values)
    return {name: reason for name, reason in reasons.items() if reason}


def unread(method: str, values: Values, given: Iterable[str]) -> list[str]:
    """Notes about given hyper-parameters that the method does not read with these values.

    Args:
      method: its name.
      values: all its hyper-parameters.
      given: names of the options that the user gave.
    """
    reasons, names = reasons_unread(method, values), set(given)
    return [f"{flag(name)} has no effect with {reason}" for name, reason in reasons.items() if name in names]


def synonym(word: str) -> str | None:
    """The option here for another tool's name of it, as it is written on the command line; None if there is none."""
    name = SYNONYMS.get(word.removeprefix("--").replace("-", "_"))
    return None if name is None else flag(name)
