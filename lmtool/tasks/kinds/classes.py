"""Shared by the kinds that predict one of several classes: the loss, the metrics and the predictions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmtool.data.examples import Examples, Rows, SplitData
from lmtool.learners.baseline import ConstantPredictor
from lmtool.learners.metrics import by_class, calibration, compute, confusion
from lmtool.learners.model import normalized_entropy
from lmtool.models.heads.base import loss_sum, losses
from lmtool.tasks.kinds.base import TaskKind
from lmtool.tasks.kinds.learner import TaskLearner
from lmtool.tasks.kinds.predictions import Prediction, column_of, values_of
from lmtool.types import Batch, Scores, StepOutput

NO_LABEL = "(no label)"
"""Shown for a text that names no class: an extra class, which is never right."""


class OneClassKind(TaskKind):
    """The base of kinds whose labels and predictions are class numbers."""

    @property
    @abstractmethod
    def classes(self) -> Sequence[str]:
        """Class names by number."""

    def metrics(self, rows: Rows, predictions: Sequence[Prediction]) -> dict[str, float]:
        return compute(self.config.metrics, np.asarray(rows.labels), _values(predictions))

    def constant(self, train: Rows) -> tuple[str, Prediction]:
        """The majority class of the training rows."""
        counts = np.bincount(np.asarray(train.labels))
        return "majority", Prediction(int(counts.argmax()), float(counts.max() / counts.sum()))

    def shown(self, value: Any) -> str:
        """The name of the class."""
        return (*self.classes, NO_LABEL)[int(value)]

    def details(self, rows: Rows, predictions: Sequence[Prediction]) -> dict[str, object]:
        """The confusion matrix (counts, gold rows and predicted columns), the metrics of each class, and the
        calibration of the probabilities, if any."""
        gold, values = np.asarray(rows.labels), _values(predictions)
        classes = [*self.classes, *([NO_LABEL] if values.max() == len(self.classes) else [])]
        counts = confusion(gold, values, len(classes))
        metadata = {"labels": classes, "confusion": counts.tolist(), "classes": by_class(counts, classes)}
        texts = column_of(predictions, "text")
        if texts is not None and any(text is not None for text in texts):
            return metadata
        return {**metadata, **calibration(gold == values, np.asarray(column_of(predictions, "score")))}


def _values(predictions: Sequence[Prediction]) -> np.ndarray:
    return np.asarray(values_of(predictions), dtype=np.int64)


# The loss over class scores of texts.
# Shape letters: N texts, C classes.


class ClassLearner(TaskLearner):
    """Cross entropy with the task's smoothing, focus and class weights.

    With class weights, the loss is the weighted sum of losses over the sum of the labels' weights, as in torch;
    without, the mean over examples. A focal loss has the same normalizer, not its own weights: well-learned texts
    already lower it.
    """

    class_weights: Tensor | None

    @abstractmethod
    def stepped(self, batch: Batch, step: int, loss: Callable[[Tensor], Tensor]) -> StepOutput:
        """A training step. loss: maps the (N, C) class scores to the sum of losses."""

    @abstractmethod
    def term_counts(self, batch: Batch, count: float) -> dict[str, float]:
        """`counts` of a batch, given the task's own count."""

    def weigh(self, config: Any) -> None:
        """Sets up the loss of a task with known labels."""
        if config.labels is None or config.loss.class_weights == "balanced":
            raise ValueError("build a task from the config that load_task gives back: its labels are filled in")
        weights = config.loss.class_weights
        self.loss = config.loss
        self.register_buffer("class_weights", torch.tensor(weights) if weights != "none" else None, persistent=False)

    def counts(self, batch: Batch) -> dict[str, float]:
        labels = self.labels(batch)
        if self.class_weights is None:
            return self.term_counts(batch, float(len(labels)))
        return self.term_counts(batch, float(self.class_weights.to(labels.device).double()[labels].sum()))

    def forward(self, batch: Batch, step: int) -> StepOutput:
        labels_N, smoothing, gamma = self.labels(batch), self.loss.label_smoothing, self.loss.focal_gamma
        weights_C = None if self.class_weights is None else self.class_weights.to(labels_N.device)
        return self.stepped(batch, step, lambda logits_NC: loss_sum(logits_NC, labels_N, smoothing, weights_C, gamma))

    def scores(self, outputs: Tensor, batch: Batch) -> Scores:
        """Plain cross entropy, without the smoothing and weights of training."""
        labels_N = self.labels(batch)
        documents = torch.arange(len(labels_N), device=labels_N.device)
        return Scores(losses(outputs, labels_N), labels_N, outputs.argmax(-1), documents)

    def uncertainty(self, outputs: Tensor, batch: Batch) -> Tensor:
        return normalized_entropy(outputs)

    def parts(self, outputs: Tensor, batch: Batch) -> list[Prediction]:
        """The best class of each text, its probability, and all class probabilities."""
        fractions_NC = outputs.detach().float().softmax(-1)
        best, classes = fractions_NC.max(-1)
        return list(map(Prediction, classes.tolist(), best.tolist(), fractions_NC.cpu().numpy()))

    def predictors(self, train: SplitData, examples: Examples) -> dict[str, ConstantPredictor]:
        """The class frequencies of the training rows."""
        counts = np.bincount(np.asarray(self.rows(train).labels), minlength=len(self.kind.config.labels))
        return {self.term: ConstantPredictor.of_counts("base rate", counts)}
