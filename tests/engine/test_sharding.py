"""Clients that belong to devices: the same results as with all examples on every device."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import tiny_federation, tiny_method

from pfl_jax import simulate
from pfl_jax.data.federated import client_data
from pfl_jax.engine import placement
from pfl_jax.errors import InvalidInput

DATA = tiny_federation((9, 20, 14, 5, 12))._replace(
    label_map=jnp.asarray([np.roll(np.arange(3), client) for client in range(5)], jnp.int32)
)
SETTINGS = simulate.Settings(rounds=2, participation=0.6, eval_every=2)


def test_every_device_has_its_own_clients_and_no_other_examples():
    @partial(jax.jit, static_argnums=2)
    def read(data, client, split, row=None):
        return client_data(data._replace(row=row), client, split)

    mesh = simulate.client_mesh()
    placed = placement.place(DATA, mesh)
    owner = np.asarray(placed.owner)
    # 20, 9 and 5 examples on one device, 14 and 12 on the other.
    assert mesh.size != 2 or owner.tolist() == [0, 0, 1, 0, 1]
    for device in range(mesh.size):
        own = jax.tree.map(lambda leaf, device=device: np.asarray(leaf)[device], placed.own)
        mine = np.flatnonzero(owner == device)
        real = sum(int(DATA.train_count[client]) + int(DATA.test_count[client]) for client in mine)
        pixels = np.asarray(own.x).reshape(len(own.x), -1)
        assert (pixels[real:] == 0).all()
        for client in mine:
            for split in ("train", "test"):
                got, want = read(own, client, split, placed.row), read(DATA, client, split)
                mask = np.asarray(want.mask)
                np.testing.assert_array_equal(got.mask, mask)
                np.testing.assert_array_equal(np.asarray(got.x)[mask], np.asarray(want.x)[mask])
                np.testing.assert_array_equal(np.asarray(got.y)[mask], np.asarray(want.y)[mask])
    assert {shard.data.shape[0] for shard in placed.own.x.addressable_shards} == {1}


def test_the_largest_clients_are_dealt_first():
    counts = np.random.default_rng(0).integers(1, 200, 40)
    dealt = placement.deal(counts, 4)
    assert [len(own) for own in dealt] == [10] * 4
    assert sorted(np.concatenate(dealt)) == list(range(40))
    assert all((np.diff(own) > 0).all() for own in dealt)
    loads, plain = np.array([counts[own].sum() for own in dealt]), np.array([counts[d::4].sum() for d in range(4)])
    assert 2 * np.ptp(loads) < np.ptp(plain)
    # Clients of one size are dealt in turns, every other one in the reverse order.
    assert [own.tolist() for own in placement.deal(np.full(5, 7), 2)] == [[0, 3, 4], [1, 2]]


def test_data_that_is_on_a_mesh_is_run_on_no_other():
    method, settings = tiny_method("local"), simulate.Settings(rounds=1)
    placed = placement.place(DATA, simulate.client_mesh(jax.devices()[:1]))
    simulate.run(method, placed, settings, jax.random.key(0), mesh=placed.mesh)
    if jax.device_count() > 1:
        with pytest.raises(InvalidInput, match="mesh: the data is on another one already"):
            simulate.run(method, placed, settings, jax.random.key(0), mesh=simulate.client_mesh())
