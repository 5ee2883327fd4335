"""Groups of the options of a run in its help, and the names that other tools have for them."""

from collections.abc import Mapping

from experiments.cli.docstrings import summary
from experiments.cli.hyper_parameters import TRAINING_HYPER_PARAMETERS, method_options
from experiments.cli.options import flag
from experiments.cli.own_code import identifier, label, method_factory
from experiments.cli.parser import Group, Option, unknown_option
from pfl_jax.hyper_parameters import listed
from pfl_jax.methods import METHODS
from pfl_jax.methods.factories import function_of

SYNONYMS = {
    "method": ("algorithm", "alg"),
    "rounds": ("global_rounds", "global_epoch", "comm_rounds"),
    "epochs": ("local_epochs", "local_epoch"),
    "lr": ("local_learning_rate", "learning_rate"),
    "participation": ("join_ratio", "client_activate_rate", "frac"),
    "num_clients": ("client_num", "num_users"),
    "drop_rate": ("client_drop_rate",),
    "eval_every": ("eval_gap", "test_interval"),
    "batch_size": ("lbs", "local_batch_size"),
    "beta": ("alpha", "dirichlet_alpha"),
    "devices": ("gpu", "device"),
    "out": ("save_folder_name",),
}
"""Option -> its names in PFLlib, FL-bench and similar code."""

SELECTION = ("method", "preset")
"""Options that determine the defaults of all others; they come last in the method's own group."""

GROUPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "data": (
        "The examples of each client.",
        (
            *("data", "label", "client_column", "test_data", "test_fraction", "normalize", "data_digest"),
            *("source", "data_dir", "partition", "s", "beta", "dirichlet_protocol", "min_size"),
            *("pathological_protocol", "train_size", "size_choices", "test_size", "val_fraction", "shift"),
            "pixel_normalization",
        ),
    ),
    "client": (
        "The number of clients, and their participation in rounds.",
        (
            *("num_clients", "participation", "full_last_round", "straggler_fraction", "straggler_rate"),
            *("drop_rate", "held_out_clients"),
        ),
    ),
    "robustness": (
        "Attacks by clients, means that withstand them, and compressed messages.",
        ("attack", "attackers", "attack_scale", "server_mean", "compress"),
    ),
    "training": (
        "The network, the rounds, and the local training of a client.",
        (
            *("model", "task", "loss", "hidden", "vocabulary", "weights", "adapter", "targets", "personal", "rounds"),
            *TRAINING_HYPER_PARAMETERS,
            *("local_steps", "optimizer", "clip_norm", "schedule", "drop_last", "shuffle", "augment", "on_nan", "seed"),
        ),
    ),
    "privacy": (
        "Differential privacy of examples or of whole clients; docs/privacy.md says what it covers.",
        ("dp_clip", "dp_noise", "dp_delta", "client_clip", "client_noise"),
    ),
    "evaluation": (
        "When and how accuracy is evaluated.",
        ("eval_every", "eval_clients", "eval_protocol", "target_accuracy"),
    ),
    "result": (
        "Output files, and resumption of an interrupted run.",
        (
            *("out", "keep_state", "checkpoint_every", "keep_checkpoints", "resume", "accept_other_code"),
            *("plot", "tensorboard", "wandb"),
        ),
    ),
    "device": (
        "Hardware and precision; up to rounding, results do not depend on these options.",
        (
            *("devices", "mesh", "chunk", "state_on", "precision", "compilation_cache"),
            *("distributed", "coordinator", "num_processes", "process_id"),
        ),
    ),
}
"""Heading, to which the help adds the word "options" -> description of the group, and its options in order."""


def grouped(method: str, options: Mapping[str, Option]) -> list[Group]:
    """Groups of all options of a run, the method's own first."""
    shared = {*SELECTION, *(name for _, names in GROUPS.values() for name in names)}
    text = summary(function_of(method_factory(method))) or label(method)
    own = text, (*(name for name in options if name not in shared), *SELECTION)
    return [
        Group(heading, text, {name: options[name] for name in names if name in options})
        for heading, (text, names) in [(identifier(method), own), *GROUPS.items()]
    ]


def unknown_run_option(word: str, options: Mapping[str, Option], method: str) -> str:
    """Error message for a word that is no option of a run, or not of this method."""
    head = word.partition("=")[0].replace("_", "-")
    if head.startswith("--"):
        owners = [name for name in METHODS if head in map(flag, method_options(name))]
        if owners:
            hint = ", or --beta for the concentration of --partition dirichlet" if head == "--alpha" else ""
            return f"{head} is an option of {listed(owners, 'and')}, not of {method}{hint}"
        for here, names in SYNONYMS.items():
            if head in map(flag, names):
                return f"unknown option {head}: here it is {flag(here)}"
    return unknown_option(word, options)
