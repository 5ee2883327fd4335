"""Servers that keep more than those of the plain method: the page's server momentum, chains of wrappers, privacy."""

import re
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest
from full_batches import run
from problems import HYPER_PARAMETERS, tiny_federation, tiny_model

from pfl_jax.engine import simulate
from pfl_jax.messages import received
from pfl_jax.methods import fedavg, feddbe, fedpac, fedper, make_method
from pfl_jax.methods.factories import recipes_of
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.wrappers import with_server_state
from pfl_jax.wrappers.client_privacy import ClientPrivacy

KEY = jax.random.key(0)

PAGE = (Path(__file__).parents[2] / "docs/your-model-and-method.md").read_text()
(BLOCK,) = (text for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "with_server_state" in text)
NAMES: dict[str, Any] = {}
exec(compile(BLOCK, "docs/your-model-and-method.md", "exec"), NAMES)
momentum_fedavg = NAMES["momentum_fedavg"]


def counting(method):
    """A counter of rounds, which changes nothing else."""
    return with_server_state(method, lambda server: jnp.zeros((), jnp.int32), lambda rounds, _, new: (new, rounds + 1))


def counted_momentum(model, training=LocalTraining()):
    return counting(momentum_fedavg(model, training))


def counted_fedper(model, training=LocalTraining()):
    return counting(fedper(model, training))


def test_momentum_is_that_of_the_servers_sgd():
    mine, built_in = run(momentum_fedavg, 3), run(fedavg, 3, server_optimizer="sgd", server_momentum=0.9)
    chex.assert_trees_all_close(mine.state.server.plain, built_in.state.server.plain, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(mine.received["loss"], built_in.received["loss"], rtol=1e-5)


def test_a_chain_keeps_every_state():
    once, twice = run(momentum_fedavg, 3), run(counted_momentum, 3)
    assert int(twice.state.server.extra) == 3
    chex.assert_trees_all_equal(twice.state.server.plain, once.state.server)


@pytest.mark.parametrize("factory", [fedpac, feddbe])
def test_clients_see_the_plain_server(factory):
    plain = factory(tiny_model(), LocalTraining())
    method, server = counting(plain), jax.eval_shape(plain.init_server, KEY)
    assert method.privacy == plain.privacy
    assert method.predict is plain.predict
    extended = jax.eval_shape(method.init_server, KEY)
    client = object()
    assert extended.plain == server
    assert received(method, extended, client) == received(plain, server, client)


def test_it_is_no_mean_of_parameters_any_more():
    assert fedavg(tiny_model()).averaged
    assert not momentum_fedavg(tiny_model()).averaged
    assert ClientPrivacy in recipes_of(momentum_fedavg)


@pytest.mark.parametrize(
    ("factory", "values"),
    [
        (momentum_fedavg, {"compress": "sign"}),
        (counted_fedper, {"client_clip": 0.5}),
        (counted_fedper, {"server_mean": "median"}),
    ],
)
def test_other_wrappers_go_around_it(factory, values):
    """The plain method with the same wrapper, as far as the server has it."""
    model, settings, data = tiny_model(), simulate.Settings(rounds=1), tiny_federation()
    inside = {momentum_fedavg: "fedavg", counted_fedper: "fedper"}[factory]
    states = []
    for name in (factory, inside):
        engine = simulate.build(make_method(name, model, **HYPER_PARAMETERS, **values), settings).jit()
        state = engine.init(data, KEY)
        states.append(engine.round(data, state, 4)[0])
    # Momentum is not seen in the first round.
    chex.assert_trees_all_close(states[0].server.plain, states[1].server, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(states[0].clients, states[1].clients, rtol=1e-5, atol=1e-6)
