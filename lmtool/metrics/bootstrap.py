"""Intervals of scores by the bootstrap: the score of many samples drawn with replacement from the scored rows.

Efron 1979; percentile intervals. Shape letters: N rows, B resamples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lmtool.metrics.intervals import LEVEL
from lmtool.streams import uniform

RESAMPLES = 1000
# The resamples' epoch in the stream of samples: no epoch of training draws from there.
_EPOCH = 1 << 40


class Interval(NamedTuple):
    """The middle 95% of a score's resamples."""

    low: float
    high: float


def resampled_rows(count: int, resamples: int = RESAMPLES, seed: int = 0) -> Iterator[np.ndarray]:
    """(N,) int64 numbers of the rows of each resample. The same for the same count, so that two systems scored on the
    same rows are resampled alike."""
    for resample in range(resamples):
        shares_N = uniform(seed, "sample", _EPOCH, np.array([resample]), count)[0]
        yield np.minimum((shares_N * count).astype(np.int64), count - 1)


def interval(values_B: Sequence[float] | np.ndarray) -> Interval:
    """The percentile interval of a score's resamples; resamples without a score (a correlation with a constant) are
    left out, and not a number where none has one."""
    values = np.asarray(values_B, dtype=np.float64)
    values = values[np.isfinite(values)]
    if not len(values):
        return Interval(float("nan"), float("nan"))
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(low), float(high))
