"""A hyper-parameter's value is accepted by both doors or by neither: the command line and the library."""

import functools
import math
from collections.abc import Callable
from typing import Annotated, get_origin

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import tiny_model

from experiments.cli.parser import OptionGroup, options_of, split
from experiments.spec.hyper_parameters import TRAINING_HYPER_PARAMETERS, method_options
from experiments.spec.option_notes import flag
from experiments.spec.options import Options
from pfl_jax import InvalidInput, LocalTraining, make_method
from pfl_jax.methods import METHODS, annotations, recipes_of
from pfl_jax.validation import NotNegative, Positive, Range, Words, describe, literals, parts, range_of
from pfl_jax.wrappers.compression import Compression
from pfl_jax.wrappers.server_mean import ServerMean
from pfl_jax.wrappers.server_optimizer import ServerOptimizer

RECIPE = {"fedavg", "fedpac", "pfedhn"}
"""Methods for which the recipe's own values are tried too, which are the same for all."""


def values(name, kind):
    """Value -> whether it is one: bounds, just outside, not a number, wrong types."""
    for words in getattr(kind, "__metadata__", ()):
        if isinstance(words, Words):
            return texts(words)
    members = parts(kind)
    found = [(word, True) for word in literals(kind)]
    found += [("x", False), (None, type(None) in members), (math.nan, False), (math.inf, False)]
    if bool in members:
        return [*found, (True, True), (False, True), (1, False)]
    found += [(True, False)]
    if int not in members and float not in members:
        return [*found, (1, False), (0.5, False)]
    limits, step = range_of(kind), 1 if float not in members else 1e-6
    found += [(1.5, False), (2.0, False)] if step == 1 else [("1e", False)]
    if limits.low == -math.inf:
        return [*found, (-7 if step == 1 else -7.5, True)]
    low = int(limits.low) if step == 1 else float(limits.low)
    found += [(low, not limits.above), (low + step, True), (low - step, False)]
    if limits.high < math.inf:
        found += [(limits.high, not limits.below), (limits.high - step, True), (limits.high + step, False)]
    return found


def texts(words):
    """Texts -> whether they are what these words can be."""
    found = [(text, True) for text in words.plain]
    found += [("x", False), (None, False), (math.nan, False), (True, False), (1, False), (0.5, False), ("", False)]
    for name, kind in words.numbered.items():
        limits, is_whole = range_of(kind), parts(kind) == (int,)
        step = 1 if is_whole else 1e-6
        for number, right in (
            (limits.low, not limits.above),
            (limits.low + step, True),
            (limits.low - step, False),
            (limits.high, not limits.below),
            (limits.high - step, True),
            (limits.high + step, False),
        ):
            found.append((f"{name}:{number:.9g}", right))
        found += [(f"{name}:", False), (f"{name}:x", False), (f"{name}:nan", False), (f"{name}:inf", False)]
        found += [(f"{name}:{limits.low + 0.5}", False)] if is_whole else []
        found += [(f"{name}:1:2", False), (f"x:{limits.high}", False), (f"{name} 0.1", False)]
    found += [(f"{words.plain[0]}:0.1", f"{words.plain[0]}" in words.numbered)]
    return found


def cases():
    wrapped = {field for recipe in (Compression, ServerMean) for field in recipe.__dataclass_fields__}
    for method, factory in METHODS.items():
        for name, kind in annotations(factory).items():
            # The same for all methods.
            if name in wrapped and method != "fedavg":
                continue
            if name in LocalTraining.__dataclass_fields__ and (
                name not in TRAINING_HYPER_PARAMETERS or method not in RECIPE
            ):
                continue
            yield pytest.param(method, name, kind, id=f"{method}-{name}")


def refusal(call: Callable[[], object]):
    """What a call refuses, None if it does not."""
    try:
        call()
    except InvalidInput as error:
        return str(error)
    return None


def words(name, value, kind):
    if parts(kind) == (bool,) and isinstance(value, bool):
        return [flag(name if value else f"no_{name}")]
    return [f"{flag(name)}={value}"]


@pytest.mark.parametrize(("method", "name", "kind"), list(cases()))
def test_both_doors_have_the_same_verdict(method, name, kind):
    options = options_of(Options) | method_options(method)

    def given(value):
        split(words(name, value, kind), [OptionGroup("", "", options)])

    # A server's numbers are those of an optimizer.
    of_server = name in ServerOptimizer.__dataclass_fields__ and ServerOptimizer in recipes_of(METHODS[method])
    others = {"server_optimizer": "adam"} if of_server else {}
    # Noise is that of clipped sums.
    others |= {"dp_noise": {"dp_clip": 1.0}, "client_noise": {"client_clip": 1.0}}.get(name, {})
    for value, right in values(name, kind):
        said = refusal(lambda value=value: make_method(method, tiny_model(), **others | {name: value}))
        told = refusal(lambda value=value: given(value))
        assert (said is None, told is None) == (right, right), f"{value!r}: {said}; {told}"
        if not right:
            assert name in said
            assert (flag(name) in told) or (f"unknown {name.replace('_', '-')} " in told)
            assert "\n" not in said + told


RECIPE_OF_MINE = LocalTraining()


def mine(
    model,
    training=RECIPE_OF_MINE,
    *,
    heat: Annotated[float, Range(1, 3, below=True)] = 2.0,
    decay=0.5,
    my_lr: NotNegative = 0.1,
    heated: Positive | None = None,
):
    return METHODS["fedavg"](model, training)


@pytest.mark.parametrize(
    ("factory", "given", "message"),
    [
        (mine, {"heat": 3.0}, "heat must be at least 1 and below 3, not 3"),
        (mine, {"decay": math.nan}, "decay must be finite, not nan"),
        (mine, {"epochs": 0}, "epochs must be at least 1, not 0"),
        (functools.partial(mine, heat=1.5), {"typo": 1}, r"^mine has no hyper-parameter typo \(there are "),
        (lambda model, *, heat=1.0: None, {}, r"^<lambda> has no argument training with a default recipe: a method is"),
    ],
)
def test_methods_of_others_are_checked_too(factory, given, message):
    with pytest.raises(InvalidInput, match=message):
        make_method(factory, tiny_model(), **given)


def with_arrays(model, training=LocalTraining(), *, start: jax.Array = jnp.zeros(3), end: jax.Array | None = None):  # noqa: B008
    return METHODS["fedavg"](model, training)


def test_an_array_alone_is_an_array_of_any_shape():
    for value in (jnp.ones(2), jnp.float32(0.5), np.float32(0.5), np.ones(())):
        make_method(with_arrays, tiny_model(), start=value, end=value)
    make_method(with_arrays, tiny_model(), end=None)
    with pytest.raises(InvalidInput, match=r"^start must be an array, not 0\.5$"):
        make_method(with_arrays, tiny_model(), start=0.5)
    with pytest.raises(InvalidInput, match=r"^end must be an array or None, not 'x'$"):
        make_method(with_arrays, tiny_model(), end="x")
    # Beside a number's type it is a number that may be traced.
    assert describe(float | jax.Array) == "a number"


def test_every_annotation_says_what_it_is():
    """A type that nothing checks would let every value pass, and so would a number without a range."""
    for factory in METHODS.values():
        for name, kind in annotations(factory).items():
            numbers = {int, float} & {*parts(kind)}
            assert not numbers or range_of(kind) != Range(), f"{factory.__name__}: {name} has no range"
            for part in parts(kind):
                known = part in (int, float, bool, str, type(None)) or get_origin(part) is not None
                assert known or part.__module__.startswith(("jax", "optax")), f"{factory.__name__}: {name} is {part}"


@pytest.mark.parametrize("method", METHODS)
def test_factories_check_their_arguments_also_without_make_method(method):
    with pytest.raises(InvalidInput, match="model must be a Model"):
        METHODS[method](None)
