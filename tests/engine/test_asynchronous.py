"""Asynchronous rounds: a step against float64 NumPy, the synchronous limit, and what changes nothing."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from full_batches import SGD, SIZES, assert_model, train, training_examples
from problems import tiny_federation, tiny_method, tiny_model

from pfl_jax import simulate
from pfl_jax.base import ClientData, LocalResult, Mean
from pfl_jax.engine.clock import Devices, Timetable, timetable
from pfl_jax.engine.simulate import Settings
from pfl_jax.errors import InvalidInput
from pfl_jax.messages import Update
from pfl_jax.methods import make_method
from pfl_jax.privacy import budgets
from pfl_jax.streams import INITIALIZATION
from pfl_jax.testing.comparison import assert_close
from pfl_jax.wrappers.buffered import stale, with_versions


def planned(clients, staleness):
    return Timetable(np.array(clients), np.array(staleness), np.arange(len(clients)))


STALE = planned([[0, 1], [0, 2], [1, 2]], [[0, 0], [0, 1], [2, 1]])
"""Three rounds of two of three clients; in the last one both are late."""


def last(method, settings, data=None, state=None, **options):
    *_, result = simulate.run(
        method, data or tiny_federation(SIZES), settings, jax.random.key(4), state=state, **options
    )
    return result


def test_rounds_of_late_clients():
    """w <- w + sum_i n_i s_i (v_i - w_then) / sum_i n_i, from the state that each client began with."""
    method = make_method("fedavg", tiny_model(), **SGD, batch_size=32, epochs=3)
    result = last(method, Settings(rounds=3, timetable=STALE))
    data, states = training_examples(), [reference.to_numpy(method.init_server(first_key()))]
    for row, late in zip(STALE.clients, STALE.staleness, strict=True):
        w, total = states[-1], dict.fromkeys(states[-1], 0.0)
        for client, tau in zip(row, late, strict=True):
            then = states[-1 - tau]
            v, share = train(then, *data[client]), SIZES[client] / sum(SIZES[one] for one in row)
            total = {name: total[name] + share * (v[name] - then[name]) / np.sqrt(1 + tau) for name in w}
        states.append({name: w[name] + total[name] for name in w})
    assert_model(result.state.server.plain, states[-1])
    # Both states before the last round are kept, the latest first.
    for index in range(2):
        assert_model(jax.tree.map(lambda leaf, at=index: leaf[at], result.state.server.extra), states[-2 - index])
    np.testing.assert_array_equal(result.cohort, [1, 2])


def first_key():
    """The key with which the engine makes the server of three clients."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(4), INITIALIZATION), 3)


def sent(staleness):
    """What leaves a client with a model, class means, an update and an array, and the server then and now."""
    method, data = make_method("fedavg", tiny_model()), ClientData(jnp.zeros(1), jnp.zeros(1), jnp.ones(1, bool))

    def local(key, server, client, data):
        model = Mean(jax.tree.map(lambda leaf: leaf + 2, server), jnp.float32(3))
        own = Mean(jnp.array([1.0, -2.0]), jnp.array([4.0, 2.0]))
        return LocalResult((), {"model": model, "own": own, "update": Update(server, jnp.ones(())), "row": server}, ())

    versioned = with_versions(method._replace(local=local), 2)
    server = versioned.init_server(jax.random.key(0))
    # Now everything is one more than a round ago, and two more than two rounds ago.
    server = server._replace(
        extra=jax.tree.map(lambda leaf: leaf - jnp.arange(1.0, 3).reshape(2, *[1] * (leaf.ndim - 1)), server.extra)
    )
    return server.plain, stale(versioned, jnp.int32(staleness)).local(0, server, (), data).message


@pytest.mark.parametrize("tau", [0, 1, 2])
def test_parts_of_a_late_message(tau):
    now, message = sent(tau)
    factor = 1 / np.sqrt(1 + tau)
    then = jax.tree.map(lambda leaf: leaf - tau, now)
    close = functools.partial(chex.assert_trees_all_close, rtol=1e-6, atol=1e-6)
    close(message["model"].value, jax.tree.map(lambda leaf: leaf + factor * 2, now))
    close(message["update"].value, jax.tree.map(lambda leaf: factor * leaf, then))
    close(message["row"], then)
    assert float(message["model"].weight) == 3
    close(message["own"], Mean(jnp.array([1.0, -2.0]), factor * jnp.array([4.0, 2.0])))


MORE = ("ditto", "scaffold", "fedas", "fedproto_g", "fedem")
LIMITS = ["fedpac", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fedavg", "fedper", *MORE))]


@pytest.mark.parametrize("name", LIMITS)
def test_equal_devices_and_a_buffer_of_all_are_the_synchronous_run(name):
    pool = Devices(np.ones(3), np.ones(3), [None] * 3)
    everyone = timetable(pool, np.full(3, 7.0), 3, buffer=3, concurrency=3)
    want, got = (last(tiny_method(name), Settings(rounds=3, timetable=one)) for one in (None, everyone))
    chex.assert_trees_all_equal(got.state._replace(key=()), want.state._replace(key=()))
    chex.assert_trees_all_equal(got.received, want.received)
    np.testing.assert_array_equal(everyone.seconds, [7, 14, 21])


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("fedper", {"client_clip": 0.5, "server_optimizer": "sgd"}),
        pytest.param("fedpac", {"client_clip": 0.5}, marks=pytest.mark.slow),
        pytest.param("scaffold", {"compress": "quantize:8", "server_mean": "median"}, marks=pytest.mark.slow),
    ],
)
def test_rounds_in_which_nobody_is_late_are_plain_ones(name, values):
    """Also where later rounds need the earlier states, bit for bit."""
    method, clients = tiny_method(name, **values), [[0, 1], [1, 2], [0, 2], [0, 1]]
    plain = last(method, Settings(rounds=3, timetable=planned(clients, np.zeros((4, 2), int))))
    later = last(method, Settings(rounds=3, timetable=planned(clients, [[0, 0]] * 3 + [[2, 1]])))
    chex.assert_trees_all_equal(later.state.server.plain, plain.state.server)
    chex.assert_trees_all_equal(later.state.clients, plain.state.clients)
    chex.assert_trees_all_equal(later.received, plain.received)


@pytest.mark.parametrize("name", ["fedper", pytest.param("fedpac", marks=pytest.mark.slow)])
def test_chunks_devices_places_and_interruptions_change_nothing(name):
    method, settings = tiny_method(name), Settings(rounds=3, chunk=1, timetable=STALE)
    want = last(method, settings)
    first = next(simulate.run(method, tiny_federation(SIZES), settings, jax.random.key(4))).state
    chex.assert_trees_all_equal(last(method, settings, state=first).state.server, want.state.server)
    for got in (
        last(method, Settings(rounds=3, chunk=2, timetable=STALE), state_on="host"),
        last(method, settings, mesh=simulate.client_mesh(jax.devices()[:2])),
    ):
        assert_close(got.state, want.state)
        np.testing.assert_allclose(got.received["loss"], want.received["loss"], rtol=1e-4)


def test_privacy_counts_the_rounds_of_the_timetable():
    values = {"client_clip": 1.0, "client_noise": 1.0}
    (budget,) = budgets("fedavg", values, Settings(rounds=3, timetable=STALE), np.array(SIZES), jax.random.key(0))
    assert budget.uses.tolist() == [1, 2, 2]
    # Who comes is no uniform draw.
    assert budget.cohort is None


def test_an_attacker_turns_the_update_that_it_trained():
    """One that is late flips what it adds to the state that it began with."""
    settings = {"rounds": 2, "timetable": planned([[0], [1]], [[0], [1]]), "attack": "signs", "attackers": 0.99}
    method = make_method("fedavg", tiny_model(), **SGD, batch_size=32, epochs=3)
    w0, data = reference.to_numpy(method.init_server(first_key())), training_examples()
    v0, v1 = (train(w0, *data[client]) for client in (0, 1))
    w1 = {name: w0[name] - (v0[name] - w0[name]) for name in w0}
    want = {name: w1[name] - (v1[name] - w0[name]) / np.sqrt(2) for name in w0}
    assert_model(last(method, Settings(**settings)).state.server.plain, want)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: Settings(rounds=4, timetable=STALE), "rounds is 4, and the timetable has 3"),
        (lambda: Settings(rounds=3, timetable=STALE, drop_rate=0.2), "drop_rate 0.2 cannot be given with a timetable"),
        (lambda: last(tiny_method("local"), Settings(rounds=3, timetable=STALE)), "methods that send a Mean"),
        (
            lambda: last(tiny_method("fedavg"), Settings(rounds=1, timetable=STALE), tiny_federation((9, 5))),
            "the timetable has a client 2, and the federation has 2",
        ),
    ],
)
def test_what_cannot_be_combined_is_refused_in_one_line(call, said):
    with pytest.raises(InvalidInput, match=said) as raised:
        call()
    assert "\n" not in str(raised.value)
