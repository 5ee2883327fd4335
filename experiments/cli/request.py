"""Command lines of runs, checked: the options of all runs and those of their methods, with the preset's defaults."""

import dataclasses
import difflib
import functools
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.choices import CUSTOM, TARGETS, WITH_FILES
from experiments.cli import config_file, parser, presets
from experiments.cli.hyper_parameters import check_schedules, method_options, real_numbers
from experiments.cli.own_code import (
    OTHER_FILES,
    files,
    identifier,
    is_own,
    is_partition_file,
    label,
    method_factory,
    weights_file,
)
from experiments.cli.parser import Group, Option, option_words, options_of, summary, unknown_option
from experiments.fields import Also, Mark, flag, marked, noted
from experiments.spec import GROUPS, KINDS, Options, names_of
from pfl_jax.data.natural import NATURAL
from pfl_jax.data.partition_files import rows_of
from pfl_jax.engine.cohort import Settings
from pfl_jax.errors import InvalidInput
from pfl_jax.hyper_parameters import listed
from pfl_jax.methods import METHODS
from pfl_jax.methods.factories import function_of
from pfl_jax.primitives.local_training import LocalTraining

IN_PLACE = "alignment in place"
"""Rounds of FedAS's released code, see `experiments.run.in_place`; their name in a run's files."""
NOT_IN_PLACE = (
    *("held_out_clients", "eval_clients", "drop_rate", "on_nan", "schedule", "attack", "device_trace", "state_on"),
    *("distributed", "server_mean", "compress", "client_clip"),
)
"""Options, and hyper-parameters of all methods, that these rounds do not have."""

SYNONYMS = {
    **{name: names[0] for name, names in noted(KINDS, Also).items()},
    "epochs": ("local_epochs", "local_epoch"),
    "lr": ("local_learning_rate", "learning_rate"),
    "batch_size": ("lbs", "local_batch_size"),
}
"""Option -> its names in PFLlib, FL-bench and similar code."""

SELECTION = ("method", "preset", "procedure")
"""Options that determine the defaults of all others; they come last in the method's own group."""


@dataclass(frozen=True)
class Request:
    """A checked command line.

    Attributes:
      dataset: name of the experiment.
      options: the common options.
      hyper_parameters: all hyper-parameters of the method; epochs is None with --local-steps.
      given: names of the options that the user gave; all others have the values of the preset or the method.
      own_code: files of the user's own method and model, see `own_code.files`.
    """

    dataset: str
    options: Options
    hyper_parameters: dict[str, Any]
    given: frozenset[str]
    own_code: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def procedure(self) -> str:
        """IN_PLACE, or "" for the rounds of `pfl_jax.simulate.run`."""
        is_aligned = self.options.method == "fedas" and self.hyper_parameters.get("alignment")
        return IN_PLACE if self.options.procedure == "release" and is_aligned else ""

    def real_numbers(self) -> dict[str, float]:
        """Hyper-parameters that can be inputs of a compiled program."""
        return real_numbers(self.options.method, self.hyper_parameters)

    def on_embedded_data(self) -> tuple["Request", dict[str, Any]]:
        """This request with the preset's smaller values for embedded data, and the values that changed."""
        chosen = {"procedure": self.options.procedure, "embedded": True}
        reduced = presets.values(self.options.preset, self.dataset, self.options.method, **chosen)
        changes = {
            name: reduced[name]
            for name, value in (dataclasses.asdict(self.options) | self.hyper_parameters).items()
            if name not in self.given and name in reduced and reduced[name] != value and name != "method"
        }
        return self.having(changes), changes

    def having(self, values: Mapping[str, Any]) -> "Request":
        """This request with other values of options and hyper-parameters, which are not checked."""
        common = {name: value for name, value in values.items() if name in vars(self.options)}
        own = {name: value for name, value in values.items() if name not in common}
        options = dataclasses.replace(self.options, **common)
        return dataclasses.replace(self, options=options, hyper_parameters=self.hyper_parameters | own)


def parse(dataset: str, arguments: Sequence[str]) -> Request:
    """Parse and check the words after `python -m experiments.DATASET`; --help prints help and raises SystemExit(0)."""
    parser.choose("dataset", [dataset], presets.DEFAULT_PRESET)
    common = options_of(Options)
    # These decide which other options there are, and their defaults.
    first = {name: common[name] for name in (*SELECTION, "config", "trust")}
    chosen = parser.split(arguments, [Group("", "", first)])[0]
    if (file := chosen.get("config")) is not None:
        asked = dict.fromkeys(parser.given(arguments))
        arguments = [*config_file.words(file, dataset, asked, trust=chosen.get("trust", False)), *arguments]
        chosen = parser.split(arguments, [Group("", "", first)])[0]
    preset = chosen.get("preset", presets.preset_of(dataset, chosen.get("method")))
    method = chosen.get("method", presets.values(preset, dataset)["method"])
    defaults = presets.values(preset, dataset, method, procedure=chosen.get("procedure", ""))
    defaults |= {"method": method, "preset": preset}
    own = method_options(method)
    every = {
        name: option._replace(default=defaults.get(name, option.default)) for name, option in (common | own).items()
    }
    found, others = parser.split(
        arguments, _grouped(method, every), f"experiments.{dataset}", _description(dataset, preset)
    )
    if others:
        raise InvalidInput(_unknown_run_option(others[0], every, method))
    values, given = {name: option.default for name, option in every.items()} | found, frozenset(found)
    hyper_parameters = {name: values[name] for name in own}
    options = _checked(dataset, Options(**{name: values[name] for name in common}), given)
    if is_partition_file(options.partition):
        options = _with_rows(options, given)
    for name in OTHER_FILES:
        if (file := getattr(options, name)) is not None:
            # Absolute: a run is resumed and exported from other folders too.
            options = dataclasses.replace(options, **{name: str(weights_file(file))})
    options.check()
    if options.head is not None and not is_own(options.model):
        raise InvalidInput(f"--head is for a flax module of your own (--model FILE.py:NAME), not for {options.model}")
    # What the library refuses is refused now, before any data is loaded and any folder made.
    settings_of(options)
    LocalTraining(dp_clip=options.dp_clip, dp_noise=options.dp_noise)
    _check_processes(options)
    if options.local_steps is not None:
        if "epochs" in given:
            raise InvalidInput("--local-steps cannot be given with --epochs: it is in place of them")
        hyper_parameters["epochs"] = None
    request = Request(dataset, options, hyper_parameters, given, files(vars(options)))
    check_schedules(options.schedule or (), method, request.real_numbers())
    if request.procedure:
        _check_in_place(request)
        # One client after another.
        request = dataclasses.replace(request, options=dataclasses.replace(options, devices=1, chunk=1))
    return request


# A table needs each command several times.
_parsed = functools.lru_cache(maxsize=4096)(parse)


@dataclass(frozen=True)
class RunCommand:
    """Command of a single run of a table, figure or sweep: its arguments are those without --seed and --out."""

    dataset: str
    arguments: tuple[str, ...]
    seed: int = 0

    def request(self, folder: str | Path | None = None) -> Request:
        """Request of the run, checked, with its results in a folder."""
        parsed = _parsed(self.dataset, self.arguments)
        if parsed.options.distributed:
            raise InvalidInput("--distributed is for single runs: a command of many runs has one process")
        out, given = (None, {"seed"}) if folder is None else (str(folder), {"seed", "out"})
        # Many runs would fill the disk.
        keep = parsed.options.keep_state if "keep_state" in parsed.given else "never"
        options = dataclasses.replace(parsed.options, seed=self.seed, out=out, keep_state=keep)
        options.check()
        return dataclasses.replace(parsed, options=options, given=parsed.given | given)

    def command(self, folder: str | Path | None = None) -> str:
        """Shell command of the same run."""
        out = () if folder is None else ("--out", str(folder))
        module = f"experiments.{self.dataset}"
        return shlex.join(["python", "-m", module, *self.arguments, "--seed", str(self.seed), *out])


def settings_of(options: Options) -> Settings:
    """The library's settings of a run; InvalidInput where they do not fit together."""
    named = {name: value for name, value in vars(options).items() if name in Settings.__dataclass_fields__}
    return Settings(before_aggregation=options.eval_protocol == "before_aggregation", **named)


def _checked(dataset: str, options: Options, given: frozenset[str]) -> Options:
    """Options that are possible on a dataset, with the partition that --client-column asks for."""
    if options.task == "next_symbol" and not is_own(options.model) and options.model != "char_lstm":
        raise InvalidInput(
            f"--task {options.task} needs --model char_lstm, or FILE.py:NAME of one that gives logits [B, T, K]: "
            f"{options.model} gives one vector for each example"
        )
    for name in ("source", "data_dir") if dataset in WITH_FILES else ():
        if getattr(options, name) != getattr(Options, name):
            raise InvalidInput(f"{flag(name)} is for the papers' data sets: {dataset} reads --data")
    if dataset != CUSTOM:
        for name in marked(KINDS, Mark.OWN_DATA, *(() if dataset in NATURAL else (Mark.FILES,))):
            if getattr(options, name) not in (None, False):
                raise InvalidInput(f"{flag(name)} is for your own data: python -m experiments.custom")
        if dataset in NATURAL:
            return options
        if options.task not in (None, "classification") and not is_own(options.model):
            raise InvalidInput(f"--task {options.task} is for your own data or model: labels of {dataset} are classes")
        return options
    if options.client_column is None:
        if options.partition == "natural":
            raise InvalidInput("--partition natural needs --client-column, the column that names each row's client")
        if options.task in TARGETS and "partition" not in given:
            # There are no classes that others could divide by.
            return dataclasses.replace(options, partition="iid")
        return options
    if "partition" in given and is_partition_file(options.partition):
        return options
    if "partition" in given and options.partition != "natural":
        raise InvalidInput(
            f"--client-column {options.client_column} and --partition {options.partition} cannot both be given: either "
            "says which rows a client has"
        )
    return dataclasses.replace(options, partition="natural")


def _with_rows(options: Options, given: frozenset[str]) -> Options:
    """Options with the number of clients of their partition's file, whose name is absolute: a run is resumed from other
    folders too."""
    path = Path(options.partition).expanduser().absolute()
    number = len(rows_of(path).train)
    if "num_clients" in given and options.num_clients != number:
        raise InvalidInput(f"--num-clients {options.num_clients}: {path.name} has {number} clients, leave it out")
    return dataclasses.replace(options, partition=str(path), num_clients=number)


def _check_processes(options: Options) -> None:
    """Raise InvalidInput unless all or none of the options that locate the processes of --distributed are given."""
    names = ("coordinator", "num_processes", "process_id")
    given = [name for name in names if getattr(options, name) is not None]
    if options.distributed and options.state_on == "disk":
        raise InvalidInput("--state-on disk is for one process: with --distributed give --state-on host")
    if given and not options.distributed:
        raise InvalidInput(f"{flag(given[0])} is for --distributed")
    if 0 < len(given) < len(names):
        missing = next(name for name in names if name not in given)
        raise InvalidInput(f"{flag(given[0])} needs {flag(missing)} too: give all three, or none under a scheduler")
    if options.coordinator is None or options.num_processes is None or options.process_id is None:
        return
    host, colon, port = options.coordinator.rpartition(":")
    if not host or not colon or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InvalidInput(f"--coordinator is HOST:PORT, such as 10.0.0.1:29500, not {options.coordinator}")
    if not 0 <= options.process_id < options.num_processes:
        raise InvalidInput(
            f"--process-id must be between 0 and {options.num_processes - 1} with --num-processes "
            f"{options.num_processes}, not {options.process_id}"
        )


def _check_in_place(request: Request) -> None:
    """Raise InvalidInput for an option that cannot be used with alignment in place."""
    usual = {name: field.default for name, field in Options.__dataclass_fields__.items()}
    usual |= {name: option.default for name, option in method_options("fedas").items()}
    values = vars(request.options) | request.hyper_parameters
    other = {"manner": "parallel", "target": "global_class_mean"}
    found = [name for name in NOT_IN_PLACE if name in values and values[name] != usual[name]]
    if found := [*found, *(name for name, value in other.items() if values[name] == value)]:
        raise InvalidInput(
            f"{flag(found[0])} {values[found[0]]} cannot be used with the {IN_PLACE} of --procedure release: give "
            "--procedure print"
        )


def _grouped(method: str, options: Mapping[str, Option]) -> list[Group]:
    """Groups of all options of a run, the method's own first."""
    shared = {name for group in GROUPS.values() for name in names_of(group)} | {*SELECTION}
    own = [*(name for name in options if name not in shared), *SELECTION]
    text = summary(function_of(method_factory(method))) or label(method)
    groups = [(identifier(method), text, own)]
    groups += [(heading, str(group.__doc__), names_of(group)) for heading, group in GROUPS.items()]
    return [
        Group(heading, text, {name: options[name] for name in names if name in options})
        for heading, text, names in groups
    ]


def _unknown_run_option(word: str, options: Mapping[str, Option], method: str) -> str:
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
        # The nearest one may be of another method.
        of_methods = {flag(option) for name in METHODS for option in method_options(name)}
        own = {name for option in options.values() for name in option.flags}
        near = difflib.get_close_matches(head, sorted(of_methods | own), n=1)
        if near and near[0] not in own:
            owners = [name for name in METHODS if near[0] in map(flag, method_options(name))]
            some = f"{', '.join(owners[:3])}, ..." if owners[3:] else listed(owners, "and")
            return f"unknown option {head}; did you mean {near[0]}? It is an option of {some}, not of {method}"
    return unknown_option(word, options)


def _description(dataset: str, preset: str) -> str:
    data = "your own data" if dataset == CUSTOM else dataset
    text = (
        f"Personalized federated learning on {data}. The defaults are the settings of the {preset} preset; "
        "the default of --method is that paper's own method."
    )
    smaller = presets.EMBEDDED.get((preset, dataset))
    return text if not smaller else f"{text} On embedded data the defaults are smaller: {assignments(smaller)}."


def assignments(values: dict[str, Any]) -> str:
    """Values as command-line options: "--rounds 30, --train-size 300, --no-drop-last"."""
    return ", ".join(" ".join(option_words({name: value})) for name, value in values.items())
