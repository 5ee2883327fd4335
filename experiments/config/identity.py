"""Identity of a run: the options on which its results depend."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from experiments.config import own_data
from experiments.config.hyper_parameters import unread_by_wrappers
from experiments.config.no_effect import unread_attack, unread_draws
from experiments.config.options import MODEL_OPTIONS, PARTITION_OPTIONS, PROCESSES, Options, reads_pixel_normalization
from experiments.config.own_code import by_content
from experiments.config.request import Request
from experiments.config.schedules import parse_schedule

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
