"""Methods that change with the round: each round has its own hyper-parameters, in runs, on the host and in sweeps."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import HYPER_PARAMETERS, tiny_federation, tiny_model

from pfl_jax import simulate, sweep
from pfl_jax.engine.cohort import Settings
from pfl_jax.methods import make_method

RATES = jnp.array([0.2, 0.05, 0.0])
KEY = jax.random.key(6)


def method(lr, name="fedper"):
    return make_method(name, tiny_model(), **HYPER_PARAMETERS | {"lr": lr})


def one_after_another(rounds, data):
    """The state after as many rounds, each by an engine of its own with that round's rate."""
    settings = Settings(rounds=rounds, participation=0.5)
    state = simulate.build(method(0.1), settings).jit().init(data, KEY)
    play = jax.jit(lambda lr, data, state: simulate.build(method(lr), settings).round(data, state, 2)[0])
    for rate in RATES[:rounds]:
        state = play(rate, data, state)
    return state


def test_each_round_has_its_own_rate():
    data, settings = tiny_federation(), Settings(rounds=3, participation=0.5)
    *_, before, last = simulate.run(lambda index: method(RATES[index]), data, settings, KEY)
    want = one_after_another(3, data)
    chex.assert_trees_all_close(last.state.server, want.server, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(last.state.clients, want.clients, rtol=1e-5, atol=1e-6)
    # The last rate is zero: the round before has the same server, which every client receives.
    np.testing.assert_allclose(last.received["loss"], before.received["loss"], rtol=1e-5)


@pytest.mark.slow
def test_clients_fine_tune_as_in_the_last_round():
    data, settings = tiny_federation(), Settings(rounds=3)
    tuned, untuned = (
        list(simulate.run(lambda index: method(RATES[index], name), data, settings, KEY))  # noqa: B023
        for name in ("fedavg_ft", "fedavg")
    )
    # The third round's rate is zero, those before are not.
    for index, same in enumerate((False, False, True)):
        near = np.allclose(tuned[index].received["loss"], untuned[index].received["loss"], atol=1e-6)
        assert near == same


@pytest.mark.slow
def test_the_scale_of_a_schedule_can_be_swept():
    data, settings = tiny_federation(), Settings(rounds=2)

    def make(lr):
        return lambda index: method(lr * RATES[index])

    keys = jax.vmap(jax.random.key)(jnp.array([6, 6]))
    *_, together = sweep.run(make, data, settings, keys, {"lr": jnp.array([1.0, 0.5])})
    for index, scale in enumerate((1.0, 0.5)):
        *_, alone = simulate.run(lambda r: method(scale * RATES[r]), data, settings, KEY)  # noqa: B023
        np.testing.assert_allclose(together.received["loss"][index], alone.received["loss"], rtol=1e-4, atol=1e-5)
