"""How sure a mean is."""

from __future__ import annotations

import numpy as np


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
