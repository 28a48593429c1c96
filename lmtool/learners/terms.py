"""One term over a held-out set: its losses summed by example, with what their standard errors need.

Shape letters: E examples, N documents of a batch, M targets, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from lmtool.errors import NotFinite
from lmtool.learners.baseline import BestConstant, Predictor, nothing_predicted
from lmtool.metrics import paired_standard_error, ratio_standard_error
from lmtool.types import Batch, Scores


@dataclass(frozen=True)
class TermEvaluation:
    """One term over E examples: sums of losses in nats, of baseline losses (None without a baseline), how many
    targets, and how many were predicted right (None of values)."""

    sums_E: np.ndarray
    counts_E: np.ndarray
    right: int | None
    baseline_sums_E: np.ndarray | None = None
    baseline_name: str | None = None

    @property
    def count(self) -> int:
        return int(self.counts_E.sum())

    @property
    def loss(self) -> float:
        """Mean loss of a target, in nats."""
        return float(self.sums_E.sum() / self.count)

    @property
    def accuracy(self) -> float | None:
        return None if self.right is None else self.right / self.count

    @property
    def standard_error(self) -> float:
        """Of the mean loss, over examples."""
        return ratio_standard_error(self.sums_E, self.counts_E)

    @property
    def baseline(self) -> float | None:
        """Mean loss of the constant predictor on the same targets."""
        return None if self.baseline_sums_E is None else float(self.baseline_sums_E.sum() / self.count)

    @property
    def gain_standard_error(self) -> float | None:
        """Of baseline minus loss, paired by example."""
        if self.baseline_sums_E is None:
            return None
        return paired_standard_error(self.baseline_sums_E, self.sums_E, self.counts_E)


class TermSums:
    """Sums by example number, grown as examples come; an example may come in several batches."""

    def __init__(self) -> None:
        self.sums: list[np.ndarray] = []
        self.baseline: list[np.ndarray] = []
        self.classes: list[np.ndarray] = []
        self.counts: list[np.ndarray] = []
        self.examples: list[np.ndarray] = []
        self.right: int | None = 0

    def add(self, batch: Batch, scores: Scores, baseline: Predictor | None) -> None:
        """Enter a batch. NotFinite where a loss is no finite number."""
        if not bool(torch.isfinite(scores.losses).all()):
            raise NotFinite("losses", batch)
        documents = scores.documents.cpu().numpy()
        count = len(batch.inputs.lengths)
        self.examples.append((batch.examples if batch.rows is None else batch.rows).cpu().numpy())
        self.sums.append(np.bincount(documents, scores.losses.double().cpu().numpy(), count))
        self.counts.append(np.bincount(documents, minlength=count))
        if scores.labels.is_floating_point():
            self.right = None
        elif self.right is not None:
            self.right += int((scores.predictions == scores.labels).sum())
        if isinstance(baseline, BestConstant):
            classes = len(baseline.expected)
            places = documents * classes + scores.labels.cpu().numpy()
            self.classes.append(np.bincount(places, minlength=count * classes).reshape(count, classes))
        elif baseline is not None:
            losses = baseline.losses(scores.labels.cpu().numpy())
            self.baseline.append(np.bincount(documents, losses, count))

    def result(self, name: str, baseline: Predictor | None) -> TermEvaluation:
        examples, inverse = np.unique(np.concatenate(self.examples), return_inverse=True)

        def by_example(pieces: list[np.ndarray]) -> np.ndarray:
            return np.bincount(inverse, np.concatenate(pieces), len(examples))

        counts = by_example(self.counts)
        if not counts.sum():
            raise nothing_predicted(name)
        if self.classes:
            # Known only now that all labels are: the losses of the best constant.
            losses_C = BestConstant.least_losses(np.sum([counts_NC.sum(axis=0) for counts_NC in self.classes], axis=0))
            self.baseline = [counts_NC @ losses_C for counts_NC in self.classes]
        return TermEvaluation(
            by_example(self.sums), counts, self.right,
            by_example(self.baseline) if baseline else None, baseline.name if baseline else None,
        )  # fmt: skip
