"""Pairs of segments for next-sentence prediction, as BERT's data script makes them, all documents at once.

A document's sentences are gathered until they reach a target length; a first part becomes A, and B is the rest or,
half of the time and whenever there is no rest, a run of sentences of another document; then what was not used is put
back (google-research/bert, create_pretraining_data.py). Two things differ on purpose: the other document is never
the same one (the script tries ten times), and the short target is drawn for each pair rather than for a whole
document, so that a corpus of a few books keeps the stated share.

Shape letters: D documents, S sentences, E pairs.
"""

from __future__ import annotations

import numpy as np

from lmtool import streams
from lmtool.data.formats import truncate_pair
from lmtool.errors import UserError

# One pair: flat borders in the token store of both segments, whether B is random, and A's document.
PAIR = np.dtype(
    [("a_start", "i8"), ("a_length", "i4"), ("b_start", "i8"), ("b_length", "i4"), ("random", "i1"), ("document", "i4")]
)
# Draws of one round of a document: the target, its length, A's end, random or not, which document, where in it.
_DRAWS = 8
_SHORT, _TARGET, _END, _RANDOM, _DOCUMENT, _START, _CUT_A, _CUT_B = range(_DRAWS)
# Draws beyond these belong to the bits that say from which end a token is cut.
_MORE_BITS = 1 << 40


def sentence_pairs(
    sentence_offsets: np.ndarray,
    document_sentences: np.ndarray,
    limit: int,
    short_probability: float,
    seed: int,
    epoch: int,
) -> np.ndarray:
    """(E,) records of `PAIR`, by document and place within it: a pure function of its arguments.

    sentence_offsets: (S+1,) flat borders of sentences in the token store. document_sentences: (D+1,) borders of
    documents among the sentences. limit: tokens of both segments together, at most.
    Raises UserError where fewer than two documents have text.
    """
    sentence_offsets = np.asarray(sentence_offsets, dtype=np.int64)
    borders = np.asarray(document_sentences, dtype=np.int64)
    documents = np.flatnonzero(np.diff(borders) > 0)
    if len(documents) < 2:
        raise UserError(
            f"next-sentence prediction needs two documents with text; there are {len(documents)}",
            "split the text into more of them (data.document=block or line), or take objective.pairs=none",
        )
    starts, ends = borders[documents], borders[documents + 1]
    build = _Builder(sentence_offsets, starts, ends, limit, short_probability, seed, epoch)
    at, active = starts.copy(), np.arange(len(documents))
    rounds: list[np.ndarray] = []
    while len(active):
        pairs, at[active] = build.round(active, at[active], len(rounds))
        pairs["document"] = documents[active]
        rounds.append(pairs)
        active = active[at[active] < ends[active]]
    pairs = np.concatenate(rounds)
    return pairs[np.argsort(pairs["document"], kind="stable")]


class _Builder:
    """One round makes the next pair of every document that has sentences left."""

    def __init__(
        self, offsets: np.ndarray, starts: np.ndarray, ends: np.ndarray, limit: int, short: float, seed: int, epoch: int
    ):
        self.offsets, self.starts, self.ends = offsets, starts, ends
        self.limit, self.short, self.seed, self.epoch = limit, short, seed, epoch

    def _uniform(self, active: np.ndarray, number: int, which: int) -> np.ndarray:
        return streams.uniform_at(
            self.seed, "sample", self.epoch, active, np.full(len(active), number * _DRAWS + which)
        )

    def _reach(self, first: np.ndarray, length: np.ndarray, last: np.ndarray) -> np.ndarray:
        """The sentence behind the run that starts at `first`, has `length` tokens or more, and ends by `last`."""
        return np.clip(np.searchsorted(self.offsets, self.offsets[first] + length), first + 1, last)

    def round(self, active: np.ndarray, at: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Pairs of the active documents, whose next sentences are `at`; and their next sentences after it."""

        def below(bound: np.ndarray | int, which: int) -> np.ndarray:
            return (self._uniform(active, number, which) * bound).astype(np.int64)

        short = self._uniform(active, number, _SHORT) < self.short
        target = np.where(short, 2 + below(self.limit - 1, _TARGET), self.limit)
        chunk_end = self._reach(at, target, self.ends[active])
        sentences = chunk_end - at
        a_end = at + np.where(sentences > 1, 1 + below(np.maximum(sentences - 1, 1), _END), 1)
        random = (sentences == 1) | (self._uniform(active, number, _RANDOM) < 0.5)
        other = below(len(self.starts) - 1, _DOCUMENT)
        other += other >= active  # skips the document itself
        b_first = self.starts[other] + below(self.ends[other] - self.starts[other], _START)
        a_length = self.offsets[a_end] - self.offsets[at]
        b_first = np.where(random, b_first, a_end)
        b_end = np.where(random, self._reach(b_first, target - a_length, self.ends[other]), chunk_end)
        b_length = self.offsets[b_end] - self.offsets[b_first]

        pairs = np.empty(len(active), dtype=PAIR)
        pairs["random"] = random
        pairs["a_length"], pairs["b_length"] = truncate_pair(a_length, b_length, self.limit)
        pairs["a_start"] = self.offsets[at] + self._cut(active, number, _CUT_A, a_length - pairs["a_length"])
        pairs["b_start"] = self.offsets[b_first] + self._cut(active, number, _CUT_B, b_length - pairs["b_length"])
        return pairs, np.where(random, a_end, chunk_end)

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
