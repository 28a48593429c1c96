"""What a task kind is: from the columns of a table to rows, from what its learner gives to predictions and scores.

A kind is built from its configuration alone and needs no model; its learner is a learner like any other. Rows are read,
checked and decoded before a model is built; what the learner says of the parts of a row (windows of a long text,
choices) is joined into one prediction a row, and every row is predicted exactly once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lmtool.data.loader import PackedLoader
from lmtool.data.plan import Examples
from lmtool.data.split import Rows, SplitData
from lmtool.errors import NotFinite
from lmtool.learners.base import Answers, BaseLearner, Progress, Warn, no_progress, silent
from lmtool.learners.baseline import Predictor
from lmtool.learners.evaluation import Evaluation, Scorer, evaluate
from lmtool.learners.terms import TermSums
from lmtool.metrics import METRICS, Metric
from lmtool.models.base import Backbone
from lmtool.tasks.kinds.inspection import TaskInspector
from lmtool.tasks.kinds.labels import IDS
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.training.precision import Precision
from lmtool.types import Batch, Scores


class Prediction(NamedTuple):
    """value: what a row is predicted to be, in the terms of its kind (a class's number, a value, a list of tags).
    score: how sure the model is of it, or the value again where there is no such thing. probabilities: (C,) of each
    class in the order of the labels, where the kind has classes."""

    value: Any
    score: float
    probabilities: np.ndarray | None = None


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
    def rows(self, columns: dict[str, list[Any]], origin: list[tuple[str, int]], labelled: bool) -> Rows:
        """Decoded rows. labelled: whether the label must be there. UserError with file:line at the first value that
        cannot be read."""

    def fitted(self, train: Rows) -> Any:
        """The configuration with what is computed from the training rows: weights of classes."""
        return self.config

    def facts(self, train: Rows) -> tuple[dict[str, Any], list[str]]:
        """What the screens say of the training rows, and warnings."""
        return {}, []

    def groups(self, rows: Rows) -> Sequence[Any]:
        """What each row belongs to: of rows that share it none is held out of training without the others. All that is
        read, where it is equal."""
        return list(zip(*rows.columns.values(), strict=True))

    def texts(self, rows: Rows) -> list[Sequence[str]]:
        """What is read, column by column, as text from which a tokenizer can be trained."""
        return list(rows.columns.values())

    # Model.

    @abstractmethod
    def learner(self, backbone: Backbone, tokenizer: Tokenizer, seed: int) -> TaskLearner:
        """What learns the task on a backbone."""

    # Predictions.

    def join(self, parts: Sequence[Any]) -> Prediction:
        """One row's prediction, from what the learner says of its parts, in their order."""
        (prediction,) = parts
        return prediction

    @abstractmethod
    def metrics(self, rows: Rows, predictions: Sequence[Prediction]) -> dict[str, float]:
        """The scores that the configuration names. rows: labelled."""

    def resampled(
        self, rows: Rows, predictions: Sequence[Prediction], draws: Iterable[np.ndarray]
    ) -> dict[str, list[float]]:
        """The scores of samples of the rows, for intervals. draws: the numbers of a sample's rows each. A kind whose
        scores take long has a shorter way, from counts of each row."""
        # Scores read labels alone.
        bare = Rows(list(range(len(rows))), {}, rows.labels, [("", 0)] * len(rows))
        values: dict[str, list[float]] = {}
        for numbers in draws:
            sample = self.metrics(bare.take(numbers), [predictions[number] for number in numbers])
            for name, value in sample.items():
                values.setdefault(name, []).append(value)
        return values

    @abstractmethod
    def constant(self, train: Rows) -> tuple[str, Prediction]:
        """What predicting without reading is called (majority, mean), and predicts for each row."""

    def single(self, values: Sequence[Any] | np.ndarray) -> Sequence[Any] | np.ndarray:
        """The labels or predicted values of rows one by one, where a row has many."""
        return values

    @abstractmethod
    def shown(self, value: Any) -> Any:
        """A label or a predicted value as a user reads it: plain data."""

    def record(self, rows: Rows, number: int, prediction: Prediction) -> dict[str, Any]:
        """What predictions.jsonl says of a row behind its id: columns, gold (where known), prediction, score."""
        texts = {name: values[number] for name, values in rows.columns.items()}
        gold = {} if rows.labels is None else {"gold": self.shown(rows.labels[number])}
        return {**texts, **gold, "prediction": self.shown(prediction.value), "score": prediction.score}

    def line(self, record: Mapping[str, Any]) -> str:
        """A record as a line on the screen, the prediction first."""
        texts = " | ".join(str(record[name]) for name in self.config.text)
        return f"{record['prediction']} {record['score']:.2f}  {texts}"

    def details(self, rows: Rows, predictions: Sequence[Prediction]) -> dict[str, Any]:
        """Plain data for the report beside the scores."""
        return {}

    @property
    def metric(self) -> Metric:
        """The score that chooses the best checkpoint."""
        return METRICS[self.config.metric]


class TaskLearner(BaseLearner):
    """The base of a kind's learner. The one term, and the head, have the task's name. scores_tokens: whether its
    outputs are of tokens, not of whole texts."""

    predicts_rows = True
    scores_tokens: bool = False

    def __init__(self, kind: TaskKind, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        super().__init__(kind.config, backbone, tokenizer, seed)
        self.kind, self.term = kind, kind.config.name
        self.weights = {self.term: 1.0}
        self.metric, self.reads = kind.metric, tuple(kind.config.text)

    @abstractmethod
    def outputs(self, batch: Batch, step: int) -> Tensor:
        """What the head gives, finite. step: keys the dropout in training."""

    @abstractmethod
    def scores(self, outputs: Tensor, batch: Batch) -> Scores:
        """Each target's loss and best guess."""

    @abstractmethod
    def parts(self, outputs: Tensor, batch: Batch) -> list[Any]:
        """What each document of the batch says of its row, on the host: what the kind's `join` reads."""

    def calibrate(self, rows: Rows, predictions: Sequence[Prediction]) -> None:  # noqa: B027 most kinds tune nothing
        """Tune on labelled development rows what turns scores into decisions, and keep it among the tensors of the
        head. predictions: as `join` gives them."""

    def decided(self, predictions: Sequence[Prediction]) -> list[Prediction]:
        """The predictions under what `calibrate` tuned."""
        return list(predictions)

    def labels(self, batch: Batch) -> Tensor:
        """The labels of a labelled batch."""
        labels = batch.targets[self.term].labels
        if labels is None:
            raise ValueError("the batch has no labels")
        return labels

    def score(self, batch: Batch) -> dict[str, Scores]:
        return {self.term: self.scores(self.outputs(batch, 0), batch)}

    def rows(self, data: SplitData) -> Rows:
        """The task's rows of a split."""
        return data.rows[self.config.name]

    def inspector(self, examples: Any, max_length: int) -> TaskInspector:
        return TaskInspector(self, examples, max_length)

    def scorer(self, data: SplitData, examples: Examples, predictors: Mapping[str, Predictor]) -> Scorer:
        parts = len(examples.plan(0))
        return TaskScorer(self, self.rows(data), data.split, parts, predictors.get(self.term))

    def baseline(
        self, train: SplitData, held_out: SplitData, batches: Iterable[Batch], predictors: Mapping[str, Predictor]
    ) -> dict[str, Any]:
        """The constant's scores: also `prediction`, and all `metrics`."""
        name, prediction = self.kind.constant(self.rows(train))
        rows = self.rows(held_out)
        metrics = self.kind.metrics(rows, [prediction] * len(rows))
        return {
            "name": name,
            "prediction": self.kind.shown(prediction.value),
            "metric": self.metric.name,
            "value": metrics[self.metric.name],
            "metrics": metrics,
        }

    def samples(self, batch: Batch, n: int) -> list[dict[str, Any]]:
        """The first n texts of a batch as plain data: `text`, `gold`, `prediction` and its `score`."""
        if batch.targets[self.term].at is not None:
            return []  # a text has many labels, of which a part of it holds some
        parts, labels = self.parts(self.outputs(batch, 0), batch), self.labels(batch)
        documents = batch.inputs.tokens.split(list(batch.inputs.lengths))
        samples = []
        for number in range(min(n, len(documents))):
            prediction = self.decided([self.kind.join([parts[number]])])[0]
            samples.append(
                {
                    "text": self.tokenizer.decode(documents[number]),
                    "gold": self.kind.shown(labels[number].tolist()),
                    "prediction": self.kind.shown(prediction.value),
                    "score": prediction.score,
                }
            )
        return samples

    def read_rows(self, columns: dict[str, list[Any]], origin: list[tuple[str, int]]) -> Rows:
        columns = {self.config.aliases.get(name, name): values for name, values in columns.items()}
        read = super().read_rows(columns, origin).columns
        further = {name: columns[name] for name in (*IDS, self.config.label) if name in columns}
        return self.kind.rows({**further, **read}, origin, labelled=False)

    def respond(
        self, rows: Rows, max_length: int, batch_tokens: int, precision: Precision, warn: Warn = silent
    ) -> Iterator[dict[str, Any]]:
        return self.answers(rows, max_length, batch_tokens, precision, warn).records

    def answers(
        self,
        rows: Rows,
        max_length: int,
        batch_tokens: int,
        precision: Precision,
        warn: Warn = silent,
        progress: Progress = no_progress,
    ) -> Answers:
        """Records of the rows, as in predictions.jsonl, and their scores where they are labelled."""
        data = SplitData("input", rows={self.config.name: rows})
        examples = self.examples(data, max_length)
        facts = examples.facts()
        if facts.get("truncated"):
            warn(f"{facts['truncated']:,} of {len(rows):,} texts are cut to {max_length} tokens")
        if facts.get("cut_questions"):
            warn(f"{facts['cut_questions']:,} of {len(rows):,} questions are cut")
        loader = PackedLoader(examples, 0, None, max(batch_tokens, max_length), shuffle=False)
        total, done = len(examples.plan(0)), 0

        def shown() -> Iterator[Batch]:
            nonlocal done
            for batch in loader.epoch_batches():
                yield batch
                done += len(batch.inputs.lengths)
                progress(done, total)

        evaluation = evaluate(self, self.scorer(data, examples, {}), shown(), precision)
        return Answers(evaluation.records(), evaluation.scores, 0 if rows.labels is None else len(rows))

    def line(self, record: Mapping[str, Any]) -> str:
        return self.kind.line(record)


@dataclass(frozen=True)
class TaskEvaluation(Evaluation):
    """A split of a task, with the prediction of each of its rows. Of unlabelled rows there are only these."""

    kind: TaskKind | None = None
    rows: Rows | None = None
    split: str = ""
    predictions: Sequence[Prediction] = ()
    losses: np.ndarray | None = None
    """(N,) the loss of each row, in nats; None without labels."""

    def metrics(self) -> dict[str, float]:
        """`loss`, and the task's scores."""
        return {"loss": self.loss, **self.scores}

    def records(self) -> Iterator[dict[str, Any]]:
        """Lines of predictions.jsonl, in the order of the rows."""
        assert self.kind is not None and self.rows is not None
        for number, prediction in enumerate(self.predictions):
            yield {
                "id": self.rows.ids[number], "split": self.split, **self.kind.record(self.rows, number, prediction)
            }  # fmt: skip


class TaskScorer(Scorer):
    """Keeps what the learner says of each part of a row, and joins the parts at the end.

    parts: how many there are, of all rows. predictor: the constant that is scored on the same targets, or None.
    """

    def __init__(self, learner: TaskLearner, rows: Rows, split: str, parts: int, predictor: Predictor | None):
        self.learner, self.rows, self.split, self.expected, self.predictor = learner, rows, split, parts, predictor
        self.sums = TermSums()
        self.parts: list[dict[int, Any]] = [{} for _ in range(len(rows))]
        self.seen = 0

    def add(self, batch: Batch) -> None:
        learner = self.learner
        outputs = learner.outputs(batch, 0)
        if not bool(torch.isfinite(outputs).all()):
            raise NotFinite("predictions", batch)
        if self.rows.labels is not None:
            self.sums.add(batch, learner.scores(outputs, batch), self.predictor)
        assert batch.rows is not None
        places = zip(batch.rows.tolist(), batch.parts.tolist(), strict=True)
        for (row, part), output in zip(places, learner.parts(outputs, batch), strict=True):
            self.parts[row][part] = output
            self.seen += 1

    def result(self) -> TaskEvaluation:
        kind, rows, term = self.learner.kind, self.rows, self.learner.term
        kept = sum(map(len, self.parts))
        if self.seen != self.expected or kept != self.expected or not all(self.parts):
            raise RuntimeError(f"{self.seen} parts of {len(rows)} rows were predicted, {kept} of {self.expected} once")
        predictions = [kind.join([parts[number] for number in sorted(parts)]) for parts in self.parts]
        if self.calibrates and rows.labels is not None:
            self.learner.calibrate(rows, predictions)
        predictions = self.learner.decided(predictions)
        if rows.labels is None:
            return TaskEvaluation({}, {}, kind=kind, rows=rows, split=self.split, predictions=predictions)
        scored = self.sums.result(term, self.predictor)
        return TaskEvaluation(
            {term: scored},
            {term: 1.0},
            kind.metrics(rows, predictions),
            self._warnings(predictions),
            kind.details(rows, predictions),
            kind,
            rows,
            self.split,
            predictions,
            scored.sums_E,
        )

    def _warnings(self, predictions: Sequence[Prediction]) -> tuple[str, ...]:
        kind, labels = self.learner.kind, self.rows.labels
        assert labels is not None
        values = kind.single([prediction.value for prediction in predictions])
        constant = len(values) > 1 and _all_same(values) and not _all_same(kind.single(labels))
        if not constant:
            return ()
        given = kind.shown(values[0]) or "nothing"
        return (f"every {kind.unit} was predicted {given}: the model learned a constant",)


def _all_same(values: Sequence[Any] | np.ndarray) -> bool:
    return all(np.array_equal(value, values[0]) for value in values)
