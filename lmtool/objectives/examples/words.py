"""Windows of whole words, and pairs of words for skip-gram."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from lmtool import random_streams
from lmtool.config.saved import JsonObject
from lmtool.data.examples import Plan, planned
from lmtool.data.formats import PackedArrays
from lmtool.data.store import TokenStore
from lmtool.errors import UserError
from lmtool.objectives.examples.windows import WINDOW, FixedPlan, Stream, numbers_of, text_capacity, text_windows
from lmtool.objectives.permutation_configs import SkipGramConfig
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Packed, Target

# Windows of whole words, with each word predicted from the preceding and from the following words. A word that its
# vocabulary spells has several tokens: a window never begins or ends within one, except for words longer than a window.
# Shape letters: V entries of the vocabulary, T tokens of a batch, W its words.


FORWARD, BACKWARD = "forward", "backward"
# Stream positions read at a time.
_PIECE = 1 << 20


class WordWindows(FixedPlan):
    """Windows over the stream of documents, each closed by the end-of-text token. Adjacent windows share a word:
    forwards, every word but the first of a document (separate) or of the stream (joined) is predicted once; backwards,
    every word but the last.

    tokenizer: that of the store. reads: maximum bytes of a word that the model reads, and the bytes of each entry;
    None: no limit. begins_V: whether an entry begins a word.
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
        self.reads = reads
        self.begins_V, self.unknown = tokenizer.starts_word, tokenizer.role("unk")
        self.stream = Stream.from_store(store, tokenizer.role("eos"))
        size, joined = text_capacity(max_length, 0, 1), documents == "joined"
        super().__init__(store, split, planned(word_windows, self.stream, self.begins_V, size, joined))

    def words(self, tokens_T: np.ndarray, starts_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(W,) the first token of each word, and (W,) its number in the vocabulary: the unknown word if it has several
        tokens. starts_N: starts of texts, each at a word boundary."""
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
        # A word and the next one in the same text.
        before = np.flatnonzero(text_W[:-1] == text_W[1:])
        targets = {
            FORWARD: _target(number_W[before + 1], first_W[before]),
            BACKWARD: _target(number_W[before], first_W[before + 1]),
        }
        return Batch(PackedArrays(tokens, lengths, {}).packed(), targets, *numbers_of(examples))

    def counts(self, words: int) -> np.ndarray:
        """(words,) counts of the vocabulary's words in the stream, including the ends of documents."""
        counts = np.zeros(words, dtype=np.int64)
        tokens = self.stream.tokens
        for start in range(0, len(tokens), _PIECE):
            # With the token after the piece, which may continue its last word; and those before it, if it begins within
            # a word.
            piece = np.asarray(tokens[start : start + _PIECE + 1], dtype=np.int64)
            begins = self.begins_V[piece]
            continued = np.append(~begins[1:], False)
            begins[_PIECE:] = False
            counts += np.bincount(np.where(continued, self.unknown, piece)[begins], minlength=words)[:words]
        counts[self.stream.separator] += len(self.stream.offsets) - 1
        return counts

    def _longer(self, limit: int, lengths_V: np.ndarray) -> int:
        """The number of words of the text with more bytes than the limit. lengths_V: bytes of each entry."""
        count, tokens = 0, self.stream.tokens
        for start in range(0, len(tokens), _PIECE):
            piece = np.asarray(tokens[start : start + _PIECE], dtype=np.int64)
            first = np.flatnonzero(self.begins_V[piece])  # the rest of a word from the previous piece is skipped
            if len(first):
                count += int((np.add.reduceat(lengths_V[piece], first) > limit).sum())
        return count

    def metadata(self) -> JsonObject:
        """Adds a warning if words are truncated."""
        metadata = super().metadata()
        if self.reads is not None and (count := self._longer(*self.reads)):
            limit = self.reads[0]
            metadata["warnings"] = [
                f"{self.split}: {count:,} words have more than {limit} bytes, of which the model reads the first "
                f"{limit} (model.word_length)"
            ]
        return metadata


def _target(labels: np.ndarray, at: np.ndarray) -> Target:
    return Target(torch.from_numpy(labels.astype(np.int64)), at=torch.from_numpy(at.astype(np.int64)))


def word_windows(stream: Stream, begins_V: np.ndarray, size: int, joined: bool) -> Plan:
    """Records of `WINDOW`: consecutive windows of at most `size` positions that begin and end with whole words,
    each sharing a word with the next. joined: across documents; else within each."""
    boundaries = np.array([0, len(stream)]) if joined else stream.boundaries
    lengths = np.diff(boundaries)
    long = lengths > size
    rows = [np.zeros(int((~long).sum()), dtype=WINDOW)]
    rows[0]["start"], rows[0]["length"] = boundaries[:-1][~long], lengths[~long]
    for first, length in zip(boundaries[:-1][long].tolist(), lengths[long].tolist(), strict=True):
        rows.append(np.array(list(_cut(stream, begins_V, size, first, first + length)), dtype=WINDOW))
    windows = np.concatenate(rows)
    windows = windows[np.argsort(windows["start"], kind="stable")]
    return Plan(windows, windows["length"].astype(np.int64))


def _cut(stream: Stream, begins_V: np.ndarray, size: int, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Starts and lengths of the windows of one run of text that is longer than a window."""
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


# Center words with their context words and negatives, for skip-gram. Mikolov, Sutskever, Chen, Corrado, Dean,
# "Distributed Representations of Words and Phrases and their Compositionality", NeurIPS 2013, sections 2.2 and 2.3. As
# in the published code, words are subsampled before windows are formed, which widens them, and words outside of the
# vocabulary are dropped.
# Shape letters: V vocabulary, N examples of a batch, T tokens of their text, K retained tokens, W words on either side,
# M pairs, J negatives of a pair.


class WordCounts:
    """(V,) word counts of the training text, without special tokens; of several texts, the sum. The distributions are
    available once all texts are added."""

    def __init__(self, config: SkipGramConfig, tokenizer: Tokenizer):
        self._config, self._special = config, sorted(tokenizer.special_ids)
        self.counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)

    def add(self, counts: np.ndarray) -> None:
        """Adds the counts of a text. UserError if it has no word."""
        regular = np.asarray(counts, dtype=np.int64).copy()
        regular[self._special] = 0
        if not regular.any():
            raise UserError("the text has no word of the vocabulary", "use the tokenizer that fits it, or more text")
        self.counts = self.counts + regular

    @property
    def retention(self) -> np.ndarray:
        """(V,) float64: the probability that an occurrence of a word is retained; 0 for special tokens."""
        share_V = self.counts / self.counts.sum()
        retained_V = np.sqrt(self._config.subsample / np.maximum(share_V, 1e-300)).clip(max=1.0)
        retained_V[self._special] = 0.0
        return retained_V

    @property
    def noise(self) -> np.ndarray:
        """(V,) float64: the distribution of negatives."""
        powers_V = np.where(self.counts > 0, self.counts.astype(np.float64) ** self._config.power, 0.0)
        return powers_V / powers_V.sum()


@dataclass(frozen=True)
class Pairs:
    """tokens: (T,) the original text. retained: (T,) bool, retained tokens. lengths: (N,) retained tokens per example.
    reach: (K,) how many words on either side of each retained one are predicted. center, context: (M,) positions among
    the retained. negatives: (M, J) words."""

    tokens: np.ndarray
    retained: np.ndarray
    lengths: np.ndarray
    reach: np.ndarray
    center: np.ndarray
    context: np.ndarray
    negatives: np.ndarray


class WordPairs(FixedPlan):
    """Examples are windows of single documents with max_length tokens; pairs do not cross them."""

    def __init__(
        self, config: SkipGramConfig, store: TokenStore, max_length: int, split: str, seed: int, counts: WordCounts
    ):
        """The plan has lengths before subsampling."""
        self.config, self.seed, self.counts = config, seed, counts
        self.stream = Stream.from_store(store, None)
        plan = planned(text_windows, self.stream, text_capacity(max_length, 0, 1), False, 1, 0)
        super().__init__(store, split, plan)
        self._distributions: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    @property
    def predicted_fraction(self) -> float:
        return self.config.predicted_fraction

    def _probabilities(self) -> tuple[np.ndarray, np.ndarray]:
        """(V,) the probability of retaining each word, and the cumulative probabilities of negatives."""
        if self._distributions is None or self._distributions[0] is not self.counts.counts:
            sums_V = np.cumsum(self.counts.noise)
            self._distributions = self.counts.counts, self.counts.retention, sums_V / sums_V[-1]
        return self._distributions[1:]

    def pairs(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Pairs:
        """The sampled pairs of these examples. Random numbers per position: whether it is retained, its reach, and the
        negatives of each of its pairs."""
        reach, number = self.config.window, self.config.negatives
        retained_V, sums_V = self._probabilities()
        lengths_N = rows["length"].astype(np.int64)
        tokens_T = self.stream.read(rows["start"], lengths_N)
        row_T = np.repeat(np.arange(len(rows)), lengths_N)
        position_T = np.arange(len(tokens_T)) - np.repeat(np.cumsum(lengths_N) - lengths_N, lengths_N)
        first_T, example_T = position_T * (2 + 2 * reach * number), np.asarray(examples, dtype=np.int64)[row_T]

        def drawn(example: np.ndarray, draw: np.ndarray) -> np.ndarray:
            return random_streams.uniform_at(self.seed, "sample", epoch, example, draw)

        retained_T = drawn(example_T, first_T) < retained_V[tokens_T]
        example_K, first_K, row_K = example_T[retained_T], first_T[retained_T], row_T[retained_T]
        reach_K = 1 + (drawn(example_K, first_K + 1) * reach).astype(np.int64)
        offset_2W = np.delete(np.arange(-reach, reach + 1), reach)
        other_K2W = np.arange(len(reach_K))[:, None] + offset_2W
        inside_K2W = (other_K2W >= 0) & (other_K2W < len(reach_K)) & (np.abs(offset_2W) <= reach_K[:, None])
        inside_K2W &= row_K[np.clip(other_K2W, 0, max(len(row_K) - 1, 0))] == row_K[:, None] if len(row_K) else True
        center_M, slot_M = np.nonzero(inside_K2W)
        draw_MJ = (first_K[center_M] + 2 + slot_M * number)[:, None] + np.arange(number)
        noise = drawn(np.repeat(example_K[center_M], number), draw_MJ.reshape(-1))
        negatives_MJ = np.searchsorted(sums_V, noise, side="right").reshape(-1, number)
        retained_N = np.bincount(row_K, minlength=len(rows))
        return Pairs(tokens_T, retained_T, retained_N, reach_K, center_M, other_K2W[center_M, slot_M], negatives_MJ)

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        pairs = self.pairs(rows, examples, epoch)
        tokens = pairs.tokens[pairs.retained]
        at, number = torch.from_numpy(pairs.center), self.config.negatives
        targets = {
            "skip_gram": Target(torch.from_numpy(tokens[pairs.context]), at=at),
            "negatives": Target(torch.from_numpy(pairs.negatives.reshape(-1)), at=at.repeat_interleave(number)),
        }
        return Batch(Packed(torch.from_numpy(tokens), tuple(pairs.lengths.tolist())), targets, *numbers_of(examples))
