"""What the kinds that predict one of several classes share: the loss, the scores and the predictions."""

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

# What kinds that predict one of several classes a row have in common: scores, the majority, what is shown of them.


NO_LABEL = "(no label)"
"""What is shown of a text that names none of the classes: a class of its own, which is never right."""


class OneClassKind(TaskKind):
    """The base of kinds whose labels, and predictions, are numbers of classes."""

    @property
    @abstractmethod
    def classes(self) -> Sequence[str]:
        """The classes by name, in the order of their numbers."""

    def metrics(self, rows: Rows, predictions: Sequence[Prediction]) -> dict[str, float]:
        return compute(self.config.metrics, np.asarray(rows.labels), _values(predictions))

    def constant(self, train: Rows) -> tuple[str, Prediction]:
        """The majority class of the training rows."""
        counts = np.bincount(np.asarray(train.labels))
        return "majority", Prediction(int(counts.argmax()), float(counts.max() / counts.sum()))

    def shown(self, value: Any) -> str:
        """The class by its name."""
        return (*self.classes, NO_LABEL)[int(value)]

    def details(self, rows: Rows, predictions: Sequence[Prediction]) -> dict[str, object]:
        """The confusion matrix (counts, rows gold and columns predicted), the scores of each class, and how well the
        probabilities, where there are any, are calibrated."""
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


# The loss over classes, whatever gives the scores of a text's classes.
#
# Shape letters: N texts, C classes.


class ClassLearner(TaskLearner):
    """Cross entropy, smoothed, focal and weighted by class as the task says.

    With class weights the loss is the weighted sum of the losses over the sum of the weights of the labels, as in
    torch; without, the mean over examples. A focal loss is divided by the same, not by its own weights: texts that are
    learned already lower it.
    """

    class_weights: Tensor | None

    @abstractmethod
    def stepped(self, batch: Batch, step: int, loss: Callable[[Tensor], Tensor]) -> StepOutput:
        """The output of a training step. loss: from the (N, C) scores of the classes to the sum of their losses."""

    @abstractmethod
    def term_counts(self, batch: Batch, count: float) -> dict[str, float]:
        """`counts` of a batch whose task has so many."""

    def weigh(self, config: Any) -> None:
        """Take the loss of a task with its labels filled in."""
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
        """Plain cross entropy, whatever smoothing and weights train with."""
        labels_N = self.labels(batch)
        documents = torch.arange(len(labels_N), device=labels_N.device)
        return Scores(losses(outputs, labels_N), labels_N, outputs.argmax(-1), documents)

    def uncertainty(self, outputs: Tensor, batch: Batch) -> Tensor:
        return normalized_entropy(outputs)

    def parts(self, outputs: Tensor, batch: Batch) -> list[Prediction]:
        """The best class of each text, its probability, and those of all classes."""
        fractions_NC = outputs.detach().float().softmax(-1)
        best, classes = fractions_NC.max(-1)
        return list(map(Prediction, classes.tolist(), best.tolist(), fractions_NC.cpu().numpy()))

    def predictors(self, train: SplitData, examples: Examples) -> dict[str, ConstantPredictor]:
        """The shares of the classes in the training rows."""
        counts = np.bincount(np.asarray(self.rows(train).labels), minlength=len(self.kind.config.labels))
        return {self.term: ConstantPredictor.of_counts("base rate", counts)}
