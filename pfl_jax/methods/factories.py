"""Functions of a method's factory: its check of arguments and its hyper-parameters."""

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, get_type_hints, overload

import jax
import jax.numpy as jnp

from pfl_jax.base import Method, Model, TrainingCost
from pfl_jax.errors import InvalidInput
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.validation import Arguments, Count, check_value, check_values, hint
from pfl_jax.wrappers.client_privacy import ClientPrivacy, private_clients
from pfl_jax.wrappers.compression import Compression, compressed
from pfl_jax.wrappers.server_mean import ServerMean, robust
from pfl_jax.wrappers.server_optimizer import ServerOptimizer, server_optimized

# Uses of data and reasons that several methods name in `pfl_jax.base.Privacy`.
SIZE = "number of examples: weight of the client in the mean"
IDENTITY = "fingerprint of the examples: identifies the client, only in a simulation"
CLASS_SIZES = "numbers of examples of each class: sent"
CLASS_MEANS = "mean feature of each class: sent"
OWN_GRADIENTS = "its steps compute gradients of their own"
WHOLE_BATCH = "its loss compares the examples of a mini-batch with each other"


@overload
def method_factory(factory: Callable[Arguments, Method], *, version: int = 1) -> Callable[Arguments, Method]: ...


@overload
def method_factory(
    *, version: int = 1, adapters: bool = False
) -> Callable[[Callable[Arguments, Method]], Callable[Arguments, Method]]: ...


def method_factory(factory: Any = None, *, version: int = 1, adapters: bool = False) -> Any:
    """Decorate a factory so that it checks its arguments first, see `pfl_jax.validation`.

    Args:
      factory: a factory whose keyword-only arguments have annotations.
      version: number that is raised when the method's results change beyond rounding, see `version_of`.
      adapters: whether the method is for models with low-rank adapters, see `is_for_adapters`.

    Returns:
      The factory, which also takes the fields of its recipe, in place of the recipe or beside it. With a function of
      the round as `lr`, such as a schedule of optax, it makes a schedule of methods for `pfl_jax.run`. It raises
      InvalidInput if the model is not a `Model`, the recipe is not a `LocalTraining`, a hyper-parameter is unknown, of
      a wrong type or out of its range, or `Method.privacy` refuses the given `dp_clip`.
    """
    if factory is None:
        return functools.partial(method_factory, version=version, adapters=adapters)

    @functools.wraps(factory)
    def with_checks(model: Any, training: Any = None, **values: Any) -> Any:
        if callable(lr := values.get("lr")):
            return lambda index: with_checks(model, training, **(values | {"lr": lr(index)}))
        recipe = default_training(factory) if training is None else training
        check_values({"model": model, "training": recipe}, {"model": Model, "training": LocalTraining})
        taken = {field.name: values.pop(field.name) for field in fields(LocalTraining) if field.name in values}
        _tell_of_own_recipe(factory, recipe)
        recipe = recipe.replace(**taken) if taken else recipe
        others = values.keys() - arguments(factory).keys()
        for wrapper in RECIPES:
            if strange := next((field.name for field in fields(wrapper) if field.name in others), None):
                raise InvalidInput(
                    f"{strange} belongs to a wrapper: give it to make_method, or wrap the method by "
                    f"{RECIPES[wrapper].__module__}.{RECIPES[wrapper].__name__}(method, {wrapper.__name__}(...))"
                )
        check_hyper_parameters(factory, {"epochs": recipe.most_passes} | values, _own_annotations(factory))
        made: Method = factory(model, recipe, **values)
        if recipe.dp_clip is not None and made.privacy is not None and made.privacy.refused:
            raise InvalidInput(f"{factory.__name__} cannot train with dp_clip: {made.privacy.refused}")
        return made._replace(
            work=TrainingCost(model, recipe.batch_size, recipe.drop_last, recipe.local_steps is not None)
        )

    vars(with_checks).update(version=version, adapters=adapters)
    return with_checks


def version_of(factory: Callable[..., Method]) -> int:
    """Version of the results of a factory's methods: results of one version agree up to rounding."""
    return vars(factory)["version"]


def is_for_adapters(factory: Callable[..., Method]) -> bool:
    """Whether a factory's methods are for models with low-rank adapters; without adapters they equal another method."""
    return vars(function_of(factory)).get("adapters", False)


def unchecked(factory: Callable[Arguments, Method]) -> Callable[Arguments, Method]:
    """Factory without the checks of `method_factory`, for use in other factories, whose phases may have zero epochs."""
    return inspect.unwrap(factory)


def needs_classes(model: Model, method: str, why: str) -> None:
    """Raise InvalidInput unless the task of the `model` has classes; `why` is the `method`'s reason to need them."""
    if model.task.kind != "classes":
        raise InvalidInput(f"{method} is for classification, and the model's task is {model.task.name}: {why}")


def needs_vectors(model: Model, method: str, why: str) -> None:
    """Raise InvalidInput if examples have a sequence of features; `why` is the `method`'s reason to need a vector."""
    if model.task.kind == "sequences":
        raise InvalidInput(f"{method} is for tasks with one vector of features, not {model.task.name}: {why}")


def check_hyper_parameters(factory: Callable[..., Method], values: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    """Raise InvalidInput for hyper-parameters with which a factory cannot make a method, see `annotations`."""
    strange = sorted(values.keys() - kinds.keys())
    takes_all = any(one.kind is one.VAR_KEYWORD for one in inspect.signature(factory).parameters.values())
    if strange and not takes_all:
        there = ", ".join(kinds)
        raise InvalidInput(
            f"{_name(factory)} has no hyper-parameter {strange[0]} (there are {there}){hint(strange[0], kinds)}"
        )
    check_values(values, kinds)


def function_of(factory: Callable[..., Method]) -> Callable[..., Method]:
    """Function inside of a `functools.partial`, with its name and docstring; any other factory itself."""
    while isinstance(factory, functools.partial):
        factory = factory.func
    return factory


def _name(factory: Callable[..., Method]) -> str:
    """Name of a factory for people."""
    return getattr(function_of(factory), "__name__", type(factory).__name__)


def arguments(factory: Callable[..., Method]) -> dict[str, inspect.Parameter]:
    """Keyword-only arguments of a factory, which are the method's own hyper-parameters."""
    every = inspect.signature(factory, eval_str=True).parameters.values()
    # `functools.partial` makes a recipe that it binds keyword-only.
    return {one.name: one for one in every if one.kind is one.KEYWORD_ONLY and one.name != "training"}


def annotations(factory: Callable[..., Method]) -> dict[str, Any]:
    """Annotation of each hyper-parameter of a method, see `hyper_parameters`; without one, the type of its default."""
    found = _own_annotations(factory)
    for recipe in recipes_of(factory):
        found |= get_type_hints(recipe, include_extras=True)
    return found


def _own_annotations(factory: Callable[..., Method]) -> dict[str, Any]:
    """Annotation of each field of the recipe of local training and of each argument of the factory."""
    recipe = get_type_hints(LocalTraining, include_extras=True) | {"epochs": Count}
    return recipe | {
        name: type(one.default) if one.annotation is one.empty else one.annotation
        for name, one in arguments(factory).items()
    }


def on_linear_model(factory: Callable[..., Method], values: Mapping[str, Any]) -> Method:
    """Method of a factory for a linear model, to read its properties without data.

    `values` are its hyper-parameters; hyper-parameters of wrappers are ignored. The others have the method's defaults,
    unless a given one excludes them: there are no default epochs beside local_steps.

    Raises:
      Exception: any, because a user's factory may need more than a linear model has.
    """
    own = {name: values[name] for name in arguments(factory) if name in values}
    recipe = {field.name: values[field.name] for field in fields(LocalTraining) if field.name in values}
    training, found = default_training(factory).replace(**recipe), []
    # Only traced: computing an array would start JAX's devices before they are set up.
    jax.eval_shape(lambda: found.append(factory(_LINEAR, training=training, **own)))
    check_value("method", found[0], Method)
    return found[0]


_LINEAR = Model(
    init=lambda key: {"backbone": {}, "head": {"kernel": jnp.zeros((2, 2)), "bias": jnp.zeros(2)}},
    features=lambda backbone, inputs: inputs,
    classify=lambda head, features: features @ head["kernel"] + head["bias"],
    num_features=2,
    num_classes=2,
)


RECIPES: dict[type, Callable[[Method, Any], Method]] = {
    Compression: compressed,
    ClientPrivacy: private_clients,
    ServerMean: robust,
    ServerOptimizer: server_optimized,
}
"""Recipes of wrappers and the wrappers, in the order in which `pfl_jax.make_method` applies them. The server's
optimizer is outermost: it steps toward the mean that all other wrappers made."""


def recipes_of(factory: Callable[..., Method]) -> list[type]:
    """Recipes of RECIPES that apply to a factory's methods, whose hyper-parameters include the recipes' fields.

    `privacy` and `server_is_mean` of a method for a linear model decide on `ClientPrivacy` and `ServerOptimizer`, which
    are left out if the factory cannot make such a method. `Compression` and `ServerMean` always apply: whether messages
    have the `Mean` that they need shows only when a method runs. A recipe with a field that is also an argument of the
    factory is left out.
    """
    own = arguments(factory).keys()
    try:
        method = on_linear_model(factory, {})
    except Exception:  # a user's factory may need anything of a model
        method = None
    privacy = None if method is None else method.privacy
    refused = set() if privacy is not None and privacy.clients is not None else {ClientPrivacy}
    refused |= set() if method is not None and method.server_is_mean else {ServerOptimizer}
    return [one for one in RECIPES if one not in refused and not own & {field.name for field in fields(one)}]


def default_training(factory: Callable[..., Method]) -> LocalTraining:
    """Default recipe of local training of a factory; InvalidInput if it has none.

    A method that wraps another with a special default, such as `fedas`, takes this default over by
    `training: LocalTraining = default_training(fedas)`.
    """
    recipe = getattr(inspect.signature(factory).parameters.get("training"), "default", None)
    if not isinstance(recipe, LocalTraining):
        raise InvalidInput(
            f"{_name(factory)} has no argument training with a default recipe: a method is made by NAME(model, "
            "training: LocalTraining = LocalTraining(), *, ...); one that wraps fedas has training: LocalTraining = "
            "default_training(fedas)"
        )
    return recipe


def _tell_of_own_recipe(factory: Callable[..., Method], recipe: LocalTraining) -> None:
    """Warn where a factory with another default gets LocalTraining(), for example from a factory that wraps it."""
    own = default_training(factory)
    if recipe.says_nothing and recipe != own:
        names = [field.name for field in fields(recipe) if getattr(recipe, field.name) != getattr(own, field.name)]
        general, usual = (", ".join(f"{name} {getattr(one, name)}" for name in names) for one in (recipe, own))
        warnings.warn(
            f"{_name(factory)} trains with {general}, as in LocalTraining(), and not with its defaults {usual}: give "
            f"these fields, or default_training({_name(factory)})",
            stacklevel=3,
        )


def hyper_parameters(factory: Callable[..., Method], given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Hyper-parameters of a method as one flat set: the given ones, and defaults for the others.

    Name -> value: the fields of its recipe of local training, its own hyper-parameters, and the fields of `recipes_of`.
    A default that the given values exclude is None, such as epochs beside local_steps, and lr beside an optimizer that
    has its own.
    """
    given = dict(given or {})
    recipe = {field.name: given.pop(field.name) for field in fields(LocalTraining) if field.name in given}
    training = default_training(factory).replace(**recipe)
    return (
        {field.name: getattr(training, field.name) for field in fields(LocalTraining)}
        | {name: one.default for name, one in arguments(factory).items()}
        | {field.name: field.default for recipe in recipes_of(factory) for field in fields(recipe)}
        | given
    )
