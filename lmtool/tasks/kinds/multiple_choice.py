"""Multiple choice (Radford et al. 2018, section 3.3; Zellers et al. 2018). The model reads the row's text and each
choice as a pair and scores the pair; the prediction is a softmax over the scores of a row's choices.

Shape letters: N pairs of text and choice, G rows of a batch, K choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from lmtool.config.base import JsonMapping, JsonObject
from lmtool.data.examples import Rows, SplitData
from lmtool.learners.inspection import Inspector
from lmtool.models.base import Backbone
from lmtool.models.heads.predicted import Classes, Predicted
from lmtool.tasks.configs.classification import MultipleChoiceConfig
from lmtool.tasks.kinds.base import TextKind
from lmtool.tasks.kinds.classes import ClassLearner, OneClassKind
from lmtool.tasks.kinds.labels import Origin, class_numbers
from lmtool.tasks.kinds.learner import TaskInspector
from lmtool.tasks.kinds.predictions import Label, Prediction
from lmtool.tasks.kinds.sequence import SequenceLearner
from lmtool.tasks.kinds.texts import GroupedExamples, SequenceExamples
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Scores


class MultipleChoice(OneClassKind, TextKind):
    """Rows of a text and its choices, with the number of the correct choice."""

    config: MultipleChoiceConfig

    @property
    def classes(self) -> tuple[str, ...]:
        """The columns of the choices."""
        return self.config.text[-self.config.choices :]

    @property
    def context_columns(self) -> tuple[str, ...]:
        """The names of the columns before those of the choices."""
        return self.config.text[: -self.config.choices]

    def decoded_labels(self, values: Sequence[object], origin: Origin) -> np.ndarray:
        """Returns the number of the correct choice of each row. values: names of the choices' columns, or their numbers
        from 0."""
        return class_numbers(self.config, self.classes, values, origin)

    def groups(self, rows: Rows) -> Sequence[object]:
        """Returns the text before the choices of each row; rows with the same text stay in the same split."""
        return list(zip(*(rows.columns[name] for name in self.context_columns), strict=True))

    def prompt_columns(self, rows: Rows) -> dict[str, list[str]]:
        """Returns the columns; before the choices, the texts in `task.wordings` are replaced ('cause' by a
        question)."""
        wordings = self.config.wordings
        context = {name: [wordings.get(text, text) for text in rows.columns[name]] for name in self.context_columns}
        return context | {name: rows.columns[name] for name in self.classes}

    def candidates(self, rows: Rows) -> list[tuple[str, ...]]:
        """Returns the choices of each row."""
        return list(zip(*(rows.columns[name] for name in self.classes), strict=True))

    def pairs(self, rows: Rows) -> Rows:
        """Returns a row for each choice: the text before it, and the choice. The choices of a row are adjacent."""
        config, columns, context_columns = self.config, self.prompt_columns(rows), self.context_columns
        # If the choices continue the last column, this column begins each second text.
        shared, first_part = (context_columns[:-1], context_columns[-1:]) if config.continued else (context_columns, ())
        firsts, seconds = [], []
        for number in range(len(rows)):
            beginning = "".join(f"{columns[name][number]} " for name in first_part)
            firsts += [" ".join(columns[name][number] for name in shared)] * config.choices
            seconds += [beginning + columns[name][number] for name in self.classes]
        repeated = np.repeat(np.arange(len(rows)), config.choices)
        labels = None
        if rows.labels is not None:  # whether the choice is right
            labels = (np.asarray(rows.labels)[:, None] == np.arange(config.choices)).astype(np.int64).reshape(-1)
        return replace(rows.take(repeated), columns={"first": firsts, "second": seconds}, labels=labels)

    def learner(self, backbone: Backbone, tokenizer: Tokenizer, seed: int) -> MultipleChoiceLearner:
        return MultipleChoiceLearner(self, backbone, tokenizer, seed)

    def join(self, parts: Sequence[float]) -> Prediction:
        """Returns the best choice, and its softmax probability."""
        probabilities = torch.tensor(parts, dtype=torch.float64).softmax(0)
        best = int(probabilities.argmax())
        return Prediction(best, float(probabilities[best]))

    def line(self, record: JsonMapping) -> str:
        context = " ".join(str(record[name]) for name in self.context_columns)
        return f"{record['prediction']} {record['score']:.2f}  {context} | {record[record['prediction']]}"


class ChoiceExamples(GroupedExamples):
    """Examples of a row with all of its choices."""

    def metadata(self) -> JsonObject:
        return {**super().metadata(), "choices": self.size}


class ChoiceInspector(TaskInspector):
    """Inspects the pairs of a row's choices."""

    def label(self, value: Label, of_token: bool) -> str:
        return "right" if value else "wrong"


class MultipleChoiceLearner(SequenceLearner, ClassLearner):
    """Learns to score choices. The loss is the cross entropy over the choices of a row."""

    kind: MultipleChoice
    config: MultipleChoiceConfig
    inspector_class = ChoiceInspector

    def __init__(self, kind: MultipleChoice, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        super().__init__(kind, backbone, tokenizer, seed, 1)
        self.set_loss()

    def examples(self, data: SplitData, max_length: int) -> ChoiceExamples:
        rows = self.rows(data)
        pairs = self.sequence_examples(self.kind.pairs(rows), data.split, max_length)
        return ChoiceExamples(rows, pairs, self.config.choices)

    def takes_texts(self, count: int) -> bool:
        return count == 2

    def examples_of_texts(self, texts: Sequence[tuple[str, ...]], max_length: int) -> SequenceExamples:
        """Returns the examples of pairs: the text before a choice, and the choice."""
        firsts, seconds = map(list, zip(*texts, strict=True))
        return self.sequence_examples(Rows.of_texts(first=firsts, second=seconds), "sample", max_length)

    def inspector(self, examples: ChoiceExamples, max_length: int) -> Inspector:
        return super().inspector(examples.pairs, max_length)

    def part_counts(self, rows: Rows, examples: object) -> np.ndarray:
        return np.full(len(rows), self.config.choices)

    def samples(self, batch: Batch, n: int) -> list[JsonObject]:
        return []  # a row is several texts

    def _choices(self, outputs_N1: Tensor) -> Tensor:
        """Returns (G, K): scores; the choices of a row are adjacent."""
        return outputs_N1.reshape(-1, self.config.choices)

    def documents(self, batch: Batch) -> Tensor:
        return super().documents(batch) * self.config.choices

    def training_loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return super().training_loss(self._choices(outputs), batch)

    def scores(self, outputs: Tensor, batch: Batch) -> Scores:
        return super().scores(self._choices(outputs), batch)

    def predicted(self, outputs: Tensor, batch: Batch) -> Predicted:
        return Classes(self._choices(outputs))

    def parts(self, outputs: Tensor, batch: Batch) -> list[float]:
        """Returns the score of each choice."""
        return outputs[:, 0].float().tolist()
