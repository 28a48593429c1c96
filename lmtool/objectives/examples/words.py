"""Windows of whole words for bidirectional language models, and pairs of words for skip-gram."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from lmtool import random_streams
from lmtool.config.base import JsonObject
from lmtool.data.examples import Plan, cached_plan
from lmtool.data.formats import PackedArrays
from lmtool.data.store import TokenStore
from lmtool.errors import UserError
from lmtool.objectives.configs import SkipGramConfig
from lmtool.objectives.examples.windows import WINDOW, FixedPlan, Stream, numbers_of, text_capacity, text_windows
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Packed, Target

# Windows of whole words. A word that is not in the vocabulary has several tokens, which spell the word. A window never
# begins or ends within a word, except if the word is longer than a window. Each word is predicted twice, from the
# preceding words and from the following words.
# Shape letters: V entries of the vocabulary, T tokens of a batch, W words of a batch.


FORWARD, BACKWARD = "forward", "backward"
# Number of tokens read at a time.
_CHUNK = 1 << 20


class WordWindows(FixedPlan):
    """Windows of whole words over a stream of documents that end with the end-of-text token.

    Consecutive windows share a word. The forward direction predicts every word once, except the first word of each
    document (separate) or of the stream (joined); the backward direction predicts every word once, except the last word
    of each document or of the stream.

    Attributes:
        begins_V: Whether an entry of the vocabulary begins a word.
        unknown: The id of the unknown word.

    Args:
        byte_limits: The maximum bytes of a word that the model reads, and the number of bytes (V,) of each entry of the
            vocabulary; None if there is no limit.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        store: TokenStore,
        max_length: int,
        documents: str,
        split: str,
        byte_limits: tuple[int, np.ndarray] | None = None,
    ):
        self.byte_limits = byte_limits
        self.begins_V, self.unknown = tokenizer.starts_word, tokenizer.role("unk")
        self.stream = Stream.from_store(store, tokenizer.role("eos"))
        size, joined = text_capacity(max_length, 0, 1), documents == "joined"
        super().__init__(store, split, cached_plan(word_windows, self.stream, self.begins_V, size, joined))

    def words(self, tokens_T: np.ndarray, starts_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Finds the words in packed texts. tokens_T: the tokens of the texts. starts_N: the index of the first token of
        each text, which also counts as the first token of a word. Returns the index (W,) of each word's first token,
        and the id (W,) of each word: that of the unknown word if the word has several tokens."""
        begins_T = self.begins_V[tokens_T]
        starts_word_T = begins_T.copy()
        starts_word_T[starts_N] = True
        first_W = np.flatnonzero(starts_word_T)
        is_single_W = (np.diff(first_W, append=len(tokens_T)) == 1) & begins_T[first_W]
        return first_W, np.where(is_single_W, tokens_T[first_W], self.unknown)

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        lengths = rows["length"].astype(np.int64)
        tokens = self.stream.read(rows["start"], lengths)
        starts = np.cumsum(lengths) - lengths
        first_W, ids_W = self.words(tokens, starts)
        text_W = np.searchsorted(starts, first_W, side="right")
        # The words that have a next word in the same text.
        left = np.flatnonzero(text_W[:-1] == text_W[1:])
        right = left + 1
        targets = {
            FORWARD: _target(ids_W[right], first_W[left]),
            BACKWARD: _target(ids_W[left], first_W[right]),
        }
        return Batch(PackedArrays(tokens, lengths, {}).packed(), targets, *numbers_of(examples))

    def counts(self, vocab_size: int) -> np.ndarray:
        """Returns the counts (V,) of the vocabulary's words in the stream, where the end of a document counts as a
        word. vocab_size: the size of the vocabulary."""
        counts = np.zeros(vocab_size, dtype=np.int64)
        tokens = self.stream.tokens
        for start in range(0, len(tokens), _CHUNK):
            # The token after the chunk shows whether the last word of the chunk continues.
            chunk = np.asarray(tokens[start : start + _CHUNK + 1], dtype=np.int64)
            begins = self.begins_V[chunk]
            continues = np.append(~begins[1:], False)
            begins[_CHUNK:] = False
            ids = np.where(continues, self.unknown, chunk)[begins]
            counts += np.bincount(ids, minlength=vocab_size)[:vocab_size]
        counts[self.stream.separator] += len(self.stream.offsets) - 1  # one for each document
        return counts

    def _count_long_words(self, limit: int, lengths_V: np.ndarray) -> int:
        count, tokens = 0, self.stream.tokens
        for start in range(0, len(tokens), _CHUNK):
            chunk = np.asarray(tokens[start : start + _CHUNK], dtype=np.int64)
            first = np.flatnonzero(self.begins_V[chunk])  # the rest of a word from the previous chunk is skipped
            if len(first):
                count += int((np.add.reduceat(lengths_V[chunk], first) > limit).sum())
        return count

    def metadata(self) -> JsonObject:
        """Adds a warning if the model does not read all bytes of some words."""
        metadata = super().metadata()
        if self.byte_limits is not None and (count := self._count_long_words(*self.byte_limits)):
            limit = self.byte_limits[0]
            subject = f"{count:,} {'word has' if count == 1 else 'words have'}"
            metadata["warnings"] = [
                f"{self.split}: {subject} more than {limit} bytes, of which the model reads the first {limit} "
                "(model.word_length)"
            ]
        return metadata


def _target(labels: np.ndarray, indices: np.ndarray) -> Target:
    return Target(torch.from_numpy(labels.astype(np.int64)), at=torch.from_numpy(indices.astype(np.int64)))


def word_windows(stream: Stream, begins_V: np.ndarray, size: int, joined: bool) -> Plan:
    """Builds a plan from consecutive windows of at most `size` tokens, of whole words. A window shares its last word
    with the next window. begins_V: whether an entry of the vocabulary begins a word. joined: whether windows continue
    across documents; otherwise, each window has tokens of one document."""
    boundaries = np.array([0, len(stream)]) if joined else stream.boundaries
    lengths = np.diff(boundaries)
    is_long = lengths > size
    rows = [np.zeros(int((~is_long).sum()), dtype=WINDOW)]
    rows[0]["start"], rows[0]["length"] = boundaries[:-1][~is_long], lengths[~is_long]
    for first, length in zip(boundaries[:-1][is_long].tolist(), lengths[is_long].tolist(), strict=True):
        rows.append(np.array(list(_split_at_words(stream, begins_V, size, first, first + length)), dtype=WINDOW))
    windows = np.concatenate(rows)
    windows = windows[np.argsort(windows["start"], kind="stable")]
    return Plan(windows, windows["length"].astype(np.int64))


def _split_at_words(stream: Stream, begins_V: np.ndarray, size: int, first: int, end: int) -> Iterator[tuple[int, int]]:
    start = read_end = first
    begins: list[int] = []
    while end - start > size:
        if start + size >= read_end:
            read_end = min(end, start + max(_CHUNK, 2 * size))
            ids = stream.read(np.array([start]), np.array([read_end - start]))
            begins = (np.flatnonzero(begins_V[ids]) + start).tolist()
        last = bisect_right(begins, start + size) - 1  # the index of the last word boundary that the window reaches
        if last < 0 or begins[last] <= start:  # a word longer than a window
            yield start, size
            start += size
            continue
        yield start, begins[last] - start
        # The next window begins with the last word of this window, unless this window has a single word.
        start = begins[last - 1] if last and begins[last - 1] > start else begins[last]
    yield start, end - start


# Pairs of a center word and a context word, with negatives, for skip-gram (Mikolov, Sutskever, Chen, Corrado, Dean,
# "Distributed Representations of Words and Phrases and their Compositionality", NeurIPS 2013, sections 2.2 and 2.3). As
# in the published code, words outside of the vocabulary are dropped, and words are subsampled before context windows
# are formed, so that windows reach further in the text.
# Shape letters: V vocabulary, N examples of a batch, T tokens of the examples, K retained tokens, W maximum words on
# either side, M pairs, J negatives of a pair.


class WordCounts:
    """The word counts (V,) of the training text, without special tokens, and the two distributions that depend on them.
    If there are several texts, their counts are added; the distributions are valid after the last text."""

    def __init__(self, config: SkipGramConfig, tokenizer: Tokenizer):
        self._config, self._special = config, sorted(tokenizer.special_ids)
        self.counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)

    def add(self, counts: np.ndarray) -> None:
        """Adds the counts of a text. Raises UserError if the text has no word of the vocabulary."""
        regular = np.asarray(counts, dtype=np.int64).copy()
        regular[self._special] = 0
        if not regular.any():
            raise UserError(
                "the text has no word of the vocabulary",
                "use a tokenizer that was trained on such text, or use more text",
            )
        self.counts = self.counts + regular

    @property
    def retention(self) -> np.ndarray:
        """The probability (V,) that an occurrence of a word is retained; 0 for special tokens."""
        frequency_V = self.counts / self.counts.sum()
        retention_V = np.sqrt(self._config.subsample / np.maximum(frequency_V, 1e-300)).clip(max=1.0)
        retention_V[self._special] = 0.0
        return retention_V

    @property
    def noise(self) -> np.ndarray:
        """The probability (V,) that a negative sample is this word, the noise distribution of the paper."""
        powers_V = np.where(self.counts > 0, self.counts.astype(np.float64) ** self._config.power, 0.0)
        return powers_V / powers_V.sum()


@dataclass(frozen=True)
class SampledPairs:
    """The sampled pairs of a batch.

    Attributes:
        tokens: (T,) the original tokens.
        retained: (T,) whether subsampling retains a token.
        lengths: (N,) the number of retained tokens of each example.
        reach: (K,) the maximum distance between each retained word and its context words.
        center: (M,) the index of each pair's center word among the retained words.
        context: (M,) the index of each pair's context word among the retained words.
        negatives: (M, J) the ids of each pair's negative words.
    """

    tokens: np.ndarray
    retained: np.ndarray
    lengths: np.ndarray
    reach: np.ndarray
    center: np.ndarray
    context: np.ndarray
    negatives: np.ndarray


class WordPairs(FixedPlan):
    """Word pairs of skip-gram. An example is a window of at most max_length tokens of one document; both words of a
    pair are in the same window. The plan has the lengths of windows before subsampling."""

    def __init__(
        self, config: SkipGramConfig, store: TokenStore, max_length: int, split: str, seed: int, counts: WordCounts
    ):
        self.config, self.seed, self.counts = config, seed, counts
        self.stream = Stream.from_store(store, None)
        plan = cached_plan(text_windows, self.stream, text_capacity(max_length, 0, 1), False, 1, 0)
        super().__init__(store, split, plan)
        # The results of `_probabilities`, after the counts that they were computed from.
        self._distributions: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    @property
    def predicted_fraction(self) -> float:
        return self.config.predicted_fraction

    def _probabilities(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the probability that a word is retained, and the cumulative probabilities of negatives."""
        if self._distributions is None or self._distributions[0] is not self.counts.counts:
            cumulative_V = np.cumsum(self.counts.noise)
            self._distributions = self.counts.counts, self.counts.retention, cumulative_V / cumulative_V[-1]
        return self._distributions[1:]

    def pairs(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> SampledPairs:
        """Samples the pairs of examples. Each position of the text has its own random numbers: one decides whether the
        word is retained, one is for its reach, and there is one for each negative of each of its possible pairs."""
        window, negatives = self.config.window, self.config.negatives
        retention_V, cumulative_V = self._probabilities()
        lengths_N = rows["length"].astype(np.int64)
        tokens_T = self.stream.read(rows["start"], lengths_N)
        row_T = np.repeat(np.arange(len(rows)), lengths_N)
        position_T = np.arange(len(tokens_T)) - np.repeat(np.cumsum(lengths_N) - lengths_N, lengths_N)
        draw_T, example_T = position_T * (2 + 2 * window * negatives), np.asarray(examples, dtype=np.int64)[row_T]

        def uniform(example: np.ndarray, draw: np.ndarray) -> np.ndarray:
            return random_streams.uniform_at(self.seed, "sample", epoch, example, draw)

        retained_T = uniform(example_T, draw_T) < retention_V[tokens_T]
        example_K, draw_K, row_K = example_T[retained_T], draw_T[retained_T], row_T[retained_T]
        reach_K = 1 + (uniform(example_K, draw_K + 1) * window).astype(np.int64)
        offset_2W = np.delete(np.arange(-window, window + 1), window)  # without 0, the word itself
        other_K2W = np.arange(len(reach_K))[:, None] + offset_2W
        inside_K2W = (other_K2W >= 0) & (other_K2W < len(reach_K)) & (np.abs(offset_2W) <= reach_K[:, None])
        inside_K2W &= row_K[np.clip(other_K2W, 0, max(len(row_K) - 1, 0))] == row_K[:, None] if len(row_K) else True
        center_M, slot_M = np.nonzero(inside_K2W)
        draw_MJ = (draw_K[center_M] + 2 + slot_M * negatives)[:, None] + np.arange(negatives)
        negative_uniform = uniform(np.repeat(example_K[center_M], negatives), draw_MJ.reshape(-1))
        negatives_MJ = np.searchsorted(cumulative_V, negative_uniform, side="right").reshape(-1, negatives)
        retained_N = np.bincount(row_K, minlength=len(rows))
        return SampledPairs(
            tokens_T, retained_T, retained_N, reach_K, center_M, other_K2W[center_M, slot_M], negatives_MJ
        )

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        pairs = self.pairs(rows, examples, epoch)
        tokens = pairs.tokens[pairs.retained]
        indices, negatives = torch.from_numpy(pairs.center), self.config.negatives
        targets = {
            "skip_gram": Target(torch.from_numpy(tokens[pairs.context]), at=indices),
            "negatives": Target(torch.from_numpy(pairs.negatives.reshape(-1)), at=indices.repeat_interleave(negatives)),
        }
        return Batch(Packed(torch.from_numpy(tokens), tuple(pairs.lengths.tolist())), targets, *numbers_of(examples))
