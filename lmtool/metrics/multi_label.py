"""Scores where a row has any number of classes, and the probability from which on a class is predicted. Conventions are
those of scikit-learn: F1 of a class that is neither in gold nor predicted is 0.

Shape letters: N rows, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lmtool.metrics.metric import Metric


def _counts(gold_NC: np.ndarray, predicted_NC: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(C,) rows that have a class in both, and rows in gold and predictions together."""
    return np.sum(gold_NC & predicted_NC, axis=0), np.sum(gold_NC, axis=0) + np.sum(predicted_NC, axis=0)


def micro_f1(gold_NC: np.ndarray, predicted_NC: np.ndarray) -> float:
    """F1 over all classes of all rows together; 0 where none is in gold or predicted."""
    both_C, either_C = _counts(gold_NC, predicted_NC)
    return float(2 * both_C.sum() / either_C.sum()) if either_C.sum() else 0.0


def macro_f1(gold_NC: np.ndarray, predicted_NC: np.ndarray) -> float:
    """Mean of the classes' F1."""
    both_C, either_C = _counts(gold_NC, predicted_NC)
    return float(np.mean(2 * both_C / np.maximum(either_C, 1)))


def subset_accuracy(gold_NC: np.ndarray, predicted_NC: np.ndarray) -> float:
    """Share of the rows all of whose classes are right."""
    return float(np.mean((gold_NC == predicted_NC).all(axis=1)))


MULTI_LABEL: dict[str, Metric] = {
    "micro_f1": Metric("micro_f1", micro_f1),
    "macro_f1": Metric("macro_f1", macro_f1),
    "subset_accuracy": Metric("subset_accuracy", subset_accuracy),
}


def compute_multi_label(names: Sequence[str], gold_NC: np.ndarray, predicted_NC: np.ndarray) -> dict[str, float]:
    """The named scores of 0 or 1 for each row and class."""
    gold_NC, predicted_NC = np.asarray(gold_NC) > 0, np.asarray(predicted_NC) > 0
    return {name: MULTI_LABEL[name](gold_NC, predicted_NC) for name in names}


def best_thresholds(gold_NC: np.ndarray, probabilities_NC: np.ndarray) -> np.ndarray:
    """(C,) for each class the probability from which on predicting it has the best F1, midway between two that occur;
    of equally good ones that nearest to .5. A class that no row has stays at .5."""
    return np.array(
        [_best_threshold(*pair) for pair in zip(np.asarray(gold_NC).T > 0, probabilities_NC.T, strict=True)]
    )


def _best_threshold(gold_N: np.ndarray, probabilities_N: np.ndarray) -> float:
    if not gold_N.any():
        return 0.5
    order = np.argsort(-probabilities_N, kind="stable")
    values = np.asarray(probabilities_N, dtype=np.float64)[order]
    right = np.cumsum(gold_N[order])
    # Predicting the first k rows; k ends a run of equal probabilities.
    ends = np.flatnonzero(np.append(values[1:] != values[:-1], True))
    scores = 2 * right[ends] / (ends + 1 + right[-1])
    thresholds = (values[ends] + np.append(values, 0.0)[ends + 1]) / 2
    best = np.flatnonzero(scores == scores.max())
    return float(thresholds[best[np.argmin(np.abs(thresholds[best] - 0.5))]])
