"""The best predictor that reads nothing: what a language model must beat.

Per term a fixed distribution over its classes, counted on the training text (add-one); the loss of a target is
minus the logarithm of its share.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from lmtool.types import Batch

# Tokens counted at a time: a store larger than memory is read in pieces.
_PIECE = 1 << 24


@dataclass(frozen=True)
class ConstantPredictor:
    """A distribution over the C classes of one term. name: what to call it on the screens. losses_C: (C,) nats."""

    name: str
    losses_C: np.ndarray

    @classmethod
    def of_counts(cls, name: str, counts_C: np.ndarray, never: Collection[int] = ()) -> ConstantPredictor:
        """From counts of each class, one added to each so that no class is impossible, but for those that are
        `never` a target."""
        shares_C = np.asarray(counts_C, dtype=np.float64) + 1
        shares_C[list(never)] = 0
        with np.errstate(divide="ignore"):
            return cls(name, np.log(shares_C.sum()) - np.log(shares_C))

    def losses(self, labels_M: np.ndarray) -> np.ndarray:
        """(M,) float64 nats of each target."""
        return self.losses_C[labels_M]


def mean_losses(predictors: Mapping[str, ConstantPredictor], batches: Iterable[Batch]) -> dict[str, float]:
    """Mean loss of each term's predictor over the targets of the batches: known before any model is run."""
    sums, counts = dict.fromkeys(predictors, 0.0), dict.fromkeys(predictors, 0)
    for batch in batches:
        for term, predictor in predictors.items():
            labels = batch.targets[term].labels
            if labels is not None:
                sums[term] += float(predictor.losses(labels.numpy()).sum())
                counts[term] += len(labels)
    return {term: sums[term] / max(counts[term], 1) for term in predictors}


def token_counts(tokens: np.ndarray, vocabulary: int) -> np.ndarray:
    """(V,) int64: how often each id occurs."""
    counts = np.zeros(vocabulary, dtype=np.int64)
    for start in range(0, len(tokens), _PIECE):
        counts += np.bincount(tokens[start : start + _PIECE], minlength=vocabulary)
    return counts
