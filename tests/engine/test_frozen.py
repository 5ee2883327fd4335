"""Frozen parameters are an argument of compiled programs, held once for all clients."""

import jax
import numpy as np
import pytest
from problems import tiny_federation

import pfl_jax
from pfl_jax import LocalTraining, Settings, methods, models
from pfl_jax.engine import simulate
from pfl_jax.networks.adapters import lora

DATA = tiny_federation()
SHAPE = DATA.x.shape[1:]
TRAINING = LocalTraining(lr=0.1, batch_size=4, epochs=1)


def adapted(hidden=(16, 16)):
    return lora(models.mlp(SHAPE, DATA.num_classes, hidden), SHAPE, rank=2, targets="fc")


def last(method, **options):
    *_, result = simulate.run(method, DATA, Settings(rounds=2, chunk=2), jax.random.key(0), **options)
    return result


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedper", {"mesh": True}),
        pytest.param("fedper", {"state_on": "host"}, marks=pytest.mark.slow),
        pytest.param("ditto", {}, marks=pytest.mark.slow),
        pytest.param("fedas", {"mesh": True}, marks=pytest.mark.slow),
    ],
)
def test_runs_are_those_of_a_model_that_closes_over_its_base(name, options):
    model = adapted()
    options = {"mesh": simulate.client_mesh()} if "mesh" in options else options
    passed, closed = (
        last(getattr(methods, name)(one, TRAINING), **options) for one in (model, model._replace(frozen=None))
    )
    for one, other in zip(jax.tree.leaves(passed.state.server), jax.tree.leaves(closed.state.server), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(passed.received["accuracy"], closed.received["accuracy"], atol=1e-6)


def lowered(model, chunk, data=DATA):
    method = methods.fedper(model, TRAINING)
    engine = pfl_jax.build(method, Settings(rounds=1, chunk=chunk)).jit()
    data = data.with_frozen(model.frozen)
    state = jax.eval_shape(engine.init, data, jax.random.key(0))
    return engine.round.lower(data, state, data.num_clients)


def test_memory_grows_by_adapters_and_activations_alone():
    model, data = adapted((1024, 1024)), tiny_federation([8] * 32)
    base = sum(leaf.nbytes for leaf in jax.tree.leaves(model.frozen.values))
    one, some, all_ = (lowered(model, chunk, data).compile().memory_analysis() for chunk in (1, 8, 32))
    assert one.argument_size_in_bytes == some.argument_size_in_bytes == all_.argument_size_in_bytes
    assert base < one.argument_size_in_bytes < 1.3 * base
    for fewer, more, clients in ((one, some, 7), (some, all_, 24)):
        assert more.temp_size_in_bytes - fewer.temp_size_in_bytes < clients * base / 8


def test_the_program_does_not_grow_with_the_base():
    small, large = (len(lowered(adapted((width, width)), 2).as_text()) for width in (16, 1024))
    assert large < 1.1 * small
