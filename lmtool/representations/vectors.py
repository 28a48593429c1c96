"""Texts as vectors: of each of their tokens, or one of each text.

Shape letters: W layers, L tokens of a text, T of a packed batch, N texts of one, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lmtool.data.loader import PackedLoader
from lmtool.data.split import Rows
from lmtool.heads.sequence import summary
from lmtool.representations.hidden import HiddenStates
from lmtool.representations.sentences import SentenceModules
from lmtool.tasks.kinds.texts import SequenceExamples
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Packed

Pooling = Literal["none", "first", "mean", "max", "last"]
# Texts whose vectors are held at a time: of each token they are many.
_TEXTS, _TOKENISED = 4096, 256


class Vectors(NamedTuple):
    """One text: tokens, (L,) ids with the special tokens around them, and vectors, (W, H) or of each token (W, L, H),
    float32."""

    tokens: np.ndarray
    vectors: np.ndarray


@dataclass(frozen=True)
class Embedder:
    """states: of the layers that are wanted. layout: how texts are laid out, a name in `lmtool.data.formats`. pooling:
    over the tokens of a text, special ones included. average: whether the layers become one, their mean. max_length:
    tokens of a text; of a longer one the end is left out. batch_tokens: of a forward. modules: of a sentence encoder,
    which pool in the place of `pooling`. prompt: stands before every text. notes: what a user should know of it."""

    states: HiddenStates
    tokenizer: Tokenizer
    layout: str
    pooling: Pooling
    average: bool
    max_length: int
    batch_tokens: int
    modules: SentenceModules | None = None
    prompt: str = ""
    notes: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """Numbers of a vector."""
        return self.states.width if self.modules is None else self.modules.width

    def vectors(
        self, rows: Rows, progress: Callable[[int, int], None], warn: Callable[[str], None]
    ) -> Iterator[Vectors]:
        """Of rows of one text or two, in their order; beyond rounding no text depends on those around it. progress: is
        given how many rows of how many are done. warn: reports texts that are cut. UserError naming file and line of a
        text without tokens."""
        portion = _TOKENISED if self.pooling == "none" else _TEXTS
        cut = 0
        for start in range(0, len(rows), portion):
            part = rows.take(np.arange(start, min(start + portion, len(rows))))
            examples = SequenceExamples(
                self._prompted(part), self.tokenizer, self.layout, self.max_length, "text", "input"
            )
            cut += examples.truncated
            yield from self._of_examples(examples, start, len(rows), progress)
        if cut:
            warn(f"{cut:,} of {len(rows):,} texts are cut to {self.max_length} tokens")

    def _prompted(self, rows: Rows) -> Rows:
        """The rows with the prompt before their first texts."""
        if not self.prompt:
            return rows
        first = next(iter(rows.columns))
        return replace(rows, columns={**rows.columns, first: [self.prompt + text for text in rows.columns[first]]})

    def _of_examples(
        self, examples: SequenceExamples, before: int, total: int, progress: Callable[[int, int], None]
    ) -> Iterator[Vectors]:
        """Those of a portion, in the order of its rows."""
        done: dict[int, Vectors] = {}
        budget = max(self.batch_tokens, self.max_length)
        for batch in PackedLoader(examples, 0, None, budget, shuffle=False).epoch_batches():
            inputs = batch.inputs.to(self.states.precision.device)
            states_WTH = self.states.read(inputs)
            if self.average:
                states_WTH = states_WTH.mean(0, keepdim=True)
            tokens = np.split(batch.inputs.tokens.numpy(), np.cumsum(batch.inputs.lengths)[:-1])
            for number, ids, vectors in zip(
                batch.examples.tolist(), tokens, self._pooled(states_WTH, inputs), strict=True
            ):
                done[number] = Vectors(ids, vectors)
            progress(before + len(done), total)
        for number in range(len(done)):
            yield done.pop(number)

    def _pooled(self, states_WTH: Tensor, inputs: Packed) -> list[np.ndarray]:
        """Of each text (W, H), or (W, L, H)."""
        if self.pooling == "none":
            return np.split(states_WTH.cpu().numpy(), np.cumsum(inputs.lengths)[:-1], axis=1)
        if self.modules is not None:
            return list(torch.stack([self.modules(states_TH, inputs) for states_TH in states_WTH], dim=1).cpu().numpy())
        pooled = [summary(states_TH, inputs, self.pooling).cpu().numpy() for states_TH in states_WTH]
        return list(np.stack(pooled, axis=1))
