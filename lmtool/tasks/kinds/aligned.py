"""Texts as tokens, each with the characters that it stands for.

Shape letters: E rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lmtool.tokenizers.tokenizer import Tokenizer

# Texts handed to the tokenizer at a time: enough for its threads, few enough to hold.
_TEXTS = 1024


class AlignedTexts:
    """The different texts of a column, tokenised once: ids and characters laid end to end."""

    def __init__(self, texts: Sequence[str], tokenizer: Tokenizer):
        numbers: dict[str, int] = {}
        self.text_E = np.array([numbers.setdefault(text, len(numbers)) for text in texts], dtype=np.int64)
        distinct = list(numbers)
        encoded = [
            pair
            for start in range(0, len(distinct), _TEXTS)
            for pair in tokenizer.encode_aligned_batch(distinct[start : start + _TEXTS])
        ]
        self.ids = np.concatenate([ids for ids, _ in encoded])
        self.spans = np.concatenate([spans for _, spans in encoded])
        lengths = np.array([len(ids) for ids, _ in encoded], dtype=np.int64)
        self.lengths_E = lengths[self.text_E]
        self.starts_E = (np.cumsum(lengths) - lengths)[self.text_E]

    def spans_of(self, row: int) -> np.ndarray:
        """(T, 2) characters of a row's tokens."""
        start = self.starts_E[row]
        return self.spans[start : start + self.lengths_E[row]]
