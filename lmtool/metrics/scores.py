"""Scores of predictions against gold, over numpy arrays of one dimension.

Classes are numbers from 0; a prediction or gold value of a regression is a float. Conventions are those of
scikit-learn (a ratio of nothing is 0) and scipy (a correlation with a constant is not a number).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lmtool.errors import UserError
from lmtool.metrics.metric import Metric


def confusion(gold: np.ndarray, predicted: np.ndarray, classes: int) -> np.ndarray:
    """(classes, classes) int64 counts; rows are gold, columns predicted."""
    return np.bincount(gold * classes + predicted, minlength=classes * classes).reshape(classes, classes)


def _counts(gold: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    return confusion(gold, predicted, int(max(gold.max(), predicted.max())) + 1).astype(np.float64)


def accuracy(gold: np.ndarray, predicted: np.ndarray) -> float:
    """Share of predictions that are right."""
    return float(np.mean(gold == predicted))


def f1(gold: np.ndarray, predicted: np.ndarray) -> float:
    """Harmonic mean of precision and recall of class 1 against class 0; 0 where class 1 is in neither."""
    both, either = np.sum((gold == 1) & (predicted == 1)), np.sum(gold == 1) + np.sum(predicted == 1)
    return float(2 * both / either) if either else 0.0


def macro_f1(gold: np.ndarray, predicted: np.ndarray) -> float:
    """Mean F1 of the classes that occur in gold or predictions."""
    counts = _counts(gold, predicted)
    either = counts.sum(0) + counts.sum(1)
    seen = either > 0
    return float(np.mean(2 * np.diag(counts)[seen] / either[seen]))


def matthews(gold: np.ndarray, predicted: np.ndarray) -> float:
    """Matthews correlation of any number of classes (Gorodkin 2004); 0 where gold or predictions are constant."""
    counts = _counts(gold, predicted)
    total, predicted_of, gold_of = counts.sum(), counts.sum(0), counts.sum(1)
    covariance = np.trace(counts) * total - gold_of @ predicted_of
    spread = (total**2 - predicted_of @ predicted_of) * (total**2 - gold_of @ gold_of)
    return float(covariance / np.sqrt(spread)) if spread > 0 else 0.0


def pearson(gold: np.ndarray, predicted: np.ndarray) -> float:
    """Linear correlation; not a number where either side is constant."""
    if len(gold) < 2 or np.all(gold == gold[0]) or np.all(predicted == predicted[0]):
        return float("nan")
    x, y = gold - np.mean(gold, dtype=np.float64), predicted - np.mean(predicted, dtype=np.float64)
    # Brought to a largest element of 1 first: the squares of small values would underflow.
    x, y = x / np.abs(x).max(), y / np.abs(y).max()
    return float(np.clip(x / np.linalg.norm(x) @ (y / np.linalg.norm(y)), -1.0, 1.0))


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1, equal values sharing the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]


def spearman(gold: np.ndarray, predicted: np.ndarray) -> float:
    """Correlation of ranks, ties sharing their mean rank; not a number where either side is constant, or has something
    that is no number."""
    if len(gold) < 2 or np.isnan(gold).any() or np.isnan(predicted).any():
        return float("nan")
    return pearson(_ranks(gold), _ranks(predicted))


def mse(gold: np.ndarray, predicted: np.ndarray) -> float:
    """Mean squared error."""
    return float(np.mean(np.square(gold.astype(np.float64) - predicted)))


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("accuracy", accuracy), Metric("f1", f1), Metric("macro_f1", macro_f1), Metric("matthews", matthews),
        Metric("pearson", pearson), Metric("spearman", spearman), Metric("mse", mse, smaller_is_better=True),
    )
}  # fmt: skip


def compute(names: Sequence[str], gold: Sequence | np.ndarray, predicted: Sequence | np.ndarray) -> dict[str, float]:
    """The named scores. A correlation with a constant tells nothing and is given as 0, so that runs compare; where
    anything is no finite number, no score is a number.

    Raises UserError for an unknown name, no rows, or sides of different length.
    """
    unknown = [name for name in names if name not in METRICS]
    if unknown:
        raise UserError(f"unknown metric {unknown[0]}", f"one of {', '.join(sorted(METRICS))}")
    gold, predicted = np.asarray(gold), np.asarray(predicted)
    if gold.shape != predicted.shape or gold.ndim != 1 or not len(gold):
        raise UserError(f"cannot score {len(predicted)} predictions against {len(gold)} gold values")
    if not (np.isfinite(gold).all() and np.isfinite(predicted).all()):
        return dict.fromkeys(names, float("nan"))
    values = {name: METRICS[name](gold, predicted) for name in names}
    return {name: 0.0 if np.isnan(value) else value for name, value in values.items()}
