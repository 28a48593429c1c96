"""Classification of a span, or a pair of spans (Tenney et al. 2019, "edge probing"): [start; end; mean] of the hidden
states of each span, and a two-layer head.

Shape letters: E rows, N examples of a batch, S spans of a row, T tokens, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmtool.data.examples import Plan, Rows, SplitData
from lmtool.data.formats import FormatTemplate, assemble, ragged_ranges, text_format
from lmtool.errors import UserError
from lmtool.learners.baseline import ConstantPredictor
from lmtool.models.base import Backbone
from lmtool.models.encoder_decoder import shifted
from lmtool.models.encoder_decoder_configs import EncoderDecoderConfig
from lmtool.models.heads.base import loss_sum, losses
from lmtool.models.heads.sequence import SpanHead, span_vectors, summary_index
from lmtool.tasks.configs import SpanClassificationConfig
from lmtool.tasks.kinds.classes import OneClassKind
from lmtool.tasks.kinds.labels import (
    class_names,
    class_numbers,
    class_warnings,
    is_unlabelled,
    label_counts,
    location,
    row_ids,
    text_of,
)
from lmtool.tasks.kinds.learner import TaskLearner
from lmtool.tasks.kinds.predictions import Prediction
from lmtool.tasks.kinds.texts import AlignedTexts
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Scores, StepOutput, Target


class SpanClassification(OneClassKind):
    """Rows of a text and its spans, with one class number each."""

    config: SpanClassificationConfig

    def with_labels(
        self, columns: Mapping[str, list[object]], origin: Sequence[tuple[str, int]]
    ) -> SpanClassificationConfig:
        if self.config.labels is not None:
            return self.config
        names = class_names(self.config, columns[self.config.label], origin)
        return self.config.model_copy(update={"labels": names})

    def rows(self, columns: dict[str, list[object]], origin: list[tuple[str, int]], labelled: bool) -> Rows:
        name, *spans = self.config.text
        texts = [text_of(self.config, name, value, where) for value, where in zip(columns[name], origin, strict=True)]
        retained: dict[str, list[Any]] = {name: texts}
        for span in spans:
            rows = zip(columns[span], texts, origin, strict=True)
            retained[span] = [_span(span, value, text, where) for value, text, where in rows]
        values, labels = columns.get(self.config.label), None
        if labelled or (values is not None and not is_unlabelled(values)):
            labels = class_numbers(self.config, self.config.labels or (), values or [], origin)
        return Rows(row_ids(columns, len(origin)), retained, labels, origin)

    def fitted(self, train: Rows) -> SpanClassificationConfig:
        if "f1" in self.config.metrics and len(self.config.labels or ()) != 2:
            raise UserError(
                f"task.metrics names f1, which needs two classes; the data have {len(self.config.labels or ())}",
                "use macro_f1, accuracy or matthews",
            )
        return self.config

    def groups(self, rows: Rows) -> Sequence[object]:
        """Spans of one text are held out together."""
        return rows.columns[self.config.text[0]]

    def texts(self, rows: Rows) -> list[Sequence[str]]:
        return [rows.columns[self.config.text[0]]]

    def metadata(self, train: Rows) -> tuple[dict[str, object], list[str]]:
        counts = label_counts(np.asarray(train.labels), self.config.labels or ())
        return {"labels": counts}, class_warnings(counts)

    def learner(self, backbone: Backbone, tokenizer: Tokenizer, seed: int) -> SpanClassificationLearner:
        return SpanClassificationLearner(self, backbone, tokenizer, seed)

    @property
    def classes(self) -> Sequence[str]:
        return self.config.labels or ()

    def line(self, record: Mapping[str, Any]) -> str:
        name, *spans = self.config.text
        span_texts = " | ".join(record[name][slice(*record[span])] for span in spans)
        return f"{record['prediction']} {record['score']:.2f}  {span_texts} | {record[name]}"


def _span(name: str, value: object, text: str, where: tuple[str, int]) -> list[int]:
    """[start, end) of a span, from a list of both or an object. UserError if it selects no text."""
    if isinstance(value, dict):
        value = [value.get("start"), value.get("end")]
    numbers = list(value) if isinstance(value, (list, tuple)) else []
    if len(numbers) != 2 or not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
        raise UserError(
            f"{location(where)}: {name}={value!r} is not a span", "write [start, end) in characters, from 0"
        )
    if not (0 <= numbers[0] < numbers[1] <= len(text)) or not text[slice(*numbers)].strip():
        raise UserError(
            f"{location(where)}: {name}={numbers} selects no text; the text has {len(text)} characters",
            "write [start, end) in characters, from 0, where end is exclusive",
        )
    return numbers


class SpanExamples:
    """Implements `data.plan.Examples`: texts with the tokens of their spans; long texts are cropped around them."""

    def __init__(self, learner: SpanClassificationLearner, rows: Rows, max_length: int, split: str):
        if not len(rows):
            raise UserError(f"the {split} split has no rows")
        model, tokenizer = learner.backbone.config, learner.tokenizer
        self.rows, self.term, self.split = rows, learner.term, split
        self.start = tokenizer.role(model.start_role) if isinstance(model, EncoderDecoderConfig) else None
        self.template = FormatTemplate.of(text_format(model.text_format, tokenizer), 1)
        name, *spans = learner.config.text
        self._texts = AlignedTexts(rows.columns[name], tokenizer)
        self._spans_ES2 = np.stack([self._tokens(rows, span) for span in spans], axis=1)
        capacity, lengths_E = max_length - self.template.special_count, self._texts.lengths_E
        first_E, last_E = self._spans_ES2[:, :, 0].min(axis=1), self._spans_ES2[:, :, 1].max(axis=1)
        wide = np.flatnonzero(last_E - first_E >= capacity)
        if len(wide):
            row, needed = wide[0], int(last_E[wide[0]] - first_E[wide[0]]) + 1
            raise UserError(
                f"{location(rows.origin[row])}: its spans extend over {needed} tokens; max_length={max_length} "
                f"allows {max(capacity, 0)}",
                f"set max_length={needed + self.template.special_count} or more, or remove the row",
            )
        around_E = (capacity - (last_E - first_E + 1)) // 2
        start_E = np.clip(first_E - around_E, 0, np.maximum(lengths_E - capacity, 0))
        self.truncated = int(np.sum(lengths_E > capacity))
        records = np.empty(len(rows), dtype=[(field, "i8") for field in ("row", "start", "length")])
        retained_E = np.minimum(lengths_E - start_E, capacity)
        for field, values in zip(records.dtype.names or (), (np.arange(len(rows)), start_E, retained_E), strict=True):
            records[field] = values
        self._plan = Plan(records, (1 if self.start is None else 2) * (retained_E + self.template.special_count))

    def _tokens(self, rows: Rows, name: str) -> np.ndarray:
        """(E, 2) first and last token of a column's spans."""
        tokens_E2 = np.empty((len(rows), 2), dtype=np.int64)
        for row, (start, end) in enumerate(rows.columns[name]):
            spans = self._texts.spans_of(row)
            first = int(np.searchsorted(spans[:, 1], start, side="right"))
            last = int(np.searchsorted(spans[:, 0], end, side="left")) - 1
            if last < first:
                raise UserError(
                    f"{location(rows.origin[row])}: {name}={[start, end]}: the tokenizer drops this span",
                    "remove the row",
                )
            tokens_E2[row] = first, last
        return tokens_E2

    def plan(self, epoch: int) -> Plan:
        return self._plan

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        row_N, length_N = rows["row"], rows["length"]
        ids = self._texts.ids[ragged_ranges(self._texts.starts_E[row_N] + rows["start"], length_N)]
        assembled = assemble(self.template, [(ids, length_N)])
        first_N = np.cumsum(assembled.lengths) - assembled.lengths + len(self.template.pieces[0]) - rows["start"]
        span_M2 = (self._spans_ES2[row_N] + first_N[:, None, None]).reshape(-1, 2)
        labels = None if self.rows.labels is None else torch.from_numpy(np.asarray(self.rows.labels)[row_N])
        inputs = assembled.packed()
        return Batch(
            inputs,
            {self.term: Target(labels, span=torch.from_numpy(span_M2))},
            torch.from_numpy(np.asarray(examples, dtype=np.int64)),
            torch.zeros(len(rows), dtype=torch.int32),
            None if self.start is None else shifted(inputs, self.start),
            torch.from_numpy(row_N.copy()),
        )

    def metadata(self) -> dict[str, object]:
        """Counts of rows, tokens, and texts cropped around their spans."""
        return {"split": self.split, **self._plan.metadata(), "truncated": self.truncated}


class SpanClassificationLearner(TaskLearner):
    """Cross entropy of the classes of a row's spans."""

    config: SpanClassificationConfig

    def __init__(self, kind: SpanClassification, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        super().__init__(kind, backbone, tokenizer, seed)
        config = kind.config
        if config.labels is None:
            raise ValueError("build a task from the config that load_task gives back: its labels are filled in")
        dropout = backbone.config.dropout if config.dropout is None else config.dropout
        self.add_head(self.term, SpanHead(backbone.feature_size, len(config.text) - 1, len(config.labels), dropout))

    def examples(self, data: SplitData, max_length: int) -> SpanExamples:
        return SpanExamples(self, self.rows(data), max_length, data.split)

    def outputs(self, batch: Batch, step: int) -> Tensor:
        """(N, C) class scores."""
        rng, target = self.dropout_rng(batch, step), batch.targets[self.term]
        assert target.span is not None
        spans_ND = span_vectors(self.hidden_of(batch, rng), target.span).reshape(len(batch.inputs.lengths), -1)
        if rng is not None:
            rng = (rng if batch.outputs is None else rng.for_outputs()).rows(summary_index(batch.inputs, "first"))
        return self.heads[self.term](spans_ND, rng)

    def counts(self, batch: Batch) -> dict[str, float]:
        return {self.term: float(len(self.labels(batch)))}

    def forward(self, batch: Batch, step: int) -> StepOutput:
        return StepOutput({self.term: loss_sum(self.outputs(batch, step), self.labels(batch))}, self.weights)

    def scores(self, outputs: Tensor, batch: Batch) -> Scores:
        labels_N = self.labels(batch)
        documents = torch.arange(len(labels_N), device=labels_N.device)
        return Scores(losses(outputs, labels_N), labels_N, outputs.argmax(-1), documents)

    def parts(self, outputs: Tensor, batch: Batch) -> list[Prediction]:
        fractions, classes = outputs.float().softmax(-1).max(-1)
        return list(map(Prediction, classes.tolist(), fractions.tolist()))

    def predictors(self, train: SplitData, examples: SpanExamples) -> dict[str, ConstantPredictor]:
        """The class frequencies of the training rows."""
        counts = np.bincount(np.asarray(self.rows(train).labels), minlength=len(self.config.labels or ()))
        return {self.term: ConstantPredictor.of_counts("base rate", counts)}
