"""Which parts of a message a client trained from received parameters, for every method."""

import jax
import jax.numpy as jnp
import pytest
from message_shapes import message_shapes

from pfl_jax.messages import has_means, is_mean, reference
from pfl_jax.methods import METHODS

PARTS = {
    # The change of the control variate is near nothing that was received.
    "scaffold": {"params"},
    # Class means are single arrays.
    "fedpac": {"backbone"},
    # Each adapter is a mean of its own.
    "hetlora": {"head"},
    "fedproto_g": set(),
}
"""Methods with a `Mean` that is not trained from what the client received -> names of the parts that are."""


@pytest.mark.parametrize("name", METHODS)
def test_received_parts_of_every_method(name):
    _, _, message, known = message_shapes(name)
    found = {}
    for path, part in jax.tree_util.tree_leaves_with_path(message, is_leaf=is_mean):
        if is_mean(part):
            base, flags = reference(part.value, known)
            assert jax.tree.structure(base) == jax.tree.structure(part.value)
            for inner, flag in jax.tree_util.tree_leaves_with_path(flags):
                found[jax.tree_util.keystr((*path, *inner), simple=True, separator=".")] = flag
    assert bool(found) == has_means(message)
    if name in PARTS:
        parts = {path.split(".")[0] for path, flag in found.items() if flag}
        assert parts == PARTS[name]
        assert not all(found.values())
    else:
        assert all(found.values())


def test_the_reference_is_what_was_received():
    params = {"kernel": jnp.ones((2, 3)), "bias": jnp.zeros(3)}
    other = jax.tree.map(lambda leaf: leaf + 7, params)
    server = {"params": params, "round": jnp.zeros(())}
    base, flags = reference(other, server)
    assert (base["kernel"] == 1).all()
    assert all(jax.tree.leaves(flags))
    # Two that fit: only a name can tell.
    twice = {"params": params, "control": other}
    assert not any(jax.tree.leaves(reference(params, twice)[1]))
    named, flags = reference({"params": params, "change": params}, twice)
    assert flags["params"]["bias"] is True
    assert (named["params"]["kernel"] == 1).all()
    assert flags["change"]["bias"] is False
    assert not named["change"]["kernel"].any()
    # Another type is another thing.
    assert not any(jax.tree.leaves(reference(jax.tree.map(jnp.int32, params), server)[1]))
    assert reference((), server) == ((), ())
