"""A method's hyper-parameters as options, from its factory's signature and docstring, and their schedules."""

import dataclasses
import difflib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_args, get_type_hints

import jax
import jax.numpy as jnp
import optax
from docstring_parser.google import DEFAULT_SECTIONS, GoogleParser, Section, SectionType

from experiments.cli.options import Options, flag, option_words
from experiments.cli.own_code import is_own, label, method_factory, option_kind
from experiments.cli.parser import TRAINING_HYPER_PARAMETERS, argument
from pfl_jax.base import Method
from pfl_jax.errors import InvalidInput
from pfl_jax.hyper_parameters import ReadWith, notes_of
from pfl_jax.methods.factories import RECIPES, annotations, arguments, default_training, function_of, recipes_of
from pfl_jax.primitives.local_training import LocalTraining


def method_config(name: str) -> type:
    """Frozen dataclass of a method's hyper-parameters, from its factory's signature and docstring.

    It has a field, with type, default and help text, for each keyword-only argument of the factory, for those of the
    recipes of wrappers that apply to it, and for the hyper-parameters of local training in TRAINING_HYPER_PARAMETERS.

    Args:
      name: a key of METHODS, or FILE.py:NAME.

    Raises:
      InvalidInput: the file cannot be used, or one of its method's options has the name of another option.
    """
    # A file may have changed since.
    return _config(name) if is_own(name) else _known_config(name)


@functools.cache
def _known_config(name: str) -> type:
    return _config(name)


def _config(name: str) -> type:
    factory = method_factory(name)
    recipes = recipes_of(factory)
    taken = _COMMON.union(*({field.name for field in dataclasses.fields(recipe)} for recipe in recipes))
    summary, texts = _documented(function_of(factory))
    fields = []
    for parameter in arguments(factory).values():
        if is_own(name) and parameter.name in taken:
            taken_already = f"{flag(parameter.name)} is an option of every experiment already; give it another name"
            raise InvalidInput(f"--method {name}: {taken_already}")
        kind = argument(option_kind(name, parameter), texts.get(parameter.name, ""))
        fields.append((parameter.name, kind, dataclasses.field(default=parameter.default)))
    training = default_training(factory)
    _, texts = _documented(LocalTraining)
    for field in TRAINING_HYPER_PARAMETERS:
        value = getattr(training, field)
        fields.append((field, argument(type(value), texts[field]), dataclasses.field(default=value)))
    for recipe in recipes:
        _, texts = _documented(recipe)
        kinds = get_type_hints(recipe)
        for field in dataclasses.fields(recipe):
            kind = argument(kinds[field.name], texts[field.name])
            fields.append((field.name, kind, dataclasses.field(default=field.default)))
    config = dataclasses.make_dataclass("MethodOptions", fields, frozen=True)
    config.__doc__ = summary or label(name)
    return config


_COMMON = frozenset(field.name for field in dataclasses.fields(Options))


def _documented(entity: Any) -> tuple[str | None, dict[str, str]]:
    """First line of a docstring, and the descriptions of its arguments or attributes by name."""
    found = _DOCSTRINGS.parse(entity.__doc__ or "")
    return found.short_description, {parameter.arg_name: parameter.description or "" for parameter in found.params}


_DOCSTRINGS = GoogleParser([*DEFAULT_SECTIONS, Section("Info", "info", SectionType.MULTIPLE)])


def documented_info(factory: Callable[..., Method]) -> dict[str, str]:
    """Name -> shape and meaning of a method's `Info`, as the section "Info" of its factory's docstring has them."""
    found = _DOCSTRINGS.parse(function_of(factory).__doc__ or "")
    return {part.args[1]: " ".join((part.description or "").split()) for part in found.meta if part.args[0] == "info"}


def real_numbers(method: str, values: dict[str, Any]) -> dict[str, float]:
    """Hyper-parameters that can be inputs of a compiled program: those with real type and value.

    Args:
      method: its name, as in `method_config`.
      values: values of all hyper-parameters of the method.
    """
    kinds = get_type_hints(method_config(method))
    real = {name for name, kind in kinds.items() if kind is float or float in get_args(kind)}
    real -= unread_by_wrappers(values).keys()
    return {name: value for name, value in values.items() if name in real and isinstance(value, float)}


def unread_by_method(method: str, values: dict[str, Any]) -> dict[str, str]:
    """Hyper-parameters that a method does not read with these values -> the option that is the reason.

    Args:
      method: its name, as in `method_config`.
      values: values of all hyper-parameters of the method.
    """
    return _reasons(values, annotations(method_factory(method)))


def unread_by_wrappers(values: dict[str, Any]) -> dict[str, str]:
    """Those of `unread_by_method` that are fields of wrappers' recipes, on which results then do not depend.

    Args:
      values: values of hyper-parameters of any method, also of one whose file is no longer there.
    """
    found: dict[str, str] = {}
    for recipe in RECIPES:
        found |= _reasons(values, get_type_hints(recipe, include_extras=True))
    return found


def _reasons(values: dict[str, Any], kinds: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in values.keys() & kinds.keys():
        for note in notes_of(kinds[name]):
            if isinstance(note, ReadWith) and note.name in values and not note.is_met(values[note.name]):
                found.setdefault(name, " ".join(option_words({note.name: values[note.name]})))
    return found


FIRST_ROUND_ONLY = {"apfl": {"alpha"}}
"""Method -> real-valued hyper-parameters that only a client's first state depends on."""

FORMS = {
    "cosine": ("cosine", "cosine:END"),
    "linear": ("linear:START:END:ROUNDS",),
    "exponential": ("exponential:FACTOR",),
    "step": ("step:FACTOR:ROUNDS",),
}
"""Kind of schedule -> its forms on the command line."""


class Schedule(NamedTuple):
    """Factor of a hyper-parameter in each round.

    Attributes:
      name: name of the hyper-parameter.
      kind: a key of FORMS.
      numbers: parameters of the schedule.
    """

    name: str
    kind: str
    numbers: tuple[float, ...]

    def factor(self, index: jax.Array, rounds: int) -> jax.Array:
        """Factor in a round.

        Args:
          index: number of the round, from 0; may be traced.
          rounds: number of rounds of the run.
        """
        if self.kind == "cosine":
            schedule = optax.cosine_decay_schedule(1.0, rounds, *self.numbers)
        elif self.kind == "linear":
            start, end, transition = self.numbers
            schedule = optax.linear_schedule(start, end, int(transition))
        else:
            factor, *every = self.numbers
            schedule = optax.exponential_decay(1.0, int(*every or [1]), factor, staircase=True)
        return jnp.asarray(schedule(index))


def parse_schedule(text: str) -> Schedule:
    """Parse a schedule NAME=KIND:NUMBERS, such as lr=cosine or lam=linear:0:1:20.

    Raises:
      InvalidInput: the text has another form, or numbers are out of range.
    """
    name, equals, rest = text.partition("=")
    kind, *parameters = rest.split(":")
    name = name.replace("-", "_")
    if not name or not equals or kind not in FORMS:
        near = difflib.get_close_matches(kind, FORMS, n=1)
        raise InvalidInput(
            f"--schedule is NAME=KIND such as lr=cosine or lam=linear:0:1:20, with the kinds {', '.join(FORMS)}, "
            f"not {text}{f'; did you mean {near[0]}?' if near else ''}"
        )
    allowed = {form.count(":") for form in FORMS[kind]}
    try:
        numbers = tuple(map(float, parameters))
    except ValueError:
        numbers = None
    if numbers is None or len(numbers) not in allowed or not all(0 <= number < float("inf") for number in numbers):
        raise InvalidInput(f"--schedule {text}: {kind} is {' or '.join(FORMS[kind])}, with numbers of at least 0")
    if kind in ("linear", "step") and (numbers[-1] < 1 or numbers[-1] != int(numbers[-1])):
        raise InvalidInput(f"--schedule {text}: ROUNDS must be a whole number of at least 1, not {parameters[-1]}")
    if kind in ("exponential", "step") and numbers[0] == 0:
        raise InvalidInput(f"--schedule {text}: FACTOR must be positive")
    return Schedule(name, kind, numbers)


def check_schedules(texts: Sequence[str], method: str, real: dict[str, float]) -> None:
    """Raise InvalidInput unless the schedules are for different real-valued hyper-parameters that rounds read.

    Args:
      texts: values of --schedule.
      method: name of the method.
      real: the method's real-valued hyper-parameters.
    """
    seen: set[str] = set()
    for text in texts:
        name = parse_schedule(text).name
        if name not in real:
            raise InvalidInput(
                f"--schedule {text}: {method} has no real-valued hyper-parameter {name} (there are {', '.join(real)})"
            )
        if name in ("client_clip", "client_noise"):
            raise InvalidInput(f"--schedule {text}: epsilon is computed for one {name} in all rounds")
        if name in FIRST_ROUND_ONLY.get(method, ()):
            raise InvalidInput(f"--schedule {text}: {method} reads {name} before the first round only")
        if name in seen:
            raise InvalidInput(f"--schedule {text}: there is another schedule of {name}")
        seen.add(name)


def scheduled(texts: Sequence[str], values: dict[str, float], index: jax.Array, rounds: int) -> dict[str, jax.Array]:
    """Values of the scheduled hyper-parameters in a round.

    Args:
      texts: values of --schedule.
      values: name -> value at factor 1; may be traced.
      index: number of the round, from 0; may be traced.
      rounds: number of rounds of the run.
    """
    schedules = map(parse_schedule, texts)
    return {one.name: values[one.name] * one.factor(index, rounds) for one in schedules}
