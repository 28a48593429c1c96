"""Constant predictors, which ignore the input: the baseline that a language model must beat.

Each term has a fixed distribution over its classes, from add-one counts on the training text; the loss of a target is
the negative logarithm of its probability.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from lmtool.data.store import release
from lmtool.errors import NotFinite, UserError
from lmtool.learners.metrics import paired_standard_error, ratio_standard_error
from lmtool.types import Batch, Scores

# Tokens counted at a time: a store larger than memory is read in chunks.
_CHUNK_TOKENS = 1 << 20


@dataclass(frozen=True)
class ConstantPredictor:
    """A distribution over the C classes of one term. name: what to call it on the screens. losses_C: (C,) nats."""

    name: str
    losses_C: np.ndarray

    @classmethod
    def of_counts(cls, name: str, counts_C: np.ndarray, never: Collection[int] = ()) -> ConstantPredictor:
        """From counts of each class, one added to each so that no class is impossible, but for those that are
        `never` a target."""
        probabilities_C = np.asarray(counts_C, dtype=np.float64) + 1
        probabilities_C[list(never)] = 0
        with np.errstate(divide="ignore"):
            return cls(name, np.log(probabilities_C.sum()) - np.log(probabilities_C))

    def losses(self, labels_M: np.ndarray) -> np.ndarray:
        """(M,) float64 nats of each target."""
        return self.losses_C[labels_M]


@dataclass(frozen=True)
class BestConstant:
    """The best distribution over C classes in hindsight, for labels that the model's own steps make: no constant
    predictor, however it was made, is better on them.

    name: what to call it on the screens. expected: (C,) the shares to reckon with before there are labels.
    """

    name: str
    expected: tuple[float, ...]

    @property
    def expected_loss(self) -> float:
        """Nats of a target, with the expected shares."""
        return self.least_loss(np.array(self.expected))

    @staticmethod
    def least_losses(counts_C: np.ndarray) -> np.ndarray:
        """(C,) nats of each class where the classes have these counts; 0 for those that never come."""
        probabilities_C = np.asarray(counts_C, dtype=np.float64) / max(float(np.sum(counts_C)), 1e-300)
        return -np.log(np.where(probabilities_C > 0, probabilities_C, 1.0))

    @classmethod
    def least_loss(cls, counts_C: np.ndarray) -> float:
        """Mean nats of a target: the entropy of the shares."""
        return float(np.sum(counts_C * cls.least_losses(counts_C)) / max(float(np.sum(counts_C)), 1e-300))


@dataclass(frozen=True)
class ConstantValue:
    """One number for every target, by squared error. name: what to call it on the screens. unit: of the errors."""

    name: str
    value: float
    unit: float = 1.0

    def losses(self, labels_M: np.ndarray) -> np.ndarray:
        """(M,) float64 squared error of each target."""
        return ((np.asarray(labels_M, dtype=np.float64) - self.value) / self.unit) ** 2


@dataclass(frozen=True)
class ConstantRates:
    """A probability for each of C classes that do not exclude each other. name: what to call it on the screens.
    losses_2C: (2, C) nats where a class does not apply, and where it does."""

    name: str
    losses_2C: np.ndarray

    @classmethod
    def of_counts(cls, name: str, counts_C: np.ndarray, rows: int) -> ConstantRates:
        """From how many of the rows have each class, one added to each side so that nothing is impossible."""
        probabilities_C = (np.asarray(counts_C, dtype=np.float64) + 1) / (rows + 2)
        return cls(name, -np.log(np.stack([1 - probabilities_C, probabilities_C])))

    def losses(self, labels: np.ndarray) -> np.ndarray:
        """(N x C,) float64 nats of labels 0 or 1, those of a text side by side."""
        labels_NC = np.asarray(labels).reshape(-1, self.losses_2C.shape[1]) > 0
        return np.where(labels_NC, self.losses_2C[1], self.losses_2C[0]).reshape(-1)


Predictor = ConstantPredictor | ConstantValue | ConstantRates | BestConstant


def mean_losses(predictors: Mapping[str, Predictor], batches: Iterable[Batch]) -> dict[str, float]:
    """Mean loss of each term's predictor over the targets of the batches: known before any model is run.

    UserError where there is nothing that a term predicts.
    """
    known = {term: predictor for term, predictor in predictors.items() if not isinstance(predictor, BestConstant)}
    sums, counts = dict.fromkeys(known, 0.0), dict.fromkeys(known, 0)
    targets: dict[str, int] = {}  # of the terms whose labels are there before a step makes them
    for batch in batches:
        for term, predictor in known.items():
            labels = batch.targets[term].labels if term in batch.targets else None
            if labels is not None:
                targets[term] = targets.get(term, 0) + len(labels)
                losses = predictor.losses(labels.numpy())
                # What the predictor holds for impossible is not scored: sentinels, the ends of outputs.
                losses = losses[np.isfinite(losses)]
                sums[term] += float(losses.sum())
                counts[term] += len(losses)
    for term, count in targets.items():
        if not count:
            raise nothing_predicted(term)
    return {
        term: predictor.expected_loss if isinstance(predictor, BestConstant) else sums[term] / max(counts[term], 1)
        for term, predictor in predictors.items()
    }


def nothing_predicted(term: str) -> UserError:
    """The error of a held-out text in which a term has no target."""
    return UserError(f"the held-out text has nothing that {term} predicts", "use more text with data.validation=")


def token_counts(tokens: np.ndarray, vocabulary: int) -> np.ndarray:
    """(V,) int64: how often each id occurs."""
    counts = np.zeros(vocabulary, dtype=np.int64)
    for start in range(0, len(tokens), _CHUNK_TOKENS):
        counts += np.bincount(tokens[start : start + _CHUNK_TOKENS], minlength=vocabulary)
        release(tokens)
    return counts


# One term over a held-out set: its losses summed by example, with what their standard errors need.
#
# Shape letters: E examples, N documents of a batch, M targets, C classes.


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

        def by_example(chunks: list[np.ndarray]) -> np.ndarray:
            return np.bincount(inverse, np.concatenate(chunks), len(examples))

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
