"""`pfl_jax.compare`: against scipy, by coverage on simulated data, and at its limits."""

import numpy as np
import pytest
from scipy import stats

from pfl_jax import InvalidInput
from pfl_jax.compare import critical_difference, difference, holm, mean_ranks


def simulated(rng, runs, clients, truth=1.0):
    """Scores of two methods whose difference varies over runs and over clients."""
    of_runs = truth + 0.5 * rng.normal(size=(runs, 1)) * (runs > 1)
    second = 10 * rng.normal(size=(runs, clients))
    return list(second + of_runs + 2 * rng.normal(size=(runs, clients))), list(second)


@pytest.mark.parametrize(("runs", "clients"), [(1, 30), (12, 20)])
def test_intervals_contain_the_truth_as_often_as_they_say(runs, clients):
    rng = np.random.default_rng(0)
    found = [difference(*simulated(rng, runs, clients), draws=400, confidence=0.9) for _ in range(300)]
    share = np.mean([one.low <= 1.0 <= one.high for one in found])
    # 300 draws of a share of 0.9 have a standard error of 0.017; the percentile interval is a little short.
    assert 0.83 <= share <= 0.95


def test_the_interval_of_one_run_is_scipys():
    first, second = simulated(np.random.default_rng(1), 1, 40)
    found = difference(first, second, draws=50_000)
    wanted = stats.bootstrap((first[0] - second[0],), np.mean, method="percentile", n_resamples=50_000, rng=0)
    assert found.mean == pytest.approx(np.mean(first[0] - second[0]), rel=1e-12)
    assert (found.low, found.high) == pytest.approx(tuple(wanted.confidence_interval), abs=0.02)


def test_runs_are_resampled_too():
    """Clients of a run agree, and runs do not: an interval over clients alone would be a point."""
    rows = [np.full(50, value) for value in (0.0, 1.0, 2.0, 3.0)]
    found = difference(rows, [np.zeros(50)] * 4)
    assert (found.mean, found.worse) == (1.5, 0.0)
    assert found.high - found.low > 1.0


def test_the_test_is_wilcoxons_over_runs():
    first, second = simulated(np.random.default_rng(2), 9, 5)
    means = [np.mean(one - other) for one, other in zip(first, second, strict=True)]
    assert difference(first, second, draws=10).p_value == pytest.approx(stats.wilcoxon(means).pvalue, rel=1e-12)
    assert difference(first[:5], second[:5], draws=10).p_value is None
    assert difference(first, first, draws=10).p_value == 1.0


def test_clients_that_are_worse_are_counted():
    found = difference([np.array([1.0, 2.0]), np.array([3.0])], [np.array([2.0, 2.0]), np.array([1.0])], draws=100)
    assert found.worse == pytest.approx(1 / 3)
    assert difference([np.ones(2)], [np.zeros(2)], higher_is_better=False, draws=2).worse == 1.0
    # Each run counts as much, whatever its number of clients.
    assert found.mean == pytest.approx((-0.5 + 2.0) / 2)


def test_the_same_numbers_give_the_same_interval():
    one, other = (difference(*simulated(np.random.default_rng(3), 3, 10), seed=7) for _ in range(2))
    assert one == other


def test_holm_is_the_definition():
    p = np.random.default_rng(0).uniform(0, 0.05, 7)
    ordered = sorted(p)
    wanted = {value: min(1, max((7 - j) * ordered[j] for j in range(i + 1))) for i, value in enumerate(ordered)}
    assert holm(list(p)) == pytest.approx([wanted[value] for value in p], rel=1e-12)
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_ranks_and_the_critical_difference():
    scores = np.array([[3.0, 1.0, 3.0], [5.0, 4.0, 1.0]])
    np.testing.assert_allclose(mean_ranks(scores), [1.25, 2.5, 2.25])
    np.testing.assert_allclose(mean_ranks(scores, higher_is_better=False), [2.75, 1.5, 1.75])
    # Demsar's Table 5: q = 2.569 for four methods at 5 %.
    assert critical_difference(4, 14) == pytest.approx(2.569 * np.sqrt(4 * 5 / (6 * 14)), abs=1e-3)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ([np.zeros(3)], [np.zeros(4)], "the same clients"),
        ([np.zeros(3)], [], "the same clients"),
        ([], [], "the same clients"),
        ([np.array([1.0, np.nan])], [np.zeros(2)], "not finite"),
    ],
)
def test_what_cannot_be_compared_is_one_line(first, second, words):
    with pytest.raises(InvalidInput, match=words):
        difference(first, second)
