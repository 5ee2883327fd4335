"""Evaluation of a sample of the clients: it has their scores of a full evaluation, and no others."""

import jax
import numpy as np
import pytest
from problems import tiny_federation, tiny_method

from pfl_jax import simulate
from pfl_jax.engine.cohort import evaluated_clients
from pfl_jax.engine.simulate import Settings
from pfl_jax.engine.store import OnHost
from pfl_jax.errors import InvalidInput


def received(seed=0, state_on="device", **settings):
    method = tiny_method("local")
    given = Settings(rounds=2, participation=0.5, **settings)
    results = simulate.run(method, tiny_federation(), given, jax.random.key(seed), state_on=state_on)
    return np.stack([result.received["loss"] for result in results])


def test_a_sample_has_the_scores_of_a_full_evaluation():
    everyone, sample = received(), received(eval_clients=2)
    scored = ~np.isnan(sample)
    assert scored.sum(axis=1).tolist() == [2, 2]
    np.testing.assert_array_equal(scored[0], scored[1])
    np.testing.assert_array_equal(sample[scored], everyone[scored])


@pytest.mark.slow
def test_states_on_the_host_and_samples_of_all_clients():
    np.testing.assert_array_equal(received(eval_clients=2, state_on="host"), received(eval_clients=2))
    np.testing.assert_array_equal(received(eval_clients=9), received())


def test_an_engine_evaluates_the_sample_of_each_run():
    """One engine with states on the host, which remembers whom it has drawn, and runs of several keys and data."""
    settings = Settings(rounds=1, eval_clients=2)
    engine = simulate.build(tiny_method("local"), settings, store=OnHost())
    data, more, keys = tiny_federation(), tiny_federation((9, 20, 14, 5, 8, 3)), [jax.random.key(0), jax.random.key(1)]
    for federation, key in ((data, keys[0]), (data, keys[1]), (more, keys[1])):
        scored = np.flatnonzero(~np.isnan(engine.evaluate(federation, engine.init(federation, key))["loss"]))
        drawn = evaluated_clients(key, federation.num_clients, settings)
        assert scored.tolist() == sorted(drawn.tolist())


def test_a_sample_is_not_evaluated_before_aggregation():
    with pytest.raises(InvalidInput, match="eval_clients cannot be given with before_aggregation"):
        Settings(rounds=1, eval_clients=2, before_aggregation=True)
