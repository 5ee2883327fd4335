"""What options have an effect on: the identity of a run are those on which its results depend; others have none."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from experiments.cli import own_data
from experiments.cli.hyper_parameters import parse_schedule, unread_by_method, unread_by_wrappers
from experiments.cli.options import (
    MODEL_OPTIONS,
    PARTITION_OPTIONS,
    PROCESSES,
    Options,
    flag,
)
from experiments.cli.own_code import by_content
from experiments.cli.request import Request
from pfl_jax.data.specs import SPECS

RESULT_NEUTRAL = {
    *("chunk", "devices", "state_on", "compilation_cache", "out", "data_dir", "eval_protocol", "source"),
    *("data", "test_data"),
    *(
        "checkpoint_every",
        "keep_checkpoints",
        "resume",
        "accept_other_code",
        "mesh",
        "tensorboard",
        "wandb",
        "plot",
        "keep_state",
    ),
    *PROCESSES,
}
"""Options that do not change the results of a run; of --source and --data, only the data that was loaded matters. See
`result_neutral` for the exception."""


def reads_pixel_normalization(dataset: str) -> bool:
    """Whether the released codes of the two papers normalize a dataset differently."""
    return dataset in SPECS and SPECS[dataset].fedpac is not None


def result_neutral(options: Mapping[str, Any]) -> set[str]:
    """Options that do not change the results of a run with these options: --eval-protocol may say when the run ends."""
    return RESULT_NEUTRAL - ({"eval_protocol"} if options.get("target_accuracy") is not None else set())


def relevant_options(request: Request) -> dict[str, Any]:
    """Options and hyper-parameters on which the results of a request depend, except seed and data.

    Options without effect on the dataset or the chosen partition are left out, and None is replaced by the value that
    it stands for.
    """
    unused = {name for names in PARTITION_OPTIONS.values() for name in names}
    unused -= set(PARTITION_OPTIONS[request.options.partition])
    if request.options.local_steps is None:
        # Its runs are those of before there was this option.
        unused.add("local_steps")
    if request.options.optimizer != "sgd":
        unused.add("momentum")
    unused |= {name for name, models in MODEL_OPTIONS.items() if request.options.model not in models}
    if "vocabulary" not in request.given:
        # The data determines it.
        unused.add("vocabulary")
    if not reads_pixel_normalization(request.dataset):
        unused.add("pixel_normalization")
    values = resolve_defaults(dataclasses.asdict(request.options) | request.hyper_parameters)
    # The attack stays, as None where nobody attacks: a run under attack is another one.
    unused |= unread_by_wrappers(values).keys() | unread_attack(request.options).keys() - {"attack"}
    unused |= unread_draws(request.options).keys()
    values |= by_content(values, request.own_code)
    if request.dataset == own_data.CUSTOM:
        values["data_digest"] = own_data.digest(request.options)
    else:
        unused |= set(own_data.OWN_DATA)
    if request.options.partition == "natural":
        # The data determines the number of clients.
        unused.add("num_clients")
    unused |= result_neutral(values) | {"seed"}
    return {name: value for name, value in values.items() if name not in unused}


def resolve_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """Options and hyper-parameters with the values that they stand for.

    `finetune_epochs` None stands for the epochs of training, and an attack without attackers for none.
    """
    resolved = dict(values)
    if "finetune_epochs" in values and values["finetune_epochs"] is None:
        resolved["finetune_epochs"] = values["epochs"]
    if "attack" in values and not values["attackers"]:
        resolved["attack"] = None
    return resolved


def fixed_rounds(options: Options) -> str:
    """Option that makes the results of a round depend on the run's number of rounds; "" without one.

    Rounds can be added to all other runs.
    """
    if options.full_last_round and options.participation < 1:
        return "--full-last-round"
    cosine = [text for text in options.schedule or () if parse_schedule(text).kind == "cosine"]
    return f"--schedule {cosine[0]}" if cosine else ""


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
