"""Multiple choice (Radford et al. 2018, section 3.3; Zellers et al. 2018): each choice is read after the same text as a
pair and scored; a softmax over the scores of a row's choices predicts the answer.

Shape letters: N documents, G rows of a batch, K choices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmtool.data.examples import Plan, Rows, SplitData
from lmtool.learners.baseline import ConstantPredictor
from lmtool.models.base import Backbone
from lmtool.models.heads.base import TokenLogits, loss_sum, losses
from lmtool.models.heads.predicted import Classes, Predicted
from lmtool.tasks.configs import MultipleChoiceConfig
from lmtool.tasks.kinds.classes import OneClassKind
from lmtool.tasks.kinds.labels import class_numbers
from lmtool.tasks.kinds.learner import ChoiceInspector
from lmtool.tasks.kinds.predictions import Prediction
from lmtool.tasks.kinds.sequence import SequenceKind, SequenceLearner
from lmtool.tasks.kinds.texts import SequenceExamples
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Scores, StepOutput, Target


class MultipleChoice(OneClassKind, SequenceKind):
    """Rows of a text and its choices, with the number of the right choice."""

    config: MultipleChoiceConfig

    @property
    def classes(self) -> tuple[str, ...]:
        """The columns of the choices."""
        return self.config.text[-self.config.choices :]

    def decoded_labels(self, values: Sequence[object], origin: Sequence[tuple[str, int]]) -> np.ndarray:
        """Names of the choice columns, or their numbers from 0."""
        return class_numbers(self.config, self.classes, values, origin)

    def groups(self, rows: Rows) -> Sequence[object]:
        return list(zip(*(rows.columns[name] for name in self.config.text[: -self.config.choices]), strict=True))

    def worded(self, rows: Rows) -> dict[str, list[str]]:
        """The columns, with `wordings` applied to those before the choices."""
        config = self.config
        return {
            name: [config.wordings.get(text, text) for text in rows.columns[name]]
            for name in config.text[: -config.choices]
        } | {name: rows.columns[name] for name in self.classes}  # fmt: skip

    def candidates(self, rows: Rows) -> list[tuple[str, ...]]:
        """The choices of each row."""
        return list(zip(*(rows.columns[name] for name in self.classes), strict=True))

    def pairs(self, rows: Rows) -> Rows:
        """One row per choice, grouped by row: the text before it, and the choice."""
        config, columns = self.config, self.worded(rows)
        before = config.text[: -config.choices]
        first, begun = (before[:-1], before[-1:]) if config.continued else (before, ())
        firsts, seconds = [], []
        for number in range(len(rows)):
            shared = " ".join(columns[name][number] for name in first)
            beginning = "".join(f"{columns[name][number]} " for name in begun)
            for name in self.classes:
                firsts.append(shared)
                seconds.append(beginning + columns[name][number])
        repeated = np.repeat(np.arange(len(rows)), config.choices)
        ids, origin = [rows.ids[row] for row in repeated], [rows.origin[row] for row in repeated]
        labels = None
        if rows.labels is not None:  # whether the choice is right
            labels = (np.asarray(rows.labels)[:, None] == np.arange(config.choices)).astype(np.int64).reshape(-1)
        return Rows(ids, {"first": firsts, "second": seconds}, labels, origin)

    def learner(self, backbone: Backbone, tokenizer: Tokenizer, seed: int) -> MultipleChoiceLearner:
        return MultipleChoiceLearner(self, backbone, tokenizer, seed)

    def join(self, parts: Sequence[float]) -> Prediction:
        """The best choice, and its softmax probability."""
        fractions = torch.tensor(parts, dtype=torch.float64).softmax(0)
        best = int(fractions.argmax())
        return Prediction(best, float(fractions[best]))

    def line(self, record: Mapping[str, Any]) -> str:
        before = " ".join(str(record[name]) for name in self.config.text[: -self.config.choices])
        return f"{record['prediction']} {record['score']:.2f}  {before} | {record[record['prediction']]}"


class ChoiceExamples:
    """Implements `data.plan.Examples`: an example is a row with all of its choices, in one batch."""

    def __init__(self, rows: Rows, pairs: SequenceExamples, choices: int, term: str):
        self.rows, self.pairs, self.classes, self.term = rows, pairs, choices, term
        flat = pairs.plan(0)
        self._plan = Plan(flat.rows.reshape(-1, choices), flat.lengths.reshape(-1, choices).sum(axis=1))

    def plan(self, epoch: int) -> Plan:
        return self._plan

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        """rows: (G, K) of the plan."""
        numbers = torch.from_numpy(np.asarray(examples, dtype=np.int64))
        flat = self.pairs.batch(rows.reshape(-1), np.arange(rows.size), epoch)
        row_G = torch.from_numpy(rows["row"][:, 0] // self.classes)
        targets = {}
        if self.rows.labels is not None:
            targets[self.term] = Target(torch.from_numpy(np.asarray(self.rows.labels))[row_G])
        return replace(
            flat,
            targets=targets,
            examples=numbers.repeat_interleave(self.classes),
            parts=torch.arange(self.classes, dtype=torch.int32).repeat(len(rows)),
            rows=row_G.repeat_interleave(self.classes),
            groups=torch.arange(len(rows)).repeat_interleave(self.classes),
        )

    def metadata(self) -> dict[str, Any]:
        """Lengths are per row with all of its choices; `truncated` counts pairs."""
        return {**self.pairs.metadata(), **self._plan.metadata(), "choices": self.classes}


class MultipleChoiceLearner(SequenceLearner):
    """Cross entropy over a row's choices."""

    kind: MultipleChoice
    config: MultipleChoiceConfig

    def __init__(self, kind: MultipleChoice, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        super().__init__(kind, backbone, tokenizer, seed, 1)

    def examples(self, data: SplitData, max_length: int) -> Any:
        rows = self.rows(data)
        pairs = self._examples(self.kind.pairs(rows), data.split, max_length)
        return ChoiceExamples(rows, pairs, self.config.choices, self.term)

    def takes_texts(self, count: int) -> bool:
        return count == 2

    def examples_of_texts(self, texts: Sequence[tuple[str, ...]], max_length: int) -> SequenceExamples:
        """A pair each: the text before a choice, and the choice."""
        firsts, seconds = map(list, zip(*texts, strict=True))
        return self._examples(Rows.of_texts(first=firsts, second=seconds), "sample", max_length)

    def inspector(self, examples: Any, max_length: int) -> Any:
        return ChoiceInspector(self, examples.pairs, max_length)

    def parts_of(self, rows: Rows, examples: object) -> np.ndarray:
        return np.full(len(rows), self.config.choices)

    def samples(self, batch: Batch, n: int) -> list[dict[str, object]]:
        return []  # a row is several texts

    def counts(self, batch: Batch) -> dict[str, float]:
        return self.term_counts(batch, float(len(self.labels(batch))))

    def _choices(self, outputs_N1: Tensor) -> Tensor:
        """(G, K) scores; the choices of a row are adjacent."""
        return outputs_N1.reshape(-1, self.config.choices)

    def forward(self, batch: Batch, step: int) -> StepOutput:
        labels_G = self.labels(batch)
        return self.stepped(batch, step, lambda out_N1: loss_sum(self._choices(out_N1), labels_G))

    def predicted(self, head: str, logits: Tensor | TokenLogits, batch: Batch) -> tuple[str, Predicted] | None:
        if head == self.term and isinstance(logits, Tensor):
            return self.term, Classes(self._choices(logits))
        return super().predicted(head, logits, batch)

    def scores(self, outputs: Tensor, batch: Batch) -> Scores:
        labels_G, scores_GK = self.labels(batch), self._choices(outputs)
        documents = torch.arange(len(labels_G), device=labels_G.device) * self.config.choices
        return Scores(losses(scores_GK, labels_G), labels_G, scores_GK.argmax(-1), documents)

    def parts(self, outputs: Tensor, batch: Batch) -> list[float]:
        """The score of each choice."""
        return outputs[:, 0].float().tolist()

    def predictors(self, train: SplitData, examples: object) -> dict[str, ConstantPredictor]:
        """Position frequencies of the right choices in the training rows."""
        counts = np.bincount(np.asarray(self.rows(train).labels), minlength=self.config.choices)
        return {self.term: ConstantPredictor.of_counts("base rate", counts)}
