"""Clients that drop out or diverge, and clients that never took part."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import HYPER_PARAMETERS, tiny_federation, tiny_model

from pfl_jax import simulate
from pfl_jax.data.federated import client_data, hold_out
from pfl_jax.engine import rounds
from pfl_jax.errors import Diverged, InvalidInput
from pfl_jax.methods import METHODS, make_method
from pfl_jax.primitives.metrics import score

DATA = tiny_federation()
KEY = jax.random.key(5)


def make(name="fedper"):
    return make_method(name, tiny_model(), **HYPER_PARAMETERS)


def broken_for(*sizes, name="fedper"):
    """A method whose local training ends in NaN for clients with so many training examples."""
    method = make(name)

    def local(key, server, client, data):
        result = method.local(key, server, client, data)
        broken = jnp.isin(jnp.sum(data.mask), jnp.array(sizes))
        return jax.tree.map(lambda leaf: jnp.where(broken, jnp.nan, leaf), result)

    return method._replace(local=local)


def first_round(method, settings, **options):
    return next(simulate.run(method, DATA, settings, KEY, **options))


def by_hand(method, clients):
    """What these clients hold and send after the first round, one after another: (server before, {client: result})."""
    state = rounds.build(method, simulate.Settings(rounds=1)).init(DATA, KEY)
    results = {}
    for client in clients:
        key = jax.random.fold_in(jax.random.fold_in(KEY, 0), client)
        row = jax.tree.map(lambda leaf, i=client: leaf[i], state.clients)
        results[client] = method.local(key, state.server, row, client_data(DATA, client, "train"))
    return state, results


def mean_backbone(results, counts):
    weights = np.array([counts[client] for client in results], np.float64)

    def mean(*leaves):
        return np.tensordot(weights / weights.sum(), np.stack(leaves).astype(np.float64), 1)

    return jax.tree.map(mean, *[result.message.value for result in results.values()])


def assert_close(left, right):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), left, right)


@pytest.mark.parametrize("state_on", ["device", "host"])
def test_who_drops_out_keeps_its_training_and_sends_nothing(state_on):
    method, settings = make(), simulate.Settings(rounds=1, drop_rate=0.5)
    result = first_round(method, settings, state_on=state_on)
    arrived = result.cohort[result.arrived].tolist()
    assert len(arrived) == 2
    _, results = by_hand(method, range(4))
    counts = np.asarray(DATA.train_count)
    assert_close(result.state.server["backbone"], mean_backbone({i: results[i] for i in arrived}, counts))
    for client in range(4):
        assert_close(jax.tree.map(lambda leaf, i=client: leaf[i], result.state.clients), results[client].client)
    assert not np.isnan(result.trained.accuracy).any()
    assert result.diverged.size == 0


def test_drop_outs_are_drawn_anew_and_somebody_always_arrives():
    settings = simulate.Settings(rounds=6, drop_rate=0.5)
    results = list(simulate.run(make("fedavg"), DATA, settings, KEY))
    assert len({tuple(sorted(result.cohort[result.arrived])) for result in results}) > 1
    assert simulate.Settings(rounds=1, drop_rate=0.99).arrivals(4) == 1
    assert simulate.Settings(rounds=1).arrivals(4) == 4


@pytest.mark.parametrize("state_on", ["device", "host"])
def test_a_diverged_client_stops_the_run_or_is_left_out(state_on):
    # Client 0 has 9 examples.
    settings = simulate.Settings(rounds=1)
    with pytest.raises(Diverged, match=r"round 1: .* client 0 is NaN") as caught:
        first_round(broken_for(9), settings, state_on=state_on)
    assert (caught.value.round, caught.value.clients) == (1, [0])
    result = first_round(broken_for(9), settings, state_on=state_on, on_nan="skip-client")
    assert result.diverged.tolist() == [0]
    assert result.cohort[~result.arrived].tolist() == [0]
    before, results = by_hand(make(), range(1, 4))
    assert_close(result.state.server["backbone"], mean_backbone(results, np.asarray(DATA.train_count)))
    first = jax.tree.map(lambda leaf: leaf[0], (result.state.clients, before.clients))
    jax.tree.map(np.testing.assert_array_equal, *first)
    assert np.isnan(result.trained.accuracy).tolist() == [True, False, False, False]
    with pytest.raises(Diverged, match="and 3 more"):
        first_round(broken_for(9, 20, 14, 5), settings, state_on=state_on, on_nan="skip-client")


def test_skipping_changes_nothing_where_all_is_well():
    settings = simulate.Settings(rounds=2, participation=0.75, drop_rate=0.3)
    usual, skipping = (
        list(simulate.run(make("fedpac"), DATA, settings, KEY, on_nan=on_nan))[-1] for on_nan in ("stop", "skip-client")
    )
    assert_close(skipping.state._replace(key=()), usual.state._replace(key=()))


def test_a_server_that_diverges_stops_the_run():
    method = make("fedavg")

    def aggregate(key, server, clients, messages, cohort):
        server, clients, info = method.aggregate(key, server, clients, messages, cohort)
        return jax.tree.map(lambda leaf: leaf / 0.0, server), clients, info

    with pytest.raises(Diverged, match="what the server computed") as caught:
        first_round(method._replace(aggregate=aggregate), simulate.Settings(rounds=1), on_nan="skip-client")
    assert caught.value.clients == []


def check_newcomers(name):
    method = make(name)
    stay, newcomers = hold_out(DATA, 2)
    assert (stay.num_clients, newcomers.num_clients) == (2, 2)
    *_, last = simulate.run(method, stay, simulate.Settings(rounds=2), KEY, newcomers=newcomers)
    received, trained = last.newcomers
    for scores in (received, trained):
        for values in scores:
            assert values.shape == (2,)
            assert np.isfinite(values).all()
    return method, last


def test_newcomers_have_the_servers_state_alone():
    method, last = check_newcomers("fedper")
    received, trained = last.newcomers
    server = last.state.server
    for index, client in enumerate((2, 3)):
        test = client_data(DATA, client, "test")
        deployed = {"backbone": server["backbone"], "head": server["head"]}
        np.testing.assert_allclose(received.loss[index], score(method.predict, deployed, test).loss, rtol=1e-5)
        assert trained.loss[index] < received.loss[index]


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_method_adapts_to_newcomers(name):
    check_newcomers(name)


def test_somebody_must_stay():
    for number in (0, 4):
        with pytest.raises(InvalidInput, match=f"1 to 3 can be held out, not {number}"):
            hold_out(DATA, number)
