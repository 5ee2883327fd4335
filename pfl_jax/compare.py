"""Statistics of a comparison of methods on the same clients: intervals of differences, tests, ranks.

The scores of a method are those of its runs, one for each seed or partition, and in a run those of its clients. Runs of
two methods with the same seed have the same clients, so that differences are taken client by client. What varies if an
experiment is repeated are the runs and the clients: both are resampled, never the examples of a client alone.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pfl_jax.errors import InvalidInput

FEWEST_PAIRS = 6
"""Pairs of runs from which on the test of Wilcoxon can find a difference at 5 %."""


class Difference(NamedTuple):
    """Difference of two methods, the first minus the second.

    Attributes:
      mean: over runs of the mean over clients.
      low, high: ends of its confidence interval.
      p_value: of Wilcoxon's signed-rank test over the runs, two-sided; None for fewer than `FEWEST_PAIRS` runs.
      worse: share of the clients, in [0, 1], whose score is worse with the first method.
    """

    mean: float
    low: float
    high: float
    p_value: float | None
    worse: float

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves out 0: otherwise the two methods cannot be told apart."""
        return self.low > 0 or self.high < 0


def difference(
    first: Sequence[np.ndarray],
    second: Sequence[np.ndarray],
    *,
    higher_is_better: bool = True,
    confidence: float = 0.95,
    draws: int = 10_000,
    seed: int = 0,
) -> Difference:
    """Difference of two methods with its bootstrap interval.

    Each draw takes as many runs as there are, with replacement, and of each as many of its clients; the interval has
    the percentiles of the mean over them. With a single run only clients are drawn: the interval then says nothing of
    other seeds.

    Args:
      first, second: scores of the clients [N] of each run; the runs of both in the same order, on the same clients.
      higher_is_better: whether larger scores are better; it decides `worse` alone.
      confidence: share of the intervals that contain the true difference, in (0, 1).
      draws: of the bootstrap.
      seed: of its random numbers.

    Raises:
      InvalidInput: the methods have other runs or clients, or a score is not finite.

    Example:
      >>> import numpy as np
      >>> from pfl_jax.compare import difference
      >>> first, second = [np.array([3.0, 4.0, 5.0])], [np.array([1.0, 2.0, 6.0])]
      >>> found = difference(first, second)
      >>> print(found.mean, round(found.worse, 2), found.is_clear)
      1.0 0.33 False

    Reference:
      Davison, Hinkley. Bootstrap Methods and their Application. 1997, Section 3.8 (hierarchical data) and 5.3.1.
    """
    rows = _paired(first, second)
    rng, means = np.random.default_rng(seed), np.array([row.mean() for row in rows])
    # Means of resampled clients, as many for each run as draws take it.
    chosen = rng.integers(len(rows), size=(draws, len(rows)))
    resampled = np.empty(chosen.shape)
    for run, row in enumerate(rows):
        taken = chosen == run
        resampled[taken] = row[rng.integers(len(row), size=(int(taken.sum()), len(row)))].mean(axis=1)
    tail = (1 - confidence) / 2
    low, high = np.quantile(resampled.mean(axis=1), [tail, 1 - tail])
    return Difference(
        float(means.mean()),
        float(low),
        float(high),
        _wilcoxon(means) if len(means) >= FEWEST_PAIRS else None,
        share_worse(first, second, higher_is_better=higher_is_better),
    )


def share_worse(first: Sequence[np.ndarray], second: Sequence[np.ndarray], *, higher_is_better: bool = True) -> float:
    """Share of the clients, in [0, 1], whose score is worse with the first method.

    Args:
      first, second: see `difference`.
      higher_is_better: whether larger scores are better.

    Raises:
      InvalidInput: as `difference`.
    """
    apart = np.concatenate(_paired(first, second))
    return float(np.mean(apart < 0 if higher_is_better else apart > 0))


def _paired(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Differences of the clients [N] of each run, float64."""
    shapes = [[np.shape(row) for row in rows] for rows in (first, second)]
    if shapes[0] != shapes[1] or not shapes[0] or any(len(shape) != 1 or shape == (0,) for shape in shapes[0]):
        raise InvalidInput(f"the runs of both methods need the same clients, and have {shapes[0]} and {shapes[1]}")
    rows = [np.subtract(one, other, dtype=np.float64) for one, other in zip(first, second, strict=True)]
    if not all(np.isfinite(row).all() for row in rows):
        raise InvalidInput("a score of a client is not finite: leave that client out of both methods")
    return rows


def _wilcoxon(differences: np.ndarray) -> float:
    from scipy import stats

    # Without any difference there is nothing to rank.
    if not np.any(differences):
        return 1.0
    found: Any = stats.wilcoxon(differences)
    return float(found.pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values of several tests, adjusted so that 5 % bound the chance of any false finding, in their order.

    Args:
      p_values: of the single tests.

    Example:
      >>> from pfl_jax.compare import holm
      >>> holm([0.01, 0.04, 0.02])
      [0.03, 0.04, 0.04]

    Reference:
      Holm. A Simple Sequentially Rejective Multiple Test Procedure. Scandinavian Journal of Statistics 1979.
    """
    order, adjusted, largest = np.argsort(p_values, kind="stable"), [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def mean_ranks(scores: np.ndarray, *, higher_is_better: bool = True) -> np.ndarray:
    """Mean rank [K] of each method, 1 for the best; equal scores share the mean of their ranks.

    Args:
      scores: [B, K] of K methods in B runs.
      higher_is_better: whether larger scores are better.
    """
    from scipy import stats

    return stats.rankdata((-1 if higher_is_better else 1) * np.asarray(scores, np.float64), axis=1).mean(axis=0)


def critical_difference(methods: int, runs: int, alpha: float = 0.05) -> float:
    r"""Difference of mean ranks below which two methods cannot be told apart (Nemenyi).

        CD = q_alpha sqrt( K (K + 1) / (6 B) )

    with q_alpha the quantile of the studentized range statistic divided by sqrt(2).

    Args:
      methods: K.
      runs: B.
      alpha: chance of any false finding.

    Example:
      >>> from pfl_jax.compare import critical_difference
      >>> round(critical_difference(4, 14), 2)  # Demsar's example
      1.25

    Reference:
      Demsar. Statistical Comparisons of Classifiers over Multiple Data Sets. JMLR 2006, Section 3.2.2.
    """
    from scipy import stats

    quantile = float(stats.studentized_range.ppf(1 - alpha, methods, np.inf)) / np.sqrt(2)
    return float(quantile * np.sqrt(methods * (methods + 1) / (6 * runs)))
