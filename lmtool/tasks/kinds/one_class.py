"""What kinds that predict one of several classes a row have in common: scores, the majority, what is shown of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from lmtool.data.split import Rows
from lmtool.metrics import by_class, calibration, compute, confusion
from lmtool.tasks.kinds.base import TaskKind
from lmtool.tasks.kinds.predictions import Prediction, column_of, values_of

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

    def details(self, rows: Rows, predictions: Sequence[Prediction]) -> dict[str, Any]:
        """The confusion matrix (counts, rows gold and columns predicted), the scores of each class, and how well the
        probabilities, where there are any, are calibrated."""
        gold, values = np.asarray(rows.labels), _values(predictions)
        classes = [*self.classes, *([NO_LABEL] if values.max() == len(self.classes) else [])]
        counts = confusion(gold, values, len(classes))
        facts = {"labels": classes, "confusion": counts.tolist(), "classes": by_class(counts, classes)}
        texts = column_of(predictions, "text")
        if texts is not None and any(text is not None for text in texts):
            return facts
        return {**facts, **calibration(gold == values, np.asarray(column_of(predictions, "score")))}


def _values(predictions: Sequence[Prediction]) -> np.ndarray:
    return np.asarray(values_of(predictions), dtype=np.int64)
