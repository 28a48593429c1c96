"""Texts without labels, masked, beside prompts in training: the auxiliary language modelling of pattern-exploiting
training (Schick and Schuetze 2021, section 3.4).

Shape letters: U texts, N of them in a batch, T tokens, M masked places.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lmtool import streams
from lmtool.data.assembly import Assembled, Template, assemble
from lmtool.data.formats import truncate_texts
from lmtool.data.split import Rows
from lmtool.objectives.configs import MlmConfig
from lmtool.objectives.corruption.masking import Vocabulary, mask_tokens
from lmtool.tasks.prompting.pattern import Pattern, PatternTexts, room_for_texts

TERM = "mlm"
"""The term of its loss."""
# Which text stands beside a row: a draw behind those of demonstrations, of which there are fewer.
_DRAW = 1 << 20


@dataclass(frozen=True)
class MaskedTexts:
    """texts: as they are read. at: (M,) flat places, rising. labels: (M,) what stood there."""

    texts: Assembled
    at: np.ndarray
    labels: np.ndarray


class Auxiliary:
    """rows: the U texts, in the same prompt as the task's; the place of the answer is masked, and not predicted.
    template: what stands around their texts. column: of the template, that marks answers that are predicted."""

    term = TERM

    def __init__(self, rows: Rows, pattern: Pattern, template: Template, column: str, max_length: int, seed: int):
        marks = tuple(np.zeros_like(mark) for mark in template.piece_columns[column])
        self.template = Template(template.pieces, {**template.piece_columns, column: marks}, template.text_columns)
        room = room_for_texts(max_length, template.overhead, len(template.pieces) - 1)
        self._texts, self.seed = PatternTexts(rows, pattern), seed
        self._kept = truncate_texts(self._texts.lengths, room)
        self.lengths = self._kept.sum(axis=0) + template.overhead
        self._masking, self._vocabulary = MlmConfig(), Vocabulary.of(pattern.tokenizer)

    def drawn(self, row_E: np.ndarray, epoch: int) -> np.ndarray:
        """(E,) the text beside each row in an epoch."""
        draws = np.full(len(row_E), _DRAW)
        return (streams.uniform_at(self.seed, "sample", epoch + 1, row_E, draws) * len(self.lengths)).astype(np.int64)

    def masked(self, text_N: np.ndarray, examples_N: np.ndarray, epoch: int) -> MaskedTexts:
        """Texts with masks, which are keyed by (seed, epoch, example, position)."""
        texts = [
            (text.read(text_N, kept[text_N]), kept[text_N])
            for text, kept in zip(self._texts.texts, self._kept, strict=True)
        ]
        whole = assemble(self.template, texts)
        masked = mask_tokens(
            self._masking, self._vocabulary, whole.tokens, whole.lengths, np.asarray(examples_N), self.seed, epoch
        )
        return MaskedTexts(Assembled(masked.tokens, whole.lengths, whole.columns), masked.at, masked.labels)
