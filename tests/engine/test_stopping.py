"""Early stopping: where a run ends, which round it keeps, and runs of a sweep that end before others."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import tiny_federation, tiny_method

from pfl_jax import InvalidInput, Settings, data, models, simulate, sweep
from pfl_jax.engine.loop import Patience
from pfl_jax.methods import make_method
from pfl_jax.tasks import Score, Scores

SETTINGS = Settings(rounds=14, eval_every=2, participation=0.5)


def scored(*values):
    return Scores({"score": np.zeros(1)}, Scores({"score": np.array(values)}))


@pytest.mark.parametrize("higher", [True, False])
def test_the_first_of_equal_means_is_kept_and_errors_count_the_other_way(higher):
    primary, waiting, sign = Score("score", None, higher), Patience.begin((2,)), 1 if higher else -1
    # One run stays equal, the other has no score, then a good one.
    rows = [(0.5, np.nan), (0.5, np.nan), (0.5, 0.1), (0.9, 0.2)]
    found = []
    for number, row in enumerate(rows, 1):
        values = [[value * sign, np.nan] for value in row]
        waiting = waiting.after(number, scored(*values), primary, 3)
        found.append((waiting.kept.tolist(), waiting.ended.tolist()))
    assert found == [
        ([1, 0], [False, False]),
        ([1, 0], [False, False]),
        ([1, 3], [False, False]),
        ([4, 4], [False, False]),
    ]
    late = Patience.begin(()).after(4, scored(np.nan), primary, 4)
    assert (int(late.kept), bool(late.ended)) == (0, True)
    # What comes after the end is not kept.
    assert int(late.after(5, scored(1.0), primary, 4).kept) == 0


@pytest.fixture(scope="module")
def federation():
    dataset = data.load("digits")
    parts = data.partition.iid(dataset, num_clients=4, train_size=15, test_size=10)
    return data.federate(dataset, data.partition.with_validation(parts, 0.3))


def end_and_kept(results, patience):
    """The slow way: last round and kept round, from the validation scores of all rounds."""
    means = {one.round: np.nanmean(one.received.validation["accuracy"]) for one in results if one.received is not None}
    for number in means:
        so_far = {one: mean for one, mean in means.items() if one <= number}
        kept = min(one for one, mean in so_far.items() if mean == max(so_far.values()))
        if number - kept >= patience:
            return number, kept
    return max(means), kept


def test_a_run_and_the_runs_of_a_sweep_end_where_their_validation_scores_say(federation):
    model = models.mlp((8, 8, 1), 10, hidden=(8,))

    def make(lr):
        return make_method("fedavg", model, lr=lr, batch_size=5, epochs=1)

    rates, stops = jnp.array([0.02, 0.3, 3.0]), replace(SETTINGS, patience=4)
    keys = jax.vmap(jax.random.key)(jnp.array([0, 1, 2]))
    whole = [list(simulate.run(make(lr), federation, SETTINGS, key)) for lr, key in zip(rates, keys, strict=True)]
    wanted = [end_and_kept(results, 4) for results in whole]
    ends = [end for end, _ in wanted]
    assert len({*ends}) > 1
    assert min(ends) < SETTINGS.rounds
    alone = list(simulate.run(make(rates[1]), federation, stops, keys[1]))
    assert (len(alone), alone[-1].kept) == wanted[1]
    for one, other in zip(alone, whole[1], strict=False):
        np.testing.assert_array_equal(one.trained["loss"], other.trained["loss"])

    together = list(sweep.run(make, federation, stops, keys, {"lr": rates}, mesh=simulate.client_mesh()))
    assert len(together) == max(ends)
    assert together[-1].kept == [kept for _, kept in wanted]
    for index, (end, results) in enumerate(zip(ends, whole, strict=True)):
        for one, every in zip(results, together, strict=False):
            goes_on = every.round <= end
            assert np.isnan(every.trained["loss"][index]).all() == (not goes_on)
            if goes_on:
                np.testing.assert_allclose(one.trained["loss"], every.trained["loss"][index], rtol=2e-3, atol=1e-4)


def test_test_examples_never_end_a_run():
    with pytest.raises(InvalidInput, match="patience needs validation examples"):
        simulate.run(tiny_method(), tiny_federation(), replace(SETTINGS, patience=2), jax.random.key(0))
    with pytest.raises(InvalidInput, match="patience needs validation examples"):
        sweep.run(
            lambda: tiny_method(), tiny_federation(), replace(SETTINGS, patience=2), jax.random.split(jax.random.key(0))
        )
