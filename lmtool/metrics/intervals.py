"""How sure a mean is."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

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
