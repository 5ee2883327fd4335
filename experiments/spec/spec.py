"""A run as a value: all options of the command of one run, checked when the value is made.

    from experiments.run.run import run
    from experiments.spec.spec import Spec

    run(Spec.of("digits", method="fedper", rounds=5, lr=0.05))

Command lines, files of options and the config.json of a run are other forms of the same value.
"""

import dataclasses
import difflib
import json
import shlex
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.spec import presets
from experiments.spec.choices import CUSTOM, TARGETS, WITH_FILES
from experiments.spec.hyper_parameters import check_schedules, method_options, real_numbers
from experiments.spec.option_notes import Trait, flag, is_own, is_partition_file, option_words, with_trait
from experiments.spec.options import COMMON, KINDS, Options
from experiments.spec.own_code import EXECUTED, OTHER_FILES, files, function, read, weights_file
from pfl_jax.data import own_files, partition_files, sites
from pfl_jax.data.natural import NATURAL
from pfl_jax.engine import selection
from pfl_jax.engine.cohort import Settings
from pfl_jax.errors import InvalidInput
from pfl_jax.methods import METHODS
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.validation import hint, listed, unknown

_REMOVED = ("accept_other_code", "trust")
"""Removed options that may be in stored runs, and on which results did not depend."""

DATASET = "dataset"
"""Entry of a file of options that names the experiment, and is not an option itself."""

SELECTION = ("method", "preset", "procedure")
"""Options that determine the defaults of all others; they come last in the method's own group."""

SYNONYMS = {
    "num_clients": ("client_num", "num_users"),
    "participation": ("join_ratio", "client_activate_rate", "frac"),
    "drop_rate": ("client_drop_rate",),
    "beta": ("alpha", "dirichlet_alpha"),
    "rounds": ("global_rounds", "global_epoch", "comm_rounds"),
    "epochs": ("local_epochs", "local_epoch"),
    "lr": ("local_learning_rate", "learning_rate"),
    "batch_size": ("lbs", "local_batch_size"),
    "eval_every": ("eval_gap", "test_interval"),
    "method": ("algorithm", "alg"),
    "out": ("save_folder_name",),
    "devices": ("gpu", "device", "mesh"),
}
"""Option -> its names in PFLlib, FL-bench and similar code."""


@dataclass(frozen=True, kw_only=True)
class Spec(Options):
    """A run: common options as attributes (see `experiments.spec.groups`), data set, and the method's own options.

    Attributes:
      dataset: name of the experiment.
      hyper_parameters: all hyper-parameters of the method; epochs is None with --local-steps.
      given: names of the options that were given; all others have the values of the preset or the method.
      own_code: files of the user's own method and model, see `own_code.files`.
    """

    dataset: str
    hyper_parameters: dict[str, Any]
    given: frozenset[str] = frozenset()
    own_code: dict[str, dict[str, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, dataset: str, **given: Any) -> "Spec":
        """Run of an experiment; options that are not given have the values of the preset or the method.

        Args:
          dataset: a name in `experiments.DATASETS`.
          **given: options and hyper-parameters by their names in Python; texts as on the command line are accepted.

        Raises:
          InvalidInput: there is no such option, or the values cannot be used, alone or together.

        Example:
          Spec.of("digits", method="fedper", rounds=5, lr=0.05)
        """
        usual = usual_values(dataset, {name: COMMON[name].value(given[name]) for name in SELECTION if name in given})
        every = COMMON | (own := method_options(usual["method"]))
        for name in given:
            if name not in every:
                raise InvalidInput(unknown_option(flag(name), map(flag, every), usual["method"]))
        values = usual | {name: every[name].value(value) for name, value in given.items()}
        common, hyper_parameters = ({name: values[name] for name in names} for names in (KINDS, own))
        spec = cls(dataset=dataset, **common, hyper_parameters=hyper_parameters, given=frozenset(given))
        _check_data(spec)
        spec = spec.having(_decided_by_files(spec))
        spec.check()
        if spec.head is not None and not is_own(spec.model):
            raise InvalidInput(f"--head is for a module of your own (--model FILE.py:NAME), not for {spec.model}")
        # The library checks its part now, before any data is loaded or folder made.
        settings_of(spec)
        LocalTraining(dp_clip=spec.dp_clip, dp_noise=spec.dp_noise)
        if spec.local_steps is not None:
            if "epochs" in given:
                raise InvalidInput("--local-steps cannot be given with --epochs, which it replaces")
            spec = spec.having({"epochs": None})
        spec = dataclasses.replace(spec, own_code=files(spec.options))
        check_schedules(spec.schedule or (), spec.method, spec.real_numbers())
        return spec

    @classmethod
    def stored(cls, config: Mapping[str, Any]) -> "Spec":
        """Run of a config.json, unchecked; KeyError, TypeError or AttributeError if the file is not of a run."""
        options = {k: tuple(v) if isinstance(v, list) else v for k, v in stored_options(config).items()}
        rest = {"given": frozenset(config["given"]), "own_code": dict(config.get("own_code", {}))}
        return cls(dataset=config[DATASET], **options, hyper_parameters=config["hyper_parameters"], **rest)

    @classmethod
    def load(cls, path: str | Path, **given: Any) -> "Spec":
        """Run from a file of options, .json or .toml, or a repetition from a run's config.json, see `values_in`.

        Args:
          path: path of the file, which names its dataset. Code that only the file names is refused.
          **given: options that replace the file's.
        """
        if DATASET not in (values := values_in(str(path), given)):
            raise InvalidInput(f"{path} names no {DATASET}")
        return cls.of(values.pop(DATASET), **values, **given)

    def save(self, path: str | Path) -> None:
        """Write a file of options for `load` and --config."""
        Path(path).write_text(self.as_json() + "\n", encoding="utf-8")

    def as_json(self) -> str:
        """All options on which results depend, as JSON; --print-config prints it."""
        return json.dumps({DATASET: self.dataset, **_relevant(self.values)}, indent=2)

    @property
    def options(self) -> dict[str, Any]:
        """Values of all options that are common to all methods."""
        return {name: getattr(self, name) for name in KINDS}

    @property
    def values(self) -> dict[str, Any]:
        """Values of all options, and hyper-parameters."""
        return self.options | self.hyper_parameters

    def data_path(self) -> str:
        """Value of --data, by default a file of an installed package; InvalidInput if there is none."""
        if self.data is None and self.dataset in sites.INSTALLED:
            return str(sites.installed(self.dataset))
        if self.data is None:
            raise InvalidInput(f"give --data: {own_files.FORMATS}")
        return self.data

    def real_numbers(self) -> dict[str, float]:
        """Hyper-parameters that can be inputs of a compiled program."""
        return real_numbers(self.method, self.hyper_parameters)

    def on_embedded_data(self) -> tuple["Spec", dict[str, Any]]:
        """This run with the preset's smaller values for embedded data, and the values that changed."""
        reduced = presets.values(self.preset, self.dataset, self.method, procedure=self.procedure, embedded=True)
        changes = {
            name: reduced[name]
            for name, value in self.values.items()
            if name not in self.given and name in reduced and reduced[name] != value and name != "method"
        }
        return self.having(changes), changes

    def having(self, values: Mapping[str, Any]) -> "Spec":
        """This run with other values of options and hyper-parameters, which are not checked."""
        common = {name: value for name, value in values.items() if name in KINDS}
        own = {name: value for name, value in values.items() if name not in common}
        return dataclasses.replace(self, **common, hyper_parameters=self.hyper_parameters | own)

    def in_folder(self, folder: str | Path) -> "Spec":
        """This run with its results in a folder."""
        return dataclasses.replace(self, out=str(folder), given=self.given | {"out"})

    def command(self, folder: str | Path | None = None) -> str:
        """Shell command of the same run, with the folder of its results if there is one."""
        # Options of a file are given one by one.
        names = sorted((self.given & self.values.keys()) - {"out", "resume", "method", "seed", "config"})
        values = {"method": self.method, **{name: self.values[name] for name in names}, "seed": self.seed}
        values |= {} if folder is None else {"out": folder}
        return shlex.join(["python", "-m", f"experiments.{self.dataset}", *option_words(values)])


def usual_values(dataset: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Default values of all options of an experiment; the given options in SELECTION decide them."""
    if dataset not in presets.DEFAULT_PRESET:
        raise InvalidInput(unknown(DATASET, dataset, presets.DEFAULT_PRESET))
    preset = given.get("preset", presets.preset_of(dataset, given.get("method")))
    method = given.get("method", presets.values(preset, dataset)["method"])
    chosen = presets.values(preset, dataset, method, procedure=given.get("procedure", ""))
    chosen |= {"method": method, "preset": preset}
    every = COMMON | method_options(method)
    return {name: chosen.get(name, option.default) for name, option in every.items()}


def unknown_option(word: str, known: Iterable[str], method: str) -> str:
    """Error message for an option --NAME that a run, or this method, does not have."""
    own, owners = {*known}, dict[str, list[str]]()
    for name in METHODS:
        for option in method_options(name):
            owners.setdefault(flag(option), []).append(name)
    if word in owners:
        other = ", or --beta for the concentration of --partition dirichlet" if word == "--alpha" else ""
        return f"{word} is an option of {listed(owners[word], 'and')}, not of {method}{other}"
    elsewhere = {flag(name): flag(here) for here, names in SYNONYMS.items() for name in names}
    near = difflib.get_close_matches(word, sorted(owners.keys() | own | elsewhere.keys()), n=1)
    if near and near[0] in elsewhere:
        return f"unknown option {word}: here it is {elsewhere[near[0]]}"
    if near and near[0] not in own:
        some = ", ".join([*owners[near[0]][:3], "..."]) if owners[near[0]][3:] else listed(owners[near[0]], "and")
        return f"unknown option {word}; did you mean {near[0]}? It is an option of {some}, not of {method}"
    return f"unknown option {word}{hint(word, own) or ': see --help'}"


def values_in(path: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Options in a file of names and values, .toml or .json, or in the config.json of a run, except the given options.

    Raises:
      InvalidInput: the file cannot be read, has an option that acts on this machine, or names code to execute.
    """
    text = read(Path(path).expanduser())
    try:
        values = tomllib.loads(text.decode()) if path.endswith(".toml") else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"--config {path} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise InvalidInput(f"--config {path} has no options with values")
    if {DATASET, "options", "hyper_parameters", "data"} <= values.keys():
        try:
            source = {"source": "embedded"} if values["data"]["source"] == "embedded" else {}
            relevant = _relevant(stored_options(values) | values["hyper_parameters"])
        except (AttributeError, KeyError, TypeError):
            raise InvalidInput(f"--config {path} is not a configuration of a run") from None
        values = {DATASET: values[DATASET]} | relevant | source
    values = {name: value for key, value in values.items() if (name := key.replace("-", "_")) not in given}
    if here := [name for name in with_trait(KINDS, Trait.NOT_IN_FILES) if name in values]:
        raise InvalidInput(
            f"--config {path} gives {flag(here[0])}, which acts on this machine and cannot come from a file: give it "
            "yourself"
        )
    for name in EXECUTED:
        if is_own(values.get(name)):
            raise InvalidInput(
                f"--config {path} names {values[name]}, which is executed only if you name it: give {flag(name)} too"
            )
    return values


def _relevant(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values on which the results of a run depend."""
    # With --local-steps there are no epochs.
    left_out = (*with_trait(KINDS, Trait.NEUTRAL), *(["epochs"] if values.get("epochs") is None else []))
    return {name: value for name, value in values.items() if name not in left_out}


def stored_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a stored run, also of an earlier format: without --procedure, or with options that were removed later
    and that the run did not use, or its results do not depend on."""
    return {"procedure": None} | {
        name: value
        for name, value in config["options"].items()
        if name in KINDS or (value is not None and name not in _REMOVED)
    }


def settings_of(options: Options) -> Settings:
    """The library's settings of a run; InvalidInput if they do not fit together."""
    named = {name: value for name, value in vars(options).items() if name in Settings.__dataclass_fields__}
    # A resumed run needs all its evaluations, so its log decides when it ends, see `best_round.final`.
    text = options.select_clients
    select = function("select_clients", text) if is_own(text) else text and selection.named(text)
    named |= {"patience": None, "select": select}
    return Settings(before_aggregation=options.eval_protocol == "before_aggregation", **named)


def _check_data(spec: Spec) -> None:
    """Raise InvalidInput for options of data, or a task, that the data set of a run does not have."""
    if spec.task == "next_symbol" and not is_own(spec.model) and spec.model != "char_lstm":
        raise InvalidInput(
            f"--task {spec.task} needs --model char_lstm, or FILE.py:NAME of a model with logits [B, T, K]: "
            f"{spec.model} gives one vector for each example"
        )
    for name in ("source", "data_dir") if spec.dataset in WITH_FILES else ():
        if getattr(spec, name) != getattr(Options, name):
            raise InvalidInput(f"{flag(name)} is for the papers' data sets: {spec.dataset} reads --data")
    if spec.dataset == CUSTOM:
        if spec.partition == "natural" and spec.client_column is None:
            raise InvalidInput("--partition natural needs --client-column, the column that names each row's client")
        return
    for name in with_trait(KINDS, Trait.OWN_DATA, *(() if spec.dataset in NATURAL else (Trait.FILES,))):
        if getattr(spec, name) not in (None, False):
            raise InvalidInput(f"{flag(name)} is for your own data: python -m experiments.custom")
    if spec.dataset not in NATURAL and spec.task not in (None, "classification") and not is_own(spec.model):
        raise InvalidInput(f"--task {spec.task} is for your own data or model: labels of {spec.dataset} are classes")


def _decided_by_files(spec: Spec) -> dict[str, Any]:
    """Options that follow from a run's files: the partition and its number of clients, and absolute paths, because a
    run may be resumed and exported from other folders."""
    others = {name: file for name in OTHER_FILES if (file := getattr(spec, name)) is not None}
    found: dict[str, Any] = {name: str(weights_file(file)) for name, file in others.items()}
    if is_partition_file(spec.partition):
        path = Path(spec.partition).expanduser().absolute()
        number = len(partition_files.load(path, None).train)
        if "num_clients" in spec.given and spec.num_clients != number:
            raise InvalidInput(f"--num-clients {spec.num_clients}: {path.name} has {number} clients, leave it out")
        return found | {"partition": str(path), "num_clients": number}
    if spec.dataset == CUSTOM and spec.client_column is not None:
        if "partition" in spec.given and spec.partition != "natural":
            raise InvalidInput(
                f"--client-column {spec.client_column} and --partition {spec.partition} cannot both be given: each "
                "decides which rows a client has"
            )
        return found | {"partition": "natural"}
    if spec.dataset == CUSTOM and spec.task in TARGETS and "partition" not in spec.given:
        # Without classes, rows are divided at random.
        return found | {"partition": "iid"}
    return found
