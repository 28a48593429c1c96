"""Checks of masked spans and of permutations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

import numpy as np

from lmtool.config.saved import JsonObject
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
from lmtool.objectives.configs import SpanConfig
from lmtool.objectives.corruption.masking import MaskedSpans, budget, length_probabilities
from lmtool.objectives.corruption.permutation import Permuted, ngram_probabilities

# Masked spans: their sampled lengths, their replacements, and their first tokens.
# Shape letters: M masked positions, D sampled lengths.


class SpanInspector(MaskingInspector):
    """Inspects examples with masks over runs of words."""

    config: SpanConfig

    def fact(self, stats: RunningStatistics) -> str:
        mean = stats.measured("words of a span, as sampled")
        return super().fact(stats) + ("" if mean is None else f"; in spans of {mean:.1f} words on average")

    def check_masks(self, stats: RunningStatistics, masks: Masks) -> None:
        spans = cast(MaskedSpans, masks.masked)
        check_lengths(stats, "words of a span", "spans", spans.sampled_lengths, length_probabilities(self.config))
        self._check_branches(stats, spans, masks.shown[spans.at])
        starts = self.vocabulary.starts_word[spans.labels[np.searchsorted(spans.at, spans.spans[:, 0])]]
        # A window may begin within a word, and so may a span at its start.
        within = ~starts & masks.text[spans.spans[:, 0] - 1]
        stats.never("spans that begin within a word", within.sum())
        expected = np.ceil(masks.eligible * self.config.probability - 1e-9)
        check_budget(stats, masks.selected, expected, masks.eligible)

    def _check_branches(self, stats: RunningStatistics, spans: MaskedSpans, visible_M: np.ndarray) -> None:
        """Checks the replacements, which are chosen per token or per span."""
        config, mask = self.config, self.vocabulary.mask
        if config.replace == "token":
            check_branches(stats, config, self.vocabulary, visible_M, spans.labels)
            return
        count, regular = len(spans.spans), len(self.vocabulary.regular)
        sizes = np.bincount(spans.span_of, minlength=count)
        hidden = np.bincount(spans.span_of, visible_M == mask, count)
        same = np.bincount(spans.span_of, visible_M == spans.labels, count)
        stats.never("spans partly replaced by [MASK]", ((hidden > 0) & (hidden < sizes)).sum())
        stats.fraction("spans replaced by [MASK]", (hidden > 0).sum(), count, config.mask)
        chances = 1 - config.mask - config.random + config.random * float(regular) ** -sizes.astype(float)
        stats.fraction("unchanged spans", ((hidden == 0) & (same == sizes)).sum(), count, chances)


def check_lengths(
    stats: RunningStatistics, length_name: str, plural: str, sampled_D: np.ndarray, probabilities_K: np.ndarray
) -> None:
    """Checks that the (D,) sampled lengths follow the (K,) probabilities of the lengths from 1.

    Lengths are sampled until their sum suffices, so their number depends on them: each is compared with its conditional
    distribution given the previous ones.
    """
    lengths, count = np.arange(1, len(probabilities_K) + 1), len(sampled_D)
    mean = float(probabilities_K @ lengths)
    variance = float(probabilities_K @ lengths**2 - mean**2)
    total, bound = sampled_D.sum(), len(lengths)
    stats.mean(f"{length_name}, as sampled", total, count, count * mean, count * variance, bound)
    for length, probability in zip(lengths, probabilities_K, strict=True):
        stats.fraction(
            f"{plural} of length {length}, as sampled", (sampled_D == length).sum(), count, float(probability)
        )


class SpanWindowsInspector(SpanInspector, MaskedWindowsInspector):
    """Inspects `MaskedWindows`."""


class SpanPairsInspector(SpanInspector, MaskedPairsInspector):
    """Inspects `MaskedPairs`."""


# Permutations: the number of predicted tokens, the lengths of their n-grams, their order, and the attention masks.
# Shape letters: N examples of a batch, T their tokens, M predicted positions, L tokens of a diagram.


# Maximum tokens of an attention diagram.
_DRAWN = 32


class PermutationInspector(Inspector):
    """Inspects examples with permutation ranks."""

    def fact(self, stats: RunningStatistics) -> str:
        words = super().fact(stats)
        return (
            f"{words}, each from all unpredicted tokens and the predicted ones before it in a random order"
            if words
            else ""
        )

    def entries(self, drawn: SampledBatch) -> Iterator[JsonObject]:
        """Adds `drawing`, the order and both streams' attention masks for the first tokens."""
        memory = self.learner.backbone.config.remembers
        retained = f"up to {memory} reused tokens of the previous windows, to which all tokens attend"
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
        eligible, selected = (np.bincount(block[tokens], minlength=2 * len(drawn.rows)) for tokens in (text, at))
        check_budget(stats, selected, budget(eligible, 1 / config.context), eligible)
        stats.never("special tokens predicted", (~text[at]).sum())
        stats.never("input tokens that differ from the original text", (inputs.tokens.numpy() != whole.tokens).sum())
        probabilities_K = ngram_probabilities(config.longest)
        check_lengths(stats, "tokens of an n-gram", "n-grams", permuted.sampled_lengths, probabilities_K)
        left = "predicted single tokens, added to reach the number"
        stats.report(left, permuted.single.sum(), len(permuted.at), is_fraction=True)
        starts = vocabulary.starts_word[whole.tokens[permuted.starts]]
        opening = (
            (permuted.starts == 0) | ~text[permuted.starts - 1] | (np.diff(block, prepend=-1)[permuted.starts] != 0)
        )
        stats.never("n-grams that begin within a word", (~starts & ~opening).sum())
        _check_order(stats, permuted, inputs.columns["rank"].numpy(), ~text, block)


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
    """Checks for uniform orders: either of two neighbors in a block comes first in half of the cases (disjoint pairs
    are independent). Unpredicted tokens precede all predicted ones, and a first block precedes a second."""
    ordered = special_T.copy()
    ordered[permuted.at] = True
    indices = np.flatnonzero(ordered)
    number = np.arange(len(indices)) - np.searchsorted(block_T[indices], block_T[indices])
    first = np.flatnonzero((number[:-1] % 2 == 0) & (block_T[indices[:-1]] == block_T[indices[1:]]))
    earlier = ranks_T[indices[first]] < ranks_T[indices[first + 1]]
    stats.fraction("neighboring tokens in the order of the text", earlier.sum(), len(first), 0.5)
    # The rank of the first one is uniform too.
    sizes = np.bincount(block_T[indices])[block_T[indices]]
    leading = np.flatnonzero((number == 0) & (sizes > 1))
    before = (
        ranks_T[indices]
        - np.minimum.reduceat(ranks_T[indices], np.flatnonzero(number == 0))[np.cumsum(number == 0) - 1]
    )
    others = sizes[leading] - 1
    rank, variance = before[leading] / others, (others + 2) / (12 * others)
    stats.mean(
        "position of a block's first token in the order, 0 to 1",
        rank.sum(),
        len(rank),
        len(rank) / 2,
        variance.sum(),
        0.5,
    )
    last_B = np.full(int(block_T.max(initial=0)) + 1, -1)
    np.maximum.at(last_B, block_T[~ordered], ranks_T[~ordered])
    stats.never(
        "permuted tokens that precede an unpredicted token", (ranks_T[indices] <= last_B[block_T[indices]]).sum()
    )
    both = np.stack([2 * (block_T[indices] // 2), ranks_T[indices]])
    stats.never("ranks that occur twice", len(indices) - np.unique(both, axis=1).shape[1])
    seconds = (np.diff(block_T, prepend=block_T[:1]) == 1) & (block_T % 2 == 1)
    highest = np.full(len(last_B) + 1, -1)
    np.maximum.at(highest, block_T, ranks_T)
    lowest = np.full(len(last_B) + 1, np.iinfo(np.int64).max)
    np.minimum.at(lowest, block_T, ranks_T)
    second_blocks = block_T[seconds]
    stats.never(
        "second parts that do not come after the first part",
        (lowest[second_blocks] <= highest[second_blocks - 1]).sum(),
    )


def draw_streams(pieces: list[str], ranks: list[int], predicted_positions: set[int]) -> list[tuple[str, str]]:
    """Diagram lines (piece, text): the order of the tokens, and the tokens (`x`) to which each attends in the content
    stream and in the query stream. Only predicted positions have a query."""
    order, count = np.array(ranks), len(pieces)
    content, query = order[None, :] <= order[:, None], order[None, :] < order[:, None]

    def rows(attended_LL: np.ndarray, positions: Iterable[int]) -> Iterator[tuple[str, str]]:
        for row in positions:
            yield pieces[row], f"{order[row]:03d} " + "".join("x" if attended else "." for attended in attended_LL[row])

    predicted = [position for position in range(count) if position in predicted_positions]
    sequence = sorted(predicted, key=lambda position: int(order[position]))
    return [
        ("order", " ".join(pieces[position] for position in sequence) or "none of these is predicted"),
        ("content stream", "rank, and tokens attended to"),
        *rows(content, range(count)),
        ("query stream", "the same, of predicted tokens"),
        *rows(query, predicted),
    ]
