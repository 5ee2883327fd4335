"""States in host memory give what states on the device give."""

import itertools

import jax
import numpy as np
import pytest
from problems import HYPER_PARAMETERS, tiny_federation, tiny_model

from pfl_jax import simulate
from pfl_jax.engine import host_state
from pfl_jax.methods import make_method

pytestmark = pytest.mark.without_f1_auc

DATA = tiny_federation((9, 20, 14, 5, 12))
SETTINGS = simulate.Settings(rounds=4, participation=0.6, full_last_round=True, eval_every=2)


def make(name):
    return make_method(name, tiny_model(), **HYPER_PARAMETERS)


def play(name, **options):
    results = list(simulate.run(make(name), DATA, SETTINGS, jax.random.key(5), **options))
    return results, jax.tree.map(np.asarray, results[-1].state._replace(key=()))


def assert_same(left, right):
    (results, state), (others, other) = left, right
    for one, two in zip(results, others, strict=True):
        np.testing.assert_array_equal(one.cohort, two.cohort)
        np.testing.assert_allclose(one.trained.loss, two.trained.loss, rtol=2e-4, atol=2e-5)
        assert (one.received is None) == (two.received is None)
        if one.received is not None:
            np.testing.assert_allclose(one.received.loss, two.received.loss, rtol=2e-4, atol=2e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), state, other)


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("fedper", 1),
        pytest.param("fedpac", 1, marks=pytest.mark.slow),
        pytest.param("fedas", 2, marks=pytest.mark.slow),
    ],
)
def test_states_on_the_host_and_on_the_device_give_the_same_results(name, devices, monkeypatch):
    # Five clients in blocks of two: the last one is filled up.
    monkeypatch.setattr(host_state, "BLOCK", 2)
    mesh = simulate.client_mesh() if devices == 2 else None
    on_host = play(name, mesh=mesh, state_on="host")
    assert_same(on_host, play(name))
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(on_host[0][-1].state.clients))


@pytest.mark.slow
def test_a_run_continues_from_a_state_on_the_host_or_the_device():
    whole, state = play("ditto")
    half = simulate.Settings(rounds=2, participation=0.6)
    (*_, middle) = simulate.run(make("ditto"), DATA, half, jax.random.key(5), state_on="host")
    kept = jax.tree.map(np.array, middle.state.clients)
    for place in ("device", "host"):
        rest = list(simulate.run(make("ditto"), DATA, SETTINGS, jax.random.key(0), state=middle.state, state_on=place))
        last = jax.tree.map(np.asarray, rest[-1].state._replace(key=()))
        assert_same((rest, last), (whole[2:], state))
        # The state that came from outside stays as it was.
        jax.tree.map(np.testing.assert_array_equal, kept, middle.state.clients)


def test_a_round_writes_the_cohorts_rows_alone():
    engine = host_state.build(make("fedper"), SETTINGS)
    state = engine.init(DATA, jax.random.key(0))
    before = jax.tree.map(np.array, state.clients)
    state, outcome = engine.round(DATA, state, 3)
    outside = np.setdiff1d(np.arange(5), np.asarray(outcome.cohort.clients))
    for was, now in zip(jax.tree.leaves(before), jax.tree.leaves(state.clients), strict=True):
        np.testing.assert_array_equal(was[outside], now[outside])
    changed = itertools.compress(range(5), np.isfinite(state.trained.accuracy))
    assert set(changed) == set(np.asarray(outcome.cohort.clients).tolist())
    assert np.isfinite(engine.evaluate(DATA, state).accuracy).all()
