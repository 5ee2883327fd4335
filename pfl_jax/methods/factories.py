"""Functions of a method's factory: its check of arguments, its hyper-parameters and what its docstring tells."""

import functools
import inspect
import re
from collections.abc import Callable, Container, Mapping
from dataclasses import fields
from typing import Any, ParamSpec, get_type_hints, overload

import jax
import jax.numpy as jnp

from pfl_jax import hyper_parameters as ranges
from pfl_jax.base import LocalWork, Method, Model
from pfl_jax.errors import InvalidInput, word
from pfl_jax.methods.data_use import CLIENT_UNCOVERED, DATA_USE, DataUse
from pfl_jax.primitives.local_sgd import LocalSGD
from pfl_jax.wrappers.client_privacy import ClientPrivacy
from pfl_jax.wrappers.compression import Compression
from pfl_jax.wrappers.server_mean import ServerMean
from pfl_jax.wrappers.server_optimizer import ServerOptimizer

Arguments = ParamSpec("Arguments")
"""Arguments of a factory: model, training and its own hyper-parameters."""

SIGNATURE = "a method is made by NAME(model, training: LocalSGD = LocalSGD(), *, ...)"
"""What a factory takes, for errors."""

WITHOUT_MEANS = frozenset(
    {
        *("local", "fedproto_l", "fedfomo", "fedamp", "apple", "hypcluster", "fedgh", "fedtgp", "pfedhn", "pfedgraph"),
        "fedcac",
    }
)
"""Methods that send no `Mean`: nothing at all, or messages that the server needs from each client by itself. There is
nothing for `Compression` and `ServerMean` to do."""


@overload
def checked(factory: Callable[Arguments, Method], *, version: int = 1) -> Callable[Arguments, Method]: ...


@overload
def checked(*, version: int) -> Callable[[Callable[Arguments, Method]], Callable[Arguments, Method]]: ...


def checked(factory: Any = None, *, version: int = 1) -> Any:
    """Decorate a factory so that it checks its arguments first, see `pfl_jax.hyper_parameters`.

    Args:
      factory: a factory whose keyword-only arguments have annotations.
      version: number that is raised when the method's results change beyond rounding, see `version_of`.

    Returns:
      The factory, which raises InvalidInput for what is no model, for a recipe that is no `LocalSGD`, and for a
      hyper-parameter that is unknown, of a wrong type or out of its range.
    """
    if factory is None:
        return functools.partial(checked, version=version)

    @functools.wraps(factory)
    def with_checks(model: Any, training: Any = None, **values: Any) -> Method:
        recipe = default_training(factory) if training is None else training
        if not isinstance(recipe, LocalSGD):
            raise InvalidInput(f"training must be a LocalSGD, such as LocalSGD(lr=0.1), not {word(training)}")
        if taken := next((field.name for field in fields(LocalSGD) if field.name in values), None):
            raise InvalidInput(f"{taken} is a field of the recipe: give LocalSGD({taken}={values[taken]!r})")
        # A server's optimizer is no argument of the factory, see `make_method`.
        check(factory, model, {"epochs": recipe.epochs} | values, _own_annotations(factory))
        use = data_use(factory) if recipe.dp_clip is not None else None
        if use is not None and (reason := use.refused(hyper_parameters(factory) | vars(recipe) | values)):
            raise InvalidInput(f"{factory.__name__} cannot train with dp_clip: {reason}")
        unchecked: Callable[..., Method] = factory
        work = LocalWork(model, recipe.batch_size, recipe.drop_last)
        return unchecked(model, recipe, **values)._replace(work=work)

    vars(with_checks)["version"] = version
    return with_checks


def version_of(factory: Callable[..., Method]) -> int:
    """Version of a method's results: those of one version agree up to rounding, as far as golden values show.

    Args:
      factory: decorated by `checked`.
    """
    return vars(factory)["version"]


def unchecked(factory: Callable[Arguments, Method]) -> Callable[Arguments, Method]:
    """Factory without the checks of `checked`, for other factories: a phase of theirs may have no epochs.

    Args:
      factory: a factory decorated by `checked`.
    """
    return inspect.unwrap(factory)


def check(factory: Callable[..., Method], model: Any, values: dict[str, Any], kinds: dict[str, Any]) -> None:
    """Raise InvalidInput for a model or hyper-parameters with which a factory cannot make a method."""
    if not isinstance(model, Model):
        raise InvalidInput(
            "model must be a Model, such as models.mlp(dataset.input_shape, dataset.num_classes), not "
            f"{word(model)}; networks.from_flax makes one of a flax module"
        )
    check_values(factory, values, kinds)


def check_values(factory: Callable[..., Method], values: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    """Raise InvalidInput for hyper-parameters with which a factory cannot make a method.

    Args:
      factory: a factory of METHODS, or one with the same kind of signature.
      values: name -> value.
      kinds: annotation of each hyper-parameter, see `annotations`.
    """
    for name in sorted(values.keys() - kinds.keys()):
        if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in inspect.signature(factory).parameters.values()):
            break
        if reason := needs_means(factory, name):
            raise InvalidInput(reason)
        raise InvalidInput(
            f"{_name(factory)} has no hyper-parameter {name} (there are {', '.join(kinds)}){ranges.hint(name, kinds)}"
        )
    # In methods of others, a name can mean anything.
    ranges.check(values, kinds, own=not factory.__module__.startswith(f"{__package__}."))


def _name(factory: Callable[..., Method]) -> str:
    """Name of a factory for people; a partial one has that of its function."""
    while isinstance(factory, functools.partial):
        factory = factory.func
    return getattr(factory, "__name__", type(factory).__name__)


def annotations(factory: Callable[..., Method]) -> dict[str, Any]:
    """Annotation of each hyper-parameter of a method, see `hyper_parameters`.

    Args:
      factory: a factory of METHODS, or one with the same kind of signature; an argument without annotation has the
        type of its default.
    """
    found = _own_annotations(factory)
    for recipe in recipes_of(factory):
        found |= get_type_hints(recipe, include_extras=True)
    return found


def _own_annotations(factory: Callable[..., Method]) -> dict[str, Any]:
    """Annotation of each field of the recipe of local training and of each keyword-only argument."""
    found: dict[str, Any] = {**get_type_hints(LocalSGD, include_extras=True), "epochs": int}
    for parameter in inspect.signature(factory, eval_str=True).parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            kind, default = parameter.annotation, parameter.default
            found[parameter.name] = type(default) if kind is inspect.Parameter.empty else kind
    return found


@functools.lru_cache(maxsize=128)
def takes_server_optimizer(factory: Callable[..., Method]) -> bool:
    """Whether `ServerOptimizer` applies to the methods of a factory, which say so themselves (`Method.averaged`).

    Args:
      factory: a factory of METHODS, or one with the same kind of signature. It makes a method of a linear model to see;
        where it cannot, or has an argument of its own with a name of `ServerOptimizer`, the answer is no.
    """
    if {field.name for field in fields(ServerOptimizer)} & inspect.signature(factory).parameters.keys():
        return False
    found = []
    try:
        # Traced, because an array that is computed would start JAX's devices before they are set up.
        jax.eval_shape(lambda: found.append(factory(_LINEAR).averaged))
    except Exception:
        return False
    return found == [True]


_LINEAR = Model(
    init=lambda key: {"backbone": {}, "head": {"kernel": jnp.zeros((2, 2)), "bias": jnp.zeros(2)}},
    features=lambda backbone, inputs: inputs,
    classify=lambda head, features: features @ head["kernel"] + head["bias"],
    num_features=2,
    num_classes=2,
)


def takes_client_privacy(factory: Callable[..., Method]) -> bool:
    """Whether `ClientPrivacy` applies to the methods of a factory, that is whether it is in CLIENT_UNCOVERED."""
    return _is_one_of(factory, CLIENT_UNCOVERED)


def recipes_of(factory: Callable[..., Method]) -> list[type]:
    """Recipes of wrappers whose fields are hyper-parameters of a factory's methods.

    `pfl_jax.make_method` applies them in this order. The optimizer of the server is outermost: its steps are made of
    what the server learns.
    """
    has_means = not _is_one_of(factory, WITHOUT_MEANS)
    applies = {
        Compression: has_means,
        ClientPrivacy: takes_client_privacy(factory),
        ServerMean: has_means,
        ServerOptimizer: takes_server_optimizer(factory),
    }
    return [recipe for recipe, it_does in applies.items() if it_does]


def data_use(factory: Callable[..., Method]) -> DataUse | None:
    """What the methods of a factory compute from a client's examples besides private steps; None if nobody said.

    Args:
      factory: a factory of METHODS, or one with the same kind of signature.
    """
    return DATA_USE.get(factory.__name__) if _is_built_in(factory) else None


def _is_built_in(factory: Callable[..., Method]) -> bool:
    return factory.__module__.startswith(f"{__package__}.")


def _is_one_of(factory: Callable[..., Method], names: Container[str]) -> bool:
    return _is_built_in(factory) and factory.__name__ in names


_FOR_MEANS = {field.name for recipe in (Compression, ServerMean) for field in fields(recipe)}


def needs_means(factory: Callable[..., Method], name: str, word: str | None = None) -> str | None:
    """Error message on a hyper-parameter that the methods of a factory do not take because they send no `Mean`.

    Args:
      factory: a factory of METHODS, or one with the same kind of signature.
      name: of the hyper-parameter.
      word: its name as the user knows it; None for the name itself.

    Returns:
      None for methods that send one, and for other hyper-parameters.
    """
    if not _is_one_of(factory, WITHOUT_MEANS) or name not in _FOR_MEANS:
        return None
    return f"{word or name} is for methods that send a Mean, and the messages of {factory.__name__} have none"


def default_training(factory: Callable[..., Method]) -> LocalSGD:
    """Default recipe of local training of a factory; InvalidInput if it has none."""
    recipe = getattr(inspect.signature(factory).parameters.get("training"), "default", None)
    if not isinstance(recipe, LocalSGD):
        raise InvalidInput(f"{_name(factory)} has no argument training with a default recipe: {SIGNATURE}")
    return recipe


def hyper_parameters(factory: Callable[..., Method]) -> dict[str, Any]:
    """Default hyper-parameters of a method as one flat set.

    They are the fields of its recipe of local training, its own, and those of the recipes of `recipes_of`.

    Args:
      factory: a factory of METHODS, or one with the same kind of signature.

    Returns:
      Name -> default value.
    """
    recipe = default_training(factory)
    own = inspect.signature(factory).parameters.values()
    wrappers = [field for recipe in recipes_of(factory) for field in fields(recipe)]
    return (
        {field.name: getattr(recipe, field.name) for field in fields(LocalSGD)}
        | {parameter.name: parameter.default for parameter in own if parameter.kind is inspect.Parameter.KEYWORD_ONLY}
        | {field.name: field.default for field in wrappers}
    )


def documented_info(factory: Callable[..., Method]) -> dict[str, str]:
    """Entries of a method's `Info` and what its factory's docstring says about them, in the section "Info".

    Args:
      factory: a factory of METHODS, or one with the same kind of signature.

    Returns:
      Name -> shape and meaning; empty if the docstring has no such section.

    Example:
      >>> from pfl_jax.methods import METHODS
      >>> from pfl_jax.methods.factories import documented_info
      >>> documented_info(METHODS["fedproto_g"])
      {'counts': "[K], the cohort's number of examples of each class."}
    """
    section = re.search(r"^Info:\n((?:[ \t]+.*\n?)*)", inspect.getdoc(factory) or "", re.MULTILINE)
    lines = inspect.cleandoc(section[1]) if section else ""
    entries = re.findall(r"^(\w+): (.*(?:\n[ \t]+.*)*)", lines, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}
