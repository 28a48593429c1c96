"""Checks of masked spans and of permutations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

import numpy as np

from lmtool.learners.inspection import Inspector, RunningStatistics, SampledBatch
from lmtool.objectives.checks.language import StreamInspector
from lmtool.objectives.checks.masking import (
    MaskedPairsInspector,
    MaskedWindowsInspector,
    MaskingInspector,
    Masks,
    check_branches,
    check_budget,
)
from lmtool.objectives.corruption.masking import MaskedSpans, budget, length_probabilities
from lmtool.objectives.corruption.permutation import Permuted, ngram_probabilities

# Masked spans: their sampled lengths, their replacements, and their first tokens.
# Shape letters: M masked positions, D sampled lengths.


class SpanInspector(MaskingInspector):
    """Inspects examples with masks over runs of words."""

    def fact(self, stats: RunningStatistics) -> str:
        mean = stats.measured("words of a span as drawn")
        return super().fact(stats) + ("" if mean is None else f"; in spans of {mean:.1f} words on average")

    def check_masks(self, stats: RunningStatistics, masks: Masks) -> None:
        spans = cast(MaskedSpans, masks.masked)
        self._check_lengths(stats, spans.drawn)
        self._check_branches(stats, spans, masks.shown[spans.at])
        starts = self.vocabulary.starts_word[spans.labels[np.searchsorted(spans.at, spans.spans[:, 0])]]
        # A window may begin within a word, and so may a span at its start.
        within = ~starts & masks.text[spans.spans[:, 0] - 1]
        stats.none("spans that begin within a word", within.sum())
        expected = np.ceil(masks.eligible * self.config.probability - 1e-9)
        check_budget(stats, masks.selected, expected, masks.eligible)

    def _check_lengths(self, stats: RunningStatistics, sampled_D: np.ndarray) -> None:
        """Checks that the (D,) sampled lengths follow the configured distribution."""
        fractions = length_probabilities(self.config)
        lengths, count = np.arange(1, len(fractions) + 1), len(sampled_D)
        mean = float(fractions @ lengths)
        variance = float(fractions @ lengths**2 - mean**2)
        stats.mean("words of a span as drawn", sampled_D.sum(), count, count * mean, count * variance, len(fractions))
        for length, share in zip(lengths, fractions, strict=True):
            stats.share(f"spans of {length} as drawn", (sampled_D == length).sum(), count, float(share))

    def _check_branches(self, stats: RunningStatistics, spans: MaskedSpans, visible_M: np.ndarray) -> None:
        """Checks the replacements, which are chosen per token or per span."""
        config, mask = self.config, self.vocabulary.mask
        regular = int((~self.vocabulary.special).sum())
        if config.replace == "token":
            check_branches(stats, config.mask, config.random, visible_M, spans.labels, regular, mask)
            return
        count = len(spans.spans)
        sizes = np.bincount(spans.span_of, minlength=count)
        hidden = np.bincount(spans.span_of, visible_M == mask, count)
        same = np.bincount(spans.span_of, visible_M == spans.labels, count)
        stats.none("spans partly [MASK]", ((hidden > 0) & (hidden < sizes)).sum())
        stats.share("spans that are [MASK]", (hidden > 0).sum(), count, config.mask)
        chances = 1 - config.mask - config.random + config.random * float(regular) ** -sizes.astype(float)
        stats.share("spans that are unchanged", ((hidden == 0) & (same == sizes)).sum(), count, chances)


class SpanWindowsInspector(SpanInspector, MaskedWindowsInspector):
    """Inspects `MaskedWindows`."""


class SpanPairsInspector(SpanInspector, MaskedPairsInspector):
    """Inspects `MaskedPairs`."""


# Permutations: how much is predicted, in n-grams of which length, in which order, and what each token attends to.
# Shape letters: N examples of a batch, T their tokens, M predicted positions, L tokens of a diagram.


# Maximum tokens of an attention diagram.
_DRAWN = 32


class PermutationInspector(Inspector):
    """Inspects examples with permutation ranks."""

    def fact(self, stats: RunningStatistics) -> str:
        words = super().fact(stats)
        return f"{words}, each from all that are not, and from those before it in a random order" if words else ""

    def entries(self, drawn: SampledBatch) -> Iterator[dict[str, Any]]:
        """Adds `drawing`, the order and both streams' attention masks for the first tokens."""
        memory = self.learner.backbone.config.remembers
        retained = f"up to {memory} tokens in front, of those that windows before reused: seen by all"
        for entry in super().entries(drawn):
            side = entry["input"]
            predicted_positions = {target["position"] for target in entry["targets"]["plm"]}
            drawing = draw_streams(side["pieces"][:_DRAWN], side["rank"][:_DRAWN], predicted_positions)
            yield {**entry, "drawing": [*([("memory", retained)] if memory else []), *drawing]}

    def check_permutations(self, stats: RunningStatistics, drawn: SampledBatch) -> None:
        """Checks the properties that the objective guarantees."""
        config, vocabulary = self.examples.config, self.examples.masks.vocabulary
        whole = self.examples.assemble(drawn.rows)
        permuted: Permuted = self.examples.masked(whole, drawn.numbers, drawn.epoch)
        at, inputs = permuted.at, drawn.batch.inputs
        documents = np.repeat(np.arange(len(whole.lengths)), whole.lengths)
        text = ~vocabulary.special[whole.tokens]
        block = 2 * documents + permuted.blocks
        eligible, selected = (np.bincount(block[places], minlength=2 * len(drawn.rows)) for places in (text, at))
        check_budget(stats, selected, budget(eligible, 1 / config.context), eligible)
        stats.none("special tokens predicted", (~text[at]).sum())
        stats.none("tokens that are not the text", (inputs.tokens.numpy() != whole.tokens).sum())
        self._check_ngrams(stats, permuted)
        starts = vocabulary.starts_word[whole.tokens[permuted.starts]]
        opening = (
            (permuted.starts == 0) | ~text[permuted.starts - 1] | (np.diff(block, prepend=-1)[permuted.starts] != 0)
        )
        stats.none("n-grams that begin within a word", (~starts & ~opening).sum())
        _check_order(stats, permuted, inputs.columns["rank"].numpy(), ~text, block)

    def _check_ngrams(self, stats: RunningStatistics, permuted: Permuted) -> None:
        drawn, fractions = permuted.drawn, ngram_probabilities(self.examples.config.longest)
        lengths, count = np.arange(1, len(fractions) + 1), len(drawn)
        mean = float(fractions @ lengths)
        variance = float(fractions @ lengths**2 - mean**2)
        # Lengths are sampled until their sum suffices: each is compared with its conditional distribution given the
        # previous ones.
        stats.mean("tokens of an n-gram as drawn", drawn.sum(), count, count * mean, count * variance, len(fractions))
        for length, share in zip(lengths, fractions, strict=True):
            stats.share(f"n-grams of {length} as drawn", (drawn == length).sum(), count, float(share))
        left = "predicted tokens that make up for what n-grams left"
        stats.note(left, permuted.single.sum(), len(permuted.at), is_share=True)


class PermutedWindowsInspector(PermutationInspector, StreamInspector):
    """Inspects windows of text."""

    def check(self, stats: RunningStatistics, drawn: SampledBatch) -> None:
        self.check_permutations(stats, drawn)


class PermutedPairsInspector(PermutationInspector, MaskedPairsInspector):
    """Inspects segment pairs without a loss over them."""

    def check(self, stats: RunningStatistics, drawn: SampledBatch) -> None:
        self.check_permutations(stats, drawn)
        self.check_pairs(stats, drawn)


def _check_order(
    stats: RunningStatistics, permuted: Permuted, ranks_T: np.ndarray, special_T: np.ndarray, block_T: np.ndarray
) -> None:
    """Checks for uniform orders: of two neighbors in a block, either comes first in half of the cases (disjoint pairs
    are independent). Unpredicted tokens precede all predicted ones, and a first block precedes a second."""
    ordered = special_T.copy()
    ordered[permuted.at] = True
    places = np.flatnonzero(ordered)
    number = np.arange(len(places)) - np.searchsorted(block_T[places], block_T[places])
    first = np.flatnonzero((number[:-1] % 2 == 0) & (block_T[places[:-1]] == block_T[places[1:]]))
    earlier = ranks_T[places[first]] < ranks_T[places[first + 1]]
    stats.share("neighbours in the order of the text", earlier.sum(), len(first), 0.5)
    # The rank of the first one is uniform too.
    sizes = np.bincount(block_T[places])[block_T[places]]
    leading = np.flatnonzero((number == 0) & (sizes > 1))
    before = (
        ranks_T[places] - np.minimum.reduceat(ranks_T[places], np.flatnonzero(number == 0))[np.cumsum(number == 0) - 1]
    )
    others_count = sizes[leading] - 1
    share, spread = before[leading] / others_count, (others_count + 2) / (12 * others_count)
    stats.mean("place of the first one in the order", share.sum(), len(share), len(share) / 2, spread.sum(), 0.5)
    last_B = np.full(int(block_T.max(initial=0)) + 1, -1)
    np.maximum.at(last_B, block_T[~ordered], ranks_T[~ordered])
    stats.none("ordered tokens not behind what is not predicted", (ranks_T[places] <= last_B[block_T[places]]).sum())
    both = np.stack([2 * (block_T[places] // 2), ranks_T[places]])
    stats.none("ranks given twice", len(places) - np.unique(both, axis=1).shape[1])
    seconds = (np.diff(block_T, prepend=block_T[:1]) == 1) & (block_T % 2 == 1)
    highest = np.full(len(last_B) + 1, -1)
    np.maximum.at(highest, block_T, ranks_T)
    lowest = np.full(len(last_B) + 1, np.iinfo(np.int64).max)
    np.minimum.at(lowest, block_T, ranks_T)
    second_blocks = block_T[seconds]
    stats.none("second parts not behind the first", (lowest[second_blocks] <= highest[second_blocks - 1]).sum())


def draw_streams(pieces: list[str], ranks: list[int], predicted_positions: set[int]) -> list[tuple[str, str]]:
    """Diagram lines (piece, text): the order of the tokens, and what each attends to (`x`) in the content stream and in
    the query stream. asked: the predicted positions, which alone have a query."""
    order, count = np.array(ranks), len(pieces)
    content, query = order[None, :] <= order[:, None], order[None, :] < order[:, None]

    def rows(sees: np.ndarray, positions: Iterable[int]) -> Iterator[tuple[str, str]]:
        for row in positions:
            yield pieces[row], f"{order[row]:03d} " + "".join("x" if seen else "." for seen in sees[row])

    predicted = [position for position in range(count) if position in predicted_positions]
    sequence = sorted(predicted, key=lambda position: int(order[position]))
    return [
        ("order", " ".join(pieces[position] for position in sequence) or "nothing of these is predicted"),
        ("content stream", "rank, and what is seen"),
        *rows(content, range(count)),
        ("query stream", "of what is predicted"),
        *rows(query, predicted),
    ]
