"""States on disk: what is written is read, no checkpoint is written over, and damage is noticed."""

import os
import types

import jax
import numpy as np
import pytest

from pfl_jax import InvalidInput, State
from pfl_jax.engine import disk_state
from pfl_jax.engine.checkpoint import Checkpoints
from pfl_jax.engine.disk_state import NAME
from pfl_jax.engine.store import OnDisk

CLIENTS = 7

# Of which only the numbers of the clients are read.
FEDERATION = types.SimpleNamespace(num_clients=CLIENTS, own_clients=lambda: np.arange(CLIENTS))


def numbers(seed, count=CLIENTS):
    """States of some clients: leaves of several shapes and types."""
    draw = np.random.default_rng(seed)
    return {
        "bias": draw.normal(size=(count, 3)).astype(np.float32),
        "empty": np.zeros((count, 0, 2), np.float32),
        "flag": draw.integers(0, 2, count).astype(bool),
        "kernel": draw.normal(size=(count, 5, 2)).astype(np.float16),
        "steps": draw.integers(0, 99, count, np.int32),
    }


def stored(clients, folder=None):
    return OnDisk(folder).adopt(FEDERATION, None, clients)


def in_memory(clients):
    return jax.tree.map(np.asarray, clients)


def changed(clients, ids, rows):
    """The states after a round in which these clients got other rows, and what they should be."""
    want = in_memory(clients)
    after = OnDisk().write(FEDERATION, clients, np.array(ids), rows)
    for leaf, row in zip(jax.tree.leaves(want), jax.tree.leaves(rows), strict=True):
        leaf[ids] = row
    return after, want


def assert_equal(found, want):
    jax.tree.map(np.testing.assert_array_equal, found, want)
    assert jax.tree.map(lambda leaf: leaf.dtype, found) == jax.tree.map(lambda leaf: leaf.dtype, want)


def state_of(clients, number=1):
    return State({"head": np.ones(2, np.float32)}, clients, (), jax.random.key(0), np.int32(number))


def flip(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("named", [False, True])
def test_rows_are_read_as_they_were_written(tmp_path, named):
    want = numbers(0)
    clients = stored(want, tmp_path if named else None)
    assert_equal(in_memory(clients), want)
    for index in (4, slice(2, 5), [5, 0, 5], np.array([[1], [6]]), np.arange(CLIENTS) % 2 == 0, -1):
        some = jax.tree.map(lambda leaf, index=index: leaf[index], clients)
        assert_equal(some, {name: leaf[index] for name, leaf in want.items()})
    leaf = clients["kernel"]
    with pytest.raises(IndexError, match="too many indices"):
        leaf[1, 2]
    assert (leaf.shape, leaf.ndim, len(leaf)) == ((CLIENTS, 5, 2), 3, CLIENTS)
    assert (tmp_path / NAME).exists() == named


def test_a_state_that_a_later_round_has_replaced_is_no_longer_read(tmp_path):
    first = stored(numbers(0), tmp_path)
    after, want = changed(first, [2], numbers(1, 1))
    assert_equal(in_memory(after), want)
    np.testing.assert_array_equal(first["bias"][3], want["bias"][3])
    with pytest.raises(InvalidInput, match=r"client 2 in .* is damaged, or a later round has replaced it"):
        first["bias"][2]


def test_states_in_another_file_are_copied(tmp_path):
    one, want = stored(numbers(0), tmp_path), numbers(0)
    # A file that was replaced by another run is still read.
    stored(numbers(3), tmp_path)
    copied = OnDisk(tmp_path).adopt(FEDERATION, None, one)
    assert_equal(in_memory(copied), want)
    assert disk_state.table_of(copied).file is not disk_state.table_of(one).file


def test_no_process_writes_over_the_checkpoints_of_another(tmp_path):
    """Checkpoints of a process that was killed, and of the one that goes on, can all be restored."""
    clients, wanted = stored(numbers(0), tmp_path), {}
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for number in (1, 2):
        clients, wanted[number] = changed(clients, [number, 5], numbers(number, 2))
        checkpoints.save(state_of(clients, number), {}, {})
    # The rows of rounds that end in no checkpoint.
    for number in range(3, 6):
        clients, _ = changed(clients, [number, 1], numbers(number, 2))
    like = state_of(jax.eval_shape(lambda: numbers(0)))
    for number in (2, 3, 4, 5):
        checkpoints = Checkpoints(tmp_path / "checkpoints")
        found = checkpoints.newest(like).state
        assert found.round == number
        assert_equal(in_memory(found.clients), wanted[number])
        clients = OnDisk(tmp_path).adopt(FEDERATION, None, found.clients)
        for seed in range(30):
            clients, wanted[number + 1] = changed(clients, [number % 7, 2], numbers(seed, 2))
        checkpoints.save(state_of(clients, number + 1), {}, {})
    damaged = tmp_path / "checkpoints/0-of-1/6.npz"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert_equal(in_memory(Checkpoints(tmp_path / "checkpoints").newest(like).state.clients), wanted[5])
    # However many rounds there are, no more than three rows of a client.
    table = disk_state.table_of(clients)
    assert (tmp_path / NAME).stat().st_size <= 3 * CLIENTS * table.row.itemsize
    assert len(table.saved) == 2


def test_a_damaged_row_or_a_missing_file_is_noticed(tmp_path, monkeypatch):
    # The damaged row is not in the first block.
    monkeypatch.setattr(disk_state, "BLOCK", 2)
    clients, wanted = stored(numbers(0), tmp_path), {}
    checkpoints, like = Checkpoints(tmp_path / "checkpoints"), state_of(jax.eval_shape(lambda: numbers(0)))
    for number in (1, 2):
        clients, wanted[number] = changed(clients, [number, 5], numbers(number, 2))
        checkpoints.save(state_of(clients, number), {}, {})
    table = disk_state.table_of(clients)
    flip(tmp_path / NAME, table._position(5))
    # Only the second checkpoint has this row.
    assert checkpoints.newest(like).state.round == 1
    with pytest.raises(InvalidInput, match=rf"the state of client 5 in .*{NAME} is damaged"):
        clients["bias"][5]
    np.testing.assert_array_equal(clients["bias"][4], wanted[2]["bias"][4])
    os.truncate(tmp_path / NAME, 3 * table.row.itemsize)
    with pytest.raises(InvalidInput, match=r"no checkpoint .*2: the state of .*1: the state of .*start the run anew"):
        checkpoints.newest(like)
    (tmp_path / NAME).unlink()
    with pytest.raises(InvalidInput, match=rf"no checkpoint in .*cannot be read from .*{NAME}: No such file"):
        checkpoints.newest(like)


def test_a_file_elsewhere_is_copied_into_checkpoints(tmp_path):
    want = numbers(0)
    state = state_of(stored(want))
    Checkpoints(tmp_path / "checkpoints").save(state, {}, {})
    found = Checkpoints(tmp_path / "checkpoints").newest(state).state
    assert disk_state.table_of(found.clients) is None
    assert_equal(found.clients, want)


def test_processes_take_the_rows_of_their_clients_from_disk(tmp_path):
    want = numbers(0)
    state, own = state_of(stored(want, tmp_path)), np.array([1, 4])
    Checkpoints(tmp_path / "checkpoints").save(state, {}, {})
    found = Checkpoints(tmp_path / "checkpoints", 2, 1, 2).newest(state, clients=own).state
    assert_equal(found.clients, {name: leaf[own] for name, leaf in want.items()})


def test_blocks_have_every_number_once():
    found = disk_state.blocks(np.arange(2 * disk_state.BLOCK + 1))
    assert [len(one) for one in found] == [disk_state.BLOCK, disk_state.BLOCK, 1]
    np.testing.assert_array_equal(np.concatenate(found), np.arange(2 * disk_state.BLOCK + 1))


def test_nothing_is_left_of_a_temporary_file(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_state.tempfile, "tempdir", str(tmp_path))
    clients = stored(numbers(0))
    assert list(tmp_path.iterdir()) == []
    assert_equal(in_memory(clients), numbers(0))
