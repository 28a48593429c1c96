"""Classification of a span, or of a pair of spans (Tenney et al. 2019, "edge probing"). A span is represented by its
first and last hidden state and their mean over the span; a head with two layers predicts the class.

Shape letters: E rows, N examples of a batch, S spans of a row, T tokens, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lmtool.config.base import JsonMapping, JsonObject
from lmtool.data.examples import Rows, SplitData
from lmtool.data.formats import FormatTemplate, assemble, ragged_ranges, text_format
from lmtool.errors import UserError
from lmtool.models.base import Backbone
from lmtool.models.heads.sequence import SpanHead, span_vectors, summary_index
from lmtool.tasks.configs.texts import SpanClassificationConfig
from lmtool.tasks.kinds.classes import ClassLearner, NamedClassKind
from lmtool.tasks.kinds.labels import Columns, Origin, location, text_of
from lmtool.tasks.kinds.predictions import Label, Prediction
from lmtool.tasks.kinds.texts import AlignedTexts, TaskExamples
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Target


class SpanClassification(NamedClassKind):
    """Rows of a text and its spans, each row with the number of its class."""

    config: SpanClassificationConfig

    def inputs(self, columns: Columns, origin: Origin) -> dict[str, list[Label]]:
        name, *spans = self.config.text
        texts = [text_of(self.config, name, value, place) for value, place in zip(columns[name], origin, strict=True)]
        inputs: dict[str, list[Label]] = {name: texts}
        for span in spans:
            rows = zip(columns[span], texts, origin, strict=True)
            inputs[span] = [_span(span, value, text, place) for value, text, place in rows]
        return inputs

    def groups(self, rows: Rows) -> Sequence[object]:
        """Returns the texts: rows with spans of the same text are held out together."""
        return rows.columns[self.config.text[0]]

    def texts(self, rows: Rows) -> list[Sequence[str]]:
        return [rows.columns[self.config.text[0]]]

    def learner(self, backbone: Backbone, tokenizer: Tokenizer, seed: int) -> SpanClassificationLearner:
        return SpanClassificationLearner(self, backbone, tokenizer, seed)

    def line(self, record: JsonMapping) -> str:
        name, *spans = self.config.text
        span_texts = " | ".join(record[name][slice(*record[span])] for span in spans)
        return f"{record['prediction']} {record['score']:.2f}  {span_texts} | {record[name]}"


def _span(name: str, value: object, text: str, place: tuple[str, int]) -> list[int]:
    if isinstance(value, dict):
        value = [value.get("start"), value.get("end")]
    numbers = list(value) if isinstance(value, (list, tuple)) else []
    if len(numbers) != 2 or not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
        raise UserError(
            f"{location(place)}: {name}={value!r} is not a span",
            "write [start, end]: the index of the first character, counted from 0, and of the first one after the span",
        )
    if not (0 <= numbers[0] < numbers[1] <= len(text)) or not text[slice(*numbers)].strip():
        raise UserError(
            f"{location(place)}: {name}={numbers} selects no text; the text has {len(text)} characters",
            "write [start, end) in characters, from 0, where end is exclusive",
        )
    return numbers


class SpanExamples(TaskExamples):
    """Examples of a text with the tokens of its spans. Long texts are cropped around the spans."""

    def __init__(self, learner: SpanClassificationLearner, rows: Rows, max_length: int, split: str):
        super().__init__(rows, learner.term, split, learner.start_token)
        tokenizer = learner.tokenizer
        self.template = FormatTemplate.of(text_format(learner.backbone.config.text_format, tokenizer), 1)
        name, *spans = learner.config.text
        self._texts = AlignedTexts(rows.columns[name], tokenizer)
        self._spans_ES2 = np.stack([self._tokens(rows, span) for span in spans], axis=1)
        capacity, lengths_E = max_length - self.template.special_count, self._texts.lengths_E
        first_E, last_E = self._spans_ES2[:, :, 0].min(axis=1), self._spans_ES2[:, :, 1].max(axis=1)
        wide = np.flatnonzero(last_E - first_E >= capacity)
        if len(wide):
            row, length = wide[0], int(last_E[wide[0]] - first_E[wide[0]]) + 1
            raise UserError(
                f"{location(rows.origin[row])}: the spans of this row extend over {length} tokens; "
                f"max_length={max_length} allows {max(capacity, 0)}",
                f"set max_length={length + self.template.special_count} or more, or remove the row",
            )
        around_E = (capacity - (last_E - first_E + 1)) // 2
        start_E = np.clip(first_E - around_E, 0, np.maximum(lengths_E - capacity, 0))
        self.truncated = int(np.sum(lengths_E > capacity))
        retained_E, row_E = np.minimum(lengths_E - start_E, capacity), np.arange(len(rows))
        packed_E = retained_E + self.template.special_count
        self._plan = self.build_plan(packed_E, row=row_E, part=np.zeros_like(row_E), start=start_E, length=retained_E)

    def _tokens(self, rows: Rows, name: str) -> np.ndarray:
        """Returns (E, 2): the first and the last token of each row's span."""
        tokens_E2 = np.empty((len(rows), 2), dtype=np.int64)
        for row, (start, end) in enumerate(rows.columns[name]):
            tokens_E2[row] = first, last = self._texts.tokens_of(row, start, end)
            if last < first:
                raise UserError(
                    f"{location(rows.origin[row])}: {name}={[start, end]}: the tokenizer drops this span",
                    "remove the row",
                )
        return tokens_E2

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        row_N, length_N = rows["row"], rows["length"]
        ids = self._texts.ids[ragged_ranges(self._texts.starts_E[row_N] + rows["start"], length_N)]
        assembled = assemble(self.template, [(ids, length_N)])
        first_N = np.cumsum(assembled.lengths) - assembled.lengths + len(self.template.pieces[0]) - rows["start"]
        span_M2 = (self._spans_ES2[row_N] + first_N[:, None, None]).reshape(-1, 2)
        target = Target(self.labels_at(row_N), span=torch.from_numpy(span_M2))
        return self.batch_of(assembled.packed(), target, rows, examples)

    def metadata(self) -> JsonObject:
        """Adds the number of texts that were cropped around their spans."""
        return {**super().metadata(), "truncated": self.truncated}


class SpanClassificationLearner(ClassLearner):
    """Learns the class of each row's spans. The loss is the cross entropy."""

    config: SpanClassificationConfig

    def __init__(self, kind: SpanClassification, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        super().__init__(kind, backbone, tokenizer, seed)
        self.set_loss()
        spans = len(kind.config.text) - 1
        self.add_head(self.term, SpanHead(backbone.feature_size, spans, len(kind.classes), self.head_dropout))

    def examples(self, data: SplitData, max_length: int) -> SpanExamples:
        return SpanExamples(self, self.rows(data), max_length, data.split)

    def outputs(self, batch: Batch, step: int) -> Tensor:
        """Returns (N, C): class scores."""
        rng, target = self.dropout_rng(batch, step), batch.targets[self.term]
        assert target.span is not None
        spans_ND = span_vectors(self.hidden_of(batch, rng), target.span).reshape(len(batch.inputs.lengths), -1)
        return self.heads[self.term](spans_ND, self.head_rng(rng, batch, summary_index(batch.inputs, "first")))

    def parts(self, outputs: Tensor, batch: Batch) -> list[Prediction]:
        probabilities, classes = outputs.float().softmax(-1).max(-1)
        return list(map(Prediction, classes.tolist(), probabilities.tolist()))
