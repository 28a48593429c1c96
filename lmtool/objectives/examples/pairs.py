"""Masked segment pairs, for next-sentence prediction and sentence-order prediction."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from lmtool import random_streams
from lmtool.config.base import JsonObject
from lmtool.data.examples import Plan, cached_plan
from lmtool.data.formats import PackedArrays, assemble, ragged_ranges, truncate_texts
from lmtool.data.store import TokenStore
from lmtool.errors import UserError
from lmtool.objectives.configs import PairsConfig, PlmConfig
from lmtool.objectives.examples.masked import MaskedExamples
from lmtool.types import Target

# How segment pairs are made, for all documents at once. A pair has two segments, A and B.
#
# Next-sentence prediction, as in BERT's data script (google-research/bert, create_pretraining_data.py): the sentences
# of a document are gathered until they reach a target length. The first of them become A. B is the rest or, half of the
# time and whenever there is no rest, consecutive sentences of another document; in this case the rest is used for the
# next pair. Two details differ from the script on purpose: the other document is never the same document (the script
# tries ten times), and short target lengths are sampled per pair instead of per document, so that a corpus of a few
# books has the configured fraction of short pairs.
#
# Sentence-order prediction (Lan et al., "ALBERT", 2020, section 3.1): the same procedure, but B is always the rest, and
# the segments are swapped half of the time. A single sentence is split in two, where ALBERT's script uses a random
# segment, so that the term is always what the paper defines.
#
# Pairs of sentences (Liu et al., "RoBERTa", 2019, section 4.2, SENTENCE-PAIR): the same procedure with one sentence per
# segment, whatever its length.
#
# Shape letters: D documents, S sentences, E pairs.


PairKind = Literal["nsp", "sop"]
"""Pairs for next-sentence prediction, or for sentence-order prediction."""
Boundaries = tuple[np.ndarray, np.ndarray]
"""For each segment, the first position in the token store, and the position after the last."""

# The record of a pair: the first positions and lengths of both segments in the token store, the class, and the document
# of A. label: 1 if B is random (nsp), or if the segments are swapped, so that A is the later segment (sop). choice:
# whether the label could also have been 0. short: whether the target length is short.
PAIR = np.dtype(
    [
        ("a_start", "i8"),
        ("a_length", "i4"),
        ("b_start", "i8"),
        ("b_length", "i4"),
        ("label", "i1"),
        ("choice", "i1"),
        ("short", "i1"),
        ("document", "i4"),
    ]
)
# The random numbers of one round of a document: whether the target is short, the target length, the end of A, the
# class, the other document, the first sentence in it, and how A and B are truncated.
_DRAWS = 8
_SHORT, _TARGET, _END, _LABEL, _DOCUMENT, _START, _CUT_A, _CUT_B = range(_DRAWS)
_BLOCK = 1 << 16  # number of documents processed at a time
# Offset between the random numbers of consecutive 64-bit words, whose bits decide at which end tokens are truncated.
_WORD_OFFSET = 1 << 40


def sentence_pairs(
    sentence_offsets: np.ndarray,
    document_sentences: np.ndarray,
    limit: int,
    short_probability: float,
    seed: int,
    epoch: int,
    kind: PairKind = "nsp",
    sentences: bool = False,
) -> np.ndarray:
    """Plans the segment pairs of an epoch, as a pure function of the arguments.

    Args:
        sentence_offsets: (S+1,) the boundaries of sentences, as positions in the token store.
        document_sentences: (D+1,) the boundaries of documents, as indices of sentences.
        limit: Maximum tokens of both segments together.
        short_probability: Fraction of pairs with a short target length; ignored if `sentences`.
        kind: Next-sentence or sentence-order prediction. Sentence-order prediction skips a sentence that has one token
            and is alone, because it cannot be split.
        sentences: Whether a segment is a single sentence.

    Returns:
        (E,) records of `PAIR`, sorted by document and by position in the document.

    Raises:
        ValueError: Fewer than two documents have text (nsp).
    """
    sentence_offsets = np.asarray(sentence_offsets, dtype=np.int64)
    boundaries = np.asarray(document_sentences, dtype=np.int64)
    starts, ends = boundaries[:-1], boundaries[1:]
    has_text = ends > starts
    documents = None if has_text.all() else np.flatnonzero(has_text)
    if documents is not None:
        starts, ends = starts[documents], ends[documents]
    if kind == "nsp" and len(starts) < 2:
        raise ValueError(f"next-sentence prediction needs two documents with text; there are {len(starts)}")
    planner = _PairPlanner(sentence_offsets, starts, ends, limit, short_probability, seed, epoch, kind, sentences)
    # A round needs about 25 arrays with an element per document, so only a block of documents is processed at a time.
    blocks = deque(planner.pairs(first, min(first + _BLOCK, len(starts))) for first in range(0, len(starts), _BLOCK))
    pairs, count = np.empty(sum(map(len, blocks)), dtype=PAIR), 0
    while blocks:  # block by block, so that there are never two copies of all pairs in memory
        block = blocks.popleft()
        pairs[count : count + len(block)] = block
        count += len(block)
    if documents is not None:
        pairs["document"] = documents[pairs["document"]]  # the planner counts only documents with text
    return pairs


@dataclass(frozen=True)
class _PairPlanner:
    """Each round plans the next pair of every document that has unused sentences, see `sentence_pairs`."""

    offsets: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    limit: int
    short_probability: float
    seed: int
    epoch: int
    kind: PairKind
    sentences: bool

    def pairs(self, first: int, end: int) -> np.ndarray:
        position, active = np.array(self.starts[first:end]), np.arange(first, end)
        rounds: list[np.ndarray] = []
        while len(active):
            pairs, position[active - first] = self.round(active, position[active - first], len(rounds))
            pairs["document"] = active
            rounds.append(pairs)
            active = active[position[active - first] < self.ends[active]]
        pairs = np.concatenate(rounds)
        pairs = pairs[(pairs["a_length"] > 0) & (pairs["b_length"] > 0)]
        return pairs[np.argsort(pairs["document"], kind="stable")]

    def _uniform(self, active: np.ndarray, number: int, draw: int) -> np.ndarray:
        return random_streams.uniform_at(
            self.seed, "sample", self.epoch, active, np.full(len(active), number * _DRAWS + draw)
        )

    def _segment_end(self, first: np.ndarray, length: np.ndarray, end: np.ndarray, max_sentences: int) -> np.ndarray:
        """A segment ends when it has `length` tokens, or after `max_sentences` if segments are single sentences."""
        if self.sentences:
            return np.minimum(first + max_sentences, end)
        return np.clip(np.searchsorted(self.offsets, self.offsets[first] + length), first + 1, end)

    def round(self, active: np.ndarray, position: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Plans one pair of each active document. Returns the pairs, and the first unused sentence of each document."""

        def random_integer(bound: np.ndarray | int, draw: int) -> np.ndarray:
            return (self._uniform(active, number, draw) * bound).astype(np.int64)

        short = self._uniform(active, number, _SHORT) < self.short_probability
        target = np.where(short, 2 + random_integer(self.limit - 1, _TARGET), self.limit)
        chunk_end = self._segment_end(position, target, self.ends[active], 2)
        sentences = chunk_end - position
        a_end = position + np.where(sentences > 1, 1 + random_integer(np.maximum(sentences - 1, 1), _END), 1)
        label = self._uniform(active, number, _LABEL) < 0.5
        if self.kind == "sop":
            first, last = self.offsets[position], self.offsets[chunk_end]
            split_at = first + 1 + random_integer(np.maximum(last - first - 1, 1), _END)
            boundary = np.where(sentences > 1, self.offsets[a_end], split_at)
            pairs = self._pairs(active, number, (first, boundary), (boundary, last), label)
            pairs["short"] = short
            return pairs, chunk_end
        label |= sentences == 1
        other = random_integer(len(self.starts) - 1, _DOCUMENT)
        other += other >= active  # the document itself is skipped
        b_first = self.starts[other] + random_integer(self.ends[other] - self.starts[other], _START)
        a_length = self.offsets[a_end] - self.offsets[position]
        b_first = np.where(label, b_first, a_end)
        b_end = np.where(label, self._segment_end(b_first, target - a_length, self.ends[other], 1), chunk_end)
        a, b = (self.offsets[position], self.offsets[a_end]), (self.offsets[b_first], self.offsets[b_end])
        pairs = self._pairs(active, number, a, b, label)
        pairs["choice"], pairs["short"] = sentences > 1, short
        return pairs, np.where(label, a_end, chunk_end)

    def _pairs(self, active: np.ndarray, number: int, a: Boundaries, b: Boundaries, label: np.ndarray) -> np.ndarray:
        pairs = np.empty(len(active), dtype=PAIR)
        pairs["label"], pairs["choice"] = label, 1
        swapped = label & (self.kind == "sop")
        a_length, b_length = a[1] - a[0], b[1] - b[0]
        retained_a, retained_b = truncate_texts(np.stack([a_length, b_length]), self.limit, "bert")
        a_start = a[0] + self._truncated_at_front(active, number, _CUT_A, a_length - retained_a)
        b_start = b[0] + self._truncated_at_front(active, number, _CUT_B, b_length - retained_b)
        pairs["a_start"], pairs["b_start"] = np.where(swapped, (b_start, a_start), (a_start, b_start))
        pairs["a_length"], pairs["b_length"] = np.where(swapped, (retained_b, retained_a), (retained_a, retained_b))
        return pairs

    def _truncated_at_front(self, active: np.ndarray, number: int, draw: int, counts: np.ndarray) -> np.ndarray:
        """As in BERT's script, a fair coin decides for each truncated token, so the number is binomial."""
        front = np.zeros(len(active), dtype=np.int64)
        truncated = np.flatnonzero(counts > 0)
        # One random bit per token, in words of 64 bits.
        words = -(-counts[truncated] // 64)
        index = np.repeat(np.arange(len(truncated)), words)
        word = np.arange(len(index)) - np.repeat(np.cumsum(words) - words, words)
        bits = random_streams.bits_at(
            self.seed, "sample", self.epoch, active[truncated][index], number * _DRAWS + draw + word * _WORD_OFFSET
        )
        used_bits = np.minimum(counts[truncated][index] - 64 * word, 64).astype(np.uint64)
        ones = np.bitwise_count(bits >> (np.uint64(64) - used_bits))
        front[truncated] = np.bincount(index, weights=ones, minlength=len(truncated)).astype(np.int64)
        return front


# There is a warning if a larger fraction of the second segments is random. Second segments are random half of the time,
# and whenever a document has no more sentences. In total, 52% are random for documents of 100 sentences, 60% for
# documents of five sentences, and 68% for documents of two sentences.
_MOSTLY_RANDOM = 0.7


def masked_pairs(
    store: TokenStore,
    limit: int,
    short_probability: float,
    seed: int,
    epoch: int,
    kind: PairKind,
    sentences: bool,
    special_count: int,
) -> Plan:
    """Builds a plan from the pairs of `sentence_pairs`, see its arguments. special_count: the number of special tokens
    in an example."""
    rows = sentence_pairs(
        store.sentence_offsets, store.document_sentences, limit, short_probability, seed, epoch, kind, sentences
    )
    return Plan(rows, rows["a_length"].astype(np.int64) + rows["b_length"] + special_count)


class MaskedPairs(MaskedExamples):
    """Masked segment pairs in the backbone's text format, such as `[CLS] a [SEP] b [SEP]`. Each epoch samples other
    pairs. The class of a pair is a target, unless pairs=unscored."""

    config: PairsConfig | PlmConfig
    text_count = 2

    def new_plan(self, epoch: int) -> Plan:
        self._require_choices()
        config, special_count = self.config, self.template.special_count
        short_probability, sentences = config.short_sequence_probability, config.pair_of == "sentences"
        kind = "sop" if config.pairs == "sop" else "nsp"
        return cached_plan(
            masked_pairs, self.store, self.capacity, short_probability, self.seed, epoch, kind, sentences, special_count
        )

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

    def truncated(self, rows: np.ndarray) -> np.ndarray:
        """Returns whether each pair was truncated, (N,) bool. A pair was truncated if one of its segments does not
        begin or end at a sentence boundary; with sop, the two halves of a split sentence do not count as truncated."""
        starts, lengths = (
            np.stack([rows[f"{side}_{field}"].astype(np.int64) for side in "ab"]) for field in ("start", "length")
        )
        ends, offsets = starts + lengths, self.store.sentence_offsets
        starts_whole, ends_whole = (
            offsets[np.searchsorted(offsets, boundary)] == boundary for boundary in (starts, ends)
        )
        if self.config.pairs == "sop":
            starts_whole |= starts == ends[::-1]
            ends_whole |= ends == starts[::-1]
        return ~(starts_whole & ends_whole).all(0)

    def metadata(self) -> JsonObject:
        """Adds the fraction of truncated pairs, and the fraction of pairs whose second segment is random (nsp) or whose
        segments are swapped (sop)."""
        plan = self.plan(0)
        fraction = float(plan.rows["label"].mean())
        longest = plan.rows[plan.lengths == self.capacity + self.template.special_count]
        metadata = {**super().metadata(), "truncated_fraction": int(self.truncated(longest).sum()) / len(plan)}
        if self.config.pairs == "sop":
            return {**metadata, "swapped_fraction": fraction}
        has_single = self._has_single_sentence
        metadata |= {"random_next_fraction": fraction, "documents_of_one_sentence": int(has_single.sum())}
        if fraction > _MOSTLY_RANDOM and self.config.pairs == "nsp" and self.split == "train":
            metadata["warnings"] = [
                f"{fraction:.0%} of the second segments are random, where next-sentence prediction intends half: "
                f"{has_single.mean():.0%} of the {self.split} documents have a single sentence, which has no next one; "
                "set data.document=file for longer documents, or objective.pairs=none"
            ]
        return metadata

    @property
    def _has_single_sentence(self) -> np.ndarray:
        return np.diff(self.store.document_sentences) == 1

    def _require_choices(self) -> None:
        """Raises UserError if all second segments would be random, or none could be."""
        hint = f"or use objective.pairs=none{' or sop' if self.config.pairs == 'nsp' else ''}"
        if self.config.pairs != "sop" and len(self.store) < 2:
            or_more = (
                "" if self.split == "train" else ", set a larger data.validation_fraction=, or set data.validation="
            )
            requirement = "next-sentence prediction needs" if self.config.pairs == "nsp" else "random pairs need"
            raise UserError(
                f"{requirement} two documents with text; the {self.split} text has one",
                f"split the text into more documents (text files: data.document=block or line){or_more}, {hint}",
            )
        if self.config.pairs == "nsp" and self.split == "train" and self._has_single_sentence.all():
            raise UserError(
                "next-sentence prediction has nothing to learn: no document has two sentences, so every second segment "
                "is random",
                f"make longer documents (text files: data.document=block or file), {hint}",
            )
