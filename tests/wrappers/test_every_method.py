"""Every wrapper over every method: limits change nothing, what may not change does not, and all else is refused."""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import HYPER_PARAMETERS, received, tiny_federation, usual_model
from wrapped import (
    COHORT,
    NEUTRAL,
    NO_OPTION,
    USUAL,
    WRAPPERS,
    at_server,
    first_round,
    made,
    refusal,
    trained,
    wrapped_round,
)

from pfl_jax import InvalidInput, Mean
from pfl_jax.messages import is_mean, may_change
from pfl_jax.methods import METHODS, make_method

EVERY = tuple(text for values in WRAPPERS.values() for text in values)
KINDS = ("fedpac", "fedselect", "fd", "fedgen", "hetlora")
"""Methods that send class means beside parameters and other arrays; entries with weights of their own; probabilities;
shares; adapters with weights of their own."""

CASES = [*((name, USUAL) for name in KINDS), *(pytest.param(name, EVERY, marks=pytest.mark.slow) for name in METHODS)]


def plain(method):
    return method


def parts(message):
    return jax.tree.leaves(message, is_leaf=is_mean)


def close(left, right):
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return all(np.allclose(one, other, rtol=1e-5, atol=2e-6) for one, other in pairs)


def of_equal_clients(message):
    """What the server gets where all clients count alike in the mean of parameters."""
    part = message if isinstance(message, Mean) else message.backbone
    part = part._replace(weight=jnp.ones_like(part.weight))
    return received(part if isinstance(message, Mean) else message._replace(backbone=part))


def is_taken(name, option, text):
    # With trimmed:0 nothing is wrapped.
    return text == "trimmed:0" or not refusal(name, option)


@functools.cache
def at_servers(name, texts):
    """Option and value -> what the method's aggregation gets; None for the method without a wrapper."""
    taken = {
        (option, text): wrapper
        for option, values in WRAPPERS.items()
        for text, wrapper in values.items()
        if text in texts and is_taken(name, option, text)
    }
    return dict(zip((None, *taken), at_server(name, [plain, *taken.values()]), strict=True))


@pytest.mark.parametrize(("name", "texts"), CASES)
def test_a_wrapped_method_is_right_or_refused(name, texts):
    method, (server, clients, results) = made(name), trained(name)
    changeable = any(map(may_change, parts(results.message)))
    for option, values in WRAPPERS.items():
        words = refusal(name, option)
        assert "\n" not in words
        if option in ("--compress", "--server-mean", "--attack"):
            # An option that would change nothing is not ignored.
            assert bool(words) != changeable
        for text in [one for one in values if one in texts and not is_taken(name, option, one) and words != NO_OPTION]:
            with pytest.raises(InvalidInput) as raised:
                jax.eval_shape(partial(wrapped_round, method, values[text]), server, clients, results)
            assert str(raised.value).replace("attack signs", "attack noise") == words
    aggregate, seen = jax.jit(method.aggregate), at_servers(name, texts).copy()
    unchanged = seen.pop(None)
    for (option, text), got in seen.items():
        where = f"{option} {text}"
        if text in NEUTRAL:
            assert close(got, of_equal_clients(results.message) if option == "--client-clip" else unchanged), where
            continue
        assert close(got, unchanged) != changeable, f"{where} changes nothing"
        for sent, one, other in zip(*map(parts, (results.message, got, unchanged)), strict=True):
            if not may_change(sent):
                assert all(map(np.array_equal, jax.tree.leaves(one), jax.tree.leaves(other))), where
        for leaf in jax.tree.leaves(aggregate(jax.random.key(7), server, results.client, got, COHORT)):
            assert np.isfinite(leaf).all(), where


def test_what_may_not_change_is_in_its_range():
    """Shares of classes, which are one in all, and a distribution for each class with the number of its holders."""
    for message in at_servers("fedgen", USUAL).values():
        assert (message.shares.value >= 0).all()
        np.testing.assert_allclose(message.shares.value.sum(), 1, rtol=1e-6)
    for outputs in at_servers("fd", USUAL).values():
        np.testing.assert_array_equal(outputs.weight, np.round(outputs.weight))
        np.testing.assert_allclose(outputs.value.sum(axis=1), outputs.weight > 0, rtol=1e-6)


WHOLE = (16, 8, 24, 16)
"""Examples of clients whose mini-batches of 8 are all whole: the sum of a private step is divided by 8."""
WITH_HELD_OUT = (20, 10, 30, 20)
"""The same where a fifth of them is held out."""


@pytest.mark.parametrize(
    "name", [name if name == "flexlora" else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]
)
def test_private_steps_with_a_clip_that_is_never_reached_are_ordinary_ones(name):
    words, model = refusal(name, "--dp-clip"), usual_model(name)
    if words:
        assert words.startswith(f"{name} cannot train with dp_clip: ")
        return
    ordinary, private = (make_method(name, model, **HYPER_PARAMETERS, dp_clip=clip) for clip in (None, 1e9))
    data = tiny_federation(WITH_HELD_OUT if name == "fedfomo" else WHOLE).with_frozen(model.frozen)
    want, got = (jax.jit(partial(first_round, method))(data)[2] for method in (ordinary, private))
    for leaf, other in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(other, leaf, rtol=1e-3, atol=1e-5)
