"""Statistics of a comparison of methods on the same clients: intervals of differences, tests, ranks.

The scores of a method come from its runs, one for each seed or partition; each run has scores of its clients. Runs of
two methods with the same seed have the same clients, so that differences are taken client by client. The clients of a
run share its seed: only the means of runs are independent of each other, and intervals are over these means.
"""

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, TypeAlias

import numpy as np
from scipy import special

from pfl_jax.errors import InvalidInput, describe_value
from pfl_jax.validation import Count, Fraction, Range, check_arguments, check_value

Probability: TypeAlias = Annotated[float, Range(0, 1, above=True, below=True)]

FEWEST_PAIRS = 6
"""Fewest pairs of runs with which Wilcoxon's test can find a difference at 5 %."""
FEWEST_RUNS = 4
"""Fewest runs with which an interval that contains 0 is informative: fewer find only very large differences."""
MANY_RUNS = 10
"""Number of runs from which on their single means need not be shown: with fewer, a failed run would go unnoticed."""


class Difference(NamedTuple):
    """Difference of two methods, the first minus the second.

    Attributes:
      mean: mean difference over clients, then over runs.
      low, high: ends of the mean's confidence interval; infinite for a single client of a single run.
      p_value: of Wilcoxon's signed-rank test over the runs, two-sided; None for fewer than `FEWEST_PAIRS` runs.
      worse: share of the clients, in [0, 1], whose score is worse with the first method.
      runs: mean difference over the clients of each run.
      median_low, median_high: `median_interval` of the runs; infinite for too few runs.
    """

    mean: float
    low: float
    high: float
    p_value: float | None
    worse: float
    runs: tuple[float, ...]
    median_low: float
    median_high: float

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes 0: otherwise the two methods cannot be told apart."""
        return self.low > 0 or self.high < 0


def difference(
    first: Sequence[np.ndarray],
    second: Sequence[np.ndarray],
    *,
    higher_is_better: bool = True,
    confidence: Probability = 0.95,
) -> Difference:
    """Difference of two methods with its confidence interval, Student's t over the means of the runs.

        mean +- t_{(1 + confidence) / 2, R - 1} s / sqrt(R),   s: sample standard deviation of the R runs' means

    With a single run the interval is over its clients instead, and says nothing about other seeds. With two or three
    runs it is so wide that it finds only differences far larger than s. If some seeds fail, or do far better than most,
    it contains the mean over all seeds less often than stated; `median_interval` does not have this weakness.

    Args:
      first, second: for each run, the scores of the clients [N]; runs in the same order, on the same clients.
      higher_is_better: whether larger scores are better; only `worse` depends on it.
      confidence: share of the intervals that contain the true difference, in (0, 1).

    Raises:
      InvalidInput: the methods differ in runs or clients, a score is not finite, or `confidence` is out of range.

    Example:
      >>> import numpy as np
      >>> from pfl_jax.compare import difference
      >>> first, second = [np.array([3.0, 4.0, 5.0])], [np.array([1.0, 2.0, 6.0])]
      >>> found = difference(first, second)
      >>> print(found.mean, round(found.worse, 2), found.is_clear)
      1.0 0.33 False
    """
    check_value("confidence", confidence, Probability)
    rows = _paired(first, second)
    means = np.array([row.mean() for row in rows])
    independent = means if len(means) > 1 else rows[0]
    mean, half = float(means.mean()), margin(independent.std(), len(independent), confidence)
    return Difference(
        mean,
        mean - half,
        mean + half,
        _wilcoxon(means) if len(means) >= FEWEST_PAIRS else None,
        share_worse(first, second, higher_is_better=higher_is_better),
        tuple(means.tolist()),
        *median_interval(means, confidence),
    )


def margin(deviation: float, number: int, confidence: Probability = 0.95) -> float:
    """Half of the confidence interval of the mean of independent values, Student's t.

    Args:
      deviation: standard deviation of the values about their mean, as from `numpy.std`.
      number: number of values. A single value says nothing about their spread: the margin is infinite.
      confidence: see `difference`.

    Example:
      >>> from pfl_jax.compare import margin
      >>> [round(margin(1.0, number), 2) for number in (1, 2, 3, 10)]
      [inf, 12.71, 3.04, 0.75]
    """
    if number < 2:
        return np.inf
    return float(special.stdtrit(number - 1, (1 + confidence) / 2) * deviation / np.sqrt(number - 1))


def median_interval(values: Sequence[float] | np.ndarray, confidence: Probability = 0.95) -> tuple[float, float]:
    """Confidence interval of the median of independent values, by their order, whatever their distribution.

        [x_(k), x_(R + 1 - k)],   k: the largest number with 2 P(Binomial(R, 1/2) < k) <= 1 - confidence

    Args:
      values: [R].
      confidence: smallest share of such intervals that contain the median.

    Returns:
      Both ends; infinite if even the range of all values is too narrow: at 95 %, for fewer than six values.

    Example:
      >>> from pfl_jax.compare import median_interval
      >>> median_interval([3.0, 1.0, 2.0, 90.0, 4.0, 2.5])
      (1.0, 90.0)

    Reference:
      Conover. Practical Nonparametric Statistics. Third edition, 1999. Section 3.2.
    """
    ordered = np.sort(np.asarray(values, np.float64))
    number = len(ordered)
    outside = 2 * special.bdtr(np.arange(number // 2), number, 0.5)
    if not (k := int(np.sum(outside <= 1 - confidence))):
        return -np.inf, np.inf
    return float(ordered[k - 1]), float(ordered[number - k])


def share_worse(first: Sequence[np.ndarray], second: Sequence[np.ndarray], *, higher_is_better: bool = True) -> float:
    """Share of the clients, in [0, 1], whose score is worse with the first method.

    Args:
      first, second: see `difference`.
      higher_is_better: whether larger scores are better.

    Raises:
      InvalidInput: as for `difference`.
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
    test: Any = stats.wilcoxon(differences)
    return float(test.pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values of several tests, in their order, adjusted so that the chance of any false finding is at most 5 %.

    Args:
      p_values: p-values of the single tests, in [0, 1].

    Raises:
      InvalidInput: a p-value is not a number in [0, 1].

    Example:
      >>> from pfl_jax.compare import holm
      >>> holm([0.01, 0.04, 0.02])
      [0.03, 0.04, 0.04]

    Reference:
      Holm. A Simple Sequentially Rejective Multiple Test Procedure. Scandinavian Journal of Statistics 1979.
    """
    for p_value in p_values:
        check_value("a p-value", p_value, Fraction)
    order, adjusted, largest = np.argsort(p_values, kind="stable"), [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def mean_ranks(scores: np.ndarray, *, higher_is_better: bool = True) -> np.ndarray:
    """Mean rank [K] of each method, 1 for the best; equal scores share the mean of their ranks.

    Args:
      scores: [B, K], scores of K methods in B runs.
      higher_is_better: whether larger scores are better.

    Raises:
      InvalidInput: the scores are not a table of this shape, or a score is NaN, which has no rank.
    """
    from scipy import stats

    table = np.asarray(scores, np.float64)
    if table.ndim != 2 or not table.size or np.isnan(table).any():
        raise InvalidInput(f"ranks need scores [runs, methods] without NaN, not {describe_value(table)}")
    return stats.rankdata(-table if higher_is_better else table, axis=1).mean(axis=0)


@check_arguments
def critical_difference(methods: Annotated[int, Range(2)], runs: Count, alpha: Probability = 0.05) -> float:
    r"""Difference of mean ranks below which two methods cannot be told apart (Nemenyi).

        CD = q_alpha sqrt( K (K + 1) / (6 B) )

    with q_alpha the quantile of the studentized range statistic divided by sqrt(2).

    Args:
      methods: K.
      runs: B.
      alpha: chance of any false finding.

    Raises:
      InvalidInput: there are fewer than two methods, no runs, or `alpha` is not in (0, 1).

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
