"""Classes and values as texts (Raffel et al. 2020, section 2.4 and appendix D): the model reads "sst2 sentence: ..."
and writes the name of the class, or the value.

Rows, labels and metrics are those of the kind whose labels are written.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from lmtool.data.examples import Rows
from lmtool.errors import UserError
from lmtool.learners.generation.configs import GenerationConfig
from lmtool.learners.model import indices_of
from lmtool.tasks.configs.base import JOINED
from lmtool.tasks.configs.sequence import TEXT_TO_TEXT
from lmtool.tasks.configs.texts import Seq2SeqConfig
from lmtool.tasks.kinds.learner import TaskScorer
from lmtool.tasks.kinds.predictions import Prediction, column_of
from lmtool.tasks.kinds.sequence import WindowedKind
from lmtool.tasks.kinds.text_learner import TextLearner, first_predictions
from lmtool.types import Batch

# Maximum tokens of a written number, including its end.
_NUMBER_TOKENS = 16


def sources(name: str, rows: Rows) -> list[str]:
    """Returns the rows as source texts: the task's name, then each column after its name, sorted by name."""
    joined_columns = [column for column in rows.columns if JOINED in column]
    if joined_columns:
        raise UserError(
            f"task.text names {joined_columns[0]}; written labels need separate columns",
            "set task.head=text_to_text too",
        )
    columns = [[f"{column}: {text}" for text in rows.columns[column]] for column in sorted(rows.columns)]
    return [" ".join([name, *cells]) for cells in zip(*columns, strict=True)]


class WrittenKind(WindowedKind):
    """Base of the kinds whose labels can be written as text."""

    @property
    def label_smoothing(self) -> float:
        """The label smoothing of the loss over written tokens."""
        return 0.0

    def texts(self, rows: Rows) -> list[Sequence[str]]:
        if self.config.head != TEXT_TO_TEXT:
            return super().texts(rows)
        return [
            sources(self.config.name, rows),
            [] if rows.labels is None else self.label_texts(np.asarray(rows.labels)),
        ]

    @abstractmethod
    def label_words(self) -> Sequence[str]:
        """Returns all texts that labels may be written as; empty for values."""

    @abstractmethod
    def label_texts(self, labels: np.ndarray) -> list[str]:
        """Returns the labels of N rows as texts."""

    @abstractmethod
    def parse(self, text: str) -> Prediction | None:
        """Returns the prediction that a written text stands for; None if the text is not a label."""

    @property
    @abstractmethod
    def invalid_prediction(self) -> Prediction:
        """The prediction for a written text that is not a label."""


class WrittenScorer(TaskScorer):
    """Warns about generated texts that are not labels."""

    learner: TextToTextLearner

    def _warnings(self, predictions: Sequence[Prediction]) -> tuple[str, ...]:
        warnings = super()._warnings(predictions)
        invalid = Counter(text for text in column_of(predictions, "text") if self.learner.kind.parse(text) is None)
        if not invalid:
            return warnings
        warning = f"{invalid.total():,} of {len(predictions):,} written texts are not labels and count as wrong"
        return (f"{warning}, such as {next(iter(invalid))[:40]!r}", *warnings)


class TextToTextLearner(TextLearner):
    """Learns the label of a row as text, and predicts by greedy generation."""

    kind: WrittenKind
    scorer_class = WrittenScorer

    @cached_property
    def seq2seq_config(self) -> Seq2SeqConfig:
        tokens = [len(self.tokenizer.encode(word)) for word in self.kind.label_words()]
        longest = max(tokens, default=_NUMBER_TOKENS) + 1  # with an end token
        # Room for a token before the label, as in BART, and for one more in targets.
        return Seq2SeqConfig(
            name=self.term,
            target_tokens=longest + 2,
            label_smoothing=self.kind.label_smoothing,
            generation=GenerationConfig.model_validate({"max_new_tokens": longest + 1}),
        )

    def label_of(self, text: str) -> object:
        parsed = self.kind.parse(text)
        return None if parsed is None else parsed.value

    def references(self, rows: Rows) -> list[tuple[str]] | None:
        """Returns the label of each row, as the only target text; None if rows have no labels."""
        return None if rows.labels is None else [(word,) for word in self.kind.label_texts(np.asarray(rows.labels))]

    def pairs(self, rows: Rows) -> Rows:
        """Returns the rows of a source text, each with its label as the only target text."""
        return replace(rows, columns={"source": sources(self.term, rows)}, labels=self.references(rows))

    def outputs(self, batch: Batch, step: int) -> Tensor:
        """Returns (M, H): the hidden states at the predicting positions; (0, H) if there are no labels."""
        if self.term in batch.targets:
            return super().outputs(batch, step)
        return torch.zeros(0, self.backbone.hidden_size, device=batch.inputs.tokens.device)

    def parts(self, outputs: Tensor, batch: Batch) -> list[Prediction]:
        """Generates a text for each document, and parses it."""
        writer, prompts = self.writer(), self._prompts(batch.host)
        generated = writer.write(prompts, self.seq2seq_config.generation, self.seed)
        texts = [writer.text(prompt, ids).strip() for prompt, ids in zip(prompts, generated, strict=True)]
        return [(self.kind.parse(text) or self.kind.invalid_prediction)._replace(text=text) for text in texts]

    def _prompts(self, batch: Batch) -> list[list[int]]:
        packed = batch.inputs
        lengths = torch.tensor(packed.lengths)
        if batch.outputs is None and self.term in batch.targets:
            # The first token of a target is predicted at the last token of its source.
            lengths = first_predictions(packed, indices_of(batch, self.term)) - torch.tensor(packed.starts) + 1
        ends = zip(packed.starts, lengths.tolist(), strict=True)
        return [packed.tokens[start : start + length].tolist() for start, length in ends]
