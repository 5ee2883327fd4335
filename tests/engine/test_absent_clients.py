"""Clients that drop out or diverge, and clients that never took part."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import diverging, tiny_federation, tiny_method
from rounds import local_results
from trees import assert_same, average, row

from pfl_jax import Diverged, Settings, simulate
from pfl_jax.data import client_data, hold_out
from pfl_jax.engine.cohort import evaluated_clients
from pfl_jax.engine.store import OnHost
from pfl_jax.primitives import score

# One program for each kind of call; operation by operation, each shape would compile a dozen.
score = jax.jit(score, static_argnums=0)


# Of the last two, which some tests hold out, the second one is larger: the largest are trained and evaluated first.
DATA = tiny_federation((9, 20, 5, 14))
KEY = jax.random.key(5)


def first_round(method, settings, **options):
    return next(simulate.run(method, DATA, settings, KEY, **options))


@functools.cache
def by_hand():
    """What all clients hold and send after the first round, one after another: (state before, [result])."""
    state = simulate.build(tiny_method(), simulate.Settings(rounds=1)).jit().init(DATA, KEY)
    return state, local_results(tiny_method(), DATA, state)


def mean_backbone(results, counts):
    return average([result.message.value for result in results.values()], [counts[client] for client in results])


assert_close = functools.partial(assert_same, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("state_on", ["device", pytest.param("host", marks=pytest.mark.slow)])
def test_clients_that_drop_out_keep_their_training_and_send_nothing(state_on):
    method, settings = tiny_method(), simulate.Settings(rounds=1, drop_rate=0.5)
    result = first_round(method, settings, state_on=state_on)
    arrived = result.cohort[result.arrived].tolist()
    assert len(arrived) == 2
    _, results = by_hand()
    counts = np.asarray(DATA.train_count)
    assert_close(result.state.server["backbone"], mean_backbone({i: results[i] for i in arrived}, counts))
    for client in range(4):
        assert_close(row(result.state.clients, client), results[client].client)
    assert not np.isnan(result.trained["accuracy"]).any()
    assert result.diverged.size == 0


def test_one_client_at_least_arrives():
    assert simulate.Settings(rounds=1, drop_rate=0.99).arrivals(4) == 1
    assert simulate.Settings(rounds=1).arrivals(4) == 4
    assert [simulate.Settings(rounds=1, drop_rate=rate).arrivals(5) for rate in (0.25, 0.35, 0.5)] == [4, 3, 3]


@pytest.mark.parametrize("part", ["client", "message"])
@pytest.mark.parametrize("state_on", ["device", pytest.param("host", marks=pytest.mark.slow)])
def test_a_diverged_client_stops_the_run_or_is_left_out(state_on, part):
    """Its state alone may be NaN, or its message alone."""
    # Client 0 has 9 examples.
    settings, method = simulate.Settings(rounds=1), diverging(tiny_method(), 9, part=part)
    with pytest.raises(Diverged, match=r"round 1: .* client 0 is NaN") as caught:
        first_round(method, settings, state_on=state_on)
    assert (caught.value.round, caught.value.clients) == (1, [0])
    result = first_round(method, settings, state_on=state_on, on_nan="skip-client")
    assert result.diverged.tolist() == [0]
    assert result.cohort[~result.arrived].tolist() == [0]
    before, results = by_hand()
    rest = {client: results[client] for client in range(1, 4)}
    assert_close(result.state.server["backbone"], mean_backbone(rest, np.asarray(DATA.train_count)))
    first = jax.tree.map(lambda leaf: leaf[0], (result.state.clients, before.clients))
    jax.tree.map(np.testing.assert_array_equal, *first)
    assert np.isnan(result.trained["accuracy"]).tolist() == [True, False, False, False]
    everyone = diverging(tiny_method(), 9, 20, 14, 5, part=part)
    with pytest.raises(Diverged, match="and 3 more"):
        first_round(everyone, settings, state_on=state_on, on_nan="skip-client")


def test_what_the_server_knows_of_absent_clients_is_that_they_are_absent():
    """One client drops out, and client 1 diverges: what the server computes is for neither."""
    base = diverging(tiny_method(), 20)

    def aggregate(key, server, clients, messages, cohort):
        info = {"counts": cohort.counts, "present": cohort.present}
        return server, jax.tree.map(lambda leaf: jnp.full_like(leaf, 7), clients), info

    settings = simulate.Settings(rounds=1, drop_rate=0.25)
    result = first_round(base._replace(aggregate=aggregate), settings, on_nan="skip-client")
    arrived = np.zeros(4, bool)
    arrived[result.cohort[result.arrived]] = True
    assert arrived.sum() == 2
    assert not arrived[1]
    np.testing.assert_array_equal(result.info["present"], arrived)
    np.testing.assert_array_equal(result.info["counts"], np.where(arrived, DATA.train_count, 0))
    # A client that drops out has trained, and its examples were visited.
    assert result.examples == DATA.train_count.sum()
    before, results = by_hand()
    for client in range(4):
        got = row(result.state.clients, client)
        if arrived[client]:
            assert all((leaf == 7).all() for leaf in jax.tree.leaves(got))
        else:
            assert_close(got, row(before.clients, 1) if client == 1 else results[client].client)


@pytest.mark.parametrize("part", ["server", "clients"])
def test_what_the_server_computed_stops_the_run_if_it_is_not_finite(part):
    method = tiny_method()

    def aggregate(*arguments):
        computed = dict(zip(("server", "clients", "info"), method.aggregate(*arguments), strict=True))
        computed[part] = jax.tree.map(lambda leaf: leaf * jnp.nan, computed[part])
        return tuple(computed.values())

    with pytest.raises(Diverged, match="what the server computed") as caught:
        first_round(method._replace(aggregate=aggregate), simulate.Settings(rounds=1), on_nan="skip-client")
    assert caught.value.clients == []


def test_newcomers_deploy_the_servers_state():
    method, (stay, newcomers) = tiny_method(), hold_out(DATA, 2)
    *_, last = simulate.run(method, stay, simulate.Settings(rounds=2), KEY, newcomers=newcomers)
    received, trained = last.newcomers
    for index, client in enumerate((2, 3)):
        test = client_data(DATA, client, "test")
        deployed = score(method.predict, dict(last.state.server), test)
        np.testing.assert_allclose(received["loss"][index], deployed["loss"], rtol=1e-5)
        assert trained["loss"][index] < received["loss"][index]


def received(seed=0, state_on="device", **settings):
    method = tiny_method("local")
    given = Settings(rounds=2, participation=0.5, **settings)
    results = simulate.run(method, tiny_federation(), given, jax.random.key(seed), state_on=state_on)
    return np.stack([result.received["loss"] for result in results])


def test_a_sample_has_the_scores_of_a_full_evaluation():
    everyone, sample = received(), received(eval_clients=2)
    scored = ~np.isnan(sample)
    assert scored.sum(axis=1).tolist() == [2, 2]
    np.testing.assert_array_equal(scored[0], scored[1])
    np.testing.assert_array_equal(sample[scored], everyone[scored])


def test_an_engine_evaluates_the_sample_of_each_run():
    """One engine with states on the host, which remembers whom it has drawn, and runs of several keys and data."""
    settings = Settings(rounds=1, eval_clients=2)
    engine = simulate.build(tiny_method("local"), settings, store=OnHost())
    data, more, keys = tiny_federation(), tiny_federation((9, 20, 14, 5, 8, 3)), [jax.random.key(0), jax.random.key(1)]
    for federation, key in ((data, keys[0]), (data, keys[1]), (more, keys[1])):
        scored = np.flatnonzero(~np.isnan(engine.evaluate(federation, engine.init(federation, key))["loss"]))
        drawn = evaluated_clients(key, federation.num_clients, settings)
        assert scored.tolist() == drawn.tolist()
