"""Scores of predictions against gold labels, over numpy arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lmtool.errors import UserError

# A score: its name, how it is computed, and which direction is better.


@dataclass(frozen=True)
class Metric:
    """name: in result files and on the screens. function: (N,) gold and (N,) predicted values to the score; None where
    it is no function of single predictions (a loss, F1 over entities): its learner computes it."""

    name: str
    function: Callable[[np.ndarray, np.ndarray], float] | None = None
    smaller_is_better: bool = False

    def __call__(self, gold: np.ndarray, predicted: np.ndarray) -> float:
        if self.function is None:
            raise TypeError(f"{self.name} is no function of single predictions")
        return self.function(gold, predicted)


LOSS = Metric("loss", smaller_is_better=True)


# Scores of predictions against gold, over numpy arrays of one dimension.
#
# Classes are numbers from 0; a prediction or gold value of a regression is a float. Conventions are those of
# scikit-learn (a ratio of nothing is 0) and scipy (a correlation with a constant is not a number).


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
        raise UserError(f"unknown metric {unknown[0]}", f"use one of {', '.join(sorted(METRICS))}")
    gold, predicted = np.asarray(gold), np.asarray(predicted)
    if gold.shape != predicted.shape or gold.ndim != 1 or not len(gold):
        raise UserError(f"cannot score {len(predicted)} predictions against {len(gold)} gold values")
    if not (np.isfinite(gold).all() and np.isfinite(predicted).all()):
        return dict.fromkeys(names, float("nan"))
    values = {name: METRICS[name](gold, predicted) for name in names}
    return {name: 0.0 if np.isnan(value) else value for name, value in values.items()}


# Scores of a classification by class, and how far its probabilities can be trusted.
#
# Shape letters: N rows, C classes.


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


def calibration(right_N: np.ndarray, confidence_N: np.ndarray, bins: int = BINS) -> dict[str, object]:
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


# Scores where a row has any number of classes, and the probability from which on a class is predicted. Conventions
# are those of scikit-learn: F1 of a class that is neither in gold nor predicted is 0.
#
# Shape letters: N rows, C classes.


def _label_counts(gold_NC: np.ndarray, predicted_NC: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(C,) rows that have a class in both, and rows in gold and predictions together."""
    return np.sum(gold_NC & predicted_NC, axis=0), np.sum(gold_NC, axis=0) + np.sum(predicted_NC, axis=0)


def micro_f1(gold_NC: np.ndarray, predicted_NC: np.ndarray) -> float:
    """F1 over all classes of all rows together; 0 where none is in gold or predicted."""
    both_C, either_C = _label_counts(gold_NC, predicted_NC)
    return float(2 * both_C.sum() / either_C.sum()) if either_C.sum() else 0.0


def label_macro_f1(gold_NC: np.ndarray, predicted_NC: np.ndarray) -> float:
    """Mean of the classes' F1."""
    both_C, either_C = _label_counts(gold_NC, predicted_NC)
    return float(np.mean(2 * both_C / np.maximum(either_C, 1)))


def subset_accuracy(gold_NC: np.ndarray, predicted_NC: np.ndarray) -> float:
    """Share of the rows all of whose classes are right."""
    return float(np.mean((gold_NC == predicted_NC).all(axis=1)))


MULTI_LABEL: dict[str, Metric] = {
    "micro_f1": Metric("micro_f1", micro_f1),
    "macro_f1": Metric("macro_f1", label_macro_f1),
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
