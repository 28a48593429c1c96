"""Constant predictors, which ignore the input: the baseline that a model must beat.

The predictor of a term, one summand of the loss, is a fixed distribution over the term's classes, from add-one smoothed
counts in the training text. The loss of a target is its negative log-probability.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from lmtool.data.store import release
from lmtool.errors import NotFinite, UserError
from lmtool.learners.metrics import Metric, paired_standard_error, ratio_standard_error
from lmtool.types import Batch, Scores

# Number of tokens counted at a time: a token store may be larger than memory.
_CHUNK_TOKENS = 1 << 20
# Replaces a count of 0 as a divisor.
_TINY = 1e-300


@dataclass(frozen=True)
class ConstantPredictor:
    """A constant distribution over the C classes of one term. name: the name on screens. losses_C: the loss of each
    class in nats, its negative log-probability."""

    name: str
    losses_C: np.ndarray

    @classmethod
    def of_counts(cls, name: str, counts_C: np.ndarray, excluded: Collection[int] = ()) -> ConstantPredictor:
        """Builds the predictor from the counts of classes, with add-one smoothing. excluded: classes that are never
        targets, which get probability 0."""
        probabilities_C = np.asarray(counts_C, dtype=np.float64) + 1
        probabilities_C[list(excluded)] = 0
        with np.errstate(divide="ignore"):
            return cls(name, np.log(probabilities_C.sum()) - np.log(probabilities_C))

    def losses(self, labels_M: np.ndarray) -> np.ndarray:
        """Returns the loss (M,) of each target in nats, float64."""
        return self.losses_C[labels_M]


@dataclass(frozen=True)
class BestConstant:
    """The constant distribution over C classes that fits the evaluated labels best.

    It is used for labels that the model itself makes in a step, such as whether a token is replaced. The training data
    has no such labels to which a distribution could be fitted. name: the name on screens. expected: (C,) the class
    probabilities to assume before there are labels.
    """

    name: str
    expected: tuple[float, ...]

    @property
    def expected_loss(self) -> float:
        """The mean loss of a target in nats, if the classes have the expected probabilities."""
        return self.least_loss(np.array(self.expected))

    @staticmethod
    def least_losses(counts_C: np.ndarray) -> np.ndarray:
        """Returns the loss (C,) of each class in nats under the best distribution; 0 for a class without targets.
        counts_C: the number of targets of each class."""
        probabilities_C = np.asarray(counts_C, dtype=np.float64) / max(float(np.sum(counts_C)), _TINY)
        return -np.log(np.where(probabilities_C > 0, probabilities_C, 1.0))

    @classmethod
    def least_loss(cls, counts_C: np.ndarray) -> float:
        """Returns the mean loss of a target in nats under the best distribution: the entropy of the class
        frequencies."""
        return float(np.sum(counts_C * cls.least_losses(counts_C)) / max(float(np.sum(counts_C)), _TINY))


@dataclass(frozen=True)
class ConstantValue:
    """Predicts the same number for every target; the loss is the squared error. unit: an error is divided by this
    number before it is squared."""

    name: str
    value: float
    unit: float = 1.0

    def losses(self, labels_M: np.ndarray) -> np.ndarray:
        """Returns the squared error (M,) of each target, float64."""
        return ((np.asarray(labels_M, dtype=np.float64) - self.value) / self.unit) ** 2


@dataclass(frozen=True)
class WeightedValue:
    """Predicts the same number for targets that have weights; the loss is the weighted squared error. name: the name on
    screens. value: the predicted number."""

    name: str
    value: float

    def losses(self, labels_M2: np.ndarray) -> np.ndarray:
        """Returns the losses (M,), float64. labels_M2: the number and the weight of each target."""
        numbers_M, weights_M = np.asarray(labels_M2, dtype=np.float64).T
        return weights_M * (numbers_M - self.value) ** 2


@dataclass(frozen=True)
class ConstantRates:
    """A constant probability for each of C independent labels. name: the name on screens. losses_2C: the loss of each
    label in nats: row 0 if the label does not apply, row 1 if it does."""

    name: str
    losses_2C: np.ndarray

    @classmethod
    def of_counts(cls, name: str, counts_C: np.ndarray, rows: int) -> ConstantRates:
        """Builds the predictor from the number of rows with each label, with add-one smoothing."""
        probabilities_C = (np.asarray(counts_C, dtype=np.float64) + 1) / (rows + 2)
        return cls(name, -np.log(np.stack([1 - probabilities_C, probabilities_C])))

    def losses(self, labels: np.ndarray) -> np.ndarray:
        """Returns the losses (N * C,) in nats, float64. labels: (N * C,) 0 or 1, the C labels of each text in
        sequence."""
        labels_NC = np.asarray(labels).reshape(-1, self.losses_2C.shape[1]) > 0
        return np.where(labels_NC, self.losses_2C[1], self.losses_2C[0]).reshape(-1)


Predictor = ConstantPredictor | ConstantValue | WeightedValue | ConstantRates | BestConstant


def mean_losses(predictors: Mapping[str, Predictor], batches: Iterable[Batch]) -> dict[str, float]:
    """Returns the mean loss of each term's predictor over the targets of batches, without running a model. Raises
    UserError if a term has no targets."""
    constants = {term: predictor for term, predictor in predictors.items() if not isinstance(predictor, BestConstant)}
    sums, scored_counts = dict.fromkeys(constants, 0.0), dict.fromkeys(constants, 0)
    # The number of targets of each term whose labels exist before the step.
    target_counts: dict[str, int] = {}
    for batch in batches:
        for term, predictor in constants.items():
            labels = batch.targets[term].labels if term in batch.targets else None
            if labels is not None:
                target_counts[term] = target_counts.get(term, 0) + len(labels)
                losses = predictor.losses(labels.numpy())
                # Targets to which the predictor gives probability 0 are not scored: sentinels, the ends of outputs.
                losses = losses[np.isfinite(losses)]
                sums[term] += float(losses.sum())
                scored_counts[term] += len(losses)
    for term, count in target_counts.items():
        if not count:
            raise nothing_predicted(term)
    return {
        term: predictor.expected_loss
        if isinstance(predictor, BestConstant)
        else sums[term] / max(scored_counts[term], 1)
        for term, predictor in predictors.items()
    }


def headline_terms(metric: Metric, loss_weights: Mapping[str, float]) -> Mapping[str, float]:
    """Returns the terms whose losses a metric sums, with their weights. metric: `loss`, TERM_loss, or a score.
    loss_weights: the weight of each term of the loss."""
    term = metric.name.removesuffix("_loss")
    return {term: 1.0} if term in loss_weights else loss_weights


def headline_errors(
    metric: Metric, loss_weights: Mapping[str, float], metrics: Mapping[str, float]
) -> dict[str, float]:
    """Returns the `standard_error` of a metric and the `gain_standard_error` of its gain over the baseline, as far as
    they are known. metric, loss_weights: as for `headline_terms`. metrics: the result of `Evaluation.metrics`."""
    term = metric.name.removesuffix("_loss")
    prefix = f"{term}_" if term in loss_weights else ""
    names = ("standard_error", "gain_standard_error")
    return {name: metrics[f"{prefix}{name}"] for name in names if f"{prefix}{name}" in metrics}


def nothing_predicted(term: str) -> UserError:
    """Returns the error for held-out text in which a term has no targets."""
    return UserError(
        f"the held-out text has nothing that {term} predicts", "set data.validation= to a file with more text"
    )


def token_counts(tokens: np.ndarray, vocabulary: int) -> np.ndarray:
    """Returns the count (V,) of each token id, int64. vocabulary: the number of ids, V."""
    counts = np.zeros(vocabulary, dtype=np.int64)
    for start in range(0, len(tokens), _CHUNK_TOKENS):
        counts += np.bincount(tokens[start : start + _CHUNK_TOKENS], minlength=vocabulary)
        release(tokens)
    return counts


# --- the evaluation of one term on a held-out split ---------------------------------------------------------------
#
# Shape letters: E examples, N documents of a batch, M targets, C classes.


@dataclass(frozen=True)
class TermEvaluation:
    """The evaluation of one term over E examples. sums_E: the sum of the losses of each example, in nats. counts_E: its
    number of targets. right: the number of correct predictions; None for regression. baseline_sums_E: the sum of the
    baseline's losses of each example; None without a baseline."""

    sums_E: np.ndarray
    counts_E: np.ndarray
    right: int | None
    baseline_sums_E: np.ndarray | None = None
    baseline_name: str | None = None

    @property
    def count(self) -> int:
        """The number of targets."""
        return int(self.counts_E.sum())

    @property
    def loss(self) -> float:
        """The mean loss of a target, in nats."""
        return float(self.sums_E.sum() / self.count)

    @property
    def accuracy(self) -> float | None:
        """The fraction of correct predictions; None for regression."""
        return None if self.right is None else self.right / self.count

    @property
    def standard_error(self) -> float:
        """The standard error of the mean loss, over examples."""
        return ratio_standard_error(self.sums_E, self.counts_E)

    @property
    def baseline(self) -> float | None:
        """The mean loss of the constant predictor on the same targets; None without a baseline."""
        return None if self.baseline_sums_E is None else float(self.baseline_sums_E.sum() / self.count)

    @property
    def gain_standard_error(self) -> float | None:
        """The standard error of the gain (baseline minus loss), paired by example; None without a baseline."""
        if self.baseline_sums_E is None:
            return None
        return paired_standard_error(self.baseline_sums_E, self.sums_E, self.counts_E)


class TermSums:
    """Accumulates the losses of a term for each example. The parts of an example may be in several batches."""

    def __init__(self) -> None:
        self.sums: list[np.ndarray] = []
        self.baseline_sums: list[np.ndarray] = []
        self.class_counts: list[np.ndarray] = []
        self.counts: list[np.ndarray] = []
        self.examples: list[np.ndarray] = []
        self.right: int | None = 0

    def add(self, batch: Batch, scores: Scores, baseline: Predictor | None) -> None:
        """Adds a batch. Raises NotFinite if a loss is not finite. baseline: the constant predictor of the term, or
        None."""
        if not bool(torch.isfinite(scores.losses).all()):
            raise NotFinite("losses", batch)
        documents = scores.documents.cpu().numpy()
        document_count = len(batch.inputs.lengths)
        self.examples.append((batch.examples if batch.rows is None else batch.rows).cpu().numpy())
        self.sums.append(np.bincount(documents, scores.losses.double().cpu().numpy(), document_count))
        self.counts.append(np.bincount(documents, minlength=document_count))
        if scores.labels.is_floating_point():
            self.right = None
        elif self.right is not None:
            self.right += int((scores.predictions == scores.labels).sum())
        if isinstance(baseline, BestConstant):
            classes = len(baseline.expected)
            cells = documents * classes + scores.labels.cpu().numpy()
            counts = np.bincount(cells, minlength=document_count * classes)
            self.class_counts.append(counts.reshape(document_count, classes))
        elif baseline is not None:
            losses = baseline.losses(scores.labels.cpu().numpy())
            self.baseline_sums.append(np.bincount(documents, losses, document_count))

    def result(self, name: str, baseline: Predictor | None) -> TermEvaluation:
        """Returns the evaluation of all batches. Raises UserError if there were no targets. name: the name of the
        term."""
        examples, inverse = np.unique(np.concatenate(self.examples), return_inverse=True)

        def sum_by_example(chunks: list[np.ndarray]) -> np.ndarray:
            return np.bincount(inverse, np.concatenate(chunks), len(examples))

        counts = sum_by_example(self.counts)
        if not counts.sum():
            raise nothing_predicted(name)
        if self.class_counts:
            # The best constant depends on all labels, which are only known now.
            counts_C = np.sum([counts_NC.sum(axis=0) for counts_NC in self.class_counts], axis=0)
            losses_C = BestConstant.least_losses(counts_C)
            self.baseline_sums = [counts_NC @ losses_C for counts_NC in self.class_counts]
        baseline_sums = sum_by_example(self.baseline_sums) if baseline else None
        baseline_name = baseline.name if baseline else None
        return TermEvaluation(sum_by_example(self.sums), counts, self.right, baseline_sums, baseline_name)
