"""What a server asks of all clients before the first round: the same on every engine, and not asked by most."""

import jax
import jax.numpy as jnp
import numpy as np
from problems import tiny_federation, tiny_method

from pfl_jax import simulate
from pfl_jax.base import Mean, Survey
from pfl_jax.data.federated import client_data
from pfl_jax.engine.simulate import Settings
from pfl_jax.engine.store import OnHost
from pfl_jax.wrappers.server_optimizer import ServerOptimizer, server_optimized

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
