"""Checks of language modeling examples: windows of running text, prefixes, words, and word pairs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import cast

import numpy as np
from torch import Tensor

from lmtool.config.saved import JsonObject
from lmtool.data.formats import FormatTemplate, ragged_ranges
from lmtool.learners.inspection import Inspector, RunningStatistics, SampledBatch
from lmtool.learners.model import indices_of, labels_of
from lmtool.models.characters import FILL, TEXT_BEGINS, TEXT_ENDS, WORD_BEGINS, WORD_ENDS
from lmtool.objectives.examples.words import BACKWARD, FORWARD, Pairs
from lmtool.types import Packed

# Windows of a document stream: their text, and their coverage of every token.


class StreamInspector(Inspector):
    """Inspects examples that window a `stream`.

    drops_single_tokens: whether a window needs two tokens, so that a single last token of a text is in no window.
    """

    drops_single_tokens = False

    def texts(self, drawn: SampledBatch) -> list[list[str]]:
        """The documents of each window, without separators."""
        return [self._documents(int(row["start"]), int(row["length"])) for row in drawn.rows]

    def _documents(self, start: int, length: int) -> list[str]:
        stream = self.examples.stream
        ids = stream.read(np.array([start]), np.array([length]))
        within = stream.boundaries[(stream.boundaries > start) & (stream.boundaries < start + length)] - start
        return [self.tokenizer.decode(part.tolist()) for part in np.split(ids, within)]

    def check_plan(self, stats: RunningStatistics) -> None:
        """Checks the fraction of text outside of all windows."""
        rows, boundaries = self.examples.plan(0).rows, self.examples.stream.boundaries
        rows = rows[np.argsort(rows["start"], kind="stable")]  # rows of lanes are in the order of steps
        start = rows["start"]
        ends = np.maximum.accumulate(start + rows["length"])
        gaps = np.maximum(np.append(start, boundaries[-1]) - np.append(0, ends), 0)
        left = ragged_ranges(np.append(0, ends), gaps)
        single = np.isin(left + 1, boundaries).sum() if self.drops_single_tokens else 0
        stats.exact("left out share of text", len(left), single, boundaries[-1])
        super().check_plan(stats)


# Next-token prediction: every token but a window's first is predicted by the previous one.


class CausalInspector(StreamInspector):
    """Inspects `CausalWindows`."""

    def fact(self, stats: RunningStatistics) -> str:
        return "every token is predicted from those before it, all of a text in one pass"

    def check(self, stats: RunningStatistics, drawn: SampledBatch) -> None:
        batch = drawn.batch
        at, labels = indices_of(batch, "clm").numpy(), labels_of(batch, "clm").numpy()
        tokens = batch.inputs.tokens.numpy()
        stats.report("predicted share of tokens", len(at), len(tokens))
        stats.never("labels that are not the next token", (tokens[at + 1] != labels).sum())
        stats.never("tokens without a prediction", len(tokens) - len(drawn.rows) - len(np.unique(at)))


# Maximum segments in a diagram.
_SEGMENTS_SHOWN = 24


class LanesInspector(StreamInspector):
    """Inspects `CausalSegments`: each lane is one piece of the text, every token but the first is predicted once, and
    each segment follows the carried state. The first examples are consecutive segments of one lane."""

    def fact(self, stats: RunningStatistics) -> str:
        return (
            f"every token is predicted from those before it; the text is read in {self.examples.lanes} lanes, each "
            "continuing from its state"
        )

    def first(self, n: int) -> np.ndarray:
        return np.flatnonzero(self.examples.plan(0).rows["lane"] == 0)[:n]

    def entries(self, drawn: SampledBatch) -> Iterator[JsonObject]:
        memory = self.learner.backbone.config.memory_states
        for entry, row in zip(super().entries(drawn), drawn.rows, strict=True):
            read = int(row["before"])
            lane = {"number": int(row["lane"]) + 1, "of": self.examples.lanes, "read": read}
            carried = "the state" if memory is None else f"{min(read, memory)} tokens of memory"
            title = f"{lane['number']} of {lane['of']}, {read:,} tokens read before, continues from {carried}"
            drawing = [("lane", f"{title}  {self._drawing(row, memory)}")]
            yield {**entry, "lane": lane, "drawing": drawing}

    def _drawing(self, row: np.void, memory: int | None) -> str:
        """A diagram of a lane up to a segment, in which each letter represents the same number of tokens: read before
        (.), in the memory (m), read now (x). A recurrent state carries all previous tokens in part (~)."""
        before, unit = int(row["before"]), max(1, self.max_length // 4)
        positions = np.arange(0, before + int(row["length"]), unit)[-_SEGMENTS_SHOWN:]
        carried = "~" if memory is None else "m"
        start = 0 if memory is None else max(0, before - memory)
        return "".join("x" if at >= before else carried if at >= start else "." for at in positions)

    def check_plan(self, stats: RunningStatistics) -> None:
        """Checks for text that is skipped or read twice, and that each segment directly follows the previous one."""
        rows, predicted = self.examples.plan(0).rows, len(self.examples.stream) - 1
        ordered = rows[np.argsort(rows["start"], kind="stable")]
        ends = ordered["start"] + ordered["length"]
        gaps = np.append(ordered["start"], predicted) - np.append(0, ends)
        stats.exact("left out share of text", np.abs(gaps).sum(), 0, predicted)
        follows = ordered["lane"][1:] == ordered["lane"][:-1]
        carried = ordered["before"][1:] == np.where(follows, ordered["before"][:-1] + ordered["length"][:-1], 0)
        stats.never("segments that do not follow the one before in their lane", (~carried).sum())
        stats.report("lanes", self.examples.lanes, 0)
        super(StreamInspector, self).check_plan(stats)

    def check(self, stats: RunningStatistics, drawn: SampledBatch) -> None:
        rows, labels = drawn.rows, labels_of(drawn.batch, "clm").numpy()
        stats.report("predicted share of tokens", len(labels), drawn.batch.tokens)
        after = self.examples.stream.read(rows["start"] + 1, rows["length"].astype(np.int64))
        stats.never("labels that are not the next token", (after != labels).sum())
        lanes = drawn.batch.lanes
        read_rows = () if lanes is None else lanes.read
        stats.never("tokens read before of which a batch knows nothing", rows["before"].sum() - sum(read_rows))


# The sides of an encoder-decoder's examples without the format's special tokens.


def within(template: FormatTemplate, packed: Packed, ids: Tensor) -> np.ndarray:
    """The ids of one side without the format's special tokens before and after the text."""
    before, behind = (len(piece) for piece in template.pieces)
    positions = packed.positions.numpy()
    lengths = np.repeat(packed.lengths, packed.lengths)
    return ids.numpy()[(positions >= before) & (positions < lengths - behind)]


class PrefixesInspector(StreamInspector):
    """The base for split texts: the position of the split is uniform, and the text after it is predicted."""

    drops_single_tokens = True

    def fact(self, stats: RunningStatistics) -> str:
        return "a text is split at a random position: the part before it is read, the part after it is predicted"

    def check(self, stats: RunningStatistics, drawn: SampledBatch) -> None:
        lengths = drawn.rows["length"].astype(np.int64)
        prefixes = self.examples.prefixes(drawn.rows, drawn.numbers, drawn.epoch)
        stats.never("splits that leave a side empty", ((prefixes < 1) | (prefixes >= lengths)).sum())
        free = lengths > 2
        fractions = (prefixes[free] - 1) / (lengths[free] - 2)
        variance = float((lengths[free] / (12 * (lengths[free] - 2))).sum())
        stats.mean("place of the split, 0 to 1", fractions.sum(), free.sum(), free.sum() / 2, variance, 0.5)
        self.check_sides(stats, drawn, lengths, prefixes)

    def check_sides(
        self, stats: RunningStatistics, drawn: SampledBatch, lengths: np.ndarray, prefixes: np.ndarray
    ) -> None:
        """Checks both sides of the splits, for texts of `lengths` (N,) with `prefixes` (N,)."""


class MaskedPrefixesInspector(PrefixesInspector):
    """Inspects `MaskedPrefixes`."""

    def check_sides(
        self, stats: RunningStatistics, drawn: SampledBatch, lengths: np.ndarray, prefixes: np.ndarray
    ) -> None:
        batch = drawn.batch
        at, labels = indices_of(batch, "prefix_lm").numpy(), labels_of(batch, "prefix_lm").numpy()
        tokens = batch.inputs.tokens.numpy()
        positions, documents = batch.inputs.positions.numpy()[at], batch.inputs.documents.numpy()[at]
        stats.never("labels that are not the next token", (tokens[at + 1] != labels).sum())
        stats.never("labels within the prefix", (positions + 1 < prefixes[documents]).sum())
        stats.never("tokens behind the split without a prediction", (lengths - prefixes).sum() - len(at))


class EncodedPrefixesInspector(PrefixesInspector):
    """Inspects `EncodedPrefixes`."""

    def check_sides(
        self, stats: RunningStatistics, drawn: SampledBatch, lengths: np.ndarray, prefixes: np.ndarray
    ) -> None:
        batch, examples, start = drawn.batch, self.examples, drawn.rows["start"]
        template, outputs = examples.sides.template, cast(Packed, batch.outputs)
        before = within(template, batch.inputs, batch.inputs.tokens)
        behind = within(template, outputs, labels_of(batch, "prefix_lm"))
        both = np.array_equal(before, examples.stream.read(start, prefixes))
        both = both and np.array_equal(behind, examples.stream.read(start + prefixes, lengths - prefixes))
        stats.never("batches whose sides do not give back the text", not both)


# Words in windows, read by their characters, and predicted in both directions.


_SIGNS = {TEXT_BEGINS: "<S>", TEXT_ENDS: "</S>", WORD_BEGINS: "<W>", WORD_ENDS: "</W>"}
# Words shown per example.
_CHECKED_WORDS = 12


class WordInspector(StreamInspector):
    """Inspects `WordWindows`."""

    def fact(self, stats: RunningStatistics) -> str:
        return "every word is predicted twice: from the words before it (→), and from those after it (←)"

    def check(self, stats: RunningStatistics, drawn: SampledBatch) -> None:
        inputs = drawn.batch.inputs
        tokens, starts = inputs.tokens.numpy(), np.array(inputs.starts)
        first_W, number_W = self.examples.words(tokens, starts)
        unknown = self.examples.unknown
        texts = len(inputs.lengths)
        stats.report("tokens a word", len(tokens), len(first_W))
        stats.report("share of words predicted as unknown", (number_W == unknown).sum(), len(first_W))
        reader = self.learner.backbone.reader
        bytes_W = np.add.reduceat(reader.entry_lengths()[tokens], first_W)
        stats.report(f"share of words cut to {reader.longest} bytes", (bytes_W > reader.longest).sum(), len(first_W))
        for term, ahead in ((FORWARD, 1), (BACKWARD, -1)):
            at, labels = indices_of(drawn.batch, term).numpy(), labels_of(drawn.batch, term).numpy()
            word_M = np.searchsorted(first_W, at)
            stats.never(
                f"{term} labels that are not the next word on its way", (number_W[word_M + ahead] != labels).sum()
            )
            stats.never(f"words that {term} lacks", len(first_W) - texts - len(np.unique(word_M + ahead)))

    def entries(self, drawn: SampledBatch) -> Iterator[JsonObject]:
        """Adds the words of each example: their symbols, and the prediction targets of each direction."""
        inputs = drawn.batch.inputs
        tokens, starts = inputs.tokens.numpy(), np.array(inputs.starts)
        first_W, _ = self.examples.words(tokens, starts)
        reader = self.learner.backbone.reader
        symbols_UL, number_W = reader.symbols(inputs, reader.words(inputs))
        symbols_WL = symbols_UL[number_W].tolist()
        targets = {
            term: dict(zip(indices_of(drawn.batch, term).tolist(), labels_of(drawn.batch, term).tolist(), strict=True))
            for term in (FORWARD, BACKWARD)
        }
        for number, entry in enumerate(super().entries(drawn)):
            start, length = starts[number], inputs.lengths[number]
            window_words = np.flatnonzero((first_W >= start) & (first_W < start + length))[:_CHECKED_WORDS]
            entry["drawing"] = [
                [_word(symbols_WL[word]), self._predicted(targets, at)]
                for word, at in zip(window_words.tolist(), first_W[window_words].tolist(), strict=True)
            ]
            yield entry

    def _predicted(self, targets: Mapping[str, Mapping[int, int]], at: int) -> str:
        """The target of each direction at a position, by its arrow."""
        arrows = ((FORWARD, "→"), (BACKWARD, "←"))
        directions = [(arrow, targets[term][at]) for term, arrow in arrows if at in targets[term]]
        return "  ".join(f"{arrow} {self.tokenizer.readable([label])[0]}" for arrow, label in directions)


def _word(symbols: list[int]) -> str:
    """The symbols of a word as text, without padding."""
    shown, run = [], bytearray()
    for symbol in [*symbols, FILL]:
        if 1 <= symbol <= 256:
            run.append(symbol - 1)
            continue
        if run:
            shown.append(" ".join(run.decode("utf-8", "backslashreplace")))
            run.clear()
        if symbol in _SIGNS:
            shown.append(_SIGNS[symbol])
    return " ".join(shown)


# Words left out by subsampling, context windows of the retained words, and negatives, compared with their definitions.
# Shape letters: V vocabulary, T tokens, K retained tokens, M pairs.


# Rank bins of the distribution of negatives: 1, 2 to 10, 11 to 100, ...
_DECADES = 8


class WordPairsInspector(StreamInspector):
    """Inspects `WordPairs`."""

    def fact(self, stats: RunningStatistics) -> str:
        retained, pairs = stats.measured("words kept"), stats.measured("pairs of a word that is kept")
        if retained is None or pairs is None:
            return ""
        negatives = self.examples.config.negatives
        return (
            f"{retained:.1%} of the words are retained; each distinguishes the {pairs:.1f} words around it from "
            f"{negatives} sampled words"
        )

    @cached_property
    def _ranks(self) -> np.ndarray:
        """(V,) the decade of each word's rank by count, in descending order."""
        counts_V = self.examples.counts.counts
        rank_V = np.empty(len(counts_V), dtype=np.int64)
        rank_V[np.argsort(-counts_V, kind="stable")] = np.arange(len(counts_V))
        return np.searchsorted(10 ** np.arange(_DECADES), rank_V, side="right")

    def check(self, stats: RunningStatistics, drawn: SampledBatch) -> None:
        pairs = self.examples.pairs(drawn.rows, drawn.numbers, drawn.epoch)
        tokens, config = pairs.tokens, self.examples.config
        special = np.isin(tokens, sorted(self.tokenizer.special_ids))
        stats.report("unknown words, left out of the text", special.sum(), len(tokens), is_fraction=True)
        stats.never("special tokens kept", (special & pairs.retained).sum())
        chance_T = self.examples.counts.retention[tokens[~special]]
        stats.fraction("words kept", pairs.retained.sum(), len(chance_T), chance_T)
        frequent = chance_T < 1
        stats.fraction(
            "frequent words kept", pairs.retained[~special][frequent].sum(), frequent.sum(), chance_T[frequent]
        )
        for words in range(1, config.window + 1):
            side = "1 word" if words == 1 else f"{words} words"
            reaches = (pairs.reach == words).sum()
            stats.fraction(f"windows of {side} on either side", reaches, len(pairs.reach), 1 / config.window)
        self._check_pairs(stats, pairs)
        self._check_negatives(stats, pairs.negatives.reshape(-1))

    def _check_pairs(self, stats: RunningStatistics, pairs: Pairs) -> None:
        """Checks that pairs are exactly the words within reach."""
        row_K = np.repeat(np.arange(len(pairs.lengths)), pairs.lengths)
        position_K = np.arange(len(row_K)) - np.repeat(np.cumsum(pairs.lengths) - pairs.lengths, pairs.lengths)
        distance_M = np.abs(pairs.center - pairs.context)
        stats.report("pairs of a word that is kept", len(pairs.center), len(row_K))
        stats.never("pairs across documents", (row_K[pairs.center] != row_K[pairs.context]).sum())
        stats.never("pairs of a word with itself", (distance_M == 0).sum())
        stats.never("pairs out of reach", (distance_M > pairs.reach[pairs.center]).sum())
        before_K = np.minimum(pairs.reach, position_K)
        behind_K = np.minimum(pairs.reach, pairs.lengths[row_K] - 1 - position_K)
        stats.exact("pairs, of all within reach", len(pairs.center), *[(before_K + behind_K).sum()] * 2)

    def _check_negatives(self, stats: RunningStatistics, drawn: np.ndarray) -> None:
        noise_V, ranks_V = self.examples.counts.noise, self._ranks
        hits, fractions = np.bincount(ranks_V[drawn], minlength=_DECADES), np.bincount(ranks_V, noise_V, _DECADES)
        for decade in range(_DECADES):
            if fractions[decade] > 0:
                ranks = f"rank {10 ** (decade - 1) + 1:,} to {10**decade:,}" if decade else "rank 1"
                stats.fraction(f"negatives of {ranks}", hits[decade], len(drawn), float(fractions[decade]))
