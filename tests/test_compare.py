"""`pfl_jax.compare`: against scipy, by coverage on simulated data, and at its limits."""

import numpy as np
import pytest
from scipy import stats

from pfl_jax import InvalidInput
from pfl_jax.compare import critical_difference, difference, holm, mean_ranks, median_interval


def simulated(rng, runs, clients, truth=1.0):
    """Scores of two methods whose difference varies over runs and over clients."""
    of_runs = truth + 0.5 * rng.normal(size=(runs, 1)) * (runs > 1)
    second = 10 * rng.normal(size=(runs, clients))
    return list(second + of_runs + 2 * rng.normal(size=(runs, clients))), list(second)


@pytest.mark.parametrize(("runs", "clients"), [(1, 30), (2, 20), (3, 20), (12, 20)])
def test_intervals_contain_the_truth_as_often_as_they_say(runs, clients):
    rng = np.random.default_rng(0)
    found = [difference(*simulated(rng, runs, clients), confidence=0.9) for _ in range(1000)]
    share = np.mean([one.low <= 1.0 <= one.high for one in found])
    # 1,000 draws of a share of 0.9 have a standard error of 0.0095.
    assert share == pytest.approx(0.9, abs=0.025)


def test_the_interval_is_scipys():
    for runs in (1, 5):
        first, second = simulated(np.random.default_rng(1), runs, 40)
        apart = np.subtract(first, second)
        wanted = stats.ttest_1samp(apart[0] if runs == 1 else apart.mean(1), 0).confidence_interval(0.99)
        found = difference(first, second, confidence=0.99)
        assert found.mean == pytest.approx(apart.mean(), rel=1e-12)
        assert (found.low, found.high) == pytest.approx(tuple(wanted), rel=1e-9)


def test_of_a_single_client_nothing_is_known_beyond_it():
    found = difference([np.array([2.0])], [np.array([1.0])])
    assert (found.mean, found.low, found.high, found.is_clear) == (1.0, -np.inf, np.inf, False)


def test_the_test_is_wilcoxons_over_runs():
    first, second = simulated(np.random.default_rng(2), 9, 5)
    means = [np.mean(one - other) for one, other in zip(first, second, strict=True)]
    assert difference(first, second).p_value == pytest.approx(stats.wilcoxon(means).pvalue, rel=1e-12)
    assert difference(first[:5], second[:5]).p_value is None
    assert difference(first, first).p_value == 1.0


def test_clients_that_are_worse_are_counted():
    found = difference([np.array([1.0, 2.0]), np.array([3.0])], [np.array([2.0, 2.0]), np.array([1.0])])
    assert found.worse == pytest.approx(1 / 3)
    assert difference([np.ones(2)], [np.zeros(2)], higher_is_better=False).worse == 1.0
    # Each run counts as much, whatever its number of clients.
    assert found.mean == pytest.approx((-0.5 + 2.0) / 2)


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
    ("asked", "words"),
    [
        (lambda: difference([np.zeros(3)], [np.zeros(4)]), "the same clients"),
        (lambda: difference([], []), "the same clients"),
        (lambda: difference([np.array([1.0, np.nan])], [np.zeros(2)]), "not finite"),
        (lambda: difference([np.ones(2)], [np.zeros(2)], confidence=95), "confidence must be above 0 and below 1"),
        (lambda: holm([0.01, np.nan]), "p-value"),
        (lambda: mean_ranks(np.array([[1.0, np.nan]])), "without NaN"),
        (lambda: mean_ranks(np.zeros((0, 2))), r"\[runs, methods\]"),
        (lambda: critical_difference(3, 0), "runs must be at least 1"),
        (lambda: critical_difference(1, 10), "methods must be at least 2"),
    ],
)
def test_what_cannot_be_compared_is_one_line(asked, words):
    with pytest.raises(InvalidInput, match=words):
        asked()


# The table of coverage on docs/evaluation.md


def test_the_interval_of_the_median_is_the_sign_test():
    values = np.random.default_rng(0).normal(size=11)
    for confidence in (0.5, 0.9, 0.95, 0.99, 0.9999):
        low, high = median_interval(values, confidence)
        inside = [
            point
            for point in np.sort(values)[:-1] + np.diff(np.sort(values)) / 2
            if stats.binomtest(int(np.sum(values > point)), 11).pvalue > 1 - confidence
        ]
        if confidence == 0.9999:
            assert (low, high) == (-np.inf, np.inf)
        else:
            assert low < min(inside) <= max(inside) < high
            assert set(np.sort(values)[[0, -1]]) >= {low, high} or confidence < 0.99
    assert median_interval([1.0, 2.0, 3.0, 4.0, 5.0]) == (-np.inf, np.inf)
    found = difference([np.ones(3), np.zeros(3)], [np.zeros(3), np.array([1.0, 2.0, 3.0])])
    assert (found.runs, found.median_low) == ((1.0, -2.0), -np.inf)
