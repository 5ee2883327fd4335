"""What changes with the round, and what is asked of all clients before the first one."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import HYPER_PARAMETERS, tiny_federation, tiny_method, tiny_model

from pfl_jax import Mean, Settings, simulate
from pfl_jax.base import Survey
from pfl_jax.data import client_data
from pfl_jax.engine.store import OnHost
from pfl_jax.methods import make_method
from pfl_jax.wrappers.server_optimizer import ServerOptimizer, server_optimized

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


SETTINGS = Settings(rounds=1)


def asking(wrapped=False):
    """FedAvg whose server's head starts at the mean input of all clients, each counted once."""
    base = tiny_method("fedavg")

    def local(key, server, data):
        total = jnp.sum(jnp.where(data.mask[:, None], data.x.reshape(len(data.mask), -1)[:, :3], 0), axis=0)
        return {
            "mean": Mean(total / jnp.sum(data.mask), jnp.ones(())),
            "draw": Mean(jax.random.normal(key), jnp.ones(())),
        }

    def aggregate(server, means):
        bias = means["mean"].value + 1e-6 * means["draw"].value
        return {**server, "head": {**server["head"], "bias": bias}}

    method = base._replace(survey=Survey(local, aggregate))
    return server_optimized(method, ServerOptimizer("adam")) if wrapped else method


def start(data=None, store=None, **settings):
    engine = simulate.build(asking(), Settings(rounds=1, **settings), store=store)
    # The engine with states on the host is compiled already.
    engine = engine.jit() if store is None else engine
    return engine.init(data or tiny_federation(), jax.random.key(0)).server


def test_the_servers_state_has_the_mean_over_all_clients():
    data = tiny_federation()
    rows = [client_data(data, client, "train") for client in range(4)]
    means = [np.asarray(one.x)[np.asarray(one.mask)].reshape(-1, 6)[:, :3].mean(0) for one in rows]
    got = start()["head"]["bias"]
    np.testing.assert_allclose(got, np.mean(means, axis=0), atol=1e-5)
    # Each client has a key of its own.
    assert np.abs(np.asarray(got) - np.mean(means, axis=0)).max() < 1e-4
    wrapped = simulate.build(asking(wrapped=True), SETTINGS).init(data, jax.random.key(0)).server
    np.testing.assert_allclose(wrapped.plain["head"]["bias"], got, rtol=1e-5)


def test_chunks_and_hosts_change_nothing():
    want = start()
    for one in (start(chunk=3), start(store=OnHost())):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), one, want)
