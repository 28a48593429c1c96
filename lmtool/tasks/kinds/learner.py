"""The base class of task learners, and the scorer that turns their outputs into one prediction per row."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lmtool.config.base import JsonMapping, JsonObject
from lmtool.data.examples import Examples, Rows, SplitData
from lmtool.data.loader import PackedLoader
from lmtool.data.tables import LINES
from lmtool.errors import NotFinite
from lmtool.learners.base import Answers, BaseLearner, Inference, Responder, forward_tokens
from lmtool.learners.baseline import Predictor, TermSums
from lmtool.learners.evaluation import Evaluation, Scorer, evaluate
from lmtool.learners.inspection import Inspector, RunningStatistics, SampledBatch
from lmtool.models.base import Backbone
from lmtool.models.encoder_decoder_configs import EncoderDecoderConfig
from lmtool.models.heads.base import TokenLogits
from lmtool.models.heads.predicted import Classes, Predicted
from lmtool.models.heads.sequence import pooler
from lmtool.nn.dropout import DropoutRng
from lmtool.tasks.kinds.base import TaskKind
from lmtool.tasks.kinds.labels import IDS, Columns, Origin, with_joined_columns
from lmtool.tasks.kinds.predictions import Label, Prediction, PredictionColumns, values_of
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Scores, StepOutput


class TaskInspector(Inspector):
    """Inspects the examples of a task."""

    def texts(self, sampled: SampledBatch) -> list[list[str]]:
        """Returns the columns of each row as texts. Lists of words are joined with spaces."""
        row_N = sampled.batch.rows
        if row_N is None:
            return super().texts(sampled)
        numbers, columns = row_N.numpy()[sampled.boundaries[:-1]].tolist(), self.examples.rows.columns.values()
        rows = [[values[number] for values in columns] for number in numbers]
        return [[" ".join(cell) if _is_words(cell) else str(cell) for cell in row] for row in rows]

    def main_finding(self, stats: RunningStatistics) -> str:
        """Returns a sentence with the mean length of the examples and the fraction of truncated ones."""
        length, truncated = stats.measured("tokens per example"), stats.measured("truncated fraction")
        if length is None:
            return ""
        sentence = f"an example has {length:.0f} tokens on average"
        return sentence if truncated is None else f"{sentence}; {truncated:.1%} are cut to max_length={self.max_length}"

    def label(self, value: Label, of_token: bool) -> object:
        return self.learner.kind.shown(value)


def _is_words(cell: object) -> bool:
    return isinstance(cell, list) and all(isinstance(word, str) for word in cell)


@dataclass(frozen=True, kw_only=True)
class TaskEvaluation(Evaluation):
    """The evaluation of one split of a task, with a prediction for each row. losses: (N,) the loss of each row in nats;
    None if the rows have no labels."""

    kind: TaskKind
    rows: Rows
    split: str
    predictions: Sequence[Prediction]
    losses: np.ndarray | None = None

    def metrics(self) -> dict[str, float]:
        """Returns `loss` and the task's metrics."""
        return {"loss": self.loss, **self.scores}

    def records(self) -> Iterator[JsonObject]:
        """Yields the lines of predictions.jsonl, in the order of the rows."""
        for number, prediction in enumerate(self.predictions):
            record = self.kind.record(self.rows, number, prediction)
            yield {"id": self.rows.ids[number], "split": self.split, **record, **self.extra_fields(number)}

    def scored_rows(self) -> Iterator[list[object]]:
        return self.kind.scored_rows(self.rows)

    def extra_fields(self, number: int) -> JsonObject:
        """Returns further fields for the record of row `number`."""
        return {}


@dataclass(frozen=True)
class TaskOutputs:
    """The outputs for a batch, on the host. parts: the output of each document, one part of a row; None if an
    output is not finite. scores: the losses and best predictions of the targets; None if the rows have no labels."""

    parts: list[Label] | None
    scores: Scores | None = None


class TaskScorer(Scorer):
    """Joins the parts of a row (windows of a long text, choices) into its prediction as soon as all have arrived.
    Outputs are retained only for incomplete rows.

    parts_N: (N,) the number of parts of each row. predictor: a constant baseline to score on the same targets, or None.
    """

    def __init__(self, learner: TaskLearner, rows: Rows, split: str, parts_N: np.ndarray, predictor: Predictor | None):
        self.learner, self.rows, self.split, self.parts_N, self.predictor = learner, rows, split, parts_N, predictor
        self.sums, self.predictions = TermSums(), PredictionColumns(len(rows))
        self.partial_rows: dict[int, dict[int, Label]] = {}
        self.scored_parts = self.finished_parts = 0

    def outputs(self, batch: Batch) -> object:
        return self.task_outputs(self.learner, batch, self.learner.outputs(batch, 0))

    def task_outputs(self, learner: TaskLearner, batch: Batch, head_outputs: Tensor) -> TaskOutputs:
        """Moves the head's outputs to the host. learner: the scorer's, or its version that stops at an exit."""
        if not bool(torch.isfinite(head_outputs).all()):
            return TaskOutputs(None)
        scores = None if self.rows.labels is None else learner.scores(head_outputs, batch).cpu()
        parts = learner.parts(head_outputs, batch)
        return TaskOutputs([part for part in parts for _ in range(learner.orders)], scores)

    def take(self, batch: Batch, outputs: Any) -> None:
        self.add_outputs(batch, outputs)

    def add_outputs(self, batch: Batch, outputs: TaskOutputs, selected_N: np.ndarray | None = None) -> None:
        """Adds the outputs for a batch. selected_N: (N,) bool, documents to add; None: all."""
        if outputs.parts is None:
            raise NotFinite("predictions", batch)
        if (scores := outputs.scores) is not None:
            self.sums.add(batch, scores if selected_N is None else _of_documents(scores, selected_N), self.predictor)
        assert batch.rows is not None
        row_parts = zip(batch.rows.tolist(), batch.parts.tolist(), strict=True)
        for number, ((row, part), output) in enumerate(zip(row_parts, outputs.parts, strict=True)):
            if selected_N is not None and not selected_N[number]:
                continue
            self.scored_parts += 1
            if self.predictions.holds(row):
                continue  # a repeated part: `result` reports it
            parts = self.partial_rows.setdefault(row, {})
            parts[part] = output
            if len(parts) == self.parts_N[row]:
                self.predictions.put(row, self.learner.kind.join([parts[index] for index in sorted(parts)]))
                self.finished_parts += len(self.partial_rows.pop(row))

    def result(self) -> TaskEvaluation:
        kind, rows, term, count = self.learner.kind, self.rows, self.learner.term, self.scored_parts
        expected, received = int(self.parts_N.sum()), self.finished_parts + sum(map(len, self.partial_rows.values()))
        if count != expected or received != expected or self.predictions.missing:
            raise RuntimeError(f"{len(rows)} rows: {count} outputs arrived, for {received} of {expected} parts")
        if self.calibrates and rows.labels is not None:
            self.learner.calibrate(rows, self.predictions)
        predictions = self.learner.with_thresholds(self.predictions)
        if rows.labels is None:
            return TaskEvaluation({}, {}, kind=kind, rows=rows, split=self.split, predictions=predictions)
        scored = self.sums.result(term, self.predictor)
        return TaskEvaluation(
            {term: scored},
            {term: 1.0},
            kind.metrics(rows, predictions),
            self._warnings(predictions),
            kind.details(rows, predictions),
            kind=kind,
            rows=rows,
            split=self.split,
            predictions=predictions,
            losses=scored.sums_E,
        )

    def _warnings(self, predictions: Sequence[Prediction]) -> tuple[str, ...]:
        kind, labels = self.learner.kind, self.rows.labels
        assert labels is not None
        values = kind.flat_values(values_of(predictions))
        if len(values) < 2 or not _all_same(values) or _all_same(kind.flat_values(labels)):
            return ()
        value_text = kind.shown(values[0])
        value_text = "nothing" if value_text in ("", []) else value_text
        return (f"every {kind.unit} was predicted {value_text}: the model predicts a constant",)


def _of_documents(scores: Scores, selected_N: np.ndarray) -> Scores:
    retained_M = torch.from_numpy(selected_N).to(scores.documents.device)[scores.documents]
    return Scores(*(getattr(scores, field.name)[retained_M] for field in fields(scores)))


def _all_same(values: Sequence[Label] | np.ndarray) -> bool:
    return all(np.array_equal(value, values[0]) for value in values)


class TaskLearner(BaseLearner):
    """Base of the learners of all task kinds. The single loss term and the head have the task's name.

    scorer_class: the class of the scorer. inspector_class: the class of the inspector.
    """

    scorer_class: Callable[..., TaskScorer] = TaskScorer
    orders: int = 1
    """The number of orders in which the texts of a row are read for one output."""
    inspector_class: type[TaskInspector] = TaskInspector

    def __init__(self, kind: TaskKind, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        super().__init__(kind.config, backbone, tokenizer, seed)
        self.kind, self.term = kind, kind.config.name
        self.loss_weights = {self.term: 1.0}
        self.metric = kind.metric

    # Heads.

    @property
    def token_width(self) -> int:
        """The input width of a head that reads tokens."""
        return self.backbone.hidden_size if self.backbone.pooler_on_tokens else self.backbone.feature_size

    def add_token_head(self, head: nn.Module) -> None:
        """Adds a head that reads tokens, and before it the pooler if the family applies one to tokens."""
        if self.backbone.pooler_on_tokens:
            self.add_head("pooler", pooler(self.backbone))
        self.add_head(self.term, head)

    def pool_tokens(self, hidden_TF: Tensor) -> Tensor:
        """Returns (T, `token_width`): the states that a token head reads. Some families pool each token."""
        return self.heads["pooler"](hidden_TF) if self.backbone.pooler_on_tokens else hidden_TF

    @property
    def head_dropout(self) -> float:
        """The dropout rate before the output layer."""
        return self.backbone.config.dropout if self.config.dropout is None else self.config.dropout

    def head_rng(self, rng: DropoutRng | None, batch: Batch, indices: Tensor | None = None) -> DropoutRng | None:
        """Returns the head's dropout generator; for an encoder-decoder, the generator of its output side. indices: flat
        indices of the tokens that the head reads; None: all tokens."""
        if rng is not None and batch.outputs is not None:
            rng = rng.for_outputs()
        return rng if rng is None or indices is None else rng.rows(indices)

    @property
    def start_token(self) -> int | None:
        """The first token of an encoder-decoder's output side; None for other models."""
        model = self.backbone.config
        return self.tokenizer.role(model.start_role) if isinstance(model, EncoderDecoderConfig) else None

    def hidden_of(self, batch: Batch, rng: DropoutRng | None, read_M: Tensor | None = None) -> Tensor:
        """Returns the hidden states of a batch that the heads read, see `hidden`."""
        return self.hidden(batch.inputs, batch.outputs, rng, read_M)

    # Loss and scores.

    @abstractmethod
    def outputs(self, batch: Batch, step: int) -> Tensor:
        """Returns the outputs of the head. step: the training step, which seeds dropout."""

    @abstractmethod
    def training_loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Returns the sum of the losses of all targets."""

    @abstractmethod
    def scores(self, outputs: Tensor, batch: Batch) -> Scores:
        """Returns the loss and best prediction of each target."""

    @abstractmethod
    def parts(self, outputs: Tensor, batch: Batch) -> list[Label]:
        """Returns the output of each document, on the host, in the form that the kind's `join` expects."""

    def predicted(self, outputs: Tensor, batch: Batch) -> Predicted:
        """Returns the head's outputs as predictions of its targets, from which another model can learn."""
        return Classes(outputs)

    def interpret_logits(self, head: str, logits: Tensor | TokenLogits, batch: Batch) -> tuple[str, Predicted] | None:
        if head == self.term and isinstance(logits, Tensor):
            return self.term, self.predicted(logits, batch)
        return super().interpret_logits(head, logits, batch)

    def labels(self, batch: Batch) -> Tensor:
        """Returns the labels of a labeled batch."""
        labels = batch.targets[self.term].labels
        if labels is None:
            raise ValueError("the batch has no labels")
        return labels

    def documents(self, batch: Batch) -> Tensor:
        """Returns (M,): the index of each target's document. By default, each document has one target."""
        labels_N = self.labels(batch)
        return torch.arange(len(labels_N), device=labels_N.device) * self.orders

    def target_count(self, batch: Batch) -> float:
        """Returns the number of targets, or the sum of their weights."""
        return float(self.labels(batch).numel())

    def counts(self, batch: Batch) -> dict[str, float]:
        return {self.term: self.target_count(batch)}

    def forward(self, batch: Batch, step: int) -> StepOutput:
        return StepOutput({self.term: self.training_loss(self.outputs(batch, step), batch)}, self.loss_weights)

    def score(self, batch: Batch) -> dict[str, Scores]:
        return {self.term: self.scores(self.outputs(batch, 0), batch)}

    def uncertainty(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Returns (N,): the normalized entropy of each document's prediction; for several predictions, the maximum.
        Raises TypeError for kinds without classes."""
        raise TypeError(f"the predictions of {type(self).__name__} have no entropy")

    def calibrate(self, rows: Rows, predictions: Sequence[Prediction]) -> None:  # noqa: B027 most kinds tune nothing
        """Tunes decision thresholds on labeled development rows and stores them in the head. predictions: those
        of `join`, before thresholds are applied."""

    def with_thresholds(self, predictions: Sequence[Prediction]) -> Sequence[Prediction]:
        """Returns the predictions under the thresholds tuned by `calibrate`."""
        return predictions

    # Data.

    def rows(self, data: SplitData) -> Rows:
        """Returns the task's rows of a split."""
        return data.rows[self.config.name]

    def part_counts(self, rows: Rows, examples: Examples) -> np.ndarray:
        """Returns (N,): the number of parts of each row, counted in the plan of the examples."""
        return np.bincount(examples.plan(0).rows["row"], minlength=len(rows))

    def scorer(self, data: SplitData, examples: Any, predictors: Mapping[str, Predictor]) -> Scorer:
        rows = self.rows(data)
        return self.scorer_class(self, rows, data.split, self.part_counts(rows, examples), predictors.get(self.term))

    def baseline(
        self, train: SplitData, held_out: SplitData, batches: Iterable[Batch], predictors: Mapping[str, Predictor]
    ) -> JsonObject:
        """Returns the constant baseline of the task: its name, its prediction, and its metrics on the held-out rows."""
        name, prediction = self.kind.constant(self.rows(train))
        rows = self.rows(held_out)
        metrics = self.kind.metrics(rows, self.kind.constant_predictions(rows, prediction))
        return {
            "name": name,
            "prediction": self.kind.shown(prediction.value),
            "metric": self.metric.name,
            "value": metrics[self.metric.name],
            "metrics": metrics,
        }

    # Inference.

    def samples(self, batch: Batch, n: int) -> list[JsonObject]:
        """Returns the first n texts of a batch as plain data: `text`, `gold`, `prediction` and `score`."""
        if batch.targets[self.term].at is not None:
            return []  # labels are per token, and a window has only some labels of a text
        parts, labels = self.parts(self.outputs(batch, 0), batch), self.labels(batch)
        documents = batch.inputs.tokens.split(list(batch.inputs.lengths))
        samples = []
        for number in range(min(n, len(documents))):
            prediction = self.with_thresholds([self.kind.join([parts[number // self.orders]])])[0]
            samples.append(
                {
                    "text": self.tokenizer.decode(documents[number]),
                    "gold": self.kind.shown(labels[number // self.orders].tolist()),
                    "prediction": self.kind.shown(prediction.value),
                    "score": prediction.score,
                }
            )
        return samples

    def takes_texts(self, count: int) -> bool:
        """Whether the task can score `count` texts that the user types (1, or 2 for a pair) in place of its columns."""
        return not self.config.scores_tokens or count == len(self.config.reads)

    def examples_of_texts(self, texts: Sequence[tuple[str, ...]], max_length: int) -> Examples:
        """Returns the examples of texts that the user types. Each tuple has a number of texts that `takes_texts`
        accepts."""
        has_all_columns = len(self.config.reads) == len(texts[0])
        names = self.config.reads if has_all_columns else ("first", "second")[: len(texts[0])]
        rows = Rows.of_texts(**{name: [row[side] for row in texts] for side, name in enumerate(names)})
        rows = self.responder().read_rows(rows.columns, rows.origin) if has_all_columns else rows
        return self.examples(SplitData("sample", rows={self.config.name: rows}), max_length)

    def responder(self) -> TaskResponder:
        return TaskResponder(self)


class TaskResponder(Responder):
    """Predicts rows of a task."""

    learner: TaskLearner

    def __init__(self, learner: TaskLearner):
        super().__init__(learner)
        self.columns = tuple(learner.config.reads)

    def read_rows(self, columns: Columns, origin: Origin) -> Rows:
        config = self.learner.config
        columns = with_joined_columns(config, config.with_aliases(columns), origin)
        decoded = self.columns_read(columns, origin)
        names = (*IDS, config.label, *config.further_columns, LINES)
        extra = {name: columns[name] for name in names if name in columns}
        return self.learner.kind.rows({**extra, **decoded}, origin, False)

    def answers(self, rows: Rows, inference: Inference) -> Answers:
        """Returns the records of the rows, as in predictions.jsonl, and their metrics if labeled."""
        learner, data = self.learner, SplitData("input", rows={self.learner.config.name: rows})
        max_length = inference.max_length
        examples = learner.examples(data, max_length)
        metadata = examples.metadata()
        kinds = {"truncated": f"texts are truncated to {max_length} tokens", "cut_questions": "questions are truncated"}
        for key, what in kinds.items():
            if metadata.get(key):
                inference.truncated[what] += metadata[key]
        budget = max(forward_tokens(inference.batch_tokens, inference.precision), max_length + learner.virtual_tokens)
        loader = PackedLoader(examples, 0, None, budget, shuffle=False, virtual_tokens=learner.virtual_tokens)

        def batches() -> Iterator[Batch]:
            total, encoded = len(examples.plan(0)), 0
            for batch in loader.epoch_batches():
                yield batch
                encoded += len(batch.inputs.lengths)
                inference.progress(encoded, total)

        evaluation = evaluate(learner, learner.scorer(data, examples, {}), batches(), inference.precision)
        return Answers(evaluation.records(), evaluation.scores, 0 if rows.labels is None else len(rows))

    def line(self, record: JsonMapping) -> str:
        return self.learner.kind.line(record)
