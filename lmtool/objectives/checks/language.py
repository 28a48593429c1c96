"""Checks of language modeling examples: windows of running text, prefixes, words, and word pairs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, cast

import numpy as np
from torch import Tensor

from lmtool.config.base import JsonObject
from lmtool.data.formats import FormatTemplate, ragged_ranges
from lmtool.learners.inspection import Inspector, RunningStatistics, SampledBatch
from lmtool.learners.model import indices_of, labels_of
from lmtool.models.characters import FILL, TEXT_BEGINS, TEXT_ENDS, WORD_BEGINS, WORD_ENDS
from lmtool.objectives.examples.words import BACKWARD, FORWARD, SampledPairs
from lmtool.types import Packed

# Windows of a document stream: the text of each window, and whether the windows cover all tokens.


class StreamInspector(Inspector):
    """Inspects examples that are windows of a document stream, the attribute `stream` of the examples.
    drops_single_tokens: whether a window needs two tokens, so that a single token at the end of a document is in no
    window."""

    drops_single_tokens = False

    def texts(self, sample: SampledBatch) -> list[list[str]]:
        """Returns the documents in each window, without separators."""
        return [self._documents(int(row["start"]), int(row["length"])) for row in sample.rows]

    def _documents(self, start: int, length: int) -> list[str]:
        stream = self.examples.stream
        ids = stream.read(np.array([start]), np.array([length]))
        boundaries = stream.boundaries[(stream.boundaries > start) & (stream.boundaries < start + length)] - start
        return [self.tokenizer.decode(document.tolist()) for document in np.split(ids, boundaries)]

    def check_plan(self, stats: RunningStatistics) -> None:
        """Checks how much text is in no window."""
        rows, boundaries = self.examples.plan(0).rows, self.examples.stream.boundaries
        rows = rows[np.argsort(rows["start"], kind="stable")]  # segments of lanes are planned in the order of steps
        starts = rows["start"]
        ends = np.maximum.accumulate(starts + rows["length"])
        gaps = np.maximum(np.append(starts, boundaries[-1]) - np.append(0, ends), 0)
        uncovered = ragged_ranges(np.append(0, ends), gaps)
        dropped = np.isin(uncovered + 1, boundaries).sum() if self.drops_single_tokens else 0
        stats.exact("fraction of text in no example", len(uncovered), dropped, boundaries[-1])
        super().check_plan(stats)


# Next-token prediction: every token of a window except the first is predicted at the previous position.


class CausalInspector(StreamInspector):
    """Inspects `CausalWindows`."""

    def main_finding(self, stats: RunningStatistics) -> str:
        return "every token is predicted from the tokens before it, all tokens of a text in one pass"

    def check(self, stats: RunningStatistics, sample: SampledBatch) -> None:
        batch = sample.batch
        indices, labels = indices_of(batch, "clm").numpy(), labels_of(batch, "clm").numpy()
        tokens = batch.inputs.tokens.numpy()
        stats.report("predicted fraction of tokens", len(indices), len(tokens))
        stats.never("labels that are not the next token", (tokens[indices + 1] != labels).sum())
        stats.never("tokens without a prediction", len(tokens) - len(sample.rows) - len(np.unique(indices)))


class LanesInspector(StreamInspector):
    """Inspects `CausalSegments`, for models that carry state from one segment of text to the next.

    A lane is a contiguous piece of the text, which is read segment by segment. Checks that each segment directly
    follows the previous segment of its lane, and that every token of the text except the first is predicted once. The
    examples that are shown first are consecutive segments of one lane.
    """

    def main_finding(self, stats: RunningStatistics) -> str:
        return (
            f"every token is predicted from the tokens before it; the text is read in {self.examples.lanes} lanes "
            "(contiguous pieces), and each segment continues with the state of the previous one"
        )

    def first(self, n: int) -> np.ndarray:
        return np.flatnonzero(self.examples.plan(0).rows["lane"] == 0)[:n]

    def entries(self, sample: SampledBatch) -> Iterator[JsonObject]:
        memory = self.learner.backbone.config.memory_states
        for entry, row in zip(super().entries(sample), sample.rows, strict=True):
            tokens_before = int(row["before"])
            lane = {"number": int(row["lane"]) + 1, "of": self.examples.lanes, "read": tokens_before}
            carried = "the state" if memory is None else f"{min(tokens_before, memory)} tokens of memory"
            title = f"{lane['number']} of {lane['of']}, {tokens_before:,} tokens read before, continues from {carried}"
            drawing = [("lane", f"{title}  {self._drawing(row, memory)}")]
            yield {**entry, "lane": lane, "drawing": drawing}

    def _drawing(self, row: np.void, memory: int | None) -> str:
        """Tokens read before (.), in the memory (m) and of this segment (x), and a recurrent state (~)."""
        before, tokens_per_letter = int(row["before"]), max(1, self.max_length // 4)
        positions = np.arange(0, before + int(row["length"]), tokens_per_letter)[-24:]
        carried = "~" if memory is None else "m"
        carried_start = 0 if memory is None else max(0, before - memory)
        return "".join(
            "x" if position >= before else carried if position >= carried_start else "." for position in positions
        )

    def check_plan(self, stats: RunningStatistics) -> None:
        """Checks that no text is skipped or read twice, and that segments directly follow each other in a lane."""
        rows, targets = self.examples.plan(0).rows, len(self.examples.stream) - 1  # the first token is not predicted
        ordered = rows[np.argsort(rows["start"], kind="stable")]
        ends = ordered["start"] + ordered["length"]
        gaps = np.append(ordered["start"], targets) - np.append(0, ends)
        stats.exact("fraction of text in no example", np.abs(gaps).sum(), 0, targets)
        same_lane = ordered["lane"][1:] == ordered["lane"][:-1]
        follows = ordered["before"][1:] == np.where(same_lane, ordered["before"][:-1] + ordered["length"][:-1], 0)
        stats.never("segments that do not follow the previous segment of their lane", (~follows).sum())
        stats.report("lanes", self.examples.lanes, 0)
        super(StreamInspector, self).check_plan(stats)

    def check(self, stats: RunningStatistics, sample: SampledBatch) -> None:
        rows, labels = sample.rows, labels_of(sample.batch, "clm").numpy()
        stats.report("predicted fraction of tokens", len(labels), sample.batch.tokens)
        next_tokens = self.examples.stream.read(rows["start"] + 1, rows["length"].astype(np.int64))
        stats.never("labels that are not the next token", (next_tokens != labels).sum())
        lanes = sample.batch.lanes
        tokens_before = () if lanes is None else lanes.read
        stats.never("tokens read before that a batch does not count", rows["before"].sum() - sum(tokens_before))


# Texts that are split into a prefix and a rest.


def without_special_tokens(template: FormatTemplate, packed: Packed, ids: Tensor) -> np.ndarray:
    """Returns the ids of packed texts without the special tokens of the text format. ids: those of the inputs, or
    labels at the same positions."""
    before, after = (len(piece) for piece in template.pieces)
    positions = packed.positions.numpy()
    lengths = np.repeat(packed.lengths, packed.lengths)
    return ids.numpy()[(positions >= before) & (positions < lengths - after)]


class PrefixesInspector(StreamInspector):
    """The base class of inspectors of texts that are split into a prefix and a rest. Checks that the position of the
    split is uniformly distributed, and that the text after it is predicted."""

    drops_single_tokens = True

    def main_finding(self, stats: RunningStatistics) -> str:
        return "a text is split at a random position: the part before it is read, the part after it is predicted"

    def check(self, stats: RunningStatistics, sample: SampledBatch) -> None:
        lengths = sample.rows["length"].astype(np.int64)
        prefixes = self.examples.prefixes(sample.rows, sample.numbers, sample.epoch)
        stats.never("splits that leave a side empty", ((prefixes < 1) | (prefixes >= lengths)).sum())
        # A text of two tokens has only one possible split. The variance is that of a discrete uniform distribution.
        has_choice = lengths > 2
        fractions = (prefixes[has_choice] - 1) / (lengths[has_choice] - 2)
        variance = float((lengths[has_choice] / (12 * (lengths[has_choice] - 2))).sum())
        count = has_choice.sum()
        stats.mean("position of the split, 0 to 1", fractions.sum(), count, count / 2, variance, 0.5)
        self.check_sides(stats, sample, lengths, prefixes)

    def check_sides(
        self, stats: RunningStatistics, sample: SampledBatch, lengths: np.ndarray, prefixes: np.ndarray
    ) -> None:
        """Checks the text before and after the split. lengths, prefixes: (N,) the number of tokens of each text, and
        before its split."""


class MaskedPrefixesInspector(PrefixesInspector):
    """Inspects `MaskedPrefixes`."""

    def check_sides(
        self, stats: RunningStatistics, sample: SampledBatch, lengths: np.ndarray, prefixes: np.ndarray
    ) -> None:
        batch = sample.batch
        indices, labels = indices_of(batch, "prefix_lm").numpy(), labels_of(batch, "prefix_lm").numpy()
        tokens = batch.inputs.tokens.numpy()
        positions, documents = batch.inputs.positions.numpy()[indices], batch.inputs.documents.numpy()[indices]
        stats.never("labels that are not the next token", (tokens[indices + 1] != labels).sum())
        stats.never("labels within the prefix", (positions + 1 < prefixes[documents]).sum())
        stats.never("tokens after the split without a prediction", (lengths - prefixes).sum() - len(indices))


class RewrittenInspector(StreamInspector):
    """Inspects `RewrittenTexts`."""

    drops_single_tokens = True

    def main_finding(self, stats: RunningStatistics) -> str:
        return "a text is read, and then written again from the last state, its end included"

    def check(self, stats: RunningStatistics, sample: SampledBatch) -> None:
        batch, end = sample.batch, self.examples.end
        indices = indices_of(batch, "sequence_autoencoder").numpy()
        labels = labels_of(batch, "sequence_autoencoder").numpy()
        tokens, documents = batch.inputs.tokens.numpy(), batch.inputs.documents.numpy()
        stats.report("predicted fraction of tokens", len(indices), len(tokens))
        read = np.setdiff1d(np.arange(len(tokens)), indices)
        starts_text = np.isin(indices, np.append(-1, read) + 1)
        stats.never("texts that are written before their end is read", (tokens[indices[starts_text]] != end).sum())
        expected = self.examples.stream.read(sample.rows["start"], sample.rows["length"].astype(np.int64))
        stats.never("batches from which the read text cannot be restored", not np.array_equal(tokens[read], expected))
        is_last = np.append(documents[indices][1:] != documents[indices][:-1], True)
        stats.never("batches that do not write the read text", not np.array_equal(labels[~is_last], expected))
        stats.never("written texts without an end", (labels[is_last] != end).sum())


class EncodedPrefixesInspector(PrefixesInspector):
    """Inspects `EncodedPrefixes`."""

    def check_sides(
        self, stats: RunningStatistics, sample: SampledBatch, lengths: np.ndarray, prefixes: np.ndarray
    ) -> None:
        batch, examples, start = sample.batch, self.examples, sample.rows["start"]
        template, outputs = examples.sides.template, cast(Packed, batch.outputs)
        before = without_special_tokens(template, batch.inputs, batch.inputs.tokens)
        after = without_special_tokens(template, outputs, labels_of(batch, "prefix_lm"))
        equal = np.array_equal(before, examples.stream.read(start, prefixes))
        equal = equal and np.array_equal(after, examples.stream.read(start + prefixes, lengths - prefixes))
        stats.never("batches from which the text cannot be restored", not equal)


# Windows of words. The model reads words by their characters, and predicts words in both directions.
# Shape letters: W words of a batch, U distinct words, L symbols of a word, M predicting positions.


# How the special symbols of the character vocabulary are shown.
_SYMBOLS = {TEXT_BEGINS: "<S>", TEXT_ENDS: "</S>", WORD_BEGINS: "<W>", WORD_ENDS: "</W>"}
# Maximum words shown per example.
_MAX_WORDS = 12


class WordInspector(StreamInspector):
    """Inspects `WordWindows`."""

    def main_finding(self, stats: RunningStatistics) -> str:
        return "every word is predicted twice: from the words before it (→), and from the words after it (←)"

    def check(self, stats: RunningStatistics, sample: SampledBatch) -> None:
        inputs = sample.batch.inputs
        tokens, starts = inputs.tokens.numpy(), np.array(inputs.starts)
        first_W, ids_W = self.examples.words(tokens, starts)
        text_count = len(inputs.lengths)
        stats.report("tokens per word", len(tokens), len(first_W))
        stats.report("fraction of words predicted as unknown", (ids_W == self.examples.unknown).sum(), len(first_W))
        reader = self.learner.backbone.reader
        bytes_W = np.add.reduceat(reader.entry_lengths()[tokens], first_W)
        stats.report(
            f"fraction of words truncated to {reader.longest} bytes", (bytes_W > reader.longest).sum(), len(first_W)
        )
        for term, ahead in ((FORWARD, 1), (BACKWARD, -1)):
            indices, labels = indices_of(sample.batch, term).numpy(), labels_of(sample.batch, term).numpy()
            word_M = np.searchsorted(first_W, indices)
            stats.never(
                f"{term} labels that are not the next word in this direction",
                (ids_W[word_M + ahead] != labels).sum(),
            )
            stats.never(
                f"words without a {term} prediction", len(first_W) - text_count - len(np.unique(word_M + ahead))
            )

    def entries(self, sample: SampledBatch) -> Iterator[JsonObject]:
        """Adds a `drawing` of the words of each example: the characters of each word, and the words that the two
        directions predict at this word."""
        inputs = sample.batch.inputs
        tokens, starts = inputs.tokens.numpy(), np.array(inputs.starts)
        first_W, _ = self.examples.words(tokens, starts)
        reader = self.learner.backbone.reader
        symbols_UL, number_W = reader.symbols(inputs, reader.words(inputs))
        symbols_WL = symbols_UL[number_W].tolist()
        targets = {
            term: dict(
                zip(indices_of(sample.batch, term).tolist(), labels_of(sample.batch, term).tolist(), strict=True)
            )
            for term in (FORWARD, BACKWARD)
        }
        for number, entry in enumerate(super().entries(sample)):
            start, length = starts[number], inputs.lengths[number]
            window_words = np.flatnonzero((first_W >= start) & (first_W < start + length))[:_MAX_WORDS]
            entry["drawing"] = [
                [_readable_word(symbols_WL[word]), self._targets_at(targets, position)]
                for word, position in zip(window_words.tolist(), first_W[window_words].tolist(), strict=True)
            ]
            yield entry

    def _targets_at(self, targets: Mapping[str, Mapping[int, int]], position: int) -> str:
        arrows = ((FORWARD, "→"), (BACKWARD, "←"))
        directions = [(arrow, targets[term][position]) for term, arrow in arrows if position in targets[term]]
        return "  ".join(f"{arrow} {self.tokenizer.readable([label])[0]}" for arrow, label in directions)


def _readable_word(symbols: list[int]) -> str:
    texts, run_bytes = [], bytearray()
    for symbol in [*symbols, FILL]:
        if 1 <= symbol <= 256:
            run_bytes.append(symbol - 1)
            continue
        if run_bytes:
            texts.append(" ".join(run_bytes.decode("utf-8", "backslashreplace")))
            run_bytes.clear()
        if symbol in _SYMBOLS:
            texts.append(_SYMBOLS[symbol])
    return " ".join(texts)


# Skip-gram: the words that subsampling drops, the context windows of the retained words, and the negatives.
# Shape letters: V vocabulary, T tokens that are not special, K retained tokens, M pairs.


# The frequencies of negatives are checked in this number of bins, by the rank of the word: 1, 2 to 10, 11 to 100, ...
_DECADES = 8


class WordPairsInspector(StreamInspector):
    """Inspects `WordPairs`."""

    def main_finding(self, stats: RunningStatistics) -> str:
        retained, pairs = stats.measured("retained words"), stats.measured("pairs per retained word")
        if retained is None or pairs is None:
            return ""
        negatives = self.examples.config.negatives
        return (
            f"{retained:.1%} of the words are retained; each distinguishes the {pairs:.1f} words around it from "
            f"{negatives} sampled words"
        )

    @cached_property
    def _decade_V(self) -> np.ndarray:
        counts_V = self.examples.counts.counts
        rank_V = np.empty(len(counts_V), dtype=np.int64)
        rank_V[np.argsort(-counts_V, kind="stable")] = np.arange(len(counts_V))
        return np.searchsorted(10 ** np.arange(_DECADES), rank_V, side="right")

    def check(self, stats: RunningStatistics, sample: SampledBatch) -> None:
        pairs = self.examples.pairs(sample.rows, sample.numbers, sample.epoch)
        tokens, config = pairs.tokens, self.examples.config
        special = np.isin(tokens, sorted(self.tokenizer.special_ids))
        stats.report("unknown words, dropped from the text", special.sum(), len(tokens), is_fraction=True)
        stats.never("retained special tokens", (special & pairs.retained).sum())
        probability_T = self.examples.counts.retention[tokens[~special]]
        stats.fraction("retained words", pairs.retained.sum(), len(probability_T), probability_T)
        frequent = probability_T < 1
        stats.fraction(
            "retained frequent words", pairs.retained[~special][frequent].sum(), frequent.sum(), probability_T[frequent]
        )
        for words in range(1, config.window + 1):
            side = "1 word" if words == 1 else f"{words} words"
            reaches = (pairs.reach == words).sum()
            stats.fraction(f"windows of {side} on either side", reaches, len(pairs.reach), 1 / config.window)
        self._check_pairs(stats, pairs)
        self._check_negatives(stats, pairs.negatives.reshape(-1))

    def _check_pairs(self, stats: RunningStatistics, pairs: SampledPairs) -> None:
        row_K = np.repeat(np.arange(len(pairs.lengths)), pairs.lengths)
        position_K = np.arange(len(row_K)) - np.repeat(np.cumsum(pairs.lengths) - pairs.lengths, pairs.lengths)
        distance_M = np.abs(pairs.center - pairs.context)
        stats.report("pairs per retained word", len(pairs.center), len(row_K))
        stats.never("pairs across documents", (row_K[pairs.center] != row_K[pairs.context]).sum())
        stats.never("pairs of a word with itself", (distance_M == 0).sum())
        stats.never("pairs outside of the windows", (distance_M > pairs.reach[pairs.center]).sum())
        before_K = np.minimum(pairs.reach, position_K)
        after_K = np.minimum(pairs.reach, pairs.lengths[row_K] - 1 - position_K)
        all_pairs = (before_K + after_K).sum()
        stats.exact("pairs, of all pairs in the windows", len(pairs.center), all_pairs, all_pairs)

    def _check_negatives(self, stats: RunningStatistics, negatives: np.ndarray) -> None:
        noise_V, decade_V = self.examples.counts.noise, self._decade_V
        counts = np.bincount(decade_V[negatives], minlength=_DECADES)
        fractions = np.bincount(decade_V, noise_V, _DECADES)
        for decade in range(_DECADES):
            if fractions[decade] > 0:
                ranks = f"rank {10 ** (decade - 1) + 1:,} to {10**decade:,}" if decade else "rank 1"
                stats.fraction(f"negatives of {ranks}", counts[decade], len(negatives), float(fractions[decade]))


class CooccurrencesInspector(Inspector):
    """Inspects `Cooccurrences`."""

    def main_finding(self, stats: RunningStatistics) -> str:
        plan, metadata = self.examples.plan(0), self.examples.metadata()
        return (
            f"{len(plan):,} pairs of words occur together, {metadata['cooccurrences']:,.0f} times in all (a place at "
            f"distance d counts 1 / d)"
        )

    def label(self, value: Any, of_token: bool) -> str:
        log_count, weight = value
        return f"{np.exp(log_count):.2f} times, weight {weight:.3f}"

    def check_plan(self, stats: RunningStatistics) -> None:
        """Checks the sum of the counts, which the lengths of the documents determine, and that the reverse of a pair
        has the same count."""
        rows, window = self.examples.plan(0).rows, self.examples.config.window
        words_D = self.examples.document_lengths()
        distance_W = np.arange(1, window + 1)
        expected = sum(2 / distance * np.maximum(words_D - distance, 0).sum() for distance in distance_W)
        stats.never("sums of counts that differ from the text's", not np.isclose(rows["count"].sum(), expected))
        keys = rows["word"].astype(np.int64) * self.tokenizer.vocab_size + rows["context"]
        stats.never("pairs that occur twice", (np.diff(keys) <= 0).sum())
        reverse = np.lexsort((rows["word"], rows["context"]))
        different = (rows["count"] != rows["count"][reverse]).sum()
        stats.never("counts that differ from those of the reverse pair", different)
        stats.report("pairs with the full weight", (rows["count"] >= self.examples.config.cap).sum(), len(rows), True)
        super().check_plan(stats)

    def check(self, stats: RunningStatistics, sample: SampledBatch) -> None:
        ids_N2, labels_N2 = sample.batch.inputs.tokens.view(-1, 2), labels_of(sample.batch, "glove")
        stats.report("count of a pair", sample.rows["count"].sum(), len(sample.rows))
        planned = np.stack([sample.rows["word"], sample.rows["context"]], 1)
        stats.never("tokens that are not the pair", (ids_N2.numpy() != planned).sum())
        counts_N = np.exp(labels_N2[:, 0].double().numpy()) / self.examples.scale
        stats.never("labels that are not the log of the count", (~np.isclose(counts_N, sample.rows["count"])).sum())
