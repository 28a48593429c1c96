"""Windows of whole words, each word predicted by those before it and by those behind it.

A word may have several tokens, when its vocabulary spells it: a window never begins or ends within one, but for words
that are longer than a window.

Shape letters: V entries of the vocabulary, T tokens of a batch, W its words.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from lmtool.data.assembly import Assembled
from lmtool.data.plan import Plan
from lmtool.data.store import TokenStore
from lmtool.objectives.examples.plans import numbers_of, plan_facts, room_for, some
from lmtool.objectives.examples.windows import WINDOW, Stream
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Target

FORWARD, BACKWARD = "forward", "backward"
# Places of a stream that are read at a time.
_PIECE = 1 << 20


class WordWindows:
    """Windows over the stream of documents, each closed by the token that ends a text. Windows next to each other share
    a word: forwards every word but the first of a document (separate) or of the stream (joined) is predicted once,
    backwards every word but the last.

    tokenizer: that of the store. reads: bytes of a word that the model reads, and those of each entry; None for all.
    begins_V: whether an entry begins a word.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        store: TokenStore,
        max_length: int,
        documents: str,
        split: str,
        reads: tuple[int, np.ndarray] | None = None,
    ):
        self.store, self.split, self.reads = store, split, reads
        self.begins_V, self.unknown = tokenizer.starts_word, tokenizer.role("unk")
        self.stream = Stream(store.tokens, store.document_offsets, tokenizer.role("eos"))
        size = room_for(max_length, 0, 1)
        rows = word_windows(self.stream, self.begins_V, size, documents == "joined")
        self._plan = some(Plan(rows, rows["length"].astype(np.int64)), split)

    def plan(self, epoch: int) -> Plan:
        return self._plan

    def words(self, tokens_T: np.ndarray, starts_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(W,) the first token of each word, and (W,) its number in the vocabulary: that of the unknown word where it
        has several tokens. starts_N: where texts begin, each with a word."""
        begins_T = self.begins_V[tokens_T]
        is_word_T = begins_T.copy()
        is_word_T[starts_N] = True
        first_W = np.flatnonzero(is_word_T)
        single_W = (np.diff(first_W, append=len(tokens_T)) == 1) & begins_T[first_W]
        return first_W, np.where(single_W, tokens_T[first_W], self.unknown)

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        lengths = rows["length"].astype(np.int64)
        tokens = self.stream.read(rows["start"], lengths)
        starts = np.cumsum(lengths) - lengths
        first_W, number_W = self.words(tokens, starts)
        text_W = np.searchsorted(starts, first_W, side="right")
        # A word and the one behind it in the same text.
        before = np.flatnonzero(text_W[:-1] == text_W[1:])
        targets = {
            FORWARD: _target(number_W[before + 1], first_W[before]),
            BACKWARD: _target(number_W[before], first_W[before + 1]),
        }
        return Batch(Assembled(tokens, lengths, {}).packed(), targets, *numbers_of(examples))

    def counts(self, words: int) -> np.ndarray:
        """(words,) how often each word of the vocabulary stands in the stream, the ends of documents among them."""
        counts = np.zeros(words, dtype=np.int64)
        tokens = self.stream.tokens
        for start in range(0, len(tokens), _PIECE):
            # With the token behind the piece, which may continue its last word; and those before it, its first.
            piece = np.asarray(tokens[start : start + _PIECE + 1], dtype=np.int64)
            begins = self.begins_V[piece]
            continued = np.append(~begins[1:], False)
            own = begins.copy()
            own[_PIECE:] = False
            counts += np.bincount(np.where(continued, self.unknown, piece)[own], minlength=words)[:words]
        counts[self.stream.separator] += len(self.stream.offsets) - 1
        return counts

    def longer(self, limit: int, lengths_V: np.ndarray) -> int:
        """Words of the text with more bytes than that. lengths_V: bytes of each entry."""
        count, tokens = 0, self.stream.tokens
        for start in range(0, len(tokens), _PIECE):
            piece = np.asarray(tokens[start : start + _PIECE], dtype=np.int64)
            first = np.flatnonzero(self.begins_V[piece])  # what continues a word of the piece before is passed by
            if len(first):
                count += int((np.add.reduceat(lengths_V[piece], first) > limit).sum())
        return count

    def facts(self) -> dict[str, Any]:
        """With a warning where words are cut."""
        facts, reads = plan_facts(self._plan, self.store, self.split), self.reads
        count = 0 if reads is None else self.longer(*reads)
        if reads is not None and count:
            facts["warnings"] = [
                f"{self.split}: {count:,} words have more than {reads[0]} bytes, of which the model reads the first "
                f"{reads[0]} (model.word_length)"
            ]
        return facts


def _target(labels: np.ndarray, at: np.ndarray) -> Target:
    return Target(torch.from_numpy(labels.astype(np.int64)), at=torch.from_numpy(at.astype(np.int64)))


def word_windows(stream: Stream, begins_V: np.ndarray, size: int, joined: bool) -> np.ndarray:
    """(E,) records of `WINDOW`: consecutive windows of at most `size` places that begin and end with whole words, each
    sharing a word with the next. joined: cut through documents; else within each."""
    borders = np.array([0, len(stream)]) if joined else stream.borders
    lengths = np.diff(borders)
    long = lengths > size
    rows = [np.zeros(int((~long).sum()), dtype=WINDOW)]
    rows[0]["start"], rows[0]["length"] = borders[:-1][~long], lengths[~long]
    for first, length in zip(borders[:-1][long].tolist(), lengths[long].tolist(), strict=True):
        rows.append(np.array(list(_cut(stream, begins_V, size, first, first + length)), dtype=WINDOW))
    windows = np.concatenate(rows)
    return windows[np.argsort(windows["start"], kind="stable")]


def _cut(stream: Stream, begins_V: np.ndarray, size: int, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Start and length of the windows of one run of text, which is longer than one."""
    start = read = first
    begins: list[int] = []
    while last - start > size:
        if start + size >= read:
            read = min(last, start + max(_PIECE, 2 * size))
            ids = stream.read(np.array([start]), np.array([read - start]))
            begins = (np.flatnonzero(begins_V[ids]) + start).tolist()
        at = bisect_right(begins, start + size) - 1
        if at < 0 or begins[at] <= start:  # a word longer than a window
            yield start, size
            start += size
            continue
        yield start, begins[at] - start
        start = begins[at - 1] if at and begins[at - 1] > start else begins[at]
    yield start, last - start
