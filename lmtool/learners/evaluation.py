"""The evaluator: runs a learner over held-out batches and passes their outputs to the learner's scorer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch

from lmtool.errors import UserError
from lmtool.learners.baseline import Predictor, TermEvaluation, TermSums
from lmtool.nn.cache import set_aside
from lmtool.training.group import ALONE, ProcessGroup
from lmtool.training.precision import FP32_CPU, Precision
from lmtool.types import Batch, Scores


@dataclass(frozen=True)
class Evaluation:
    """The evaluation of one split.

    terms: the evaluation of each loss term by name. weights: the weight of each term in the loss. scores: further
    scores by name. warnings: caveats about the scores for the user. details: plain data for the report (a confusion
    matrix, ...).
    """

    terms: dict[str, TermEvaluation]
    weights: Mapping[str, float]
    scores: dict[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    details: dict[str, object] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """Weighted sum of the terms' mean losses, the same as in training."""
        return sum(self.weights[name] * term.loss for name, term in self.terms.items())

    @property
    def standard_error(self) -> float:
        """Standard error of the gain over the baseline, or of the loss if any term has no baseline. Terms are treated
        as independent."""
        gains = {name: term.gain_standard_error for name, term in self.terms.items()}
        errors = {name: gain for name, gain in gains.items() if gain is not None}
        if len(errors) < len(gains):
            errors = {name: term.standard_error for name, term in self.terms.items()}
        return float(np.sqrt(sum((self.weights[name] * error) ** 2 for name, error in errors.items())))

    def metrics(self) -> dict[str, float]:
        """The numbers of metrics.jsonl and result.json: `loss`, `standard_error`, the scores, and for each term NAME
        `NAME_loss`, `NAME_accuracy`, `NAME_count`, `NAME_standard_error` and, with a baseline, `NAME_baseline` and
        `NAME_gain_standard_error`."""
        values: dict[str, float | None] = {"loss": self.loss, "standard_error": self.standard_error, **self.scores}
        for name, term in self.terms.items():
            values |= {
                f"{name}_loss": term.loss,
                f"{name}_accuracy": term.accuracy,
                f"{name}_count": term.count,
                f"{name}_standard_error": term.standard_error,
                f"{name}_baseline": term.baseline,
                f"{name}_gain_standard_error": term.gain_standard_error,
            }
        # The standard error of a single example is NaN, which JSON cannot represent.
        return {name: value for name, value in values.items() if value is not None and np.isfinite(value)}

    def records(self) -> Iterator[dict[str, object]]:
        """The predictions of the rows, as lines of predictions.jsonl; empty for learners that predict no rows."""
        yield from ()


class Scorer(ABC):
    """Accumulates the scores of a learner on one split, batch by batch, with a few numbers per example.

    A batch is scored in two steps: `outputs` runs the learner, `take` adds the result. Each process runs the learner on
    its own batches and adds the results of all processes in order, so all have the same scores.

    calibrates: whether the result may tune decision thresholds: in training, on the rows that select the best
    checkpoint. selects: whether the scores select checkpoints during training, so that expensive scores may be computed
    for part of the rows.
    """

    calibrates: bool = False
    selects: bool = False

    @abstractmethod
    def outputs(self, batch: Batch) -> object:
        """Run the learner on a batch on its device, in evaluation mode, without gradients and under autocast. Returns
        plain data and tensors on the host, and does not change the scorer."""

    @abstractmethod
    def take(self, batch: Batch, outputs: Any) -> None:
        """Add the `outputs` of a batch. batch: on the host. Raises NotFinite."""

    @abstractmethod
    def result(self) -> Evaluation:
        """The evaluation of all batches. Raises UserError if there is nothing to score."""


class ScoresTargets(Protocol):
    """The part of a learner that `TermScorer` uses."""

    weights: dict[str, float]

    def score(self, batch: Batch) -> dict[str, Scores]: ...


class TermScorer(Scorer):
    """Mean losses by term. predictors: constant predictors by term, scored on the same targets."""

    def __init__(self, learner: ScoresTargets, predictors: Mapping[str, Predictor] | None = None):
        self.learner, self.predictors = learner, predictors or {}
        self.sums: dict[str, TermSums] = {}

    def outputs(self, batch: Batch) -> dict[str, Scores]:
        return {name: scores.cpu() for name, scores in self.learner.score(batch).items()}

    def take(self, batch: Batch, outputs: Mapping[str, Scores]) -> None:
        for name, scores in outputs.items():
            self.enter(name, batch, scores)

    def enter(self, name: str, batch: Batch, scores: Scores) -> None:
        """Add the scores of one term."""
        self.sums.setdefault(name, TermSums()).add(batch, scores, self.predictors.get(name))

    def result(self) -> Evaluation:
        if not self.sums:
            raise UserError("there is no held-out text to evaluate on", "use some with data.validation=")
        terms = {name: sums.result(name, self.predictors.get(name)) for name, sums in self.sums.items()}
        return Evaluation(terms, {name: float(self.learner.weights[name]) for name in terms})


def evaluate(
    learner: torch.nn.Module,
    scorer: Scorer,
    batches: Iterable[Batch],
    precision: Precision = FP32_CPU,
    group: ProcessGroup = ALONE,
) -> Evaluation:
    """Evaluate a split without gradients. The learner's mode and carried state are restored afterwards.

    Args:
        learner: The learner, which is set to evaluation mode.
        scorer: Accumulates the scores.
        batches: The batches of the split, the same in all processes.
        precision: Number format and device.
        group: The processes that share the work: each runs every size-th batch, and all return the same result.

    Raises:
        NotFinite: The learner's output is not finite.
    """
    was_training, remaining = learner.training, iter(batches)
    learner.eval()
    try:
        with torch.no_grad(), set_aside(learner):
            while one_each := list(islice(remaining, group.size)):
                # If fewer batches than processes remain, some processes repeat one, since all must run equally many.
                local_batch = one_each[min(group.rank, len(one_each) - 1)].to(precision.device)
                with precision.autocast():
                    outputs = scorer.outputs(local_batch)
                for batch, gathered in zip(one_each, group.all(outputs), strict=False):
                    scorer.take(batch, gathered)
    finally:
        learner.train(was_training)
    return scorer.result()


@dataclass(frozen=True)
class SplitEvaluations:
    """The evaluations of all held-out splits of a run; the first one is the main one."""

    splits: dict[str, Evaluation]

    @property
    def first(self) -> Evaluation:
        return next(iter(self.splits.values()))

    def metrics(self) -> dict[str, float]:
        """The metrics of the first split by name; with several splits, also those of every split, with its name as a
        prefix."""
        metrics = dict(self.first.metrics())
        if len(self.splits) > 1:
            for split, evaluation in self.splits.items():
                metrics |= {f"{split}_{name}": value for name, value in evaluation.metrics().items()}
        return metrics

    @property
    def warnings(self) -> list[str]:
        """The warnings of all splits, each with the name of its split."""
        return [f"{split}: {text}" for split, evaluation in self.splits.items() for text in evaluation.warnings]

    def records(self) -> Iterator[dict[str, Any]]:
        """The predictions of all splits."""
        for evaluation in self.splits.values():
            yield from evaluation.records()
