"""Code shared by the task kinds that predict classes: class names, metrics, predictions, and the loss over class
scores.

Shape letters: N texts, M targets, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from lmtool.config.base import JsonObject
from lmtool.data.examples import Examples, Rows, SplitData
from lmtool.errors import UserError
from lmtool.learners.baseline import ConstantPredictor, Predictor
from lmtool.learners.metrics import by_class, calibration, confusion
from lmtool.learners.model import normalized_entropy
from lmtool.models.heads.base import loss_sum, losses
from lmtool.system.terminal import counted
from lmtool.tasks.configs.classification import ClassificationConfig
from lmtool.tasks.configs.sequence import ClassLossConfig, MultiLabelConfig
from lmtool.tasks.configs.texts import SpanClassificationConfig, TokenClassificationConfig
from lmtool.tasks.kinds.base import TaskKind, TextKind
from lmtool.tasks.kinds.labels import Columns, Origin, class_names, class_numbers, class_warnings, label_counts
from lmtool.tasks.kinds.learner import TaskLearner
from lmtool.tasks.kinds.predictions import Label, Prediction, column_of, values_of
from lmtool.types import Batch, Scores

NO_LABEL = "(no label)"
"""Shown if a generated text names no class; counts as an extra class that is never correct."""
Weighted = TypeVar("Weighted", ClassificationConfig, MultiLabelConfig, TokenClassificationConfig)


class OneClassKind(TaskKind):
    """The base of kinds whose labels and predictions are class numbers."""

    def constant(self, train: Rows) -> tuple[str, Prediction]:
        """Returns the majority class of the training rows."""
        counts = np.bincount(np.asarray(train.labels))
        return "majority", Prediction(int(counts.argmax()), float(counts.max() / counts.sum()))

    def shown(self, value: Label) -> str:
        """Returns the name of the class."""
        return (*self.classes, NO_LABEL)[int(value)]

    def details(self, rows: Rows, predictions: Sequence[Prediction]) -> JsonObject:
        """Returns the confusion matrix (gold rows, predicted columns), metrics by class, and calibration, if any."""
        gold, values = np.asarray(rows.labels), np.asarray(values_of(predictions))
        classes = [*self.classes, *([NO_LABEL] if values.max() == len(self.classes) else [])]
        counts = confusion(gold, values, len(classes))
        metadata = {"labels": classes, "confusion": counts.tolist(), "classes": by_class(counts, classes)}
        texts = column_of(predictions, "text")
        if texts is not None and any(text is not None for text in texts):
            return metadata
        return {**metadata, **calibration(gold == values, np.asarray(column_of(predictions, "score")))}


class NamedClassKind(OneClassKind, TextKind):
    """Base of the kinds whose classes are named in `labels`, or else found in the training column."""

    config: ClassificationConfig | SpanClassificationConfig

    def with_labels(self, columns: Columns, origin: Origin) -> ClassificationConfig | SpanClassificationConfig:
        if self.config.labels is not None:
            return self.config
        names = class_names(self.config, columns[self.config.label], origin)
        return self.config.model_copy(update={"labels": names})

    def decoded_labels(self, values: Sequence[object], origin: Origin) -> np.ndarray:
        return class_numbers(self.config, self.classes, values, origin)

    def fit_config(self, train: Rows) -> ClassificationConfig | SpanClassificationConfig:
        """Returns the configuration, unchanged. Raises UserError if a metric is not defined for the number of
        classes."""
        if "f1" in self.config.metrics and len(self.classes) != 2:
            raise UserError(
                f"task.metrics includes f1, which needs two classes, but the data has {len(self.classes)}",
                "use macro_f1, accuracy or matthews",
            )
        return self.config

    def metadata(self, train: Rows) -> tuple[JsonObject, list[str]]:
        metadata, warnings = super().metadata(train)
        counts = label_counts(np.asarray(train.labels), self.classes)
        return {**metadata, "labels": counts}, [*warnings, *class_warnings(counts)]


def with_class_weights(config: Weighted, balanced: tuple[float, ...]) -> Weighted:
    """Returns the configuration with class_weights=balanced replaced by these weights. Raises UserError unless there is
    one weight for each class."""
    weights = balanced if config.loss.class_weights == "balanced" else config.loss.class_weights
    require_one_per_class("loss.class_weights", weights, config.labels or ())
    loss = {**config.loss.model_dump(), "class_weights": weights}
    return type(config).model_validate({**config.model_dump(), "loss": loss})


def require_one_per_class(key: str, numbers: object, names: Sequence[str]) -> None:
    """Raises UserError if a tuple does not have one number for each class."""
    if isinstance(numbers, tuple) and len(numbers) != len(names):
        raise UserError(
            f"task.{key} has {counted(len(numbers), 'number')}, but the task has {counted(len(names), 'label')}: "
            f"{', '.join(names[:8])}",
            "use one number per label, in the order of the labels",
        )


class ClassLearner(TaskLearner):
    """Minimizes the cross entropy with the task's label smoothing, focal loss and class weights.

    The loss is the mean over examples; with class weights, the weighted sum of the losses divided by the sum of the
    labels' weights, as in torch. Focal loss has the same divisor: its factors are meant to lower the loss."""

    loss: ClassLossConfig
    class_weights: Tensor | None

    def set_loss(self, loss: ClassLossConfig | None = None) -> None:
        """Sets the loss and its class weights. loss: None for plain cross entropy. Raises ValueError if the classes are
        not known yet."""
        self.loss = ClassLossConfig.model_validate({}) if loss is None else loss
        weights = self.loss.class_weights
        if not self.kind.classes or weights == "balanced":
            raise ValueError("the classes are not known yet: build the task from the config that load_task returns")
        self.register_buffer("class_weights", None if weights == "none" else torch.tensor(weights), persistent=False)

    def weights_on(self, device: torch.device) -> Tensor | None:
        """Returns (C,): the class weights; None if there are none."""
        return None if self.class_weights is None else self.class_weights.to(device)

    def target_count(self, batch: Batch) -> float:
        labels_M, weights_C = self.labels(batch), self.weights_on(self.labels(batch).device)
        return float(len(labels_M) if weights_C is None else weights_C.double()[labels_M].sum())

    def training_loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        loss, weights_C = self.loss, self.weights_on(outputs.device)
        return loss_sum(outputs, self.labels(batch), loss.label_smoothing, weights_C, loss.focal_gamma)

    def scores(self, outputs: Tensor, batch: Batch) -> Scores:
        """Returns plain cross entropies, without label smoothing and weights."""
        labels_M = self.labels(batch)
        return Scores(losses(outputs, labels_M), labels_M, outputs.argmax(-1), self.documents(batch))

    def predictors(self, train: SplitData, examples: Examples) -> dict[str, Predictor]:
        """Returns a constant baseline: the class frequencies of the training rows."""
        counts = np.bincount(np.asarray(self.rows(train).labels), minlength=len(self.kind.classes))
        return {self.term: ConstantPredictor.of_counts("base rate", counts)}


class TextClassLearner(ClassLearner):
    """Predicts one class for a whole text, with the probabilities of all classes."""

    def uncertainty(self, outputs: Tensor, batch: Batch) -> Tensor:
        return normalized_entropy(outputs)

    def parts(self, outputs: Tensor, batch: Batch) -> list[Prediction]:
        """Returns, for each text, the best class, its probability, and the probabilities of all classes."""
        probabilities_NC = outputs.detach().float().softmax(-1)
        best, classes = probabilities_NC.max(-1)
        return list(map(Prediction, classes.tolist(), best.tolist(), probabilities_NC.cpu().numpy()))
