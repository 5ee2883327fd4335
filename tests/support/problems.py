"""Tiny federations and models that several test files share."""

import functools

import jax
import jax.numpy as jnp

from pfl_jax import models
from pfl_jax.engine import mapping
from pfl_jax.messages import join, split
from pfl_jax.methods import METHODS, make_method
from pfl_jax.methods.factories import is_for_adapters
from pfl_jax.networks import adapters
from pfl_jax.testing.problems import (  # noqa: F401
    CLASSES,
    FEATURES,
    HYPER_PARAMETERS,
    SHAPE,
    tiny_federation,
    tiny_model,
)


def adapted_model(rank=3, scale=2.0):
    """A perceptron with adapters on both layers of its backbone."""
    return adapters.lora(models.mlp(SHAPE, 3, hidden=(6, 5)), SHAPE, rank=rank, alpha=scale * rank, targets="fc")


def usual_model(name):
    """The tiny model, or one with adapters for a method that is made for them."""
    return adapted_model() if is_for_adapters(METHODS[name]) else tiny_model()


@functools.cache
def tiny_method(name="fedper", **more):
    """A method for the tiny model, one object for equal arguments, so that its programs are compiled once."""
    return make_method(name, tiny_model(), **HYPER_PARAMETERS | more)


def diverging(method, *sizes, part=None, when=True):
    """The method whose local training, or one part of its result, ends in NaN for clients of so many examples."""

    def local(key, server, client, data):
        result = method.local(key, server, client, data)
        broken = jnp.isin(jnp.sum(data.mask), jnp.array(sizes)) & when
        spoiled = jax.tree.map(lambda leaf: jnp.where(broken, jnp.nan, leaf).astype(leaf.dtype), result)
        return spoiled if part is None else result._replace(**{part: getattr(spoiled, part)})

    return method._replace(local=local)


def received(messages, present=None):
    """What the server gets of the clients' messages, stacked along M."""
    leaves = jax.tree.leaves(messages)
    if not leaves:
        return messages
    rows, terms = jax.vmap(split)(messages, jnp.ones(len(leaves[0]), bool) if present is None else present)
    return join(rows, mapping.add_up(terms))
