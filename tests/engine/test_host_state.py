"""States on the host and on disk, and clients that belong to devices, give what states on one device give."""

import errno
import functools
import itertools
import os
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from problems import tiny_federation, tiny_method

from pfl_jax import InvalidInput, State, simulate
from pfl_jax.data import client_data
from pfl_jax.data.federated import spread
from pfl_jax.engine import mapping, placement, store
from pfl_jax.engine.checkpoint import Checkpoints
from pfl_jax.errors import CannotWrite

PLAIN = tiny_federation((9, 20, 14, 5, 12))
DATA = PLAIN._replace(
    label_map=np.stack([np.roll(np.arange(3, dtype=np.int32), client) for client in range(5)]),
    validation_index=np.roll(PLAIN.test_index[:, 4:9], 1, axis=0),
    validation_count=np.array([5, 1, 3, 0, 5], np.int32),
)
SETTINGS = simulate.Settings(rounds=4, participation=0.6, eval_every=2, before_aggregation=True)


def play(name, data=DATA, **options):
    results = []
    for result in simulate.run(tiny_method(name), data, SETTINGS, jax.random.key(5), **options):
        # On disk, a state can be read until the next round.
        clients = jax.tree.map(np.array, result.state.clients)
        results.append(result._replace(state=result.state._replace(clients=clients)))
    return results


@functools.cache
def usual(name):
    return play(name)


def assert_same(results, others):
    """The same cohorts, scores by every protocol, also on validation examples, and final states."""
    parts = [
        [(one.cohort, one.trained, one.received, one.before_aggregation) for one in run]
        + [jax.tree.map(np.asarray, run[-1].state._replace(key=()))]
        for run in (results, others)
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), *parts)


@pytest.mark.parametrize(
    ("name", "state_on", "devices", "owned"),
    [
        ("fedper", "host", 1, False),
        ("fedper", "device", 2, True),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (("fedpac", "host", 1, False), ("fedas", "host", 2, False))
        ),
        *(pytest.param("fedper", place, 2, True, marks=pytest.mark.slow) for place in ("host", "disk")),
    ],
)
def test_states_and_data_give_the_same_results_in_every_place(name, state_on, devices, owned, monkeypatch):
    # Five clients in blocks of two: the last one is filled up.
    monkeypatch.setattr(store, "BLOCK", 2)
    mesh = simulate.client_mesh() if devices == 2 else None
    data = placement.place(DATA, mesh) if owned else DATA
    options, want = {"data": data, "mesh": mesh, "state_on": state_on}, usual(name)
    assert_same(play(name, **options), want)
    # It goes on from a state of the same place.
    first = next(simulate.run(tiny_method(name), data, SETTINGS, jax.random.key(5), mesh=mesh, state_on=state_on))
    assert_same(play(name, **options, state=first.state), want[1:])


def test_initial_states_are_written_to_disk_in_blocks(tmp_path, monkeypatch):
    def init_client(key, server, data):
        return {"draw": jax.random.normal(key, (2,)), "count": data.mask.sum()}

    method = tiny_method("fedper")._replace(init_client=init_client, init_server=lambda key: ())
    monkeypatch.setattr(store, "BLOCK", 2)
    stores = store.OnHost(), store.OnDisk(tmp_path)
    init, on_disk = (simulate.build(method, SETTINGS, store=place).init for place in stores)
    want, found = init(DATA, jax.random.key(3)).clients, on_disk(DATA, jax.random.key(3)).clients
    assert isinstance(found["draw"], np.memmap)
    # The files have no names.
    assert list(tmp_path.iterdir()) == []
    jax.tree.map(np.testing.assert_array_equal, want, jax.tree.map(np.asarray, found))
    assert want["count"].tolist() == [9, 20, 14, 5, 12]


@pytest.mark.parametrize("devices", [1, 2])
def test_no_more_clients_than_a_block_are_on_the_devices_at_once(devices, monkeypatch):
    monkeypatch.setattr(store, "BLOCK", 4)
    ids = spread(7, devices)
    blocks = list(store.OnHost().blocks(store.Places(ids, ids < 7, 7)))
    assert {places.ids.shape for places in blocks} == {(devices, 4 // devices)}
    found = np.concatenate([places.ids[places.is_real] for places in blocks])
    assert sorted(found) == list(range(7))


def test_a_round_writes_the_cohorts_rows_alone(tmp_path):
    engine = simulate.build(tiny_method("fedper"), SETTINGS, store=store.OnHost())
    state = engine.init(DATA, jax.random.key(0))
    before = jax.tree.map(np.array, state.clients)
    disk = store.OnDisk(tmp_path)
    on_disk = state._replace(clients=disk.adopt(DATA, None, state.clients))
    held = state.clients
    state, outcome = engine.round(DATA, state, 3)
    # Without donation the state before a round stays as it is.
    jax.tree.map(np.testing.assert_array_equal, held, before)
    outside = np.setdiff1d(np.arange(5), np.asarray(outcome.cohort.clients))
    for was, now in zip(jax.tree.leaves(before), jax.tree.leaves(state.clients), strict=True):
        np.testing.assert_array_equal(was[outside], now[outside])
    changed = itertools.compress(range(5), np.isfinite(state.trained["accuracy"]))
    assert set(changed) == set(np.asarray(outcome.cohort.clients).tolist())
    scores = engine.evaluate(DATA, state)
    assert np.isfinite(scores["accuracy"]).all()
    from_disk = simulate.build(tiny_method("fedper"), SETTINGS, store=disk)
    later, _ = from_disk.round(DATA, on_disk, 3)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, later.clients), state.clients)
    jax.tree.map(np.testing.assert_array_equal, from_disk.evaluate(DATA, later), scores)


def test_a_full_disk_is_an_error_before_the_first_round(tmp_path, monkeypatch):
    def full(file, offset, size):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(CannotWrite, match=r"cannot write .*: No space left on device"):
        play("fedper", state_on="disk", state_folder=tmp_path)


def test_states_on_disk_come_from_checkpoints_by_rows(tmp_path):
    """Of leaves of several types, also those that NumPy does not know, and of one without entries."""
    draw = np.random.default_rng(0)
    clients = {
        "bias": jax.numpy.asarray(draw.normal(size=(5, 3)), jax.numpy.bfloat16),
        "empty": np.zeros((5, 0, 2), np.float32),
        "flag": draw.integers(0, 2, 5).astype(bool),
        "steps": draw.integers(0, 99, 5, np.int32),
    }
    state = State({"head": np.ones(2, np.float32)}, clients, (), jax.random.key(0), np.int32(1))
    on_disk = store.OnDisk(tmp_path)
    mapped = on_disk.adopt(DATA, None, clients)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(state._replace(clients=mapped), {})
    found = checkpoints.newest(state, by_rows=True).state.clients
    assert all(isinstance(found[name], np.memmap) for name in ("bias", "flag", "steps"))
    again = on_disk.adopt(DATA, None, found)
    for want, *leaves in zip(*map(jax.tree.leaves, (clients, mapped, again)), strict=True):
        for leaf in leaves:
            assert leaf.dtype == want.dtype
            np.testing.assert_array_equal(leaf, want)
    # What a round writes there reaches no state of another place.
    taken = store.ClientStore().adopt(DATA, None, again)
    on_disk.write(DATA, again, np.array([2]), jax.tree.map(lambda leaf: leaf[:1], clients))
    jax.tree.map(np.testing.assert_array_equal, taken, clients)
    np.testing.assert_array_equal(again["steps"][2], clients["steps"][0])
    path = tmp_path / "checkpoints/0-of-1/1.npz"
    content = path.read_bytes()
    place = content.index(clients["steps"].tobytes())
    path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    with pytest.raises(InvalidInput, match=r"no checkpoint .* can be read \(round 1: .*steps.* is damaged\)"):
        checkpoints.newest(state, by_rows=True)


def test_every_device_has_its_own_clients_and_no_other_examples():
    @partial(jax.jit, static_argnums=2)
    def read(data, client, split, row=None):
        return client_data(data._replace(row=row), client, split)

    mesh = simulate.client_mesh()
    placed = placement.place(PLAIN, mesh)
    owner = np.asarray(placed.owner)
    # 20, 9 and 5 examples on one device, 14 and 12 on the other.
    assert mesh.size != 2 or owner.tolist() == [0, 0, 1, 0, 1]
    for device in range(mesh.size):
        own = jax.tree.map(lambda leaf, device=device: np.asarray(leaf)[device], placed.own)
        mine = np.flatnonzero(owner == device)
        real = sum(int(PLAIN.train_count[client]) + int(PLAIN.test_count[client]) for client in mine)
        pixels = np.asarray(own.x).reshape(len(own.x), -1)
        assert (pixels[real:] == 0).all()
        for client in mine:
            for split in ("train", "test"):
                got, want = read(own, client, split, placed.row), read(PLAIN, client, split)
                mask = np.asarray(want.mask)
                np.testing.assert_array_equal(got.mask, mask)
                np.testing.assert_array_equal(np.asarray(got.x)[mask], np.asarray(want.x)[mask])
                np.testing.assert_array_equal(np.asarray(got.y)[mask], np.asarray(want.y)[mask])
    assert {shard.data.shape[0] for shard in placed.own.x.addressable_shards} == {1}


def test_a_process_has_the_positions_of_its_own_devices(monkeypatch):
    devices = np.array([SimpleNamespace(process_index=process) for process in (1, 0, 1, 2)])
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert mapping.own_devices(SimpleNamespace(devices=devices)) == [0, 2]
