"""Parsing of a command line into checked options; a method's own options come from its factory's signature.

tyro converts values and writes --help. Its error messages are boxes of several lines, so this module checks the command
line first and reports errors in one line.
"""

import contextlib
import dataclasses
import io
import textwrap
import types
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin, get_type_hints

import tyro

from experiments.cli import own_data, presets
from experiments.cli.hyper_parameters import check_schedules, method_config, real_numbers
from experiments.cli.options import Options, PresetName, flag, option_words
from experiments.cli.own_code import files, is_own, method_factory
from experiments.cli.parser import grouped, limited_columns, synonym, ungrouped
from pfl_jax.data.sources import Dataset
from pfl_jax.data.specs import SPECS
from pfl_jax.errors import InvalidInput
from pfl_jax.hyper_parameters import as_number, check_value, describe, hint, listed, literals, parts, unknown
from pfl_jax.methods import METHODS
from pfl_jax.methods.factories import annotations

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
        """Examples of the mini-batches of a round: with --local-steps, those of complete ones.

        Args:
          clients: number of clients that train.
          examples: their training examples together.
        """
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
        common = {name: value for name, value in changes.items() if name not in own}
        request = dataclasses.replace(
            self,
            options=dataclasses.replace(self.options, **common),
            hyper_parameters=self.hyper_parameters | own,
        )
        return request, changes


def parse(dataset: str, arguments: Sequence[str]) -> Request:
    """Parse and check a command line; print help and raise SystemExit(0) for --help.

    Args:
      dataset: a key of `presets.DEFAULT_PRESET`.
      arguments: command-line arguments after the module's name.

    Raises:
      InvalidInput: an option or choice is unknown, or a value has the wrong type or is out of range.
    """
    preset = _first_choice("preset", arguments, get_args(PresetName), presets.DEFAULT_PRESET[dataset])
    default_method = presets.values(preset, dataset)["method"]
    method = _first_choice("method", arguments, tuple(METHODS), default_method, own=True)
    values = presets.values(preset, dataset, method)
    config_type = method_config(method)
    hints = get_type_hints(Options) | get_type_hints(config_type)
    given = check_arguments(arguments, hints, method)

    common_names, own_names = ({field.name for field in dataclasses.fields(kind)} for kind in (Options, config_type))
    defaults: dict[str, Any] = values | {"method": method, "preset": preset}
    common: Options = Options(**{name: value for name, value in defaults.items() if name in common_names})
    config = config_type(**{name: value for name, value in defaults.items() if name in own_names})
    parsed = _tyro(dataset, arguments, common, config, given)
    options = Options(**{name: parsed[name] for name in vars(common)})
    hyper_parameters = {name: parsed[name] for name in vars(config)}
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


def _mesh_devices(text: str) -> int:
    """Number of devices of --mesh clients=SIZE; raise InvalidInput for any other text."""
    name, equals, size = text.partition("=")
    if name != "clients" or not equals:
        raise InvalidInput(f"--mesh is clients=SIZE, such as clients=8, not {text}: clients are the only axis there is")
    if not size.isdecimal() or int(size) < 1:
        raise InvalidInput(f"--mesh clients={size}: the size must be a whole number of at least 1")
    return int(size)


def _tyro(dataset: str, arguments: Sequence[str], common: Options, config: Any, given: set[str]) -> dict[str, Any]:
    """Values of all options, including the method's own, as parsed by tyro."""
    defaults = vars(common) | vars(config)
    # Tyro takes a millisecond for each option that it is told of.
    known = defaults.keys() if {"--help", "-h"} & set(arguments) else given
    if not known:
        return defaults
    groups, errors = grouped(common, config, known), io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), limited_columns() as columns:
            parsed = tyro.cli(
                groups,
                args=list(arguments),
                prog=f"python -m experiments.{dataset}",
                description=_description(dataset, common.preset, columns),
                # Every option has its text already; looking for comments in the source takes as long as all the rest.
                config=(tyro.conf.HelptextFromCommentsOff,),
            )
    except SystemExit as ending:
        if not ending.code:
            raise
        # All known errors are found before tyro runs; any other one is still reported in one line.
        message = " ".join(line.strip("╭╮╰╯│─ ") for line in errors.getvalue().splitlines())
        raise InvalidInput(" ".join(message.split())) from None
    return defaults | ungrouped(parsed)


def _description(dataset: str, preset: str, columns: int) -> str:
    data = "your own data" if dataset == own_data.CUSTOM else dataset
    text = (
        f"Personalized federated learning on {data}. The defaults are the settings of the {preset} preset; "
        "the default of --method is that paper's own method."
    )
    smaller = presets.EMBEDDED.get((preset, dataset))
    if smaller:
        text += " On embedded data the defaults are smaller: " + assignments(smaller) + "."
    # Indented, because tyro would join lines that start with a letter.
    return textwrap.fill(text, columns, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)


def assignments(values: dict[str, Any]) -> str:
    """Values as command-line options: "--rounds 30, --train-size 300, --no-drop-last"."""
    return ", ".join(" ".join(option_words({name: value})) for name, value in values.items())


def _first_choice(
    name: str, arguments: Sequence[str], choices: Sequence[str], default: str, *, own: bool = False
) -> str:
    """Value of an option on which the others depend; if it is given several times the last one counts, as in tyro."""
    found = default
    for position, word in enumerate(arguments):
        head, equals, value = word.partition("=")
        if head != flag(name):
            continue
        if not equals:
            value = arguments[position + 1] if position + 1 < len(arguments) else ""
        if value not in choices and not (own and is_own(value)):
            if not value or value.startswith("-"):
                raise InvalidInput(f"{flag(name)} needs a value: {listed(choices)}")
            raise InvalidInput(unknown(name, value, choices))
        found = value
    return found


def check_arguments(arguments: Sequence[str], hints: dict[str, Any], method: str) -> set[str]:
    """Check all arguments against the options, their types, and the ranges of the method's hyper-parameters.

    Args:
      arguments: command-line arguments after the module's name.
      hints: name -> type of every option.
      method: name of the method.

    Returns:
      Names of the given options.

    Raises:
      InvalidInput: an unknown option, or a wrong value.
    """
    kinds = annotations(method_factory(method))
    switches = {}
    for name, kind in hints.items():
        if kind is bool:
            switches |= {flag(name): name, flag(f"no_{name}"): name}
    valued = {flag(name): name for name in hints if flag(name) not in switches}
    given = set()
    remaining = deque(arguments)
    while remaining:
        head, equals, value = remaining.popleft().partition("=")
        head = head.replace("_", "-")
        if head in ("--help", "-h"):
            continue
        if head in switches:
            if equals:
                raise InvalidInput(f"{head} takes no value: give {head} or {_opposite(head)}")
            given.add(switches[head])
        elif head in valued:
            kind = hints[valued[head]]
            values: list[str | None] = [value] if equals else [remaining.popleft()] if remaining else [None]
            if any(get_origin(part) is tuple for part in parts(kind)):
                while not equals and remaining and not remaining[0].startswith("--"):
                    values.append(remaining.popleft())
            texts = [_check_value(head, kind, value) for value in values]
            if valued[head] in kinds:
                check_value(head, _parsed(kind, texts), kinds[valued[head]])
            given.add(valued[head])
        else:
            raise InvalidInput(_unknown(head, (*valued, *switches), method))
    return given


def _opposite(switch: str) -> str:
    return f"--{switch[5:]}" if switch.startswith("--no-") else f"--no-{switch[2:]}"


def _unknown(word: str, known: Iterable[str], method: str) -> str:
    """Error message for an argument that is not an option, or not an option of this method."""
    if not word.startswith("-"):
        return f"unexpected word '{word}': options start with --, see --help"
    dirichlet = ", or --beta for the concentration of --partition dirichlet" if word == "--alpha" else ""
    owners = [name for name in METHODS if word in map(flag, get_type_hints(method_config(name)))]
    if owners:
        return f"{word} is an option of {listed(owners, 'and')}, not of {method}{dirichlet}"
    if here := synonym(word):
        return f"unknown option {word}: here it is {here}"
    near = hint(word, list(known)) if word.startswith("--") else ""
    return f"unknown option {word}{near or ': see --help'}"


def _check_value(option: str, kind: Any, value: str | None) -> str:
    """The text of a value; InvalidInput unless it is one of this type."""
    if value is None or (value.startswith("--") and not _accepts(kind, value)):
        raise InvalidInput(f"{option} needs a value: {describe(kind)}")
    if _accepts(kind, value):
        return value
    choices = literals(kind)
    if choices and all(get_origin(part) is Literal or part is str for part in parts(kind)):
        raise InvalidInput(unknown(option.removeprefix("--"), value, choices))
    raise InvalidInput(f"{option} must be {describe(kind)}, not '{value}'{hint(value, choices)}")


def _parsed(kind: Any, texts: Sequence[str]) -> Any:
    """Value of an option's texts for the check of its type and range."""
    several = next((part for part in parts(kind) if get_origin(part) is tuple), None)
    if several is None or (list(texts) == ["None"] and types.NoneType in parts(kind)):
        return _number(kind, texts[0])
    return tuple(_number(get_args(several)[0], text) for text in texts)


def _number(kind: Any, text: str) -> Any:
    """Value of a text for the check of the range: a number, None for "None", otherwise the text."""
    if text in literals(kind):
        return text
    return None if text == "None" else as_number(text, kind)


def _accepts(kind: Any, value: str) -> bool:
    for part in parts(kind):
        if get_origin(part) is Literal:
            if value in map(str, get_args(part)):
                return True
        elif part is types.NoneType:
            if value == "None":
                return True
        elif get_origin(part) is tuple:
            # tuple[int, ...]: each element is checked separately.
            if _accepts(get_args(part)[0], value):
                return True
        elif part in (int, float):
            with contextlib.suppress(ValueError):
                part(value)
                return True
        elif part is str and any(get_origin(one) is Literal for one in parts(kind)):
            # A name of the user's own beside those that are built in.
            if is_own(value):
                return True
        elif part is not str or not value.startswith("--"):
            return True
    return False
