"""Command lines with tyro: a dataclass whose fields are the options, texts and groups of the help."""

import contextlib
import dataclasses
import functools
import hashlib
import io
import os
import re
import shutil
import types
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

import docstring_parser
import tyro

from experiments.cli.options import Options, flag
from experiments.cli.own_code import identifier
from pfl_jax.errors import InvalidInput
from pfl_jax.hyper_parameters import parts

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

MOST_BYTES = 255
"""Length of a file's name on the usual file systems."""

_Options = TypeVar("_Options")

Names: TypeAlias = tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]]
"""Type of an option that may be repeated and takes one or more words; `flat` returns all of them."""

Switch: TypeAlias = tyro.conf.FlagCreatePairsOff[bool]
Folder: TypeAlias = Annotated[Path | None, tyro.conf.arg(metavar="DIR")]
Number: TypeAlias = Annotated[int | None, tyro.conf.arg(metavar="INT")]


def parse(
    kind: type[_Options], module: str, description: str | None, words: Sequence[str] | None, *, more: bool = False
) -> tuple[_Options, tuple[str, ...]]:
    """Options of a command; prints help and raises SystemExit(0) for --help.

    Args:
      kind: dataclass of the options.
      module: module of the command, as after `python -m`.
      description: docstring of the command.
      words: command-line arguments; None for those of this process.
      more: whether other arguments are allowed, for the runs.

    Returns:
      The options, and the other arguments.

    Raises:
      InvalidInput: a missing or unknown option, or a value of the wrong kind.
    """
    errors = io.StringIO()
    prog, text = f"python -m {module}", description or ""
    try:
        with contextlib.redirect_stderr(errors), limited_columns():
            options, rest = tyro.cli(
                kind, args=None if words is None else list(words), prog=prog, description=text, return_unknown_args=True
            )
    except SystemExit as ending:
        if not ending.code:
            raise
        raise InvalidInput(f"{_one_line(errors.getvalue())}; see --help") from None
    if rest and not more:
        raise InvalidInput(f"unrecognized arguments: {' '.join(rest)}; see --help")
    return options, tuple(rest)


def _one_line(box: str) -> str:
    """Error message of tyro in one line, from its box of several lines."""
    # Borders are lines or blanks, depending on the terminal.
    missing = re.findall(r"^[^\w-]*(--(?!help)[a-z]\S*)", box, re.MULTILINE)
    if "Missing from" in box:
        return f"missing: {', '.join(missing)}"
    text = " ".join(" ".join(line.strip("│ ") for line in box.splitlines()[1:-1]).split())
    if found := re.search(r"Missing value for argument '(--[^']+)'", text):
        return f"{found[1]} needs a value"
    # All other values are texts.
    if found := re.search(r"Error parsing (--\S+):[^']*'([^']*)'", text):
        return f"{found[1]} must be a whole number, not '{found[2]}'"
    return text


def flat(names: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """All words of an option, each once."""
    return tuple(dict.fromkeys(name for of in names for name in of))


def choose(name: str, asked: Iterable[str], choices: Iterable[str], where: str = "") -> None:
    """Raise InvalidInput for the first word that is not a choice, with all choices."""
    choices = list(choices)
    for word in asked:
        if word not in choices:
            raise InvalidInput(f"unknown {name} '{word}'{where} (there are {', '.join(choices)})")


def at_least_one(**values: int | None) -> None:
    """Raise InvalidInput for the first number below 1."""
    for name, value in values.items():
        if value is not None and value < 1:
            raise InvalidInput(f"{flag(name)} must be at least 1, not {value}")


def slug(text: str) -> str:
    """Text as a file name: letters, digits, "=", "+" and "." as they are, the rest as single hyphens.

    A name that is too long for file systems ends in a digest of the text.
    """
    kept = "".join(character if character.isalnum() or character in "=._+" else "-" for character in text)
    name = "-".join(filter(None, kept.split("-"))).encode()
    if len(name) <= MOST_BYTES:
        return name.decode()
    end = f"-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    return name[: MOST_BYTES - len(end)].decode(errors="ignore") + end


def given(words: Iterable[str]) -> set[str]:
    """Names of the options among the words; switches by the name of what they switch."""
    heads = (word.partition("=")[0] for word in words if word.startswith("--"))
    return {head.removeprefix("--").replace("-", "_").removeprefix("no_") for head in heads}


SELECTION = ("method", "preset")
"""Options that determine the defaults of all others; they come last in the method's own group."""

TRAINING_HYPER_PARAMETERS = ("lr", "momentum", "weight_decay", "batch_size", "epochs")
"""Hyper-parameters of `LocalTraining` for which methods and presets have their own defaults; in the group training."""

TRAINING_OPTIONS = ("local_steps", "optimizer", "clip_norm", "schedule", "drop_last", "shuffle", "augment")
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
        (
            *("model", "task", "loss", "hidden", "vocabulary", "rounds"),
            *(*TRAINING_HYPER_PARAMETERS, *TRAINING_OPTIONS, "on_nan", "seed"),
        ),
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
      config: the method's hyper-parameters, an instance of `experiments.cli.hyper_parameters.method_config`.
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


def synonym(word: str) -> str | None:
    """The option here for another tool's name of it, as it is written on the command line; None if there is none."""
    name = SYNONYMS.get(word.removeprefix("--").replace("-", "_"))
    return None if name is None else flag(name)


def by_option(words: Iterable[str]) -> list[list[str]]:
    """Words of each option, its name first."""
    found: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not found:
            found.append([])
        found[-1].append(word)
    return found
