"""Asynchronous rounds: parts of a late message, the synchronous limit, what changes nothing, and virtual time."""

import functools
import json
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from full_batches import SIZES
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import tiny_federation, tiny_method, tiny_model

from pfl_jax import simulate
from pfl_jax.base import ClientData, LocalResult, Mean
from pfl_jax.engine.asynchronous import Devices, Timetable, read_devices, stale, timetable, with_versions
from pfl_jax.engine.simulate import Settings
from pfl_jax.errors import InvalidInput
from pfl_jax.methods import make_method
from pfl_jax.privacy import budgets
from pfl_jax.testing.comparison import assert_close


def planned(clients, staleness):
    return Timetable(np.array(clients), np.array(staleness), np.arange(len(clients)))


STALE = planned([[0, 1], [0, 2], [1, 2]], [[0, 0], [0, 1], [2, 1]])
"""Three rounds of two of three clients; in the last one both are late."""


def last(method, settings, data=None, state=None, **options):
    *_, result = simulate.run(
        method, data or tiny_federation(SIZES), settings, jax.random.key(4), state=state, **options
    )
    return result


def test_a_timetable_that_changes_between_two_runs_is_the_new_one():
    plan, method = planned([[0, 1]], [[0, 0]]), tiny_method("fedavg")
    settings = Settings(rounds=1, timetable=plan)
    assert last(method, settings).cohort.tolist() == [0, 1]
    plan.clients[0] = [1, 2]
    assert last(method, settings).cohort.tolist() == [1, 2]


@jax.jit
def sent(staleness):
    """What leaves a client with a model, class means, a change and an array, and the server then and now."""
    method, data = make_method("fedavg", tiny_model()), ClientData(jnp.zeros(1), jnp.zeros(1), jnp.ones(1, bool))

    def local(key, server, client, data):
        model = Mean(jax.tree.map(lambda leaf: leaf + 2, server), jnp.float32(3))
        own = Mean(jnp.array([1.0, -2.0]), jnp.array([4.0, 2.0]))
        return LocalResult((), {"model": model, "own": own, "change": Mean(server, jnp.ones(())), "row": server}, ())

    def from_these(server, client):
        return {"model": server, "own": None, "change": jax.tree.map(jnp.zeros_like, server), "row": None}

    versioned = with_versions(method._replace(local=local, trained_from=from_these), 2)
    server = versioned.init_server(jax.random.key(0))
    # Now everything is one more than a round ago, and two more than two rounds ago.
    server = server._replace(
        extra=jax.tree.map(lambda leaf: leaf - jnp.arange(1.0, 3).reshape(2, *[1] * (leaf.ndim - 1)), server.extra)
    )
    return server.plain, stale(versioned, staleness).local(0, server, (), data).message


@pytest.mark.parametrize("tau", [0, 1, 2])
def test_parts_of_a_late_message(tau):
    now, message = sent(tau)
    factor = 1 / np.sqrt(1 + tau)
    then = jax.tree.map(lambda leaf: leaf - tau, now)
    close = functools.partial(chex.assert_trees_all_close, rtol=1e-6, atol=1e-6)
    close(message["model"].value, jax.tree.map(lambda leaf: leaf + factor * 2, now))
    close(message["change"].value, jax.tree.map(lambda leaf: factor * leaf, then))
    close(message["row"], then)
    assert float(message["model"].weight) == 3
    close(message["own"], Mean(jnp.array([1.0, -2.0]), factor * jnp.array([4.0, 2.0])))


MORE = ("ditto", "scaffold", "fedas", "fedproto_g", "fedem")
LIMITS = ["fedper", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fedavg", "fedpac", *MORE))]


@pytest.mark.parametrize("name", LIMITS)
def test_equal_devices_and_a_buffer_of_all_are_the_synchronous_run(name):
    pool = Devices(np.ones(3), np.ones(3), [None] * 3)
    everyone = timetable(pool, np.full(3, 7.0), 3, buffer=3, concurrency=3)
    want, got = (last(tiny_method(name), Settings(rounds=3, timetable=one)) for one in (None, everyone))
    chex.assert_trees_all_equal(got.state._replace(key=()), want.state._replace(key=()))
    chex.assert_trees_all_equal(got.received, want.received)
    np.testing.assert_array_equal(everyone.seconds, [7, 14, 21])


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


TIMES = st.sampled_from([0.0, 1e-12, 1e-6, 1e-5, 0.1, 1.0, 7.0, 86_400.0, 1e7, 1e12, 1e300, math.inf, math.nan, -1.0])


class Counted(Devices):
    """Devices that are asked a bounded number of times."""

    asked = 0

    def wait(self, client, now):
        type(self).asked += 1
        assert self.asked < 20_000, "the trace does not end"
        return super().wait(client, now)


@settings(max_examples=200, deadline=None)
@given(given=st.data(), number=st.integers(1, 4))
def test_every_trace_ends_or_is_refused(given, number):
    intervals = st.lists(TIMES, min_size=2, max_size=6).map(lambda edges: [*zip(edges[::2], edges[1::2], strict=False)])
    one = st.none() | st.tuples(TIMES, intervals)
    available = given.draw(st.lists(one, min_size=number, max_size=number))
    seconds = np.array(given.draw(st.lists(TIMES, min_size=number, max_size=number)))
    buffer, concurrency = given.draw(st.integers(1, number)), given.draw(st.none() | st.integers(1, number))
    Counted.asked = 0
    try:
        devices = Counted(np.ones(number), np.ones(number), available)
        found = timetable(devices, seconds, 5, buffer=buffer, concurrency=concurrency)
    except InvalidInput as error:
        assert "\n" not in str(error)  # noqa: PT017
        return
    assert found.clients.shape == (5, buffer)
    assert np.isfinite(found.seconds).all()


@pytest.mark.parametrize("period", [2e-5, 0.1, 10.0, 86_400.0])
def test_who_waits_begins_within_an_interval(period):
    """A client that is available for half of its period begins there, however late it is."""
    devices = Devices(np.ones(1), np.ones(1), [(period, [(period / 4, 3 * period / 4)])])
    for now in np.random.default_rng(0).uniform(0, 1e9, 200).tolist():
        wait = devices.wait(0, now)
        assert 0 <= wait <= period
        assert devices.wait(0, now + wait) == 0
    with pytest.raises(InvalidInput, match="virtual time is beyond 1e\\+09 seconds, and device 0 is not always"):
        devices.wait(0, 2e9)


# Virtual time: events of a few clients by hand, and of more against a simulation second by second


def devices(speeds, available=None):
    return Devices(np.array(speeds, np.float64), np.full(len(speeds), 100.0), available or [None] * len(speeds))


def rows(found):
    return found.clients.tolist(), found.staleness.tolist(), found.seconds.tolist()


def test_the_work_of_a_client_is_computation_and_communication():
    pool = Devices(np.array([0.5, 2.0, 9.0]), np.array([10.0, 100.0, 1.0]), [None] * 3)
    np.testing.assert_array_equal(pool.seconds(np.array([4, 3]), 30, 20), [4 * 0.5 + 5, 3 * 2 + 0.5])


def test_a_synchronous_step_waits_for_the_slowest_of_its_clients():
    seconds = np.array([2.0, 3.0, 7.0])
    found = timetable(devices(seconds), seconds, 20, buffer=2)
    np.testing.assert_array_equal(np.diff(found.seconds, prepend=0), seconds[found.clients].max(axis=1))
    assert found.largest_staleness == 0
    assert len({tuple(row) for row in found.clients.tolist()}) == 3


def test_a_synchronous_step_takes_who_comes():
    """Client 0 can begin in the first second of ten, client 1 from the third to the fifth."""
    pool = devices([1, 1], [(10.0, [(0.0, 1.0)]), (10.0, [(2.0, 5.0)])])
    # The next one begins when it is over.
    np.testing.assert_allclose(timetable(pool, np.array([4.0, 1.0]), 2, buffer=2).seconds, [4, 14], atol=1e-5)


def second_by_second(seconds, open_at, rounds, buffer):
    """All clients train whenever they can; whole seconds, nothing else is clever."""
    busy, waiting, steps, now = {}, [], [], 0
    while len(steps) < rounds:
        for client in sorted(client for client, (end, _) in busy.items() if end == now):
            waiting.append((client, len(steps) - busy.pop(client)[1]))
            if len(waiting) == buffer and len(steps) < rounds:
                steps.append((sorted(waiting), now))
                waiting = []
        for client in range(len(seconds)):
            if client not in busy and client not in dict(waiting) and open_at(client, now):
                busy[client] = (now + seconds[client], len(steps))
        now += 1
    pairs = np.array([pairs for pairs, _ in steps])
    return pairs[..., 0].tolist(), pairs[..., 1].tolist(), [time for _, time in steps]


@pytest.mark.parametrize("seed", range(4))
def test_events_against_a_simulation_second_by_second(seed):
    rng = np.random.default_rng(seed)
    seconds, buffer = rng.integers(1, 20, 7), int(rng.integers(1, 7))
    opens = [None if client % 2 else (24.0, [(3.0, 7.0), (float(9 + client), 24.0)]) for client in range(7)]

    def open_at(client, now):
        return client % 2 or 3 <= now % 24 < 7 or 9 + client <= now % 24 < 24

    found = timetable(devices(np.ones(7), opens), seconds.astype(float), 40, buffer=buffer, concurrency=7)
    clients, staleness, times = second_by_second(seconds.tolist(), open_at, 40, buffer)
    assert rows(found)[:2] == (clients, staleness)
    np.testing.assert_allclose(found.seconds, times, atol=1e-3)
    assert found.largest_staleness > 0


def test_draws_are_those_of_the_seed_and_do_not_favor_anybody():
    def drawn(seed, rounds=600, concurrency=4):
        return timetable(devices(np.ones(9)), np.ones(9), rounds, buffer=4, concurrency=concurrency, seed=seed)

    assert rows(drawn(1)) == rows(drawn(1)) != rows(drawn(2))
    # More rounds go on, and nothing changes in those before.
    assert rows(drawn(1, 20)) == tuple(part[:20] for part in rows(drawn(1)))
    # Equal devices with as many messages as clients at once are a synchronous run.
    assert rows(drawn(1)) == rows(drawn(1, concurrency=None))
    often = np.bincount(drawn(1).clients.ravel())
    assert often.min() > 0.8 * often.max()


def test_a_file_of_devices(tmp_path):
    file = tmp_path / "devices.json"
    pair = {"seconds_per_example": 0.5, "bytes_per_second": 1e6}
    file.write_text(json.dumps({"devices": [pair, pair | {"period": 10, "available": [[0, 2], [2, 3]]}]}))
    found = read_devices(file)
    assert found.available == [None, (10.0, [(0.0, 2.0), (2.0, 3.0)])]
    assert (found.seconds_per_example.tolist(), found.bytes_per_second.tolist()) == ([0.5, 0.5], [1e6, 1e6])
    for wrong, said in (
        ("[]", "is not a trace of devices"),
        (json.dumps({"devices": [{"seconds_per_example": 1}]}), "bytes_per_second"),
        (json.dumps({"devices": [pair | {"bytes_per_second": 0}]}), "device 0 must have positive"),
        (json.dumps({"devices": [pair | {"period": 10, "available": [[0, 11]]}]}), "within its period"),
        (json.dumps({"devices": [pair | {"period": 10, "available": [[3, 3]]}]}), "ascending intervals"),
        (json.dumps({"devices": [pair | {"period": 10, "available": [[0, 1e-9]]}]}), "of at least 1e-05 seconds"),
        (json.dumps({"devices": [pair | {"period": float("nan"), "available": [[1, 2]]}]}), "ascending intervals"),
        (json.dumps({"devices": [pair | {"period": float("inf"), "available": [[1, 2]]}]}), "ascending intervals"),
        (json.dumps({"devices": [pair | {"period": 10, "available": [[float("nan"), 2]]}]}), "ascending intervals"),
    ):
        file.write_text(wrong)
        with pytest.raises(InvalidInput, match=said) as raised:
            read_devices(file)
        assert "\n" not in str(raised.value)


def run(name, data=None, rounds=3):
    return last(tiny_method(name), Settings(rounds=rounds, timetable=STALE), data)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: Settings(rounds=4, timetable=STALE), "rounds is 4, and the timetable has 3"),
        (lambda: run("fedavg", tiny_federation((9, 5)), 1), "the timetable has a client 2, and the federation has 2"),
        (lambda: timetable(devices([1, 1]), np.ones(2), 1, buffer=3), "buffer must be at most the number of clients"),
        (lambda: timetable(devices([1, 1]), np.ones(2), 1, buffer=0), "buffer must be at least 1, not 0"),
        (lambda: Timetable(np.array([[1, 1]]), np.zeros((1, 2)), np.ones(1)), "distinct, and in ascending order"),
        (lambda: Timetable(np.array([[0]]), np.ones((1, 1)), np.ones(1)), "number of rounds before"),
        (lambda: Timetable(np.array([[0]]), np.zeros((1, 2)), np.ones(1)), "clients .R, K., staleness .R, K."),
        (lambda: Timetable(np.zeros((2, 1)), np.zeros((2, 1)), np.array([2, 1])), "seconds of a timetable must ascend"),
    ],
)
def test_what_is_no_timetable_or_does_not_go_with_one_is_refused_in_one_line(call, said):
    with pytest.raises(InvalidInput, match=said) as raised:
        call()
    assert "\n" not in str(raised.value)
