"""The base class of task kinds: columns of a table to rows, outputs of a learner to predictions and scores.

A kind is built from its configuration alone and needs no model. Rows are read, checked and decoded before a model is
built; what the learner says of the parts of a row (windows of a long text, choices) is joined into one prediction a
row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from lmtool.data.examples import Rows
from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner
from lmtool.learners.metrics import METRICS, Metric
from lmtool.models.base import Backbone
from lmtool.tasks.kinds.predictions import Prediction, select_predictions
from lmtool.tokenizers.tokenizer import Tokenizer


class TaskKind(ABC):
    """The base of every kind. config: with the labels filled in, once the training rows are read. unit: what has one
    prediction, for messages."""

    unit = "row"

    def __init__(self, config: Any):
        self.config = config

    # Rows.

    def with_labels(self, columns: Mapping[str, list[Any]], origin: Sequence[tuple[str, int]]) -> Any:
        """The configuration with the names that only the training columns know: of classes, of tags. The same where
        it names them, or there are none. UserError where the column cannot be what the kind predicts."""
        return self.config

    @abstractmethod
    def rows(self, columns: dict[str, list[object]], origin: list[tuple[str, int]], labelled: bool) -> Rows:
        """Decoded rows. labelled: whether the label must be there. UserError with file:line at the first value that
        cannot be read."""

    def labels_of_predictions(self, columns: Mapping[str, list[object]]) -> list[object]:
        """What a file of predictions says, as a file of labeled rows has it. columns: with `prediction`."""
        return columns["prediction"]

    def fitted(self, train: Rows) -> Any:
        """The configuration with what is computed from the training rows: weights of classes."""
        return self.config

    def first_loss(self, train: Rows) -> float | None:
        """The loss of a new head that gives zeros, where it depends on the scale of the labels; None: it does not."""
        return None

    def metadata(self, train: Rows) -> tuple[dict[str, object], list[str]]:
        """What the screens say of the training rows, and warnings."""
        return {}, []

    def groups(self, rows: Rows) -> Sequence[object]:
        """What each row belongs to: of rows that share it none is held out of training without the others. All that is
        read, where it is equal."""
        return list(zip(*rows.columns.values(), strict=True))

    def texts(self, rows: Rows) -> list[Sequence[str]]:
        """What is read, column by column, as text from which a tokenizer can be trained; words of a list are joined."""
        return [
            [value if isinstance(value, str) else " ".join(value) for value in column]
            for column in rows.columns.values()
        ]

    # Model.

    @abstractmethod
    def learner(self, backbone: Backbone, tokenizer: Tokenizer, seed: int) -> BaseLearner:
        """What learns the task on a backbone."""

    # Prompts.

    def candidates(self, rows: Rows) -> list[tuple[str, ...]] | None:
        """The answers among which a prompted language model chooses for each row, in the order of the classes; None
        where it writes one. UserError where rows of this kind are not put into words."""
        raise UserError(
            f"task={self.config.name} is {self.config.kind}: its rows are not put into words",
            f"lmtool finetune task={self.config.name} learns it",
        )

    def right_answers(self, rows: Rows) -> list[str]:
        """Of labeled rows, as demonstrations show them."""
        labels = np.asarray(rows.labels)
        return [texts[label] for texts, label in zip(self.candidates(rows) or [], labels, strict=True)]

    def worded(self, rows: Rows) -> Mapping[str, Sequence[str]]:
        """The columns as prompts show them."""
        return rows.columns

    def predicted_rows(self, rows: Rows) -> Rows:
        """The rows that have a prediction each."""
        return rows

    # Predictions.

    @property
    def classes(self) -> Sequence[str]:
        """The classes by name, in the order of their numbers; empty where none are predicted."""
        return ()

    def join(self, parts: Sequence[Any]) -> Prediction:
        """One row's prediction, from what the learner says of its parts, in order."""
        (prediction,) = parts
        return prediction

    @abstractmethod
    def metrics(self, rows: Rows, predictions: Sequence[Prediction]) -> dict[str, float]:
        """The scores that the configuration names. rows: labeled."""

    def resampled(
        self, rows: Rows, predictions: Sequence[Prediction], draws: Iterable[np.ndarray]
    ) -> dict[str, list[float]]:
        """The scores of samples of the rows, for intervals. draws: the numbers of a sample's rows each. A kind whose
        scores take long has a shorter way, from counts of each row."""
        ids: list[str | int] = [0] * len(rows)
        origin = [("", 0)] * len(rows)
        values: dict[str, list[float]] = {}
        for numbers in draws:
            # Scores read labels alone.
            bare = Rows(ids[: len(numbers)], {}, rows.labels_at(numbers), origin[: len(numbers)])
            sample = self.metrics(bare, select_predictions(predictions, numbers))
            for name, value in sample.items():
                values.setdefault(name, []).append(value)
        return values

    @abstractmethod
    def constant(self, train: Rows) -> tuple[str, Prediction]:
        """What predicting without reading is called (majority, mean), and predicts for each row."""

    def single(self, values: Sequence[object] | np.ndarray) -> Sequence[object] | np.ndarray:
        """The labels or predicted values of rows one by one, where a row has many."""
        return values

    @abstractmethod
    def shown(self, value: Any) -> Any:
        """A label or a predicted value as a user reads it: plain data."""

    def record(self, rows: Rows, number: int, prediction: Prediction) -> dict[str, object]:
        """What predictions.jsonl says of a row behind its id: columns, gold (where known), prediction, score, and the
        probability of each class where the prediction has them."""
        texts = {name: values[number] for name, values in rows.columns.items()}
        gold = {} if rows.labels is None else {"gold": self.shown(rows.labels[number])}
        written = {} if prediction.text is None else {"written": prediction.text}
        record = {**texts, **gold, "prediction": self.shown(prediction.value), "score": prediction.score, **written}
        if prediction.probabilities is not None:
            record["probabilities"] = dict(zip(self.classes, prediction.probabilities.tolist(), strict=True))
        return record

    def line(self, record: Mapping[str, object]) -> str:
        """A record as a line on the screen, the prediction first."""
        texts = " | ".join(str(record[name]) for name in self.config.reads)
        return f"{record['prediction']} {record['score']:.2f}  {texts}"

    def details(self, rows: Rows, predictions: Sequence[Prediction]) -> dict[str, object]:
        """Plain data for the report beside the scores."""
        return {}

    @property
    def metric(self) -> Metric:
        """The score that chooses the best checkpoint."""
        return METRICS[self.config.metric]
