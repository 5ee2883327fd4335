"""Command line of a run, checked: the options of all runs and those of its method, with the preset's defaults."""

import dataclasses
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from experiments.cli import own_data, parser, presets
from experiments.cli.groups import SELECTION, grouped, unknown_run_option
from experiments.cli.hyper_parameters import check_schedules, method_options, real_numbers
from experiments.cli.options import Options, option_words
from experiments.cli.own_code import files
from experiments.cli.parser import Option, options_of
from pfl_jax.data.sources import Dataset
from pfl_jax.data.specs import SPECS
from pfl_jax.errors import InvalidInput

IN_PLACE = "alignment in place"
"""Procedure of FedAS's released code, see `experiments.lab.fedas_ablation.released`; its name in a run's files."""


@dataclass(frozen=True)
class Request:
    """A checked command line.

    Attributes:
      dataset: name of the experiment.
      options: the common options.
      hyper_parameters: all hyper-parameters of the method; epochs is None with --local-steps.
      given: names of the options that the user gave; all others have the values of the preset or the method.
      own_code: files of the user's own method and model, see `own_code.files`.
      procedure: IN_PLACE, or "" for the rounds of `pfl_jax.simulate.run`.
    """

    dataset: str
    options: Options
    hyper_parameters: dict[str, Any]
    given: frozenset[str]
    own_code: dict[str, dict[str, str]] = field(default_factory=dict)
    procedure: str = ""

    def visits(self, clients: int, examples: int) -> int:
        """Examples that clients with these training examples visit in a round: of complete batches with --local-steps."""
        if self.options.local_steps is None:
            return examples * self.hyper_parameters.get("epochs", 1)
        return clients * self.options.local_steps * self.hyper_parameters["batch_size"]

    def real_numbers(self) -> dict[str, float]:
        """Hyper-parameters that can be inputs of a compiled program."""
        return real_numbers(self.options.method, self.hyper_parameters)

    def on_own_data(self, dataset: Dataset) -> "Request":
        """This request with what the user's own data decides; InvalidInput if given options contradict the data."""
        return dataclasses.replace(self, options=own_data.fitted(self.options, self.given, dataset))

    def on_embedded_data(self) -> tuple["Request", dict[str, Any]]:
        """This request with the preset's smaller values for embedded data, and the values that changed."""
        reduced = presets.values(self.options.preset, self.dataset, self.options.method, embedded=True)
        changes = {
            name: reduced[name]
            for name, value in (dataclasses.asdict(self.options) | self.hyper_parameters).items()
            if name not in self.given and name in reduced and reduced[name] != value and name != "method"
        }
        own = {name: value for name, value in changes.items() if name in self.hyper_parameters}
        options = dataclasses.replace(self.options, **{name: changes[name] for name in changes.keys() - own.keys()})
        return dataclasses.replace(self, options=options, hyper_parameters=self.hyper_parameters | own), changes


def parse(dataset: str, arguments: Sequence[str]) -> Request:
    """Parse and check the words after `python -m experiments.DATASET`; --help prints help and raises SystemExit(0)."""
    common = common_options()
    # These two decide which other options there are, and their defaults.
    first = {name: common[name] for name in SELECTION}
    chosen = parser.converted(parser.split(arguments, [parser.Group("", "", first)])[0], first)
    preset = chosen.get("preset", presets.DEFAULT_PRESET[dataset])
    method = chosen.get("method", presets.values(preset, dataset)["method"])
    defaults = presets.values(preset, dataset, method) | {"method": method, "preset": preset}
    own = method_options(method)
    every = {
        name: option._replace(default=defaults.get(name, option.default)) for name, option in (common | own).items()
    }
    texts, others = parser.split(
        arguments, grouped(method, every), f"experiments.{dataset}", _description(dataset, preset)
    )
    if others:
        raise InvalidInput(unknown_run_option(others[0], every, method))
    found = parser.converted(texts, every)
    values, given = {name: option.default for name, option in every.items()} | found, set(found)
    options = Options(**{name: values[name] for name in common})
    hyper_parameters = {name: values[name] for name in own}
    options = own_data.checked(dataset, options, frozenset(given))
    options.check()
    if options.mesh is not None:
        # --mesh is converted to --devices.
        number = _mesh_devices(options.mesh)
        if "devices" in given and options.devices != number:
            raise InvalidInput(f"--mesh {options.mesh} and --devices {options.devices} disagree: give one of them")
        options = dataclasses.replace(options, devices=number, mesh=None)
        given = given - {"mesh"} | {"devices"}
    if options.augment and dataset in SPECS and SPECS[dataset].shape[-1] != 3:
        raise InvalidInput(f"--augment is for color images, and those of {dataset} are gray")
    if options.local_steps is not None:
        if "epochs" in given:
            raise InvalidInput("--local-steps cannot be given with --epochs: it is in place of them")
        hyper_parameters["epochs"] = None
    request = Request(dataset, options, hyper_parameters, frozenset(given), files(vars(options)))
    check_schedules(options.schedule or (), method, request.real_numbers())
    return request


@functools.cache
def common_options() -> dict[str, Option]:
    """Options of all runs."""
    return options_of(Options)


def _mesh_devices(text: str) -> int:
    """Number of devices of --mesh clients=SIZE; raise InvalidInput for any other text."""
    found = re.fullmatch("clients=([1-9][0-9]*)", text)
    if found is None:
        raise InvalidInput(
            f"--mesh is clients=SIZE, with a size of at least 1, not {text}: clients are the only axis there is"
        )
    return int(found[1])


def _description(dataset: str, preset: str) -> str:
    data = "your own data" if dataset == own_data.CUSTOM else dataset
    text = (
        f"Personalized federated learning on {data}. The defaults are the settings of the {preset} preset; "
        "the default of --method is that paper's own method."
    )
    smaller = presets.EMBEDDED.get((preset, dataset))
    return text if not smaller else f"{text} On embedded data the defaults are smaller: {assignments(smaller)}."


def assignments(values: dict[str, Any]) -> str:
    """Values as command-line options: "--rounds 30, --train-size 300, --no-drop-last"."""
    return ", ".join(" ".join(option_words({name: value})) for name, value in values.items())
