"""Checkpoints: what is written is read again, and what is damaged is noticed."""

import jax
import numpy as np
import pytest
from problems import HYPER_PARAMETERS, tiny_federation, tiny_model

from pfl_jax import simulate
from pfl_jax.checkpoint import MANIFEST, Checkpoints
from pfl_jax.errors import InvalidInput
from pfl_jax.methods import METHODS


def play(name, rounds=4, state=None):
    method = METHODS[name](tiny_model(), **HYPER_PARAMETERS)
    (*_, last) = simulate.run(
        method, tiny_federation(), simulate.Settings(rounds=rounds, participation=0.5), jax.random.key(2), state=state
    )
    return last.state


def plain(state):
    return jax.tree.map(np.asarray, state._replace(key=jax.random.key_data(state.key)))


@pytest.mark.parametrize("name", ["fedavg", "fedpac"])
def test_a_run_from_a_checkpoint_is_the_uninterrupted_one(name, tmp_path):
    middle = play(name, rounds=2)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    assert checkpoints.newest(middle) is None
    arrays = {"curve": np.array([0.5, np.nan]), "none": np.empty((0, 3), np.float32)}
    checkpoints.save(middle, arrays, {"seed": 3})
    found = checkpoints.newest(jax.eval_shape(lambda: middle))
    assert found.record == {"seed": 3}
    for key, value in arrays.items():
        np.testing.assert_array_equal(found.arrays[key], value)
    jax.tree.map(np.testing.assert_array_equal, plain(found.state), plain(middle))
    jax.tree.map(np.testing.assert_array_equal, plain(play(name, state=found.state)), plain(play(name)))


def test_the_newest_good_one_counts_and_few_are_kept(tmp_path):
    state = play("fedavg", rounds=1)
    checkpoints = Checkpoints(tmp_path, keep=2)
    for number in (1, 2, 3):
        checkpoints.save(state._replace(round=np.int32(number)), {}, {"number": number})
    assert checkpoints.rounds() == [2, 3]
    assert checkpoints.newest(state).record == {"number": 3}

    largest = max((tmp_path / "3").rglob("d/*"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    assert checkpoints.newest(state).record == {"number": 2}
    # Killed before the last file.
    (tmp_path / "2" / MANIFEST).unlink()
    with pytest.raises(InvalidInput, match=r"no checkpoint in .* can be read"):
        checkpoints.newest(state)


def test_another_runs_checkpoint_is_refused(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(play("fedavg", rounds=1), {}, {})
    with pytest.raises(InvalidInput, match=r"round 1 .* is of another run"):
        checkpoints.newest(play("fedper", rounds=1))


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match="cannot write the checkpoint of round 1 into"):
        Checkpoints(tmp_path / "file").save(play("fedavg", rounds=1), {}, {})
