"""Scores of a classification by class, and how far its probabilities can be trusted.

Shape letters: N rows, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

BINS = 15


def by_class(counts_CC: np.ndarray, labels: Sequence[str]) -> dict[str, dict[str, float]]:
    """Precision, recall, F1 and the number of gold rows (support) of each class. A ratio of nothing is 0.

    counts_CC: the confusion matrix, rows gold and columns predicted.
    """
    right, gold, predicted = np.diag(counts_CC), counts_CC.sum(1), counts_CC.sum(0)
    return {
        label: {
            "precision": float(right[number] / max(predicted[number], 1)),
            "recall": float(right[number] / max(gold[number], 1)),
            "f1": float(2 * right[number] / max(gold[number] + predicted[number], 1)),
            "support": int(gold[number]),
        }
        for number, label in enumerate(labels)
    }


def calibration(right_N: np.ndarray, confidence_N: np.ndarray, bins: int = BINS) -> dict[str, Any]:
    """The expected calibration error (Guo et al. 2017, equation 3): the mean distance of confidence and accuracy over
    bins of equal width, weighted by their rows; and of each bin with rows (rows, mean confidence, accuracy)."""
    right_N, confidence_N = np.asarray(right_N, dtype=np.float64), np.asarray(confidence_N, dtype=np.float64)
    # Bin b holds the confidences in (b/bins, (b+1)/bins], as in the paper.
    bin_N = np.clip(np.ceil(confidence_N * bins).astype(np.int64) - 1, 0, bins - 1)
    counts = np.bincount(bin_N, minlength=bins)
    kept = counts > 0
    accuracy = np.bincount(bin_N, right_N, bins)[kept] / counts[kept]
    confidence = np.bincount(bin_N, confidence_N, bins)[kept] / counts[kept]
    error = float(np.sum(counts[kept] * np.abs(accuracy - confidence)) / max(len(right_N), 1))
    rows = zip(counts[kept].tolist(), confidence.tolist(), accuracy.tolist(), strict=True)
    return {"calibration_error": error, "bins": [list(row) for row in rows]}
