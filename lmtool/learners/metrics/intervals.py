"""Standard errors and bootstrap intervals."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lmtool.random_streams import uniform

LEVEL = 0.95
"""Confidence level: the fraction of intervals that contain the true value."""


def ratio_standard_error(sums: np.ndarray, counts: np.ndarray) -> float:
    """Returns the standard error of the mean loss per target, sum(sums) / sum(counts).

    The targets of one example are not independent, but the examples are. So the variance is that of a ratio estimator
    over examples, linearized (Cochran 1977, section 6.13). sums: (N,) the sum of the losses of each example. counts:
    (N,) the number of targets of each example. Returns the standard error; NaN for fewer than two examples.
    """
    sums, counts = np.asarray(sums, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    examples, total = len(sums), counts.sum()
    if examples < 2 or total <= 0:
        return float("nan")
    residuals = sums - (sums.sum() / total) * counts
    return float(np.sqrt(examples / (examples - 1) * np.sum(residuals**2)) / total)


def paired_standard_error(first_sums: np.ndarray, second_sums: np.ndarray, counts: np.ndarray) -> float:
    """Returns the standard error of the difference between two mean losses over the same examples. first_sums,
    second_sums: (N,) the sums of two predictors' losses over each example. counts: (N,) the number of targets of each
    example."""
    return ratio_standard_error(np.asarray(first_sums, np.float64) - np.asarray(second_sums, np.float64), counts)


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Returns the mean of independent values, and its standard error: the sample standard deviation divided by the
    square root of the number of values. The error of a single value is None."""
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, None
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


def t_quantile(freedom: int) -> float:
    """Returns the two-sided quantile of Student's t distribution: the t for which P(|T| <= t) = LEVEL.

    For integer degrees of freedom, the distribution is a finite sum that increases with the angle whose tangent is t /
    sqrt(freedom) (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4). The angle is found by bisection. freedom: the degrees
    of freedom, at least 1.
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):  # halvings: more than the 53 bits of a float
        angle = (low + high) / 2
        low, high = (angle, high) if _probability_within(angle, freedom) < LEVEL else (low, angle)
    return math.tan((low + high) / 2) * math.sqrt(freedom)


def _probability_within(angle: float, freedom: int) -> float:
    """Returns the probability that |T| is at most sqrt(freedom) * tan(angle)."""
    sine, cosine, odd = math.sin(angle), math.cos(angle), freedom % 2
    term, total = cosine if odd else 1.0, 0.0
    for index in range(odd + 1, freedom, 2):
        total += term
        term *= cosine**2 * index / (index + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


# Bootstrap intervals of scores (Efron 1979): the scored rows are resampled with replacement many times, and the
# interval lies between two percentiles of the scores of the resamples.
#
# Shape letters: N rows, B resamples.


RESAMPLES = 10_000
"""Maximum number of resamples: the ends of an interval are then accurate to 0.03 standard errors of the score."""
MIN_RESAMPLES = 1_000
"""Minimum number of resamples: the ends of an interval are then accurate to 0.08 standard errors of the score."""
# Number of rows that one core scores in about half a second: for metrics that count, and for metrics that sort rows.
_COUNTED_ROWS, _SORTED_ROWS = 20_000_000, 2_000_000
_SORTED_METRICS = frozenset({"spearman", "best_exact_match", "best_f1"})
# The epoch that keys the random numbers of resamples; no training run reaches it, so they share no random numbers.
_EPOCH = 1 << 40
# Number of random values generated at a time.
_BLOCK = 1 << 14


class Interval(NamedTuple):
    """The middle 95% of a score's resamples."""

    low: float
    high: float


def resample_count(count: int, scores: Collection[str]) -> int:
    """Returns the number of resamples for an interval.

    It is RESAMPLES if these take less than about a second, otherwise fewer, but at least MIN_RESAMPLES. The number
    depends on the arguments only, not on the machine, so results are reproducible. count: the number of rows that are
    scored. scores: the names of the scores.
    """
    affordable = (_COUNTED_ROWS if _SORTED_METRICS.isdisjoint(scores) else _SORTED_ROWS) // count
    return min(max(affordable, MIN_RESAMPLES), RESAMPLES)


def resampled_rows(count: int, resamples: int, seed: int = 0) -> Iterator[np.ndarray]:
    """Yields the row indices (N,) of each resample, int64. They depend on the count and the seed only, so two models
    that are scored on the same rows get the same resamples.

    Args:
        count: The number of rows, N.
        resamples: The number of resamples, B.
        seed: The seed of the random numbers.
    """
    block = max(_BLOCK // count, 1)
    for start in range(0, resamples, block):
        fractions_BN = uniform(seed, "sample", _EPOCH, np.arange(start, min(start + block, resamples)), count)
        yield from np.minimum((fractions_BN * count).astype(np.int64), count - 1)


def interval(values_B: Sequence[float] | np.ndarray) -> Interval:
    """Returns the percentile interval of a score. values_B: the score of each resample.

    Resamples without a finite score (such as the correlation with a constant) are ignored; both ends are NaN if no
    resample has a score.
    """
    values = np.asarray(values_B, dtype=np.float64)
    values = values[np.isfinite(values)]
    if not len(values):
        return Interval(float("nan"), float("nan"))
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(low), float(high))
