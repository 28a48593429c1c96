"""Losses of a learner over a held-out set, term by term, with what their standard errors need.

Shape letters: E examples, M targets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from lmtool.errors import UserError
from lmtool.metrics import paired_standard_error, ratio_standard_error
from lmtool.objectives.baseline import BestConstant, Predictor, nothing_predicted
from lmtool.types import Batch, Scores


class Scorer(Protocol):
    """A learner that scores a batch, as a module does; its terms add up with these weights."""

    weights: dict[str, float]
    measures: Mapping[str, Callable[[np.ndarray, np.ndarray], dict[str, float]]]
    training: bool

    def score(self, batch: Batch) -> dict[str, Scores]: ...

    def train(self, mode: bool = True) -> Any: ...


@dataclass(frozen=True)
class TermEvaluation:
    """One term over E examples: sums of losses in nats, of baseline losses (None without a baseline), how many
    targets, and how many were predicted right (None of values). scores: further ones by name."""

    sums_E: np.ndarray
    counts_E: np.ndarray
    right: int | None
    baseline_sums_E: np.ndarray | None = None
    baseline_name: str | None = None
    scores: dict[str, float] = field(default_factory=dict)

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


@dataclass(frozen=True)
class Evaluation:
    """Terms by name, and the weights with which they make up the loss."""

    terms: dict[str, TermEvaluation]
    weights: dict[str, float]

    @property
    def loss(self) -> float:
        """Weighted sum of the terms' mean losses: what training lowers."""
        return sum(self.weights[name] * term.loss for name, term in self.terms.items())

    @property
    def standard_error(self) -> float:
        """Of the gain over the baseline where every term has one, else of the loss; terms as if independent."""
        gains = {name: term.gain_standard_error for name, term in self.terms.items()}
        errors = {name: gain for name, gain in gains.items() if gain is not None}
        if len(errors) < len(gains):
            errors = {name: term.standard_error for name, term in self.terms.items()}
        return float(np.sqrt(sum((self.weights[name] * error) ** 2 for name, error in errors.items())))

    def metrics(self) -> dict[str, float]:
        """Plain numbers for metrics.jsonl and result.json: `loss` and its `standard_error`, and for each term NAME
        `NAME_loss`, `NAME_accuracy`, `NAME_count`, `NAME_standard_error`, its further scores and, with a baseline,
        `NAME_baseline` and `NAME_gain_standard_error`."""
        values: dict[str, float | None] = {"loss": self.loss, "standard_error": self.standard_error}
        for name, term in self.terms.items():
            values |= {
                f"{name}_loss": term.loss,
                f"{name}_accuracy": term.accuracy,
                f"{name}_count": term.count,
                f"{name}_standard_error": term.standard_error,
                **{f"{name}_{score}": value for score, value in term.scores.items()},
            }
            values |= {f"{name}_baseline": term.baseline, f"{name}_gain_standard_error": term.gain_standard_error}
        # A single example has no standard error, and JSON has no word for that.
        return {name: value for name, value in values.items() if value is not None and np.isfinite(value)}


class _Sums:
    """Sums by example number, grown as examples come; an example may come in several batches. measure: of all labels
    and predictions, which are kept for it alone."""

    def __init__(self, measure: Callable[[np.ndarray, np.ndarray], dict[str, float]] | None) -> None:
        self.measure = measure
        self.answers: list[tuple[np.ndarray, np.ndarray]] = []
        self.sums: list[np.ndarray] = []
        self.baseline: list[np.ndarray] = []
        self.classes: list[np.ndarray] = []
        self.counts: list[np.ndarray] = []
        self.examples: list[np.ndarray] = []
        self.right: int | None = 0

    def add(self, batch: Batch, scores: Scores, baseline: Predictor | None) -> None:
        documents = scores.documents.cpu().numpy()
        count = len(batch.inputs.lengths)
        self.examples.append(batch.examples.cpu().numpy())
        self.sums.append(np.bincount(documents, scores.losses.double().cpu().numpy(), count))
        self.counts.append(np.bincount(documents, minlength=count))
        if scores.labels.is_floating_point():
            self.right = None
        elif self.right is not None:
            self.right += int((scores.predictions == scores.labels).sum())
        if self.measure is not None:
            self.answers.append((scores.labels.cpu().numpy(), scores.predictions.cpu().numpy()))
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
            losses_C = BestConstant.least_losses(np.sum([one.sum(axis=0) for one in self.classes], axis=0))
            self.baseline = [one @ losses_C for one in self.classes]
        return TermEvaluation(
            by_example(self.sums), counts, self.right,
            by_example(self.baseline) if baseline else None, baseline.name if baseline else None, self._scores(),
        )  # fmt: skip

    def _scores(self) -> dict[str, float]:
        if self.measure is None:
            return {}
        gold, predicted = (np.concatenate(one) for one in zip(*self.answers, strict=True))
        return self.measure(gold, predicted)


def evaluate(
    learner: Scorer,
    batches: Iterable[Batch],
    device: torch.device | str = "cpu",
    autocast: Callable[[], AbstractContextManager] = nullcontext,
    baselines: Mapping[str, Predictor] | None = None,
) -> Evaluation:
    """One pass in evaluation mode, without gradients. Keeps a few numbers an example; logits never leave a batch.

    autocast: a factory of contexts for the forward. baselines: a constant predictor by term, scored on the same
    targets. The learner is left in the mode it came in.
    """
    was_training = learner.training
    learner.train(False)
    sums: dict[str, _Sums] = {}
    try:
        with torch.no_grad():
            for batch in batches:
                batch = batch.to(torch.device(device))
                with autocast():
                    scores = learner.score(batch)
                for name, one in scores.items():
                    own = sums.setdefault(name, _Sums(learner.measures.get(name)))
                    own.add(batch, one, (baselines or {}).get(name))
    finally:
        learner.train(was_training)
    if not sums:
        raise UserError("there is no held-out text to evaluate on", "give some with data.validation=")
    terms = {name: one.result(name, (baselines or {}).get(name)) for name, one in sums.items()}
    return Evaluation(terms, {name: float(learner.weights[name]) for name in terms})
