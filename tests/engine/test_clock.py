"""Virtual time: events of three clients by hand, and of more against a simulation second by second."""

import json

import numpy as np
import pytest

from pfl_jax.engine.clock import Devices, Timetable, read_devices, timetable
from pfl_jax.errors import InvalidInput


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


def test_availability_by_hand():
    """Client 0 can begin in the first second of ten, client 1 from the third to the fifth."""
    pool = devices([1, 1], [(10.0, [(0.0, 1.0)]), (10.0, [(2.0, 5.0)])])
    assert [pool.wait(0, now) for now in (0.0, 0.9)] == [0, 0]
    np.testing.assert_allclose([pool.wait(0, 1.0), pool.wait(1, 1.0), pool.wait(1, 26.0)], [9, 1, 6], atol=1e-5)
    found = timetable(pool, np.array([4.0, 1.0]), 3, buffer=1, concurrency=1)
    # 0 trains until 4, and 1 until 5, when nobody is available until 10.
    assert (found.clients.ravel().tolist(), found.staleness.ravel().tolist()) == ([0, 1, 0], [0, 0, 0])
    np.testing.assert_allclose(found.seconds, [4, 5, 14], atol=1e-5)
    found = timetable(pool, np.array([4.0, 1.0]), 2, buffer=2)
    # A synchronous round takes who comes, and the next one begins when it is over.
    np.testing.assert_allclose(found.seconds, [4, 14], atol=1e-5)


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
        ("[]", "is no trace of devices"),
        (json.dumps({"devices": [{"seconds_per_example": 1}]}), "bytes_per_second"),
        (json.dumps({"devices": [pair | {"bytes_per_second": 0}]}), "device 0 must have positive"),
        (json.dumps({"devices": [pair | {"period": 10, "available": [[0, 11]]}]}), "within its period"),
        (json.dumps({"devices": [pair | {"period": 10, "available": [[3, 3]]}]}), "ascending intervals"),
    ):
        file.write_text(wrong)
        with pytest.raises(InvalidInput, match=said) as raised:
            read_devices(file)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: timetable(devices([1, 1]), np.ones(3), 1, buffer=1), "there are 2 devices, and 3 clients"),
        (
            lambda: timetable(devices([1, 1]), np.ones(2), 1, buffer=3),
            "buffer must be at most the number of clients",
        ),
        (lambda: timetable(devices([1, 1]), np.ones(2), 1, buffer=1, concurrency=3), "concurrency must be at most"),
        (lambda: timetable(devices([1, 1]), np.ones(2), 1, buffer=0), "buffer must be at least 1, not 0"),
        (lambda: Timetable(np.array([[1, 1]]), np.zeros((1, 2)), np.ones(1)), "distinct, and in ascending order"),
        (lambda: Timetable(np.array([[0]]), np.ones((1, 1)), np.ones(1)), "number of rounds before"),
        (lambda: Timetable(np.array([[0]]), np.zeros((1, 2)), np.ones(1)), "clients .R, K., staleness .R, K."),
        (lambda: Timetable(np.zeros((2, 1)), np.zeros((2, 1)), np.array([2, 1])), "seconds of a timetable must ascend"),
    ],
)
def test_what_has_no_timetable_is_refused(call, said):
    with pytest.raises(InvalidInput, match=said):
        call()
