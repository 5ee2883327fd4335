"""Given options without effect, and names of options in other tools."""

from collections.abc import Iterable
from typing import Any

from experiments.cli.hyper_parameters import unread_by_method
from experiments.cli.options import PARTITION_OPTIONS, Options, flag, reads_pixel_normalization

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


def unread(method: str, values: dict[str, Any], given: Iterable[str]) -> list[str]:
    """Notes about given hyper-parameters that the method does not read with these values.

    Args:
      method: its name.
      values: all its hyper-parameters.
      given: names of the options that the user gave.
    """
    reasons, names = unread_by_method(method, values), set(given)
    return [f"{flag(name)} has no effect with {reason}" for name, reason in reasons.items() if name in names]


def synonym(word: str) -> str | None:
    """The option here for another tool's name of it, as it is written on the command line; None if there is none."""
    name = SYNONYMS.get(word.removeprefix("--").replace("-", "_"))
    return None if name is None else flag(name)
