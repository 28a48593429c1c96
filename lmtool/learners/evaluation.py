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
from lmtool.runs.files import rows_digest
from lmtool.training.group import ALONE, ProcessGroup
from lmtool.training.precision import FP32_CPU, Precision
from lmtool.types import Batch, Scores


@dataclass(frozen=True)
class Evaluation:
    """The evaluation of one split: of each term of the loss, by name, with its weight, and further scores by name.
    warnings: caveats about the scores, for the user. details: plain data for the report, such as a confusion matrix."""

    terms: dict[str, TermEvaluation]
    loss_weights: Mapping[str, float]
    scores: dict[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    details: dict[str, object] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """The weighted sum of the terms' mean losses, as in training."""
        return sum(self.loss_weights[name] * term.loss for name, term in self.terms.items())

    @property
    def standard_error(self) -> float:
        """The standard error of the loss. The errors of the terms are treated as independent."""
        return self._combined({name: term.standard_error for name, term in self.terms.items()})

    @property
    def gain_standard_error(self) -> float | None:
        """The standard error of the gain over the baseline, paired by example; None if a term has no baseline. The
        errors of the terms are treated as independent."""
        gains = {name: term.gain_standard_error for name, term in self.terms.items()}
        errors = {name: gain for name, gain in gains.items() if gain is not None}
        return self._combined(errors) if len(errors) == len(gains) else None

    def _combined(self, errors: Mapping[str, float]) -> float:
        return float(np.sqrt(sum((self.loss_weights[name] * error) ** 2 for name, error in errors.items())))

    def metrics(self) -> dict[str, float]:
        """Returns the numbers for metrics.jsonl and result.json: `loss`, `standard_error`, with baselines
        `gain_standard_error`, the scores, and for each term NAME `NAME_loss`, `NAME_accuracy`, `NAME_count`,
        `NAME_standard_error` and, with a baseline, `NAME_baseline` and `NAME_gain_standard_error`."""
        values: dict[str, float | None] = {
            "loss": self.loss,
            "standard_error": self.standard_error,
            "gain_standard_error": self.gain_standard_error,
            **self.scores,
        }
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
        """Yields the prediction of each row, for predictions.jsonl; nothing for learners that do not predict rows."""
        yield from ()

    def scored_rows(self) -> Iterator[list[object]]:
        """Yields for each row, in the order of `records`, the list of its texts and its gold label."""
        yield from ()

    @property
    def rows_digest(self) -> str | None:
        """The sha256 of the scored rows: only scores with the same one can be compared. None without rows."""
        return rows_digest(self.scored_rows())


class Scorer(ABC):
    """Accumulates the scores of a learner on one split, batch by batch. It stores only a few numbers per example.

    A batch is scored in two steps: `outputs` runs the learner, and `take` adds the result. Each process runs the
    learner on its own batches and adds the results of all processes in the same order, so all have the same scores.
    calibrates: whether the result may tune decision thresholds. It may in training, on the rows that select the best
    checkpoint. selects: whether the scores select checkpoints during training. If so, expensive scores may be computed
    for a fraction of the rows. has_documents: whether it can sum the losses of each document of a text. by_document:
    whether to do so, if it can.
    """

    calibrates: bool = False
    selects: bool = False
    has_documents: bool = False
    by_document: bool = False

    @abstractmethod
    def outputs(self, batch: Batch) -> object:
        """Runs the learner on a batch, and returns plain data and tensors on the host. Does not change the scorer.

        `evaluate` calls this method in evaluation mode, without gradients and under autocast. batch: the batch, on the
        learner's device.
        """

    @abstractmethod
    def take(self, batch: Batch, outputs: Any) -> None:
        """Adds the outputs of a batch to the scores. Raises NotFinite if a loss is not finite. batch: the batch, on the
        host. outputs: the result of the method `outputs` for this batch."""

    @abstractmethod
    def result(self) -> Evaluation:
        """Returns the evaluation of all batches. Raises UserError if there was nothing to score."""


class ScoresTargets(Protocol):
    """The interface of a learner that `TermScorer` uses."""

    loss_weights: dict[str, float]

    def score(self, batch: Batch) -> dict[str, Scores]: ...


class TermScorer(Scorer):
    """Accumulates the mean loss of each term, for the learner and for its baseline. learner: the learner to score.
    predictors: the constant predictor of each term, which is scored on the same targets."""

    def __init__(self, learner: ScoresTargets, predictors: Mapping[str, Predictor] | None = None):
        self.learner, self.predictors = learner, predictors or {}
        self.sums: dict[str, TermSums] = {}

    def outputs(self, batch: Batch) -> dict[str, Scores]:
        return {name: scores.cpu() for name, scores in self.learner.score(batch).items()}

    def take(self, batch: Batch, outputs: Mapping[str, Scores]) -> None:
        for name, scores in outputs.items():
            self.add_term(name, batch, scores)

    def add_term(self, name: str, batch: Batch, scores: Scores) -> None:
        """Adds the scores of one term of a batch. name: the name of the term."""
        self.sums.setdefault(name, TermSums()).add(batch, scores, self.predictors.get(name))

    def result(self) -> Evaluation:
        if not self.sums:
            raise UserError(
                "there is no held-out text to evaluate on", "set data.validation= to a file with held-out text"
            )
        terms = {name: sums.result(name, self.predictors.get(name)) for name, sums in self.sums.items()}
        return Evaluation(terms, {name: float(self.learner.loss_weights[name]) for name in terms})


def evaluate(
    learner: torch.nn.Module,
    scorer: Scorer,
    batches: Iterable[Batch],
    precision: Precision = FP32_CPU,
    group: ProcessGroup = ALONE,
) -> Evaluation:
    """Evaluates a learner on a split. Its mode (training or evaluation) and carried state are restored afterwards.

    batches: the batches of the split, the same in all processes. group: the processes that share the work. With N
    processes, each runs every N-th batch, and all return the same result. Raises NotFinite if an output is not finite.
    """
    was_training, remaining = learner.training, iter(batches)
    learner.eval()
    try:
        with torch.no_grad(), set_aside(learner):
            while round_of_batches := list(islice(remaining, group.size)):
                # Each process runs one batch of a round. If fewer batches than processes remain, several processes run
                # the last batch, since all processes must do equally many forwards.
                local_batch = round_of_batches[min(group.rank, len(round_of_batches) - 1)].to(precision.device)
                with precision.autocast():
                    outputs = scorer.outputs(local_batch)
                for batch, gathered in zip(round_of_batches, group.all(outputs), strict=False):
                    scorer.take(batch, gathered)
    finally:
        learner.train(was_training)
    return scorer.result()


@dataclass(frozen=True)
class SplitEvaluations:
    """The evaluations of all held-out splits of a run; the first split gives the main score."""

    splits: dict[str, Evaluation]

    @property
    def first(self) -> Evaluation:
        return next(iter(self.splits.values()))

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the first split by name. If there are several splits, the metrics of each split are
        added as SPLIT_NAME."""
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
        """Yields the predictions of all splits, see `Evaluation.records`."""
        for evaluation in self.splits.values():
            yield from evaluation.records()
