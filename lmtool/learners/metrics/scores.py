"""Metrics of classification and regression: predictions compared with gold labels, as numpy arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lmtool.errors import UserError


@dataclass(frozen=True)
class Metric:
    """A score of predictions. function: computes it from (N,) gold and (N,) predicted values. None if the score needs
    more than one prediction per row, such as a loss or F1 over entities; then the learner's scorer computes it."""

    name: str
    function: Callable[[np.ndarray, np.ndarray], float] | None = None
    smaller_is_better: bool = False

    def __call__(self, gold: np.ndarray, predicted: np.ndarray) -> float:
        if self.function is None:
            raise TypeError(f"{self.name} cannot be computed from one prediction per row")
        return self.function(gold, predicted)


LOSS = Metric("loss", smaller_is_better=True)
"""The metric that selects checkpoints in language modeling: the loss."""


# Metrics with one prediction per row; all arrays have shape (N,).
#
# Classes are integers from 0; regression values are floats. As in scikit-learn, 0 divided by 0 is 0; as in scipy, the
# correlation with a constant is NaN.


def confusion(gold: np.ndarray, predicted: np.ndarray, classes: int) -> np.ndarray:
    """Returns the confusion matrix (classes, classes), int64: rows are gold classes, columns predicted classes."""
    return np.bincount(gold * classes + predicted, minlength=classes * classes).reshape(classes, classes)


def _counts(gold: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    return confusion(gold, predicted, int(max(gold.max(), predicted.max())) + 1).astype(np.float64)


def accuracy(gold: np.ndarray, predicted: np.ndarray) -> float:
    """Returns the fraction of correct predictions."""
    return float(np.mean(gold == predicted))


def f1(gold: np.ndarray, predicted: np.ndarray) -> float:
    """Returns the F1 score of class 1, for the classes 0 and 1; 0 if class 1 occurs in neither array."""
    intersection, total = np.sum((gold == 1) & (predicted == 1)), np.sum(gold == 1) + np.sum(predicted == 1)
    return float(2 * intersection / total) if total else 0.0


def macro_f1(gold: np.ndarray, predicted: np.ndarray) -> float:
    """Returns the mean F1 score of the classes that occur in gold labels or predictions."""
    counts = _counts(gold, predicted)
    occurrences = counts.sum(0) + counts.sum(1)
    present = occurrences > 0
    return float(np.mean(2 * np.diag(counts)[present] / occurrences[present]))


def matthews(gold: np.ndarray, predicted: np.ndarray) -> float:
    """Returns the Matthews correlation for any number of classes (Gorodkin 2004); 0 if gold labels or predictions are
    constant."""
    counts = _counts(gold, predicted)
    total, predicted_C, gold_C = counts.sum(), counts.sum(0), counts.sum(1)
    covariance = np.trace(counts) * total - gold_C @ predicted_C
    variances = (total**2 - predicted_C @ predicted_C) * (total**2 - gold_C @ gold_C)
    return float(covariance / np.sqrt(variances)) if variances > 0 else 0.0


def pearson(gold: np.ndarray, predicted: np.ndarray) -> float:
    """Returns the linear correlation; NaN if either array is constant."""
    if len(gold) < 2 or np.all(gold == gold[0]) or np.all(predicted == predicted[0]):
        return float("nan")
    x, y = gold - np.mean(gold, dtype=np.float64), predicted - np.mean(predicted, dtype=np.float64)
    # Scale the largest element to 1 first, because the squares of small values would underflow.
    x, y = x / np.abs(x).max(), y / np.abs(y).max()
    return float(np.clip(x / np.linalg.norm(x) @ (y / np.linalg.norm(y)), -1.0, 1.0))


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last_ranks = np.cumsum(counts)
    return (last_ranks - (counts - 1) / 2)[inverse]


def spearman(gold: np.ndarray, predicted: np.ndarray) -> float:
    """Returns the correlation of ranks, with mean ranks for ties; NaN if either array is constant or contains NaN."""
    if len(gold) < 2 or np.isnan(gold).any() or np.isnan(predicted).any():
        return float("nan")
    return pearson(_ranks(gold), _ranks(predicted))


def mse(gold: np.ndarray, predicted: np.ndarray) -> float:
    """Returns the mean squared error."""
    return float(np.mean(np.square(gold.astype(np.float64) - predicted)))


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("accuracy", accuracy),
        Metric("f1", f1),
        Metric("macro_f1", macro_f1),
        Metric("matthews", matthews),
        Metric("pearson", pearson),
        Metric("spearman", spearman),
        Metric("mse", mse, smaller_is_better=True),
    )
}


def compute(names: Sequence[str], gold: Sequence | np.ndarray, predicted: Sequence | np.ndarray) -> dict[str, float]:
    """Returns the scores of gold and predicted values (N,) by name.

    A correlation with a constant counts as 0, so that runs can be compared. All scores are NaN if any value is not
    finite. Raises UserError if a name is not in METRICS, there are no rows, or the lengths of the arrays differ.
    """
    unknown = [name for name in names if name not in METRICS]
    if unknown:
        raise UserError(f"the metric {unknown[0]} does not exist", f"use one of {', '.join(sorted(METRICS))}")
    gold, predicted = np.asarray(gold), np.asarray(predicted)
    if gold.shape != predicted.shape or gold.ndim != 1 or not len(gold):
        raise UserError(f"cannot score {len(predicted)} predictions against {len(gold)} gold values")
    if not (np.isfinite(gold).all() and np.isfinite(predicted).all()):
        return dict.fromkeys(names, float("nan"))
    values = {name: METRICS[name](gold, predicted) for name in names}
    return {name: 0.0 if np.isnan(value) else value for name, value in values.items()}


# Scores of each class, and the calibration of predicted probabilities.
#
# Shape letters: N rows, C classes.


BINS = 15
"""Number of bins of the calibration error, as in Guo et al. 2017."""


def by_class(counts_CC: np.ndarray, labels: Sequence[str]) -> dict[str, dict[str, float]]:
    """Returns the precision, recall, F1 and number of gold rows (support) of each class. 0 divided by 0 is 0.
    counts_CC: the confusion matrix; rows are gold classes, columns predicted classes. labels: the names of the
    classes."""
    correct, gold, predicted = np.diag(counts_CC), counts_CC.sum(1), counts_CC.sum(0)
    return {
        label: {
            "precision": float(correct[number] / max(predicted[number], 1)),
            "recall": float(correct[number] / max(gold[number], 1)),
            "f1": float(2 * correct[number] / max(gold[number] + predicted[number], 1)),
            "support": int(gold[number]),
        }
        for number, label in enumerate(labels)
    }


def calibration(right_N: np.ndarray, confidence_N: np.ndarray, bins: int = BINS) -> dict[str, object]:
    """Returns the expected calibration error (Guo et al. 2017, equation 3), `calibration_error`, and `bins`: for each
    bin with rows, [number of rows, mean confidence, accuracy].

    The error is the mean absolute difference between confidence and accuracy over bins of equal width, weighted by the
    number of rows in each bin. right_N: whether each prediction is correct. confidence_N: the probability of each
    predicted class.
    """
    right_N, confidence_N = np.asarray(right_N, dtype=np.float64), np.asarray(confidence_N, dtype=np.float64)
    # Bin b contains the confidences in (b/bins, (b+1)/bins], as in the paper.
    bin_N = np.clip(np.ceil(confidence_N * bins).astype(np.int64) - 1, 0, bins - 1)
    counts = np.bincount(bin_N, minlength=bins)
    has_rows = counts > 0
    accuracy = np.bincount(bin_N, right_N, bins)[has_rows] / counts[has_rows]
    confidence = np.bincount(bin_N, confidence_N, bins)[has_rows] / counts[has_rows]
    error = float(np.sum(counts[has_rows] * np.abs(accuracy - confidence)) / max(len(right_N), 1))
    rows = zip(counts[has_rows].tolist(), confidence.tolist(), accuracy.tolist(), strict=True)
    return {"calibration_error": error, "bins": [list(row) for row in rows]}


# Metrics of multi-label classification, in which a row has any number of classes, and the thresholds from which on a
# class is predicted. As in scikit-learn, F1 is 0 for a class that occurs neither in gold labels nor in predictions.
#
# Shape letters: N rows, C classes.


def _label_counts(gold_NC: np.ndarray, predicted_NC: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns for each class the number of rows that have it in both arrays, and the sum of their numbers in each."""
    return np.sum(gold_NC & predicted_NC, axis=0), np.sum(gold_NC, axis=0) + np.sum(predicted_NC, axis=0)


def micro_f1(gold_NC: np.ndarray, predicted_NC: np.ndarray) -> float:
    """Returns the F1 score over all pairs of a row and a class; 0 if there are no gold and no predicted classes."""
    both_C, either_C = _label_counts(gold_NC, predicted_NC)
    return float(2 * both_C.sum() / either_C.sum()) if either_C.sum() else 0.0


def label_macro_f1(gold_NC: np.ndarray, predicted_NC: np.ndarray) -> float:
    """Returns the mean over classes of the F1 score."""
    both_C, either_C = _label_counts(gold_NC, predicted_NC)
    return float(np.mean(2 * both_C / np.maximum(either_C, 1)))


def subset_accuracy(gold_NC: np.ndarray, predicted_NC: np.ndarray) -> float:
    """Returns the fraction of rows for which exactly the gold classes are predicted."""
    return float(np.mean((gold_NC == predicted_NC).all(axis=1)))


MULTI_LABEL: dict[str, Metric] = {
    "micro_f1": Metric("micro_f1", micro_f1),
    "macro_f1": Metric("macro_f1", label_macro_f1),
    "subset_accuracy": Metric("subset_accuracy", subset_accuracy),
}


def compute_multi_label(names: Sequence[str], gold_NC: np.ndarray, predicted_NC: np.ndarray) -> dict[str, float]:
    """Returns the scores by name, of names in MULTI_LABEL. gold_NC, predicted_NC: 1 for the classes that a row
    has, and for those that are predicted; otherwise 0."""
    gold_NC, predicted_NC = np.asarray(gold_NC) > 0, np.asarray(predicted_NC) > 0
    return {name: MULTI_LABEL[name](gold_NC, predicted_NC) for name in names}


def best_thresholds(gold_NC: np.ndarray, probabilities_NC: np.ndarray) -> np.ndarray:
    """Returns the decision threshold (C,) of each class that maximizes its F1 score.

    A threshold is halfway between two neighboring predicted probabilities. If several thresholds are equally good, the
    one closest to 0.5 is chosen. The threshold of a class that no row has is 0.5.
    """
    return np.array(
        [_best_threshold(*pair) for pair in zip(np.asarray(gold_NC).T > 0, probabilities_NC.T, strict=True)]
    )


def _best_threshold(gold_N: np.ndarray, probabilities_N: np.ndarray) -> float:
    if not gold_N.any():
        return 0.5
    order = np.argsort(-probabilities_N, kind="stable")
    values = np.asarray(probabilities_N, dtype=np.float64)[order]
    correct = np.cumsum(gold_N[order])
    # A threshold predicts the class for the first k rows. Rows with equal probabilities are on the same side of it.
    ends = np.flatnonzero(np.append(values[1:] != values[:-1], True))
    scores = 2 * correct[ends] / (ends + 1 + correct[-1])
    thresholds = (values[ends] + np.append(values, 0.0)[ends + 1]) / 2
    best = np.flatnonzero(scores == scores.max())
    return float(thresholds[best[np.argmin(np.abs(thresholds[best] - 0.5))]])
