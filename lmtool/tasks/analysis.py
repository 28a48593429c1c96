"""Analysis of an evaluation: confidence intervals, paired differences, the hardest rows, early exits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from lmtool.config.base import JsonObject
from lmtool.errors import UserError
from lmtool.learners.metrics import interval, resample_count, resampled_rows
from lmtool.learners.model import Segment, at_exit, exits_of, select_documents
from lmtool.models.base import OneStack
from lmtool.runs.files import to_json
from lmtool.tasks.kinds.learner import TaskEvaluation, TaskLearner, TaskOutputs, TaskScorer
from lmtool.types import Batch

HARDEST = 20


def analysis(evaluation: TaskEvaluation) -> JsonObject:
    """Summarizes the evaluation of a labeled split: `n`, `loss`, `metrics` by name ({"value", "low", "high"}: the 95%
    bootstrap interval over rows), `hardest` (the records with the largest `loss`, in descending order), `warnings`, and
    the details of the kind."""
    kind, rows = evaluation.kind, evaluation.rows
    assert evaluation.losses is not None
    samples = _resample(evaluation, resample_count(len(rows), evaluation.scores))
    order = np.argsort(-evaluation.losses, kind="stable")[:HARDEST]
    hardest = [
        {
            "id": rows.ids[number],
            **kind.record(rows, int(number), evaluation.predictions[number]),
            "loss": float(evaluation.losses[number]),
        }
        for number in order
    ]
    return {
        "n": len(rows),
        "loss": evaluation.loss,
        "metrics": {name: _with_interval(value, samples.get(name, [])) for name, value in evaluation.scores.items()},
        "warnings": list(evaluation.warnings),
        **evaluation.details,
        "hardest": hardest,
    }


def difference(first: TaskEvaluation, second: TaskEvaluation) -> dict[str, dict[str, float]]:
    """Returns the paired bootstrap of two evaluations, by metric: the first system's score minus the second's
    ({"value", "low", "high"}), both resampled with the same rows. Raises UserError if they were scored on different
    rows or labels."""
    rows, other = first.rows, second.rows
    if list(rows.ids) != list(other.ids) or rows.columns != other.columns or not _same_labels(first, second):
        raise UserError(
            "the two checkpoints were scored on different rows or labels: no paired comparison is possible",
            "give both the same data with task.path=",
        )
    resamples = resample_count(len(rows), first.scores)
    first_samples, second_samples = _resample(first, resamples), _resample(second, resamples)
    return {
        name: _with_interval(value - second.scores[name], np.subtract(first_samples[name], second_samples[name]))
        for name, value in first.scores.items()
        if name in second.scores
    }


def _same_labels(first: TaskEvaluation, second: TaskEvaluation) -> bool:
    labels, other_labels = ([to_json(gold) for _, gold in evaluation.scored_rows()] for evaluation in (first, second))
    return len({*zip(labels, other_labels, strict=True)}) == len({*labels}) == len({*other_labels})


def _resample(evaluation: TaskEvaluation, resamples: int) -> dict[str, list[float]]:
    rows = evaluation.rows
    return evaluation.kind.resampled(rows, evaluation.predictions, resampled_rows(len(rows), resamples))


def _with_interval(value: float, samples: Sequence[float] | np.ndarray) -> dict[str, float]:
    return {"value": value, **interval(samples)._asdict()}


# Early exits of rows: all at one depth, or each at the first exit with low entropy.
#
# Xin, Tang, Lee, Yu, Lin, "DeeBERT: Dynamic Early Exiting for Accelerating BERT Inference", ACL 2020: a text exits
# where the entropy of the prediction is below a threshold. Only the remaining texts of a batch run through the layers
# above.
#
# Shape letters: T tokens, N documents of a batch, H hidden width.


@dataclass(frozen=True)
class EarlyEvaluation(TaskEvaluation):
    """The evaluation of rows that exit early. depths: for each row, the number of the layer after which it was
    predicted; for several windows, the deepest."""

    depths: tuple[int, ...] = ()

    def extra_fields(self, number: int) -> JsonObject:
        return {"exit": self.depths[number]}


class EarlyExitScorer(TaskScorer):
    """Scores rows that exit early. A row has one window or more; each window is a document of a batch, called a text.

    views: by depth, the learner that ends there; the last one takes all remaining texts. entropy: a text exits at an
    earlier depth if its normalized entropy is at most this.
    """

    def __init__(self, *arguments: Any, views: Mapping[int, TaskLearner], entropy: float = 0.0):
        super().__init__(*arguments)
        self.views, self.entropy = views, entropy
        self.depths: list[int] = [0] * len(self.rows)

    def outputs(self, batch: Batch) -> list[tuple[TaskOutputs, Tensor]]:
        """Returns for each depth that a text reaches, in order: the outputs there, and a (N,) bool mask of the texts
        that exit there, among the N that have reached it."""
        first, states_TH, last = 0, None, max(self.views)
        exited: list[tuple[TaskOutputs, Tensor]] = []
        for depth, view in self.views.items():
            segment = Segment(first, states_TH, None if depth == last else depth)
            stack = cast(OneStack, view.backbone)
            stack.tap = segment
            try:
                outputs = view.outputs(batch, 0)
            finally:
                stack.tap = None
            documents = len(batch.inputs.lengths)
            exits_N = torch.ones(documents, dtype=torch.bool)
            if depth != last:
                exits_N = view.uncertainty(outputs, batch).cpu() <= self.entropy
            exited.append((self.task_outputs(view, batch, outputs), exits_N))
            if bool(exits_N.all()):
                break
            assert segment.recorded is not None
            remaining_N = ~exits_N
            remaining_T = remaining_N.repeat_interleave(torch.tensor(batch.inputs.lengths))
            first, states_TH = depth, segment.recorded[remaining_T.to(segment.recorded.device)]
            batch = select_documents(batch, remaining_N)
        return exited

    def take(self, batch: Batch, outputs: list[tuple[TaskOutputs, Tensor]]) -> None:
        for depth, (task_outputs, exits_N) in zip(self.views, outputs, strict=False):
            self.add_outputs(batch, task_outputs, exits_N.numpy())
            assert batch.rows is not None
            for row in batch.rows[exits_N].tolist():
                self.depths[row] = max(self.depths[row], depth)
            if not bool(exits_N.all()):
                batch = select_documents(batch, ~exits_N)

    def result(self) -> EarlyEvaluation:
        evaluation = super().result()
        fields = {name: getattr(evaluation, name) for name in evaluation.__dataclass_fields__}
        details = {**evaluation.details, "exits": {str(depth): self.depths.count(depth) for depth in self.views}}
        return replace(EarlyEvaluation(**fields), details=details, depths=tuple(self.depths))


def with_early_exit(learner: Any, checkpoint: str, depth: int | None, entropy: float | None) -> Any:
    """Returns a learner whose rows exit early: all after the layer `depth`, or each at the first exit where the
    normalized entropy of its prediction is at most `entropy`; the learner itself if both are None. Raises UserError if
    it has no such exit or predicts no classes."""
    if depth is None and entropy is None:
        return learner
    if depth is not None and entropy is not None:
        raise UserError("exit and exit_entropy both choose the exit", "give one of them")
    exits, key = exits_of(learner), "exit" if depth is not None else "exit_entropy"
    if not exits:
        raise UserError(
            f"{key}={depth if depth is not None else entropy}: checkpoint={checkpoint} has no early exits",
            "omit it; lmtool finetune ... distill=self trains a model with exits",
        )
    if depth is not None:
        if depth not in exits:
            nearest_exit = min(exits, key=lambda other: abs(other - depth))
            raise UserError(
                f"exit={depth}: checkpoint={checkpoint} has exits only after the layers {', '.join(map(str, exits))}",
                f"set exit={nearest_exit}, or omit it for all layers",
            )
        view = at_exit(learner, depth)
        view.scorer_class = partial(EarlyExitScorer, views={depth: view})
        return view
    if type(learner).uncertainty is TaskLearner.uncertainty:
        raise UserError(
            f"exit_entropy={entropy}: task={learner.config.name} is {learner.config.kind}, whose predictions are not "
            "classes with an entropy",
            f"set exit={exits[0]}: all rows exit there",
        )
    assert entropy is not None
    views = {number: at_exit(learner, number) for number in exits}
    views[learner.backbone.config.num_layers] = at_exit(learner, None)
    last = views[learner.backbone.config.num_layers]
    last.scorer_class = partial(EarlyExitScorer, views=views, entropy=entropy)
    return last
