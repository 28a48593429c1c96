"""The base class of task kinds. A kind converts columns of a table to rows, and outputs of a learner to predictions and
metrics.

A kind is built from its configuration and needs no model, so that rows are decoded and checked before a model is built.
If a row has several parts (windows of a long text, choices), their outputs are joined into one prediction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from lmtool.config.base import JsonMapping, JsonObject
from lmtool.data.examples import Rows
from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner
from lmtool.learners.metrics import METRICS, Metric, compute
from lmtool.models.base import Backbone
from lmtool.system.terminal import counted
from lmtool.tasks.configs.base import TaskConfig
from lmtool.tasks.kinds.labels import Columns, Origin, cell_text, is_unlabeled, row_ids, text_of
from lmtool.tasks.kinds.predictions import Label, Prediction, values_of
from lmtool.tokenizers.tokenizer import Tokenizer


class TaskKind(ABC):
    """Base of every kind. config: the task's configuration; `with_labels` and `fit_config` return a copy completed from
    the training data. unit: the noun for what one prediction belongs to (row, word), for messages."""

    config: TaskConfig
    unit = "row"

    def __init__(self, config: TaskConfig):
        self.config = config

    # Rows.

    def with_labels(self, columns: Columns, origin: Origin) -> TaskConfig:
        """Returns the configuration with the class or tag names found in the training columns, unless they are
        configured. Raises UserError if the columns have no valid ones."""
        return self.config

    @abstractmethod
    def rows(self, columns: Columns, origin: Origin, labeled: bool) -> Rows:
        """Decodes rows. columns: values by column name. origin: (file, line) of each row. labeled: whether labels are
        required. Raises UserError with file:line at the first invalid value."""

    def inputs(self, columns: Columns, origin: Origin) -> dict[str, list[Label]]:
        """Decodes the columns that the model reads; by default, they are texts."""
        return {
            name: [text_of(self.config, name, value, place) for value, place in zip(columns[name], origin, strict=True)]
            for name in self.config.reads
        }

    @property
    def reads_dialogues(self) -> bool:
        """Whether the rows of a table are dialogues, of which `replies` makes rows."""
        return False

    def replies(self, columns: Columns, origin: Origin) -> tuple[dict[str, list[Label]], Origin, int]:
        """Makes a row of each reply in a table of dialogues. Returns the columns, the origins of the rows, and the
        number of dialogues without a reply. Raises UserError, with file:line, if a row is not a dialogue."""
        raise TypeError(f"task={self.config.name} reads no dialogues")

    def labels_of_predictions(self, columns: Columns) -> list[object]:
        """Converts the columns of a predictions file to labels as in a data file, so that predictions can be training
        labels."""
        return columns["prediction"]

    def fit_config(self, train: Rows) -> TaskConfig:
        """Returns the configuration with values computed from the training rows, such as class weights."""
        return self.config

    def first_loss(self, train: Rows) -> float | None:
        """Returns the loss of a new head, whose outputs are 0, if it depends on the scale of the labels; otherwise
        None."""
        return None

    def metadata(self, train: Rows) -> tuple[JsonObject, list[str]]:
        """Returns metadata of the training rows for the screen, and warnings."""
        return {}, []

    def groups(self, rows: Rows) -> Sequence[object]:
        """Returns a group key for each row. Rows of a group are held out together; by default, rows with equal texts
        form a group."""
        return list(zip(*rows.columns.values(), strict=True))

    def texts(self, rows: Rows) -> list[Sequence[str]]:
        """Returns the input texts of each column, to train a tokenizer on. Lists of words are joined with spaces."""
        return [list(map(cell_text, column)) for column in rows.columns.values()]

    # Model.

    @abstractmethod
    def learner(self, backbone: Backbone, tokenizer: Tokenizer, seed: int) -> BaseLearner:
        """Returns the learner of this task on a backbone."""

    # Prompts.

    def candidates(self, rows: Rows) -> list[tuple[str, ...]] | None:
        """Returns the candidate answers of each row, in class order; None if answers are generated. Raises UserError
        for kinds without prompts."""
        raise UserError(
            f"task={self.config.name} is {self.config.kind}, which has no prompts",
            f"lmtool finetune task={self.config.name} learns it",
        )

    def right_answers(self, rows: Rows) -> list[str]:
        """Returns the correct answers of labeled rows, as demonstrations show them."""
        labels = np.asarray(rows.labels)
        return [texts[label] for texts, label in zip(self.candidates(rows) or [], labels, strict=True)]

    def prompt_columns(self, rows: Rows) -> Mapping[str, Sequence[str]]:
        """Returns the columns as prompts show them."""
        return rows.columns

    def predicted_rows(self, rows: Rows) -> Rows:
        """Returns the rows to predict: all rows, or fewer if several rows share one prediction (the targets of a
        source)."""
        return rows

    # Predictions.

    @property
    def classes(self) -> Sequence[str]:
        """Class names by number; empty without classes."""
        return self.config.class_names or ()

    def join(self, parts: Sequence[Label]) -> Prediction:
        """Joins the outputs for the parts of a row, in order, into its prediction."""
        (prediction,) = parts
        return prediction

    def metrics(self, rows: Rows, predictions: Sequence[Prediction]) -> dict[str, float]:
        """Returns the configured metrics of the predictions, by name. rows: labeled."""
        return self.scores_of(np.asarray(rows.labels), np.asarray(values_of(predictions)))

    def scores_of(self, labels: np.ndarray, values: np.ndarray) -> dict[str, float]:
        """Returns the configured metrics by name. labels, values: the gold and the predicted value of each row."""
        return compute(self.config.metrics, labels, values)

    def resampled(
        self, rows: Rows, predictions: Sequence[Prediction], draws: Iterable[np.ndarray]
    ) -> dict[str, list[float]]:
        """Returns the metrics of resampled rows, for bootstrap intervals. draws: the row indices of each sample. Kinds
        with slow metrics override this method and add up counts of each row."""
        samples: dict[str, list[float]] = {}
        for scores in self._scores_of_draws(rows, predictions, draws):
            for name, score in scores.items():
                samples.setdefault(name, []).append(score)
        return samples

    def _scores_of_draws(
        self, rows: Rows, predictions: Sequence[Prediction], draws: Iterable[np.ndarray]
    ) -> Iterator[dict[str, float]]:
        if type(self).metrics is TaskKind.metrics:
            labels, values = np.asarray(rows.labels), np.asarray(values_of(predictions))
            yield from (self.scores_of(labels[indices], values[indices]) for indices in draws)
            return
        for indices in draws:  # a plugin's kind overrides `metrics`, which may read only the labels of the rows
            count = len(indices)
            label_rows = Rows([0] * count, {}, rows.labels_at(indices), [("", 0)] * count)
            yield self.metrics(label_rows, [predictions[index] for index in indices])

    @abstractmethod
    def constant(self, train: Rows) -> tuple[str, Prediction]:
        """Returns the constant baseline: its name (majority, mean), and its prediction, the same for every row."""

    def constant_predictions(self, rows: Rows, prediction: Prediction) -> list[Prediction]:
        """Returns the constant baseline's predictions of the rows."""
        return [prediction] * len(rows)

    def flat_values(self, values: Sequence[object] | np.ndarray) -> Sequence[object] | np.ndarray:
        """Returns the labels or predicted values, flattened if each row has several."""
        return values

    @abstractmethod
    def shown(self, value: Label) -> object:
        """Returns a label or predicted value in the form that users read, as plain data."""

    def record(self, rows: Rows, number: int, prediction: Prediction) -> JsonObject:
        """Returns a line of predictions.jsonl without its id: columns, gold, prediction, score, and probabilities of
        the classes."""
        record = {name: values[number] for name, values in rows.columns.items()}
        for name, trees in rows.parents.items():
            record[self.config.head_columns[name]] = [parent + 1 for parent in trees[number]]
        if rows.labels is not None:
            record["gold"] = self.shown(rows.labels[number])
        record |= {"prediction": self.shown(prediction.value), "score": prediction.score}
        if prediction.text is not None:
            record["written"] = prediction.text
        if prediction.probabilities is not None:
            record["probabilities"] = dict(zip(self.classes, prediction.probabilities.tolist(), strict=True))
        return record

    def scored_rows(self, rows: Rows) -> Iterator[list[object]]:
        """Yields for each row what a score depends on besides the model: the values that the model reads, before they
        are truncated to max_length, and the gold label as in `record`."""
        for number, values in enumerate(zip(*rows.columns.values(), strict=True)):
            yield [list(values), None if rows.labels is None else self.shown(rows.labels[number])]

    def line(self, record: JsonMapping) -> str:
        """Returns a record as a line of the screen, prediction first."""
        texts = " | ".join(cell_text(record[name]) for name in self.config.reads)
        return f"{record['prediction']} {record['score']:.2f}  {texts}"

    def details(self, rows: Rows, predictions: Sequence[Prediction]) -> JsonObject:
        """Returns plain data for the report in addition to the metrics."""
        return {}

    @property
    def metric(self) -> Metric:
        """The metric that selects the best checkpoint."""
        return METRICS[self.config.metric]


class TextKind(TaskKind):
    """Base of kinds whose rows have one label each, which is decoded without looking at the texts."""

    def rows(self, columns: Columns, origin: Origin, labeled: bool) -> Rows:
        inputs, values, labels = self.inputs(columns, origin), columns.get(self.config.label), None
        if labeled or (values is not None and not is_unlabeled(values, self.classes)):
            labels = self.decoded_labels(values or [], origin)
        return Rows(row_ids(columns, len(origin)), inputs, labels, origin)

    @abstractmethod
    def decoded_labels(self, values: Sequence[object], origin: Origin) -> np.ndarray | Sequence[Label]:
        """Returns (N,): the labels in a column. Raises UserError with file:line at the first invalid value."""

    def metadata(self, train: Rows) -> tuple[JsonObject, list[str]]:
        texts = (cell for column in train.columns.values() for cell in column if isinstance(cell, str | list))
        empty = sum(not cell_text(cell).strip() for cell in texts)
        return {}, [f"{counted(empty, 'empty text')} in the training rows"] if empty else []
