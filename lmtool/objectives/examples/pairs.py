"""Pairs of segments for next-sentence and sentence-order prediction, all documents at once.

Next sentence, as BERT's data script makes them: a document's sentences are gathered until they reach a target length;
a first part becomes A, and B is the rest or, half of the time and whenever there is no rest, a run of sentences of
another document; then what was not used is put back (google-research/bert, create_pretraining_data.py). Two things
differ on purpose: the other document is never the same one (the script tries ten times), and the short target is
drawn for each pair rather than for a whole document, so that a corpus of a few books keeps the stated share.

Sentence order (Lan et al., "ALBERT", 2020, section 3.1): the same walk, but B is always the rest, and the two are
swapped half of the time. Where the script of ALBERT falls back to a random segment since there is one sentence only,
that sentence is cut in two: the term stays what the paper says it is.

Pairs of sentences (Liu et al., "RoBERTa", 2019, section 4.2, SENTENCE-PAIR) are the same walk with one sentence in each
place: two sentences are gathered, whatever their length.

Shape letters: D documents, S sentences, E pairs.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

import numpy as np

from lmtool import streams
from lmtool.data.formats import truncate_pair

Pairs = Literal["nsp", "sop"]
Borders = tuple[np.ndarray, np.ndarray]

# One pair: flat borders in the token store of both segments, its class, and A's document. label: 1 where B is random
# (nsp), or where the two are swapped, so that A is the later one (sop). choice: whether it could have been 0. short:
# whether it aims at a shorter length.
PAIR = np.dtype(
    [
        ("a_start", "i8"), ("a_length", "i4"), ("b_start", "i8"), ("b_length", "i4"), ("label", "i1"), ("choice", "i1"),
        ("short", "i1"), ("document", "i4"),
    ]
)  # fmt: skip
# Draws of one round of a document: the target, its length, A's end, the class, which document, where in it.
_DRAWS = 8
_SHORT, _TARGET, _END, _LABEL, _DOCUMENT, _START, _CUT_A, _CUT_B = range(_DRAWS)
_BLOCK = 1 << 16  # documents at a time
# Draws beyond these belong to the bits that say from which end a token is cut.
_MORE_BITS = 1 << 40


def sentence_pairs(
    sentence_offsets: np.ndarray,
    document_sentences: np.ndarray,
    limit: int,
    short_probability: float,
    seed: int,
    epoch: int,
    kind: Pairs = "nsp",
    sentences: bool = False,
) -> np.ndarray:
    """(E,) records of `PAIR`, by document and place within it: a pure function of its arguments.

    sentence_offsets: (S+1,) flat borders of sentences in the token store. document_sentences: (D+1,) borders of
    documents among the sentences. limit: tokens of both segments together, at most.
    kind: next sentence or sentence order. A lone sentence of one token has no order and is passed over.
    sentences: pairs of single sentences instead of segments; short_probability is not read.
    Raises ValueError where fewer than two documents have text (nsp).
    """
    sentence_offsets = np.asarray(sentence_offsets, dtype=np.int64)
    borders = np.asarray(document_sentences, dtype=np.int64)
    starts, ends = borders[:-1], borders[1:]
    full = ends > starts
    documents = None if full.all() else np.flatnonzero(full)
    if documents is not None:
        starts, ends = starts[documents], ends[documents]
    if kind == "nsp" and len(starts) < 2:
        raise ValueError(f"next-sentence prediction needs two documents with text; there are {len(starts)}")
    build = _Builder(sentence_offsets, starts, ends, limit, short_probability, seed, epoch, kind, sentences)
    # A round takes some 25 arrays as long as the documents it is of.
    blocks = deque(build.pairs(first, min(first + _BLOCK, len(starts))) for first in range(0, len(starts), _BLOCK))
    pairs, filled = np.empty(sum(map(len, blocks)), dtype=PAIR), 0
    while blocks:  # one at a time, so that all pairs are never held twice
        block = blocks.popleft()
        pairs[filled : filled + len(block)] = block
        filled += len(block)
    if documents is not None:
        pairs["document"] = documents[pairs["document"]]
    return pairs


class _Builder:
    """One round makes the next pair of every document at hand that has sentences left."""

    def __init__(
        self, offsets: np.ndarray, starts: np.ndarray, ends: np.ndarray, limit: int, short: float, seed: int,
        epoch: int, kind: Pairs, sentences: bool,
    ):  # fmt: skip
        self.offsets, self.starts, self.ends, self.sentences = offsets, starts, ends, sentences
        self.limit, self.short, self.seed, self.epoch, self.kind = limit, short, seed, epoch, kind

    def pairs(self, first: int, last: int) -> np.ndarray:
        """The pairs of the documents from first up to last, by document."""
        at, active = np.array(self.starts[first:last]), np.arange(first, last)
        rounds: list[np.ndarray] = []
        while len(active):
            pairs, at[active - first] = self.round(active, at[active - first], len(rounds))
            pairs["document"] = active
            rounds.append(pairs)
            active = active[at[active - first] < self.ends[active]]
        pairs = np.concatenate(rounds)
        pairs = pairs[(pairs["a_length"] > 0) & (pairs["b_length"] > 0)]
        return pairs[np.argsort(pairs["document"], kind="stable")]

    def _uniform(self, active: np.ndarray, number: int, which: int) -> np.ndarray:
        return streams.uniform_at(
            self.seed, "sample", self.epoch, active, np.full(len(active), number * _DRAWS + which)
        )

    def _reach(self, first: np.ndarray, length: np.ndarray, last: np.ndarray, most: int) -> np.ndarray:
        """The sentence behind the run that starts at `first`, has `length` tokens or more, and ends by `last`.
        Of single sentences: behind `most` of them."""
        if self.sentences:
            return np.minimum(first + most, last)
        return np.clip(np.searchsorted(self.offsets, self.offsets[first] + length), first + 1, last)

    def round(self, active: np.ndarray, at: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Pairs of the active documents, whose next sentences are `at`; and their next sentences after it."""

        def below(bound: np.ndarray | int, which: int) -> np.ndarray:
            return (self._uniform(active, number, which) * bound).astype(np.int64)

        short = self._uniform(active, number, _SHORT) < self.short
        target = np.where(short, 2 + below(self.limit - 1, _TARGET), self.limit)
        chunk_end = self._reach(at, target, self.ends[active], 2)
        sentences = chunk_end - at
        a_end = at + np.where(sentences > 1, 1 + below(np.maximum(sentences - 1, 1), _END), 1)
        label = self._uniform(active, number, _LABEL) < 0.5
        if self.kind == "sop":
            first, last = self.offsets[at], self.offsets[chunk_end]
            border = np.where(
                sentences > 1, self.offsets[a_end], first + 1 + below(np.maximum(last - first - 1, 1), _END)
            )
            pairs = self._pairs(active, number, (first, border), (border, last), label)
            pairs["short"] = short
            return pairs, chunk_end
        label |= sentences == 1
        other = below(len(self.starts) - 1, _DOCUMENT)
        other += other >= active  # skips the document itself
        b_first = self.starts[other] + below(self.ends[other] - self.starts[other], _START)
        a_length = self.offsets[a_end] - self.offsets[at]
        b_first = np.where(label, b_first, a_end)
        b_end = np.where(label, self._reach(b_first, target - a_length, self.ends[other], 1), chunk_end)
        a, b = (self.offsets[at], self.offsets[a_end]), (self.offsets[b_first], self.offsets[b_end])
        pairs = self._pairs(active, number, a, b, label)
        pairs["choice"], pairs["short"] = sentences > 1, short
        return pairs, np.where(label, a_end, chunk_end)

    def _pairs(self, active: np.ndarray, number: int, a: Borders, b: Borders, label: np.ndarray) -> np.ndarray:
        """Records of segments with the given flat borders, cut to the limit; sop puts the later one first where its
        label says so."""
        pairs = np.empty(len(active), dtype=PAIR)
        pairs["label"], pairs["choice"] = label, 1
        swapped = label & (self.kind == "sop")
        a_length, b_length = a[1] - a[0], b[1] - b[0]
        kept_a, kept_b = (np.asarray(kept) for kept in truncate_pair(a_length, b_length, self.limit))
        a_start = a[0] + self._cut(active, number, _CUT_A, a_length - kept_a)
        b_start = b[0] + self._cut(active, number, _CUT_B, b_length - kept_b)
        pairs["a_start"], pairs["b_start"] = np.where(swapped, (b_start, a_start), (a_start, b_start))
        pairs["a_length"], pairs["b_length"] = np.where(swapped, (kept_b, kept_a), (kept_a, kept_b))
        return pairs

    def _cut(self, active: np.ndarray, number: int, which: int, tokens: np.ndarray) -> np.ndarray:
        """How many of the tokens that go are cut at the front: each by a fair coin, so a binomial number."""
        front = np.zeros(len(active), dtype=np.int64)
        some = np.flatnonzero(tokens > 0)
        words = -(-tokens[some] // 64)
        index = np.repeat(np.arange(len(some)), words)
        word = np.arange(len(index)) - np.repeat(np.cumsum(words) - words, words)
        bits = streams.bits_at(
            self.seed, "sample", self.epoch, active[some][index], number * _DRAWS + which + word * _MORE_BITS
        )
        used = np.minimum(tokens[some][index] - 64 * word, 64).astype(np.uint64)
        heads = np.bitwise_count(bits >> (np.uint64(64) - used))
        front[some] = np.bincount(index, weights=heads, minlength=len(some)).astype(np.int64)
        return front
