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
    """One split.

    terms: by name, and weights: with which they make up the loss. scores: further ones by name. warnings: what a user
    should know before he trusts the scores. details: plain data for the report (a confusion matrix, ...).
    """

    terms: dict[str, TermEvaluation]
    weights: Mapping[str, float]
    scores: dict[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    details: dict[str, object] = field(default_factory=dict)

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
        `NAME_loss`, `NAME_accuracy`, `NAME_count`, `NAME_standard_error` and, with a baseline, `NAME_baseline` and
        `NAME_gain_standard_error`; and the scores."""
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
        # A single example has no standard error, and JSON has no word for that.
        return {name: value for name, value in values.items() if value is not None and np.isfinite(value)}

    def records(self) -> Iterator[dict[str, object]]:
        """What each row was predicted to be, as lines of predictions.jsonl; nothing where no rows are predicted."""
        yield from ()


class Scorer(ABC):
    """Collects what a learner makes of one split, batch by batch. Keeps a few numbers an example; logits never leave
    a batch.

    A batch is scored in two parts: `outputs` runs the learner, `take` enters what came of it. Of several processes each
    runs it on its own batches, and takes what came of all of them in order: so all have the same result.

    calibrates: whether its result may tune what turns scores into decisions (a threshold): in training, on the
    development rows that choose the best checkpoint. selects: whether its scores choose among checkpoints, in training
    too: what costs much may be done for a part of the rows.
    """

    calibrates: bool = False
    selects: bool = False

    @abstractmethod
    def outputs(self, batch: Batch) -> object:
        """What the learner makes of a batch on its device, in evaluation mode, without gradients and under autocast:
        plain data and tensors on the host. It changes nothing in the scorer."""

    @abstractmethod
    def take(self, batch: Batch, outputs: Any) -> None:
        """Enter the `outputs` of a batch. batch: on the host. NotFinite where a number among them is not finite."""

    @abstractmethod
    def result(self) -> Evaluation:
        """The scores over all that was added. UserError where that is nothing to score on."""


class ScoresTargets(Protocol):
    """A learner as `TermScorer` sees it."""

    weights: dict[str, float]

    def score(self, batch: Batch) -> dict[str, Scores]: ...


class TermScorer(Scorer):
    """Mean losses, term by term. predictors: by term, the constant predictor that is scored on the same targets."""

    def __init__(self, learner: ScoresTargets, predictors: Mapping[str, Predictor] | None = None):
        self.learner, self.predictors = learner, predictors or {}
        self.sums: dict[str, TermSums] = {}

    def outputs(self, batch: Batch) -> dict[str, Scores]:
        return {name: scores.cpu() for name, scores in self.learner.score(batch).items()}

    def take(self, batch: Batch, outputs: Mapping[str, Scores]) -> None:
        for name, scores in outputs.items():
            self.enter(name, batch, scores)

    def enter(self, name: str, batch: Batch, scores: Scores) -> None:
        """Take what the learner says of one term."""
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
    """One pass over a split in evaluation mode, without gradients. The learner is left in the mode it came in, with the
    state that it carries. NotFinite where it gives something that is no finite number.

    group: the processes that share the pass. All give the same batches; each runs the learner on every size-th of them,
    and all have the same result.
    """
    was_training, left = learner.training, iter(batches)
    learner.eval()
    try:
        with torch.no_grad(), set_aside(learner):
            while in_turn := list(islice(left, group.size)):
                # Where the last batches are fewer than the processes, some run one again: all run as many.
                local_batch = in_turn[min(group.rank, len(in_turn) - 1)].to(precision.device)
                with precision.autocast():
                    outputs = scorer.outputs(local_batch)
                for batch, gathered in zip(in_turn, group.all(outputs), strict=False):
                    scorer.take(batch, gathered)
    finally:
        learner.train(was_training)
    return scorer.result()


@dataclass(frozen=True)
class SplitEvaluations:
    """All held-out splits of a run; the first gives the headline."""

    splits: dict[str, Evaluation]

    @property
    def first(self) -> Evaluation:
        return next(iter(self.splits.values()))

    def metrics(self) -> dict[str, float]:
        """Those of the first split by their plain names; where there are several, all as SPLIT_NAME too."""
        metrics = dict(self.first.metrics())
        if len(self.splits) > 1:
            for split, evaluation in self.splits.items():
                metrics |= {f"{split}_{name}": value for name, value in evaluation.metrics().items()}
        return metrics

    @property
    def warnings(self) -> list[str]:
        """Of all splits, each behind the name of its split."""
        return [f"{split}: {text}" for split, evaluation in self.splits.items() for text in evaluation.warnings]

    def records(self) -> Iterator[dict[str, Any]]:
        """Of all splits."""
        for evaluation in self.splits.values():
            yield from evaluation.records()
