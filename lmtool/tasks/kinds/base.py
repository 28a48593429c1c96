"""The base class of task kinds: table columns to rows, learner outputs to predictions and metrics.

A kind is built from its configuration alone and needs no model. Rows are read, checked and decoded before a model is
built; the outputs for parts of a row (windows of a long text, choices) are joined into one prediction per row.
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
    """The base of every kind. config: with labels, once the training rows are read. unit: what each prediction is for,
    in messages."""

    unit = "row"

    def __init__(self, config: Any):
        self.config = config

    # Rows.

    def with_labels(self, columns: Mapping[str, list[Any]], origin: Sequence[tuple[str, int]]) -> Any:
        """The configuration completed by names from the training columns: classes or tags. Unchanged if it already has
        them. UserError if the column does not suit this kind."""
        return self.config

    @abstractmethod
    def rows(self, columns: dict[str, list[object]], origin: list[tuple[str, int]], labelled: bool) -> Rows:
        """Decodes rows.

        Args:
            columns: Values by column name.
            origin: (file, line) of each row.
            labelled: Whether labels are required.

        Raises:
            UserError: With file:line, at the first invalid value.
        """

    def labels_of_predictions(self, columns: Mapping[str, list[object]]) -> list[object]:
        """Converts the columns of a predictions file, with `prediction`, to labels as in a data file."""
        return columns["prediction"]

    def fitted(self, train: Rows) -> Any:
        """The configuration with values computed from the training rows, such as class weights."""
        return self.config

    def first_loss(self, train: Rows) -> float | None:
        """The loss of a new head with zero outputs, if it depends on the scale of the labels; else None."""
        return None

    def metadata(self, train: Rows) -> tuple[dict[str, object], list[str]]:
        """Metadata of the training rows for screens, and warnings."""
        return {}, []

    def groups(self, rows: Rows) -> Sequence[object]:
        """A group key per row: rows of a group are held out together. By default, rows with equal texts."""
        return list(zip(*rows.columns.values(), strict=True))

    def texts(self, rows: Rows) -> list[Sequence[str]]:
        """The input texts by column, to train a tokenizer on; words of a list are joined."""
        return [
            [value if isinstance(value, str) else " ".join(value) for value in column]
            for column in rows.columns.values()
        ]

    # Model.

    @abstractmethod
    def learner(self, backbone: Backbone, tokenizer: Tokenizer, seed: int) -> BaseLearner:
        """The learner of this task on a backbone."""

    # Prompts.

    def candidates(self, rows: Rows) -> list[tuple[str, ...]] | None:
        """The candidate answers of each row, in class order; None if a model generates the answer. UserError if the
        kind has no prompts."""
        raise UserError(
            f"task={self.config.name} is {self.config.kind}, which has no prompts",
            f"lmtool finetune task={self.config.name} learns it",
        )

    def right_answers(self, rows: Rows) -> list[str]:
        """The answers of labeled rows, as shown in demonstrations."""
        labels = np.asarray(rows.labels)
        return [texts[label] for texts, label in zip(self.candidates(rows) or [], labels, strict=True)]

    def worded(self, rows: Rows) -> Mapping[str, Sequence[str]]:
        """The columns as shown in prompts."""
        return rows.columns

    def predicted_rows(self, rows: Rows) -> Rows:
        """The rows that have one prediction each."""
        return rows

    # Predictions.

    @property
    def classes(self) -> Sequence[str]:
        """Class names by number; empty without classes."""
        return ()

    def join(self, parts: Sequence[Any]) -> Prediction:
        """Joins the outputs for the parts of a row, in order, into its prediction."""
        (prediction,) = parts
        return prediction

    @abstractmethod
    def metrics(self, rows: Rows, predictions: Sequence[Prediction]) -> dict[str, float]:
        """The configured metrics of labeled rows."""

    def resampled(
        self, rows: Rows, predictions: Sequence[Prediction], draws: Iterable[np.ndarray]
    ) -> dict[str, list[float]]:
        """The metrics of resampled rows, for intervals. draws: row indices of each sample. Kinds with slow metrics
        override this with sums of per-row counts."""
        ids: list[str | int] = [0] * len(rows)
        origin = [("", 0)] * len(rows)
        values: dict[str, list[float]] = {}
        for numbers in draws:
            # Metrics read labels only.
            bare = Rows(ids[: len(numbers)], {}, rows.labels_at(numbers), origin[: len(numbers)])
            sample = self.metrics(bare, select_predictions(predictions, numbers))
            for name, value in sample.items():
                values.setdefault(name, []).append(value)
        return values

    @abstractmethod
    def constant(self, train: Rows) -> tuple[str, Prediction]:
        """The constant baseline: its name (majority, mean), and its prediction for every row."""

    def single(self, values: Sequence[object] | np.ndarray) -> Sequence[object] | np.ndarray:
        """Flattens labels or predicted values if each row has many."""
        return values

    @abstractmethod
    def shown(self, value: Any) -> Any:
        """A label or predicted value as plain data for users."""

    def record(self, rows: Rows, number: int, prediction: Prediction) -> dict[str, object]:
        """A row of predictions.jsonl without its id: columns, gold (if known), prediction, score, and class
        probabilities (if any)."""
        texts = {name: values[number] for name, values in rows.columns.items()}
        gold = {} if rows.labels is None else {"gold": self.shown(rows.labels[number])}
        written = {} if prediction.text is None else {"written": prediction.text}
        record = {**texts, **gold, "prediction": self.shown(prediction.value), "score": prediction.score, **written}
        if prediction.probabilities is not None:
            record["probabilities"] = dict(zip(self.classes, prediction.probabilities.tolist(), strict=True))
        return record

    def line(self, record: Mapping[str, object]) -> str:
        """A record as a line of the screen, prediction first."""
        texts = " | ".join(str(record[name]) for name in self.config.reads)
        return f"{record['prediction']} {record['score']:.2f}  {texts}"

    def details(self, rows: Rows, predictions: Sequence[Prediction]) -> dict[str, object]:
        """Plain data for the report besides the metrics."""
        return {}

    @property
    def metric(self) -> Metric:
        """The metric that selects the best checkpoint."""
        return METRICS[self.config.metric]
