"""A method's hyper-parameters as options, from its factory's signature and docstring, and their schedules."""

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple, get_type_hints

import jax
import jax.numpy as jnp
import optax

from experiments.spec.groups import Training
from experiments.spec.option_notes import Option, flag, is_own, with_note
from experiments.spec.options import KINDS, unread
from experiments.spec.own_code import method_factory, option_kind
from pfl_jax.base import Method
from pfl_jax.errors import InvalidInput
from pfl_jax.methods.factories import annotations, arguments, function_of, hyper_parameters, recipes_of
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.validation import AtInit, ReadWith, hint, parts, range_of

TRAINING_HYPER_PARAMETERS = Training.of_methods
"""Hyper-parameters of `LocalTraining` for which methods and presets have their own defaults."""


def method_options(name: str) -> dict[str, Option]:
    """Hyper-parameters of a method (a key of METHODS or FILE.py:NAME), from its factory and its recipes."""
    return _options(name, method_factory(name))


def defaults(name: str) -> dict[str, Any]:
    """Hyper-parameters of a method, see `method_options`, with their defaults."""
    return {option.name: option.default for option in method_options(name).values()}


@functools.cache
def _options(name: str, factory: Callable[..., Method]) -> dict[str, Option]:
    own, recipes = arguments(factory), recipes_of(factory)
    kinds, values = annotations(factory), hyper_parameters(factory)
    texts = entries(LocalTraining, "Attributes")
    for recipe in recipes:
        texts |= entries(recipe, "Attributes")
    texts |= entries(function_of(factory), "Args")
    if is_own(name):
        of_recipes = {field for recipe in recipes for field in get_type_hints(recipe)}
        if taken := sorted(own.keys() & (KINDS.keys() | of_recipes)):
            raise InvalidInput(
                f"--method {name}: {flag(taken[0])} is an option of every experiment already; give it another name"
            )
        kinds |= {one.name: option_kind(name, one) for one in own.values()}
    for one in TRAINING_HYPER_PARAMETERS:
        # On the command line, these are always numbers, never optimizers.
        kinds[one] = Annotated[type(values[one]), range_of(kinds[one])]
    others = [one for one in values if one not in own and one not in get_type_hints(LocalTraining)]
    texts = {one: text[:1].upper() + text[1:] for one, text in texts.items()}
    names = [*own, *TRAINING_HYPER_PARAMETERS, *others]
    return {one: Option(one, kinds[one], values[one], texts.get(one, "")) for one in names}


def entries(entity: Any, section: str) -> dict[str, str]:
    """Name -> text of each entry in a section of a docstring, such as "Args"."""
    found: dict[str, list[str]] = {}
    indent, inside, text = 0, False, []
    for line in filter(str.strip, inspect.cleandoc(entity.__doc__ or "").splitlines()):
        depth = len(line) - len(line.lstrip())
        if depth == 0:
            inside, indent = line.rstrip() == f"{section}:", 0
        elif inside:
            indent = indent or depth
            entry = re.match(r"([^:]+?)(?: \([^)]*\))?: *(.*)", line.strip()) if depth == indent else None
            if entry:
                text = [entry[2]]
                found |= dict.fromkeys(entry[1].split(", "), text)
            else:
                text.append(line.strip())
    return {name: " ".join(text) for name, text in found.items()}


def documented_info(factory: Callable[..., Method]) -> dict[str, str]:
    """Name -> shape and meaning of a method's `Info`, from the section "Info" of its factory's docstring."""
    return entries(function_of(factory), "Info")


def real_numbers(method: str, values: dict[str, Any]) -> dict[str, float]:
    """Hyper-parameters that can be inputs of a compiled program: their types and their values are real."""
    real = {name for name, option in method_options(method).items() if float in parts(option.kind)}
    real -= unread(values).keys()
    return {name: value for name, value in values.items() if name in real and isinstance(value, float)}


def unread_by_method(method: str, values: dict[str, Any]) -> dict[str, str]:
    """Hyper-parameters that a method does not read, given the values of all -> reason, see `options.unread`."""
    return unread(values, with_note(annotations(method_factory(method)), ReadWith))


def read_at_init(method: str) -> set[str]:
    """Hyper-parameters of a method that only a client's first state depends on."""
    kinds = {name: option.kind for name, option in method_options(method).items()}
    return {*with_note(kinds, AtInit)}


FORMS = {
    "cosine": ("cosine", "cosine:END"),
    "linear": ("linear:START:END:ROUNDS",),
    "exponential": ("exponential:FACTOR",),
    "step": ("step:FACTOR:ROUNDS",),
}
"""Kind of schedule -> its forms on the command line."""


class Schedule(NamedTuple):
    """Factor of the hyper-parameter `name` in each round, of a `kind` in FORMS with the parameters `numbers`."""

    name: str
    kind: str
    numbers: tuple[float, ...]

    def factor(self, index: jax.Array, rounds: int) -> jax.Array:
        """Factor in round `index` (from 0, may be traced) of a run of `rounds` rounds."""
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
    """Parse a schedule NAME=KIND:NUMBERS, such as lr=cosine or lam=linear:0:1:20."""
    name, equals, rest = text.partition("=")
    kind, *parameters = rest.split(":")
    if not name or not equals or kind not in FORMS:
        raise InvalidInput(
            f"--schedule is NAME=KIND such as lr=cosine or lam=linear:0:1:20, with the kinds {', '.join(FORMS)}, "
            f"not {text}{hint(kind, FORMS)}"
        )
    try:
        numbers = tuple(map(float, parameters))
    except ValueError:
        numbers = (-1.0,)
    is_form = len(parameters) in {form.count(":") for form in FORMS[kind]}
    if not is_form or not all(0 <= number < float("inf") for number in numbers):
        raise InvalidInput(f"--schedule {text}: {kind} is {' or '.join(FORMS[kind])}, with numbers of at least 0")
    if kind in ("linear", "step") and (numbers[-1] < 1 or numbers[-1] != int(numbers[-1])):
        raise InvalidInput(f"--schedule {text}: ROUNDS must be a whole number of at least 1, not {parameters[-1]}")
    if kind in ("exponential", "step") and numbers[0] == 0:
        raise InvalidInput(f"--schedule {text}: FACTOR must be positive")
    return Schedule(name.replace("-", "_"), kind, numbers)


def check_schedules(texts: Sequence[str], method: str, real: dict[str, float]) -> None:
    """Raise InvalidInput unless the schedules are for different `real_numbers` of a method that its rounds read."""
    names = [parse_schedule(text).name for text in texts]
    for index, (text, name) in enumerate(zip(texts, names, strict=True)):
        why = ""
        if name not in real:
            why = f"{method} has no real-valued hyper-parameter {name} (there are {', '.join(real)})"
        elif name in ("client_clip", "client_noise"):
            why = f"epsilon is computed for one {name} in all rounds"
        elif name in read_at_init(method):
            why = f"{method} reads {name} before the first round only"
        elif name in names[:index]:
            why = f"{name} has another schedule"
        if why:
            raise InvalidInput(f"--schedule {text}: {why}")


def scheduled(texts: Sequence[str], values: dict[str, float], index: jax.Array, rounds: int) -> dict[str, jax.Array]:
    """Hyper-parameters with a --schedule in a round: their `values` times `Schedule.factor`."""
    schedules = map(parse_schedule, texts)
    return {schedule.name: values[schedule.name] * schedule.factor(index, rounds) for schedule in schedules}
