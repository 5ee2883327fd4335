"""Runs of a sweep against the same runs alone, and what sweeps say and refuse."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import HYPER_PARAMETERS, tiny_federation, tiny_method, tiny_model

from pfl_jax import InvalidInput, simulate, sweep
from pfl_jax.data import federate_runs, load, partition
from pfl_jax.methods import make_method
from pfl_jax.primitives import byte_count

SETTINGS = simulate.Settings(rounds=3, participation=0.75, full_last_round=True, eval_every=2)
SEEDS, RATES = (0, 1, 1), (0.1, 0.1, 0.02)


def keys(seeds):
    return jax.vmap(jax.random.key)(jnp.asarray(seeds))


def assert_same_run(alone, together, index):
    """A run's results, round by round, against its row in a sweep's."""
    for one, every in zip(alone, together, strict=True):
        assert (one.round, one.examples) == (every.round, every.examples[index])
        assert len(every.examples) == len(every.cohort)
        np.testing.assert_array_equal(one.cohort, every.cohort[index])
        np.testing.assert_allclose(one.trained["loss"], every.trained["loss"][index], rtol=2e-4, atol=2e-5)
        assert (one.received is None) == (every.received is None)
        if one.received is not None:
            np.testing.assert_allclose(one.received["loss"], every.received["loss"][index], rtol=2e-4, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "chunk", "devices"), [("fedpac", 1, 2), ("ditto", None, 1)])
def test_each_run_equals_the_same_run_alone(name, chunk, devices):
    data = tiny_federation()

    def make(**values):
        return make_method(name, tiny_model(), **HYPER_PARAMETERS | values)

    # Three runs do not divide by two devices.
    mesh = simulate.client_mesh() if devices == 2 else None
    together = list(sweep.run(make, data, SETTINGS, keys(SEEDS), {"lr": jnp.array(RATES)}, chunk=chunk, mesh=mesh))
    # All states stay usable.
    first, _, last = (jax.tree.map(np.asarray, result.state.server) for result in together)
    assert not np.allclose(*(jax.tree.leaves(server)[0] for server in (first, last)))
    alone = []
    for result in simulate.run(make(lr=RATES[2]), data, SETTINGS, jax.random.key(SEEDS[2])):
        alone.append(result)
        server = result.state.server
    assert_same_run(alone, together, 2)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b[2], rtol=2e-4, atol=2e-5), server, last)
    for other in (0, 1):
        assert not np.allclose(together[-1].trained["loss"][2], together[-1].trained["loss"][other])


def test_a_sweep_says_whose_server_diverged():
    method = tiny_method("fedavg")

    def broken(lam):
        def aggregate(*arguments):
            server, clients, info = method.aggregate(*arguments)
            return jax.tree.map(lambda leaf: leaf / lam, server), clients, info

        return method._replace(aggregate=aggregate)

    settings, values = simulate.Settings(rounds=1), {"lam": jnp.array([1.0, 0.0])}
    (result,) = sweep.run(broken, tiny_federation(), settings, keys([0, 1]), values)
    assert result.finite.all(axis=1).tolist() == [True, False]


@pytest.mark.parametrize("on_nan", ["stop", "skip-client"])
def test_a_run_of_a_sweep_has_no_scores_from_the_round_on_in_which_it_diverges_alone(on_nan):
    """Runs in which nobody, one client, and all clients of the second round diverge."""
    method, data, values = tiny_method("fedavg"), tiny_federation(), {"dose": jnp.array([0.0, 1.0, 2.0])}
    first = jax.tree.leaves(simulate.build(method, SETTINGS).init(data, jax.random.key(0)).server)[0]

    def sick(dose):
        def local(key, server, client, data):
            result, later = method.local(key, server, client, data), (jax.tree.leaves(server)[0] != first).any()
            largest = jnp.sum(data.mask) == data.mask.shape[0]
            broken = later & jnp.where(dose == 1, largest, dose == 2)
            return result._replace(message=jax.tree.map(lambda leaf: jnp.where(broken, jnp.nan, leaf), result.message))

        return method._replace(local=local)

    settings = simulate.Settings(rounds=3, before_aggregation=True)
    results = list(sweep.run(sick, data, settings, keys([0, 0, 0]), values, on_nan=on_nan))
    wanted = [[False] * 3, *[[False, on_nan == "stop", True]] * 2]
    assert [one.ended.tolist() for one in results] == wanted
    for one in results:
        for scores in (one.received, one.trained, one.before_aggregation):
            assert np.isnan(scores["loss"]).all(axis=1).tolist() == one.ended.tolist()
    # All means of a round without messages would be zero.
    server = jax.tree.leaves(results[-1].state.server)[0]
    np.testing.assert_array_equal(server[2], jax.tree.leaves(results[0].state.server)[0][2])


def test_runs_must_agree_in_number():
    def make(**values):
        return make_method("fedavg", tiny_model(), **values)

    with pytest.raises(InvalidInput, match=r"keys has shape \(2,\), but lr \(3,\)"):
        sweep.run(make, tiny_federation(), SETTINGS, keys([0, 1]), {"lr": jnp.ones(3)})
    dataset = load("digits")
    parts = [partition.iid(dataset, clients, train_size=5, test_size=5) for clients in (2, 3)]
    with pytest.raises(InvalidInput, match="of as many clients"):
        federate_runs(dataset, parts)


def test_the_memory_of_a_run_grows_with_its_clients():
    def make(**values):
        return make_method("ditto", tiny_model(), **values)

    few, many = tiny_federation(), tiny_federation((9,) * 12)
    small = sweep.bytes_of_runs(make, few, SETTINGS, {"lr": 0.1})
    large = sweep.bytes_of_runs(make, many, SETTINGS, {"lr": 0.1})
    model = byte_count(tiny_model().init(jax.random.key(0)))
    # One personal model more for each client, twice.
    assert large - small > 8 * 2 * model


def test_raw_keys_are_the_keys_that_they_stand_for():
    settings, raw = simulate.Settings(rounds=1), np.asarray([jax.random.PRNGKey(0), jax.random.PRNGKey(1)])
    make = functools.partial(tiny_method, "local")
    got, want = (next(sweep.run(make, tiny_federation(), settings, each)) for each in (raw, keys([0, 1])))
    np.testing.assert_array_equal(got.received["loss"], want.received["loss"])


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_states_of_other_runs_are_refused_at_once(devices):
    def make(name):
        return lambda: tiny_method(name)

    mesh = None if devices == 1 else simulate.client_mesh(jax.devices()[:devices])
    settings, data = simulate.Settings(rounds=3), tiny_federation()
    first, second = list(sweep.run(make("fedavg"), data, replace(settings, rounds=2), keys([0, 1, 2]), mesh=mesh))
    again = sweep.run(make("fedavg"), data, settings, keys([0, 1, 2]), states=first.state, mesh=mesh)
    assert [result.round for result in again] == [2, 3]
    for changes, match in (
        ({"keys": keys(range(5))}, "states has [34] runs, and keys 5"),
        ({"make_method": make("local")}, "states? is of another method"),
        ({"settings": replace(settings, rounds=1)}, "completed 2 rounds, and settings.rounds is 1"),
        ({"states": 3}, "states must be a State"),
        (
            {"states": second.state._replace(round=second.state.round.at[0].set(1))},
            "states has runs of 1 and of 2 completed rounds",
        ),
    ):
        right = {"make_method": make("fedavg"), "data": data, "settings": settings, "keys": keys([0, 1, 2])}
        with pytest.raises(InvalidInput, match=match):
            sweep.run(**right | {"states": second.state, "mesh": mesh} | changes)
