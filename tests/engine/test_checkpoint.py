"""Checkpoints: what is written is read again, and what is damaged is noticed."""

import jax
import numpy as np
import pytest
from damage import DAMAGES
from problems import tiny_federation, tiny_method

from pfl_jax import InvalidInput, State, simulate
from pfl_jax.engine.checkpoint import Checkpoints
from pfl_jax.errors import CannotWrite
from pfl_jax.safe_read import mapped


def play(rounds=4, state=None):
    method = tiny_method("fedper")
    (*_, last) = simulate.run(
        method, tiny_federation(), simulate.Settings(rounds=rounds, participation=0.5), jax.random.key(2), state=state
    )
    return last.state


def plain(state):
    return jax.tree.map(np.asarray, state._replace(key=jax.random.key_data(state.key)))


# Conformance continues every method from its state; here it matters that what is written is read.
def test_a_run_from_a_checkpoint_is_the_uninterrupted_one(tmp_path):
    middle = play(rounds=2)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    assert checkpoints.newest(middle) is None
    checkpoints.save(middle, {"seed": 3})
    found = checkpoints.newest(jax.eval_shape(lambda: middle))
    assert found.record == {"seed": 3}
    jax.tree.map(np.testing.assert_array_equal, plain(found.state), plain(middle))
    jax.tree.map(np.testing.assert_array_equal, plain(play(state=found.state)), plain(play()))


def test_the_newest_readable_checkpoint_is_read_and_old_ones_are_deleted(tmp_path):
    state = small_state()
    checkpoints = Checkpoints(tmp_path, keep=2)
    for number in (1, 2, 3):
        checkpoints.save(state._replace(round=np.int32(number)), {"number": number})
    assert checkpoints.rounds() == [2, 3]
    assert checkpoints.newest(state).record == {"number": 3}
    DAMAGES["cut off"](tmp_path / "0-of-1/3.npz")
    assert checkpoints.newest(state).record == {"number": 2}
    # The run goes on from there, whatever is left of a later end.
    checkpoints.save(state._replace(round=np.int32(3)), {"number": 4})
    assert checkpoints.newest(state).record == {"number": 4}
    checkpoints.save(state._replace(round=np.int32(2)), {"number": 5})
    assert checkpoints.rounds() == [2]
    checkpoints.save(state._replace(round=np.int32(3)), {"number": 6})
    DAMAGES["cut off"](tmp_path / "0-of-1/3.npz")
    DAMAGES["cut off"](tmp_path / "0-of-1/2.npz")
    with pytest.raises(InvalidInput, match=r"no checkpoint in .* can be read \(round 3: .*; round 2: .*\): start"):
        checkpoints.newest(state)


@pytest.mark.parametrize(("old", "new"), [(b'"number": 1', b'"number": 2'), (b"float32", b"float16")])
def test_a_record_with_another_byte_is_noticed(tmp_path, old, new):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(small_state(), {"number": 1})
    path = tmp_path / "0-of-1/1.npz"
    assert old in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(old, new))
    with pytest.raises(InvalidInput, match="round 1: Bad CRC-32 for file 'about"):
        checkpoints.newest(small_state())


def small_state(number=1, width=3):
    """A state that nothing was trained for, which saves the tests below their compilation."""
    server = {"head": np.ones((width, 2), np.float32), "steps": np.int32(number)}
    return State(server, {"own": np.zeros((4, width), np.float32)}, (), jax.random.key(0), np.int32(number))


def test_another_runs_checkpoint_is_refused_by_what_differs(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(small_state(), {"seed": 3})
    words = r"round 1 .* is of another run: its server\['head'\] is float32 \[3, 2\], and here float32 \[5, 2\]"
    with pytest.raises(InvalidInput, match=words):
        checkpoints.newest(small_state(width=5))
    with pytest.raises(InvalidInput, match=r"its clients\['own'\] is .*, and here nothing"):
        checkpoints.newest(small_state()._replace(clients=()))

    def check(record):
        raise InvalidInput(f"not with seed {record['seed']}")

    # What the record says comes before the arrays.
    with pytest.raises(InvalidInput, match="not with seed 3"):
        checkpoints.newest(small_state(width=5), check)


def test_a_full_disk_keeps_the_earlier_checkpoints(tmp_path, full_disk):
    checkpoints, first, second = Checkpoints(tmp_path / "run", keep=1), small_state(1), small_state(2)
    checkpoints.save(first, {})
    with full_disk(100), pytest.raises(CannotWrite, match=r"cannot write .*2\.npz: .*; make room"):
        checkpoints.save(second, {})
    assert [path.name for path in (tmp_path / "run/0-of-1").iterdir()] == ["1.npz"]
    assert checkpoints.newest(small_state()).state.round == 1
    checkpoints.save(small_state(2), {})
    assert checkpoints.rounds() == [2]


# Several processes, played by one; tests/experiments/test_distributed.py has real ones.

OWN = (np.array([1, 2]), np.array([0, 3]))
"""Clients of two processes."""


def save_as_two(folder, number, whole):
    """Saves both parts; a process has the rows of all clients, as on devices, or of its own."""
    state = small_state(number)._replace(clients={"own": ROWS + number})
    for process, own in enumerate(OWN):
        mine = state if whole else state._replace(clients={"own": state.clients["own"][own]})
        Checkpoints(folder, 2, process, 2).save(mine, {"number": number}, own)
    return state


ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)


@pytest.mark.parametrize("whole", [True, False])
def test_any_number_of_processes_reads_the_parts_of_two(tmp_path, whole):
    wanted = save_as_two(tmp_path, 3, whole)
    for clients in (None, np.array([0, 1, 3]), np.array([2])):
        found = Checkpoints(tmp_path).newest(jax.eval_shape(lambda: wanted), clients=clients)
        own = wanted if clients is None else wanted._replace(clients={"own": wanted.clients["own"][clients]})
        jax.tree.map(np.testing.assert_array_equal, plain(found.state), plain(own))
        assert found.record == {"number": 3}
    # A process that goes on with a part of what one process wrote.
    Checkpoints(tmp_path / "one").save(wanted, {})
    found = Checkpoints(tmp_path / "one", 2, 1, 2).newest(wanted, clients=np.array([2]))
    np.testing.assert_array_equal(found.state.clients["own"], wanted.clients["own"][[2]])


def test_a_round_counts_if_all_parts_are_intact(tmp_path):
    for number in (3, 4, 5):
        wanted = save_as_two(tmp_path, number, whole=False)
    assert Checkpoints(tmp_path, 2, 1, 2).rounds() == [4, 5]
    assert Checkpoints(tmp_path).newest(wanted, until=4).record == {"number": 4}
    DAMAGES["cut off"](tmp_path / "1-of-2/5.npz")
    assert Checkpoints(tmp_path, 2, 0, 2).newest(wanted).record == {"number": 4}
    # As if the process had been killed before it wrote its part.
    (tmp_path / "1-of-2/5.npz").unlink()
    assert Checkpoints(tmp_path).rounds() == [4]


def test_checkpoints_of_other_processes_go_when_there_are_enough_new_ones(tmp_path):
    wanted = save_as_two(tmp_path, 3, whole=False)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(wanted._replace(round=np.int32(4)), {})
    assert checkpoints.rounds() == [3, 4]
    checkpoints.save(wanted._replace(round=np.int32(5)), {})
    assert checkpoints.rounds() == [4, 5]
    assert [path.name for path in tmp_path.iterdir()] == ["0-of-1"]


def test_only_plain_arrays_are_mapped(tmp_path):
    array = np.arange(12.0).reshape(4, 3)
    np.savez(tmp_path / "plain.npz", a=array, columns=np.asfortranarray(array), empty=array[:0])
    np.savez_compressed(tmp_path / "packed.npz", a=array)
    for name, field, is_mapped in (("plain", "a", True), ("plain", "columns", False), ("packed", "a", False)):
        found = mapped(tmp_path / f"{name}.npz", field)
        assert isinstance(found, np.memmap) == is_mapped
        np.testing.assert_array_equal(found, array)
    assert mapped(tmp_path / "plain.npz", "empty").shape == (0, 3)
