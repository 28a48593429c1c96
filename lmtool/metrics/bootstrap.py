"""Intervals of scores by the bootstrap: the score of many samples drawn with replacement from the scored rows.

Efron 1979; percentile intervals. Shape letters: N rows, B resamples.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lmtool.metrics.intervals import LEVEL
from lmtool.streams import uniform

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
        shares_BN = uniform(seed, "sample", _EPOCH, np.arange(first, min(first + block, resamples)), count)
        yield from np.minimum((shares_BN * count).astype(np.int64), count - 1)


def interval(values_B: Sequence[float] | np.ndarray) -> Interval:
    """The percentile interval of a score's resamples; resamples without a score (a correlation with a constant) are
    left out, and not a number where none has one."""
    values = np.asarray(values_B, dtype=np.float64)
    values = values[np.isfinite(values)]
    if not len(values):
        return Interval(float("nan"), float("nan"))
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(low), float(high))
