"""A method's hyper-parameters as options of the command line, from the signature and docstring of its factory."""

import dataclasses
import functools
from typing import Any, get_args, get_type_hints

import docstring_parser

from experiments.config.help_groups import TRAINING_HYPER_PARAMETERS, argument
from experiments.config.options import Options, flag, option_words
from experiments.config.own_code import is_own, label, method_factory, option_kind
from pfl_jax.errors import InvalidInput
from pfl_jax.hyper_parameters import unread
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
    found = docstring_parser.parse(entity.__doc__ or "", docstring_parser.DocstringStyle.GOOGLE)
    return found.short_description, {parameter.arg_name: parameter.description or "" for parameter in found.params}


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
    return {name: " ".join(option_words({other: values[other]})) for name, other in unread(values, kinds).items()}
