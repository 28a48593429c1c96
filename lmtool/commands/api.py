"""`lmtool.load`: a checkpoint in Python. It predicts, embeds and generates as the commands do, and its model and
tokenizer can be called on plain tensors and texts.

Shape letters: B rows, L their padded length, N texts, W layers, H hidden width.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lmtool.config.base import JsonObject
from lmtool.data.examples import Rows
from lmtool.learners.base import BaseLearner, Inference, truncation_warnings
from lmtool.learners.representations.reading import Layers, embedder_of, text_format_of
from lmtool.learners.representations.vectors import Embedder, Pooling
from lmtool.session.requests import PAIR, TEXT, columns_of
from lmtool.session.trained import Trained, predicting_learner, read_trained
from lmtool.tasks.kinds.texts import InputFormat, SequenceExamples
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.training.precision import Precision
from lmtool.weights.padded_model import LoadedCheckpoint
from lmtool.weights.padded_model import load as load_checkpoint
from lmtool.weights.reading import ignored_warnings

Texts = str | Sequence[str]
_BATCH_TOKENS = 8192
# More tokens than any text has.
_ANY_LENGTH = 1 << 30


class CallableTokenizer(Tokenizer):
    """A tokenizer that returns inputs of a model: texts in the format that the model reads, padded on the right, like
    transformers' AutoTokenizer of the exported folder. If the checkpoint was not trained on a task, special tokens in
    texts ("[MASK]") are parsed, as in transformers; otherwise they are text, as in training.

    format_name: a name in `lmtool.data.formats`. has_segments: whether the model reads segment ids. has_task: whether
    the checkpoint was trained on a task.
    """

    def __init__(self, tokenizer: Tokenizer, format_name: str, has_segments: bool, has_task: bool):
        source = tokenizer
        super().__init__(source._backend, source.roles, source._origin, source.parse_special_tokens, source._unflagged)
        self._format_name, self._has_segments, self._parses_special = format_name, has_segments, not has_task

    @cached_property
    def _reader(self) -> Tokenizer:
        if not self._parses_special or self.parse_special_tokens:
            return self
        return self.with_parsing(True)

    def __call__(self, texts: Texts, pairs: Texts | None = None, max_length: int | None = None) -> dict[str, Tensor]:
        """Returns `input_ids`, `attention_mask` and, if the model has segments, `token_type_ids`: (B, L) int64.

        max_length: maximum tokens of a row. Longer texts are truncated at their end; in a pair, the longer text is
        truncated. None for no limit.
        """
        rows = _rows({TEXT: texts} if pairs is None else {TEXT: texts, PAIR: pairs})
        limit = _ANY_LENGTH if max_length is None else max_length
        examples = SequenceExamples(rows, InputFormat(self._reader, self._format_name, limit), TEXT, "input")
        packed = examples.batch(examples.plan(0).rows, np.arange(len(rows)), 0).inputs
        lengths_B = torch.tensor(packed.lengths)
        real_BL = torch.arange(int(lengths_B.max())) < lengths_B[:, None]

        def pad(values_T: Tensor, filler: int) -> Tensor:
            return torch.full(real_BL.shape, filler).masked_scatter(real_BL, values_T)

        inputs = {"input_ids": pad(packed.tokens, self.roles.get("pad", 0)), "attention_mask": real_BL.long()}
        if self._has_segments and "segment" in packed.columns:
            inputs["token_type_ids"] = pad(packed.columns["segment"], 0)
        return inputs


@dataclass(frozen=True)
class Loaded(LoadedCheckpoint):
    """A checkpoint in use, see `lmtool.weights.padded_model.LoadedCheckpoint`. checkpoint: the path or address of the
    checkpoint."""

    tokenizer: CallableTokenizer | None
    checkpoint: str
    offline: bool

    def predict(
        self,
        texts: Texts | Mapping[str, Sequence[object]],
        pairs: Texts | None = None,
        batch_tokens: int = _BATCH_TOKENS,
        task: str | None = None,
    ) -> list[JsonObject]:
        """Returns the predictions of `lmtool predict`, a record per text: label and score, filled masks, or a
        continuation.

        texts: texts, or the columns of a task by name. pairs: the second texts of pairs. batch_tokens: maximum real
        tokens of a forward pass. task: the task whose head predicts, if the checkpoint learned several. Raises
        UserError if the checkpoint cannot predict, or reads other inputs.
        """
        paired = pairs is not None or (isinstance(texts, Mapping) and PAIR in texts)
        responder = self._predicting_learner(paired, task).responder()
        if isinstance(texts, Mapping):
            columns: dict[str, list[Any]] = {name: list(values) for name, values in texts.items()}
        else:
            columns = {**columns_of(responder, _as_list(texts), None if pairs is None else _as_list(pairs))}
        count = len(next(iter(columns.values()), []))
        if not count:
            return []
        rows = responder.read_rows(columns, [("texts", number) for number in range(count)])
        inference = Inference(self._trained.longest, batch_tokens, self._precision)
        records = list(responder.answers(rows, inference).records)
        _warn_of_truncation(inference.truncated, count)
        return records

    def embed(
        self,
        texts: Texts,
        pairs: Texts | None = None,
        layers: Layers = "last",
        pooling: Pooling | Literal["auto"] = "auto",
        batch_tokens: int = _BATCH_TOKENS,
    ) -> np.ndarray | list[np.ndarray]:
        """Returns the vectors of `lmtool embed`: (N, H) float32, or (N, W, H) for layers="all"; for pooling="none" a
        list with the tokens of each text, (L, H) or (W, L, H). Raises UserError if there is no such layer."""
        rows = _rows({TEXT: texts} if pairs is None else {TEXT: texts, PAIR: pairs})
        embedder = self._embedder(layers, pooling, batch_tokens)
        for note in embedder.notes:
            warnings.warn(note, stacklevel=2)
        truncated: Counter[str] = Counter()
        vectors = [text.vectors for text in embedder.vectors(rows, truncated)]
        _warn_of_truncation(truncated, len(rows))
        if layers != "all":
            vectors = [layer for (layer,) in vectors]
        return vectors if embedder.pooling == "none" else np.stack(vectors)

    @property
    def _precision(self) -> Precision:
        return Precision("fp32", next(self.model.parameters()).device, "as loaded")

    @cached_property
    def _embedders(self) -> dict[tuple[object, ...], Embedder]:
        return {}

    def _embedder(self, layers: Layers, pooling: Pooling | Literal["auto"], batch_tokens: int) -> Embedder:
        # Building one reads files and copies the tokenizer, which takes longer than embedding a sentence.
        precision = self._precision
        key = layers, pooling, batch_tokens, precision.device
        if key not in self._embedders:
            embedder, _ = embedder_of(self, self.checkpoint, layers, pooling, batch_tokens, precision, self.offline)
            self._embedders[key] = embedder
        return self._embedders[key]

    @cached_property
    def _trained(self) -> Trained:
        return read_trained(self.checkpoint, self.offline, self._precision)

    @cached_property
    def _learners(self) -> dict[tuple[bool, str | None], BaseLearner]:
        return {}

    def _predicting_learner(self, paired: bool, task: str | None) -> BaseLearner:
        """Returns the learner that predicts. It shares the tensors of `model`, so that changes there apply."""
        key, task_config = (paired, task), self._trained.task(task)
        if key not in self._learners:
            self._learners[key] = (
                predicting_learner(self._trained, paired) if task_config is None else self._trained.learner(task_config)
            )
        learner = self._learners[key].to(self._precision.device)
        learner.load_state_dict(self.model.parts.state_dict(), strict=False, assign=True)
        return learner


def _warn_of_truncation(truncated: Counter[str], rows: int) -> None:
    for text in truncation_warnings(truncated, rows):
        warnings.warn(text, stacklevel=3)


def load(checkpoint: str | Path, device: str = "cpu", offline: bool = False) -> Loaded:
    """Loads a checkpoint: a run or checkpoint of lmtool, a published folder or hf://org/name. Raises UserError if it
    cannot be read, or a part of the backbone is missing."""
    base = load_checkpoint(checkpoint, device, offline)
    for note in ignored_warnings(str(checkpoint), base.report.ignored):
        warnings.warn(note, stacklevel=2)
    parts: dict[str, Any] = {field.name: getattr(base, field.name) for field in fields(base)}
    if base.tokenizer is not None:
        has_segments = base.config.segment_types > 1
        parts["tokenizer"] = CallableTokenizer(
            base.tokenizer, text_format_of(base), has_segments, has_task=base.task is not None
        )
    return Loaded(**parts, checkpoint=str(checkpoint), offline=offline)


def _as_list(texts: Texts) -> list[str]:
    return [texts] if isinstance(texts, str) else list(texts)


def _rows(columns: Mapping[str, Texts]) -> Rows:
    texts_by_column = {name: _as_list(texts) for name, texts in columns.items()}
    if len({len(texts) for texts in texts_by_column.values()}) != 1:
        counts = " and ".join(f"{len(texts)} of {name}" for name, texts in texts_by_column.items())
        raise ValueError(f"the columns have different lengths: {counts}")
    return Rows.of_texts(**texts_by_column)
