"""Sentences of words as packed batches: tokenised once, long ones read in overlapping windows, so that every word
predicts exactly once.

Shape letters: E sentences, W windows, N windows of a batch, T tokens, M tokens that predict.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lmtool.data.assembly import Template, assemble, ragged_ranges
from lmtool.data.formats import text_format
from lmtool.data.plan import Plan
from lmtool.data.split import Rows
from lmtool.errors import UserError
from lmtool.models.encoder_decoder import shifted
from lmtool.tasks.kinds.windows import windows
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Packed, Target

# Sentences handed to the tokenizer at a time: enough for its threads, few enough to hold.
_SENTENCES = 4096
# What stands for a word that the tokenizer has nothing for, the first that the vocabulary has.
_UNKNOWN = ("unk", "mask", "eos", "pad")
WORD = "word"
"""The column of a batch with the number of the word whose first piece a token is, -1 for others."""


class WordWindows:
    """One sentence a row. later: by tag the one that the later pieces of a word learn; None: first pieces alone
    predict, as they always do where there are no tags. start: for a model whose decoder reads the same text behind this
    token, and whose decoder's states predict.

    stride: tokens that neighbouring windows share, at most half of one. A word that the tokenizer has no piece for is
    one unknown token, and so is a sentence without words, which predicts nothing.
    """

    def __init__(
        self,
        rows: Rows,
        tokenizer: Tokenizer,
        format_name: str,
        max_length: int,
        stride: int,
        term: str,
        split: str,
        later: np.ndarray | None = None,
        start: int | None = None,
    ):
        if not len(rows):
            raise UserError(f"the {split} split has no rows")
        self.rows, self.term, self.split, self.start = rows, term, split, start
        self.template = Template.of(text_format(format_name, tokenizer), 1)
        room = max_length - self.template.overhead
        if room < 2:
            raise UserError(
                f"max_length={max_length} leaves no room for text", f"max_length={self.template.overhead + 8} or more"
            )
        (sentences,) = rows.columns.values()
        self._encode(sentences, tokenizer)
        self._label(later)
        self.windows = windows(self._lengths_E, room, min(stride, room // 2))
        cut = self.windows
        records = np.empty(
            len(cut), dtype=[("row", "i8"), ("part", "i4"), ("start", "i8"), ("length", "i4"), ("own", "i4", 2)]
        )
        records["row"], records["part"], records["length"] = cut.text, cut.part, cut.lengths
        records["start"] = self._starts_E[cut.text] + cut.start
        records["own"] = np.stack([cut.own_start - cut.start, cut.own_end - cut.start], axis=1)
        sides = 1 if start is None else 2
        self._plan = Plan(records, sides * (cut.lengths + self.template.overhead))

    def _encode(self, sentences: list[list[str]], tokenizer: Tokenizer) -> None:
        """Ids, and which word each begins, of all sentences end to end."""
        unknown = next((tokenizer.roles[role] for role in _UNKNOWN if role in tokenizer.roles), 0)
        ids, words, self.unknown_words = [], [], 0
        for start in range(0, len(sentences), _SENTENCES):
            part = sentences[start : start + _SENTENCES]
            for own, (ids_T, word_T) in zip(part, tokenizer.encode_sentences(part), strict=True):
                missing = np.setdiff1d(np.arange(len(own)), word_T)
                self.unknown_words += len(missing)
                if len(missing) or not len(ids_T):
                    places = np.searchsorted(word_T, missing) if len(own) else np.zeros(1, dtype=np.int64)
                    ids_T = np.insert(ids_T, places, unknown)
                    word_T = np.insert(word_T, places, missing if len(own) else -1)
                first_T = np.diff(word_T, prepend=-1) != 0
                ids.append(ids_T)
                words.append(np.where(first_T & (word_T >= 0), word_T, -1))
        self._lengths_E = np.array([len(own) for own in ids], dtype=np.int64)
        self._starts_E = np.cumsum(self._lengths_E) - self._lengths_E
        self._ids, self._words = np.concatenate(ids), np.concatenate(words)

    def _label(self, later: np.ndarray | None) -> None:
        """Which tokens predict, and their tags where they are known."""
        self._predicts, self._labels = self._words >= 0, None
        if self.rows.labels is None:
            return
        tags = np.array([tag for own in self.rows.labels for tag in own], dtype=np.int64)
        # Words are in order within a sentence, and sentences are: their first pieces are too.
        numbers_T = np.cumsum(self._predicts) - 1
        if int(numbers_T[-1]) + 1 != len(tags):
            raise RuntimeError(f"{int(numbers_T[-1]) + 1} words and {len(tags)} tags")
        worded_T = numbers_T >= 0 if len(tags) else np.zeros(len(numbers_T), dtype=bool)
        labels_T = np.where(worded_T, tags[numbers_T] if len(tags) else -1, -1)
        if later is not None:
            # The token of a sentence without words is of no word.
            empty_T = np.zeros(len(self._ids), dtype=bool)
            empty_T[self._starts_E[[not own for own in self.rows.labels]]] = True
            labels_T = np.where(self._predicts, labels_T, later[labels_T])
            self._predicts = worded_T & ~empty_T
        self._labels = labels_T

    def plan(self, epoch: int) -> Plan:
        return self._plan

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        lengths_N = rows["length"].astype(np.int64)
        source_T = ragged_ranges(rows["start"], lengths_N)
        inside_T = ragged_ranges(np.zeros(len(rows), dtype=np.int64), lengths_N)
        window_T = np.repeat(np.arange(len(rows)), lengths_N)
        own_T = (inside_T >= rows["own"][window_T, 0]) & (inside_T < rows["own"][window_T, 1])
        chosen = np.flatnonzero(own_T & self._predicts[source_T])
        before = len(self.template.pieces[0])
        places_T = np.arange(len(source_T)) + window_T * self.template.overhead + before
        inputs = assemble(self.template, [(self._ids[source_T], lengths_N)]).packed()
        words = np.full(len(inputs.tokens), -1, dtype=np.int64)
        words[places_T] = self._words[source_T]
        inputs.columns[WORD] = torch.from_numpy(words)
        labels = None if self._labels is None else torch.from_numpy(self._labels[source_T[chosen]])
        outputs = None if self.start is None else shifted(Packed(inputs.tokens, inputs.lengths), self.start)
        target = Target(
            labels, at=torch.from_numpy(places_T[chosen]), side="inputs" if self.start is None else "outputs"
        )
        numbers = torch.from_numpy(np.asarray(examples, dtype=np.int64))
        row_N, part_N = torch.from_numpy(rows["row"].astype(np.int64)), torch.from_numpy(rows["part"].astype(np.int32))
        return Batch(inputs, {self.term: target}, numbers, part_N, outputs, row_N)

    def facts(self) -> dict[str, Any]:
        """Windows, tokens, and how many sentences were read in several windows."""
        counts = {
            "sentences_in_windows": int(np.sum(self.windows.part == 1)),
            "words_without_pieces": self.unknown_words,
        }
        return {"split": self.split, **self._plan.facts(), **{name: count for name, count in counts.items() if count}}
