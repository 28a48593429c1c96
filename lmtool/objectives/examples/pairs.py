"""Segment pairs for next-sentence and sentence-order prediction, masked."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from lmtool import random_streams
from lmtool.config.saved import JsonObject
from lmtool.data.examples import Plan, planned
from lmtool.data.formats import PackedArrays, assemble, ragged_ranges, truncate_texts
from lmtool.data.store import TokenStore
from lmtool.errors import UserError
from lmtool.objectives.configs import PairsConfig
from lmtool.objectives.examples.masked import MaskedExamples
from lmtool.objectives.permutation_configs import PlmConfig
from lmtool.types import Target

# Segment pairs for next-sentence and sentence-order prediction, for all documents at once.
# Next sentence, as in BERT's data script: a document's sentences are gathered until they reach a target length; a first
# part becomes A, and B is the rest or, half of the time and whenever there is no rest, a run of sentences from another
# document; then unused sentences are put back (google-research/bert, create_pretraining_data.py). Two things differ on
# purpose: the other document is never the same one (the script tries ten times), and the short target is sampled per
# pair rather than per document, so that a corpus of a few books has the configured fraction.
# Sentence order (Lan et al., "ALBERT", 2020, section 3.1): the same walk, but B is always the rest, and the two are
# swapped half of the time. Where ALBERT's script falls back to a random segment for a single sentence, that sentence is
# split in two: the term remains as the paper defines it.
# Sentence pairs (Liu et al., "RoBERTa", 2019, section 4.2, SENTENCE-PAIR) are the same walk with one sentence on each
# side: two sentences are gathered, whatever their length.
# Shape letters: D documents, S sentences, E pairs.


Pairs = Literal["nsp", "sop"]
Boundaries = tuple[np.ndarray, np.ndarray]

# One pair: flat boundaries of both segments in the token store, its class, and A's document. label: 1 if B is random
# (nsp), or if the two are swapped, so that A is the later one (sop). choice: whether it could have been 0. short:
# whether it aims at a shorter length.
PAIR = np.dtype(
    [
        ("a_start", "i8"), ("a_length", "i4"), ("b_start", "i8"), ("b_length", "i4"), ("label", "i1"), ("choice", "i1"),
        ("short", "i1"), ("document", "i4"),
    ]
)  # fmt: skip
# Random numbers of one round of a document: the target length, A's end, the class, the other document, the position in
# it.
_DRAWS = 8
_SHORT, _TARGET, _END, _LABEL, _DOCUMENT, _START, _CUT_A, _CUT_B = range(_DRAWS)
_BLOCK = 1 << 16  # documents at a time
# Random bits beyond these choose the end at which a token is truncated.
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
    """Plans segment pairs: a pure function of its arguments.

    Args:
        sentence_offsets: (S+1,) flat sentence boundaries in the token store.
        document_sentences: (D+1,) document boundaries among the sentences.
        limit: Maximum tokens of both segments together.
        short_probability: Fraction of pairs with a shorter target length; unused with `sentences`.
        seed: Of the run.
        epoch: Keys the random numbers.
        kind: Next sentence or sentence order. A single sentence of one token has no order and is skipped.
        sentences: Pairs of single sentences instead of segments.

    Returns:
        (E,) records of `PAIR`, by document and position within it.

    Raises:
        ValueError: If fewer than two documents have text (nsp).
    """
    sentence_offsets = np.asarray(sentence_offsets, dtype=np.int64)
    boundaries = np.asarray(document_sentences, dtype=np.int64)
    starts, ends = boundaries[:-1], boundaries[1:]
    full = ends > starts
    documents = None if full.all() else np.flatnonzero(full)
    if documents is not None:
        starts, ends = starts[documents], ends[documents]
    if kind == "nsp" and len(starts) < 2:
        raise ValueError(f"next-sentence prediction needs two documents with text; there are {len(starts)}")
    build = _Builder(sentence_offsets, starts, ends, limit, short_probability, seed, epoch, kind, sentences)
    # A round uses some 25 arrays of the length of its documents.
    blocks = deque(build.pairs(first, min(first + _BLOCK, len(starts))) for first in range(0, len(starts), _BLOCK))
    pairs, filled = np.empty(sum(map(len, blocks)), dtype=PAIR), 0
    while blocks:  # one at a time, so that all pairs are never in memory twice
        block = blocks.popleft()
        pairs[filled : filled + len(block)] = block
        filled += len(block)
    if documents is not None:
        pairs["document"] = documents[pairs["document"]]
    return pairs


@dataclass(frozen=True)
class _Builder:
    """One round plans the next pair of every document that has sentences left."""

    offsets: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    limit: int
    short: float
    seed: int
    epoch: int
    kind: Pairs
    sentences: bool

    def pairs(self, first: int, last: int) -> np.ndarray:
        """The pairs of the documents from first to last (exclusive), by document."""
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
        return random_streams.uniform_at(
            self.seed, "sample", self.epoch, active, np.full(len(active), number * _DRAWS + which)
        )

    def _reach(self, first: np.ndarray, length: np.ndarray, last: np.ndarray, most: int) -> np.ndarray:
        """The sentence after the run that starts at `first`, has at least `length` tokens, and ends by `last`; for
        single sentences, after at most `most` of them."""
        if self.sentences:
            return np.minimum(first + most, last)
        return np.clip(np.searchsorted(self.offsets, self.offsets[first] + length), first + 1, last)

    def round(self, active: np.ndarray, at: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Pairs of the active documents with next sentences `at`; and their next sentences afterwards."""

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
            split_at = first + 1 + below(np.maximum(last - first - 1, 1), _END)
            boundary = np.where(sentences > 1, self.offsets[a_end], split_at)
            pairs = self._pairs(active, number, (first, boundary), (boundary, last), label)
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

    def _pairs(self, active: np.ndarray, number: int, a: Boundaries, b: Boundaries, label: np.ndarray) -> np.ndarray:
        """Records of segments with these flat boundaries, truncated to the limit; sop swaps them by their label."""
        pairs = np.empty(len(active), dtype=PAIR)
        pairs["label"], pairs["choice"] = label, 1
        swapped = label & (self.kind == "sop")
        a_length, b_length = a[1] - a[0], b[1] - b[0]
        retained_a, retained_b = truncate_texts(np.stack([a_length, b_length]), self.limit)
        a_start = a[0] + self._cut(active, number, _CUT_A, a_length - retained_a)
        b_start = b[0] + self._cut(active, number, _CUT_B, b_length - retained_b)
        pairs["a_start"], pairs["b_start"] = np.where(swapped, (b_start, a_start), (a_start, b_start))
        pairs["a_length"], pairs["b_length"] = np.where(swapped, (retained_b, retained_a), (retained_a, retained_b))
        return pairs

    def _cut(self, active: np.ndarray, number: int, which: int, tokens: np.ndarray) -> np.ndarray:
        """How many of the truncated tokens come from the front: a fair coin per token, so a binomial number."""
        front = np.zeros(len(active), dtype=np.int64)
        some = np.flatnonzero(tokens > 0)
        words = -(-tokens[some] // 64)
        index = np.repeat(np.arange(len(some)), words)
        word = np.arange(len(index)) - np.repeat(np.cumsum(words) - words, words)
        bits = random_streams.bits_at(
            self.seed, "sample", self.epoch, active[some][index], number * _DRAWS + which + word * _MORE_BITS
        )
        used = np.minimum(tokens[some][index] - 64 * word, 64).astype(np.uint64)
        heads = np.bitwise_count(bits >> (np.uint64(64) - used))
        front[some] = np.bincount(index, weights=heads, minlength=len(some)).astype(np.int64)
        return front


# Second segments are random half of the time, and whenever a document runs out of sentences: in total 52% for documents
# of a hundred, 60% for those of five and 68% for those of two.
_MOSTLY_RANDOM = 0.7


def masked_pairs(
    store: TokenStore, limit: int, short_probability: float, seed: int, epoch: int, kind: Pairs, sentences: bool,
    special_count: int,
) -> Plan:  # fmt: skip
    """The pairs of `sentence_pairs`."""
    rows = sentence_pairs(
        store.sentence_offsets, store.document_sentences, limit, short_probability, seed, epoch, kind, sentences
    )
    return Plan(rows, rows["a_length"].astype(np.int64) + rows["b_length"] + special_count)


class MaskedPairs(MaskedExamples):
    """Masked segment pairs, `[CLS] a [SEP] b [SEP]` in the backbone's format, resampled each epoch; with or without a
    loss over them."""

    config: PairsConfig | PlmConfig
    texts = 2

    def new_plan(self, epoch: int) -> Plan:
        self._require_choices()
        return planned(
            masked_pairs, self.store, self.capacity, self.config.short_sequence_probability, self.seed, epoch,
            "sop" if self.config.pairs == "sop" else "nsp", self.config.pair_of == "sentences",
            self.template.special_count,
        )  # fmt: skip

    def assemble(self, rows: np.ndarray) -> PackedArrays:
        texts = []
        for side in ("a", "b"):
            lengths = rows[f"{side}_length"]
            ids = np.asarray(self.store.tokens[ragged_ranges(rows[f"{side}_start"], lengths)], dtype=np.int64)
            texts.append((ids, lengths))
        return assemble(self.template, texts)

    def extra_targets(self, rows: np.ndarray) -> dict[str, Target]:
        if self.config.pairs == "unscored":
            return {}
        return {self.config.pairs: Target(torch.from_numpy(rows["label"].astype(np.int64)))}

    def cut(self, rows: np.ndarray) -> np.ndarray:
        """(N,) bool: pairs that were too long and lost tokens at the ends of their segments, so that a segment does not
        begin and end with a sentence. For sentence order, the halves of a single sentence are adjacent."""
        starts, lengths = (
            np.stack([rows[f"{side}_{field}"].astype(np.int64) for side in "ab"]) for field in ("start", "length")
        )
        ends, offsets = starts + lengths, self.store.sentence_offsets
        opens, closes = (offsets[np.searchsorted(offsets, at)] == at for at in (starts, ends))
        if self.config.pairs == "sop":
            opens |= starts == ends[::-1]
            closes |= ends == starts[::-1]
        return ~(opens & closes).all(0)

    def metadata(self) -> JsonObject:
        """Adds the fraction of pairs with a random (nsp) or an earlier (sop) second segment."""
        plan = self.plan(0)
        fraction = float(plan.rows["label"].mean())
        full = plan.rows[plan.lengths == self.capacity + self.template.special_count]
        metadata = {**super().metadata(), "truncated_fraction": int(self.cut(full).sum()) / len(plan)}
        if self.config.pairs == "sop":
            return {**metadata, "swapped_fraction": fraction}
        single = self._single
        metadata |= {"random_next_fraction": fraction, "documents_of_one_sentence": int(single.sum())}
        if fraction > _MOSTLY_RANDOM and self.config.pairs == "nsp":
            metadata["warnings"] = [
                f"{fraction:.0%} of the second segments are random, where next-sentence prediction intends half: "
                f"{single.mean():.0%} of the {self.split} documents have a single sentence without a next one; "
                "data.document=file makes longer documents, objective.pairs=none needs none"
            ]
        return metadata

    @property
    def _single(self) -> np.ndarray:
        """(D,) bool: documents with a single sentence, whose next one can only be random."""
        return np.diff(self.store.document_sentences) == 1

    def _require_choices(self) -> None:
        """UserError if next-sentence prediction has only one class."""
        hint = f"or use objective.pairs=none{' or sop' if self.config.pairs == 'nsp' else ''}"
        if self.config.pairs != "sop" and len(self.store) < 2:
            more = "" if self.split == "train" else ", a larger data.validation_fraction=, or data.validation="
            learned = "next-sentence prediction needs" if self.config.pairs == "nsp" else "random pairs need"
            raise UserError(
                f"{learned} two documents with text; the {self.split} text has one",
                f"split the text into more documents (text files: data.document=block or line){more}, {hint}",
            )
        if self.config.pairs == "nsp" and self.split == "train" and self._single.all():
            raise UserError(
                "next-sentence prediction has nothing to learn: no document has two sentences, so every second segment "
                "is a random one",
                f"make longer documents (text files: data.document=block or file), {hint}",
            )
