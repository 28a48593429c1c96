"""Standard errors and bootstrap intervals."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lmtool.random_streams import uniform

LEVEL = 0.95
"""The share of intervals that hold the true value."""


def ratio_standard_error(sums: np.ndarray, counts: np.ndarray) -> float:
    """Standard error of sum(sums) / sum(counts) over examples drawn as wholes.

    sums: (N,) the sum of an example's losses. counts: (N,) how many targets it has. The targets of one example lean
    on each other, so the examples are what is independent: the linearised variance of a ratio (Cochran 1977, 6.13).
    Not a number for fewer than two examples.
    """
    sums, counts = np.asarray(sums, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    examples, total = len(sums), counts.sum()
    if examples < 2 or total <= 0:
        return float("nan")
    residuals = sums - (sums.sum() / total) * counts
    return float(np.sqrt(examples / (examples - 1) * np.sum(residuals**2)) / total)


def paired_standard_error(first_sums: np.ndarray, second_sums: np.ndarray, counts: np.ndarray) -> float:
    """Standard error of the difference of two mean losses over the same examples (a model and its baseline)."""
    return ratio_standard_error(np.asarray(first_sums, np.float64) - np.asarray(second_sums, np.float64), counts)


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean of independent values, and its standard error: their sample deviation over the root of their number. No
    error (None) is known of a single value."""
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, None
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


def t_quantile(freedom: int, level: float = LEVEL) -> float:
    """The value that Student's t stays within, on both sides, in this share of draws. freedom: degrees of freedom, 1 at
    least.

    Abramowitz and Stegun 1964, 26.7.3 and 26.7.4: the distribution for whole degrees of freedom is a finite sum, which
    rises with the angle whose tangent is t / sqrt(freedom).
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        low, high = (angle, high) if _within(angle, freedom) < level else (low, angle)
    return math.tan((low + high) / 2) * math.sqrt(freedom)


def _within(angle: float, freedom: int) -> float:
    """The probability that |t| is at most sqrt(freedom) times the tangent of the angle."""
    sine, cosine, odd = math.sin(angle), math.cos(angle), freedom % 2
    term, total = cosine if odd else 1.0, 0.0
    for place in range(odd + 1, freedom, 2):
        total += term
        term *= cosine**2 * place / (place + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


# Intervals of scores by the bootstrap: the score of many samples drawn with replacement from the scored rows.
#
# Efron 1979; percentile intervals. Shape letters: N rows, B resamples.


RESAMPLES = 10_000
"""Leave the end of an interval open by 0.03 standard errors of the score; FEWEST of them by 0.08."""
FEWEST = 1_000
# Rows that are scored in about half a second on one core: by counts, and where the score sorts its rows.
_ROWS, _SORTED_ROWS = 20_000_000, 2_000_000
_SORTING = frozenset({"spearman", "best_exact_match", "best_f1"})
# The resamples' epoch in the stream of samples: no epoch of training draws from there.
_EPOCH = 1 << 40
# Values that are drawn at once.
_BLOCK = 1 << 14


class Interval(NamedTuple):
    """The middle 95% of a score's resamples."""

    low: float
    high: float


def resample_count(count: int, scores: Collection[str]) -> int:
    """How often so many rows are resampled: RESAMPLES times where that takes less than about a second, else fewer,
    FEWEST at least. A function of the rows and of the names of the scores alone, so that a result can be repeated."""
    affordable = (_ROWS if _SORTING.isdisjoint(scores) else _SORTED_ROWS) // count
    return min(max(affordable, FEWEST), RESAMPLES)


def resampled_rows(count: int, resamples: int, seed: int = 0) -> Iterator[np.ndarray]:
    """(N,) int64 numbers of the rows of each resample. The same for the same count, so that two systems scored on the
    same rows are resampled alike."""
    block = max(_BLOCK // count, 1)
    for first in range(0, resamples, block):
        fractions_BN = uniform(seed, "sample", _EPOCH, np.arange(first, min(first + block, resamples)), count)
        yield from np.minimum((fractions_BN * count).astype(np.int64), count - 1)


def interval(values_B: Sequence[float] | np.ndarray) -> Interval:
    """The percentile interval of a score's resamples; resamples without a score (a correlation with a constant) are
    left out, and not a number where none has one."""
    values = np.asarray(values_B, dtype=np.float64)
    values = values[np.isfinite(values)]
    if not len(values):
        return Interval(float("nan"), float("nan"))
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(low), float(high))
