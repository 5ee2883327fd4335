"""Groups of options in `--help`, as one dataclass for each group, which tyro fills in."""

import contextlib
import dataclasses
import functools
import os
import shutil
import types
from collections.abc import Container, Iterator
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import docstring_parser
import tyro

from experiments.config.options import Options
from experiments.config.own_code import identifier
from pfl_jax.hyper_parameters import parts

SELECTION = ("method", "preset")
"""Options that determine the defaults of all others; they come last in the method's own group."""

TRAINING_HYPER_PARAMETERS = ("lr", "momentum", "weight_decay", "batch_size", "epochs")
"""Hyper-parameters of `LocalTraining` for which methods and presets have their own defaults; in the group training."""

TRAINING_OPTIONS = ("optimizer", "clip_norm", "schedule", "drop_last", "shuffle", "augment")
"""Other options of local training, which have the same defaults for all methods."""

PRIVACY_OPTIONS = ("dp_clip", "dp_noise", "dp_delta")
"""Options of differential privacy that all methods have."""

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
        ("model", "hidden", "vocabulary", "rounds", *TRAINING_HYPER_PARAMETERS, *TRAINING_OPTIONS, "on_nan", "seed"),
    ),
    "privacy": (
        "Differential privacy of examples or of whole clients; docs/privacy.md says what it covers.",
        (*PRIVACY_OPTIONS, "client_clip", "client_noise"),
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
"""Heading, to which tyro adds the word "options" -> description of the group, and its options in order."""

MAX_COLUMNS = 100
"""Maximum width of the help: on wider terminals tyro would arrange the groups in columns, out of order."""


MAX_METAVAR = 60
"""Characters of a list of choices in the place of a value; longer lists are part of the help text."""


def argument(kind: Any, text: str) -> Any:
    """Type of an option annotated with its help text, in the form that tyro reads.

    Args:
      kind: type of the option's value.
      text: help text; line breaks are ignored.
    """
    text, metavar = " ".join(text.split()), _metavar(kind)
    if metavar and len(metavar) > MAX_METAVAR:
        # A long word would be broken within names.
        *names, last = metavar.split("|")
        metavar, text = f"NAME|{last}", f"{text} The names: {', '.join(names)}."
    return Annotated[kind, tyro.conf.arg(help=text[:1].upper() + text[1:], metavar=metavar)]


def grouped(common: Options, config: Any, known: Container[str]) -> type:
    """Dataclass of options: one nested dataclass for each group, with the given values as defaults.

    Args:
      common: options that all methods have.
      config: the method's hyper-parameters, an instance of `experiments.config.hyper_parameters.method_config`.
      known: names of the options that the dataclass has.
    """
    kinds = _common_kinds() | {field.name: field.type for field in dataclasses.fields(config)}
    values = vars(common) | vars(config)
    shared = {name for _, names in GROUPS.values() for name in names}
    own = [name for name in vars(config) if name not in shared]
    heading = identifier(common.method)
    heading += "_" * (heading in GROUPS)
    groups = {heading: (type(config).__doc__ or "", (*own, *SELECTION)), **GROUPS}

    members: list[tuple[str, Any, Any]] = []
    for heading, (text, names) in groups.items():
        names = [name for name in names if name in values and name in known]
        if not names:
            continue
        fields = [(name, kinds[name], dataclasses.field(default=values[name])) for name in names]
        group = dataclasses.make_dataclass("Group", fields, frozen=True)
        # Given here, because tyro would look for it in the source of this generated class.
        group.__doc__, described = text, Annotated[tyro.conf.OmitArgPrefixes[group], tyro.conf.arg(help=text)]
        members.append((heading, described, dataclasses.field(default=group())))
    return dataclasses.make_dataclass("Groups", members, frozen=True)


@functools.cache
def _common_kinds() -> dict[str, Any]:
    """Types of the common options, annotated with the help texts of the docstring."""
    texts = {entry.arg_name: entry.description or "" for entry in docstring_parser.parse_from_object(Options).params}
    return {name: argument(kind, texts[name]) for name, kind in get_type_hints(Options).items()}


def ungrouped(groups: Any) -> dict[str, Any]:
    """Values of all options by name, without groups."""
    return {name: value for group in vars(groups).values() for name, value in vars(group).items()}


@contextlib.contextmanager
def limited_columns() -> Iterator[int]:
    """Context in which the reported width of the terminal is at most MAX_COLUMNS; yields the width."""
    before = os.environ.get("COLUMNS")
    columns = min(shutil.get_terminal_size().columns, MAX_COLUMNS)
    os.environ["COLUMNS"] = str(columns)
    try:
        yield columns
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before


def _metavar(kind: Any) -> str | None:
    """Placeholder of a value with several types in the help, such as INT|None; None leaves the choice to tyro."""
    members = parts(kind)
    names = []
    for part in members if len(members) > 1 else ():
        if get_origin(part) is Literal:
            names += map(str, get_args(part))
        elif part is str and names:
            names.append("FILE.py:NAME")
        elif get_origin(part) is tuple:
            names.append(f"{get_args(part)[0].__name__.upper()}...")
        else:
            names.append("None" if part is types.NoneType else part.__name__.upper())
    return "|".join(names) or None
