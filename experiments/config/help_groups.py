"""The groups of options in `--help`: a dataclass for each, which tyro fills in, and the same values without groups."""

import contextlib
import dataclasses
import os
import shutil
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import docstring_parser
import tyro

from experiments.config.options import Options

SELECTION = ("method", "preset")
"""Options that everything else on the page depends on; they close the method's own group."""

TRAINING_HYPER_PARAMETERS = ("lr", "momentum", "weight_decay", "batch_size", "epochs")
"""Hyper-parameters that every method has, of its recipe of local training: with the options of training."""

TRAINING_OPTIONS = ("optimizer", "clip_norm", "schedule", "drop_last", "shuffle", "augment")
"""Options of local training that no method has defaults of its own for."""

GROUPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "data": (
        "Which examples each client has.",
        (
            *("data", "label", "client_column", "test_data", "test_fraction", "normalize", "data_digest"),
            *("source", "data_dir", "partition", "s", "beta", "dirichlet_protocol", "min_size"),
            *("pathological_protocol", "train_size", "size_choices", "test_size", "shift", "pixel_normalization"),
        ),
    ),
    "client": (
        "How many clients there are, and who takes part in a round.",
        (
            *("num_clients", "participation", "full_last_round", "straggler_fraction", "straggler_rate"),
            *("drop_rate", "held_out_clients"),
        ),
    ),
    "training": (
        "The network, the rounds, and the local training of a client.",
        ("model", "rounds", *TRAINING_HYPER_PARAMETERS, *TRAINING_OPTIONS, "on_nan", "seed"),
    ),
    "evaluation": ("When and how accuracy is measured.", ("eval_every", "eval_protocol", "target_accuracy")),
    "result": (
        "What is written, and how an interrupted run goes on.",
        ("out", "checkpoint_every", "keep_checkpoints", "resume", "plot", "tensorboard", "wandb"),
    ),
    "device": (
        "Where and how the computation runs; the results do not depend on it, up to rounding.",
        (
            *("devices", "mesh", "chunk", "state_on", "precision", "compilation_cache"),
            *("distributed", "coordinator", "num_processes", "process_id"),
        ),
    ),
}
"""Heading, without the word "options" that tyro adds -> one line about the group, and its options in their order."""

MAX_COLUMNS = 100
"""Width of the help on wide terminals, where tyro would lay the groups side by side and so out of order."""


def argument(kind: Any, text: str) -> Any:
    """The type of an option together with its help text, as tyro reads them.

    Args:
      kind: type of the option's value.
      text: help text; its line breaks do not matter.
    """
    text = " ".join(text.split())
    return Annotated[kind, tyro.conf.arg(help=text[:1].upper() + text[1:], metavar=_metavar(kind))]


def grouped(common: Options, config: Any) -> type:
    """All options as a dataclass of dataclasses, one for each group and with the given values as defaults.

    Args:
      common: the options of every method.
      config: the method's hyper-parameters, an instance of `experiments.config.request.method_config`.
    """
    texts = {entry.arg_name: entry.description or "" for entry in docstring_parser.parse_from_object(Options).params}
    kinds = {name: argument(kind, texts[name]) for name, kind in get_type_hints(Options).items()}
    kinds |= {field.name: field.type for field in dataclasses.fields(config)}
    values = vars(common) | vars(config)
    own = [name for name in vars(config) if name not in TRAINING_HYPER_PARAMETERS]
    groups = {common.method: (type(config).__doc__ or "", (*own, *SELECTION)), **GROUPS}

    members: list[tuple[str, Any, Any]] = []
    for heading, (text, names) in groups.items():
        group = dataclasses.make_dataclass(
            "Group",
            [(name, kinds[name], dataclasses.field(default=values[name])) for name in names if name in values],
            frozen=True,
        )
        group.__doc__ = text
        members.append((heading, tyro.conf.OmitArgPrefixes[group], dataclasses.field(default=group())))
    return dataclasses.make_dataclass("Groups", members, frozen=True)


def ungrouped(groups: Any) -> dict[str, Any]:
    """The values of all groups by name."""
    return {name: value for group in vars(groups).values() for name, value in vars(group).items()}


@contextlib.contextmanager
def limited_columns() -> Iterator[int]:
    """A terminal of at most MAX_COLUMNS, inside the with statement, for what asks its size; yields the columns."""
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
    """The value of an option that has several types, as the help writes it: INT|None; None leaves it to tyro."""
    parts = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else ()
    words = []
    for part in parts:
        if get_origin(part) is Literal:
            words += map(str, get_args(part))
        elif get_origin(part) is tuple:
            words.append(f"{get_args(part)[0].__name__.upper()}...")
        else:
            words.append("None" if part is types.NoneType else part.__name__.upper())
    return "|".join(words) or None
