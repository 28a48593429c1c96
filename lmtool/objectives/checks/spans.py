"""Checks of examples with masked spans, and of permuted examples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

import numpy as np

from lmtool.config.base import JsonObject
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
from lmtool.objectives.corruption.permutation import PermutedTexts, ngram_probabilities

# Masked spans: the sampled lengths of spans, what replaces spans, and where spans begin.
# Shape letters: M masked positions, D sampled lengths, K possible lengths.


class SpanInspector(MaskingInspector):
    """Inspects examples with masks over spans of words."""

    config: SpanConfig

    def main_finding(self, stats: RunningStatistics) -> str:
        mean = stats.measured("words of a span, as sampled")
        return super().main_finding(stats) + ("" if mean is None else f"; in spans of {mean:.1f} words on average")

    def check_masks(self, stats: RunningStatistics, masks: Masks) -> None:
        spans = cast(MaskedSpans, masks.masked)
        check_lengths(stats, "words of a span", "spans", spans.sampled_lengths, length_probabilities(self.config))
        self._check_branches(stats, spans, masks.inputs[spans.at])
        first_tokens = spans.labels[np.searchsorted(spans.at, spans.spans[:, 0])]
        starts_word = self.vocabulary.starts_word[first_tokens]
        # A window may begin within a word. If so, a span at the start of the window begins within the word too.
        within_word = ~starts_word & masks.is_text_T[spans.spans[:, 0] - 1]
        stats.never("spans that begin within a word", within_word.sum())
        budget_N = np.ceil(masks.eligible_N * self.config.probability - 1e-9)
        check_budget(stats, masks.selected_N, budget_N, masks.eligible_N)

    def _check_branches(self, stats: RunningStatistics, spans: MaskedSpans, visible_M: np.ndarray) -> None:
        """Checks the replacements, which are chosen per token or per span. visible_M: the input token at each masked
        position."""
        config, mask = self.config, self.vocabulary.mask
        if config.replace == "token":
            check_branches(stats, config, self.vocabulary, visible_M, spans.labels)
            return
        count, regular_count = len(spans.spans), len(self.vocabulary.regular)
        sizes = np.bincount(spans.span_of, minlength=count)
        masked = np.bincount(spans.span_of, visible_M == mask, count)
        unchanged = np.bincount(spans.span_of, visible_M == spans.labels, count)
        stats.never("spans partly replaced by [MASK]", ((masked > 0) & (masked < sizes)).sum())
        stats.fraction("spans replaced by [MASK]", (masked > 0).sum(), count, config.mask)
        # A span is unchanged by decision, or if all of its random tokens happen to equal the original tokens.
        probabilities = 1 - config.mask - config.random + config.random * float(regular_count) ** -sizes.astype(float)
        stats.fraction("unchanged spans", ((masked == 0) & (unchanged == sizes)).sum(), count, probabilities)


def check_lengths(
    stats: RunningStatistics, length_name: str, plural: str, sampled_D: np.ndarray, probabilities_K: np.ndarray
) -> None:
    """Checks that sampled lengths have the defined distribution.

    Lengths are sampled until their sum is large enough, so the number of lengths depends on the lengths. The intervals
    remain valid, because each length has the same distribution given the previous lengths.

    Args:
        stats: The statistics to add to.
        length_name: The name of the mean length, such as "words of a span".
        plural: The name of the items that have the lengths, such as "spans".
        sampled_D: The sampled lengths.
        probabilities_K: The probability of each length, from length 1.
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
    """Inspects `MaskedWindows` with masked spans."""


class SpanPairsInspector(SpanInspector, MaskedPairsInspector):
    """Inspects `MaskedPairs` with masked spans."""


# Permuted examples: the number of predicted tokens, the lengths of n-grams, the random order, and attention masks.
# Shape letters: N examples of a batch, T tokens of a batch, B blocks of a batch, M predicted positions, L tokens of a
# diagram, K possible lengths.


# Maximum tokens in an attention diagram.
_DIAGRAM_TOKENS = 32


class PermutationInspector(Inspector):
    """Inspects permuted examples, in which the column `rank` is the position of each token in a random order."""

    def main_finding(self, stats: RunningStatistics) -> str:
        words = super().main_finding(stats)
        return (
            f"{words}, each from all unpredicted tokens and from the predicted tokens before it in a random order"
            if words
            else ""
        )

    def entries(self, sample: SampledBatch) -> Iterator[JsonObject]:
        """Adds a `drawing` of the first tokens: the random order, and the attention masks of both streams."""
        memory = self.learner.backbone.config.max_memory_length
        memory_line = f"up to {memory} reused tokens of the previous windows, to which all tokens attend"
        for entry in super().entries(sample):
            side = entry["input"]
            predicted_positions = {target["position"] for target in entry["targets"]["plm"]}
            drawing = draw_streams(
                side["pieces"][:_DIAGRAM_TOKENS], side["rank"][:_DIAGRAM_TOKENS], predicted_positions
            )
            yield {**entry, "drawing": [*([("memory", memory_line)] if memory else []), *drawing]}

    def check_permutations(self, stats: RunningStatistics, sample: SampledBatch) -> None:
        """Checks the predicted tokens, the n-grams and the random order."""
        config, vocabulary = self.examples.config, self.examples.masks.vocabulary
        original = self.examples.assemble(sample.rows)
        permuted: PermutedTexts = self.examples.mask(original, sample.numbers, sample.epoch)
        indices, inputs = permuted.at, sample.batch.inputs
        documents = np.repeat(np.arange(len(original.lengths)), original.lengths)
        is_text = ~vocabulary.special[original.tokens]
        # The index of each token's block: 2 i for the first block of example i, 2 i + 1 for the second block.
        block = 2 * documents + permuted.blocks
        eligible, selected = (
            np.bincount(block[tokens], minlength=2 * len(sample.rows)) for tokens in (is_text, indices)
        )
        check_budget(stats, selected, budget(eligible, 1 / config.context), eligible)
        stats.never("special tokens predicted", (~is_text[indices]).sum())
        stats.never("input tokens that differ from the original text", (inputs.tokens.numpy() != original.tokens).sum())
        probabilities_K = ngram_probabilities(config.longest)
        check_lengths(stats, "tokens of an n-gram", "n-grams", permuted.sampled_lengths, probabilities_K)
        single_tokens = "predicted single tokens, added to reach the number"
        stats.report(single_tokens, permuted.single.sum(), len(permuted.at), is_fraction=True)
        starts_word = vocabulary.starts_word[original.tokens[permuted.starts]]
        starts_run = (
            (permuted.starts == 0) | ~is_text[permuted.starts - 1] | (np.diff(block, prepend=-1)[permuted.starts] != 0)
        )
        stats.never("n-grams that begin within a word", (~starts_word & ~starts_run).sum())
        _check_order(stats, permuted, inputs.columns["rank"].numpy(), ~is_text, block)


class PermutedWindowsInspector(PermutationInspector, StreamInspector):
    """Inspects permuted windows of text."""

    def check(self, stats: RunningStatistics, sample: SampledBatch) -> None:
        self.check_permutations(stats, sample)


class PermutedPairsInspector(PermutationInspector, MaskedPairsInspector):
    """Inspects permuted segment pairs, over which there is no loss."""

    def check(self, stats: RunningStatistics, sample: SampledBatch) -> None:
        self.check_permutations(stats, sample)
        self.check_pairs(stats, sample)


def _check_order(
    stats: RunningStatistics, permuted: PermutedTexts, ranks_T: np.ndarray, special_T: np.ndarray, block_T: np.ndarray
) -> None:
    """Checks the random order of the permuted tokens, which are the predicted tokens and the special tokens.

    In a uniformly random order, each of two neighboring tokens comes first in half of the cases. Only disjoint pairs of
    neighbors are counted, because they are independent. Unpredicted tokens must precede all permuted tokens of their
    block, and the first block of an example must precede the second. stats: the statistics to add to. permuted: the
    permutation of the batch. ranks_T: the rank of each token in the batch. special_T: whether a token is a special
    token. block_T: the index of each token's block.
    """
    is_permuted = special_T.copy()
    is_permuted[permuted.at] = True
    indices = np.flatnonzero(is_permuted)
    number_in_block = np.arange(len(indices)) - np.searchsorted(block_T[indices], block_T[indices])
    first = np.flatnonzero((number_in_block[:-1] % 2 == 0) & (block_T[indices[:-1]] == block_T[indices[1:]]))
    earlier = ranks_T[indices[first]] < ranks_T[indices[first + 1]]
    stats.fraction("neighboring tokens in the order of the text", earlier.sum(), len(first), 0.5)
    # The rank of the first permuted token of a block is uniformly distributed over the block's permuted tokens.
    sizes = np.bincount(block_T[indices])[block_T[indices]]
    starts_block = number_in_block == 0
    leading = np.flatnonzero(starts_block & (sizes > 1))
    lowest_ranks = np.minimum.reduceat(ranks_T[indices], np.flatnonzero(starts_block))
    ranks_in_block = ranks_T[indices] - lowest_ranks[np.cumsum(starts_block) - 1]
    maximum = sizes[leading] - 1
    position, variance = ranks_in_block[leading] / maximum, (maximum + 2) / (12 * maximum)
    stats.mean(
        "position of a block's first token in the order, 0 to 1",
        position.sum(),
        len(position),
        len(position) / 2,
        variance.sum(),
        0.5,
    )
    highest_unpredicted_B = np.full(int(block_T.max(initial=0)) + 1, -1)
    np.maximum.at(highest_unpredicted_B, block_T[~is_permuted], ranks_T[~is_permuted])
    stats.never(
        "permuted tokens that precede an unpredicted token",
        (ranks_T[indices] <= highest_unpredicted_B[block_T[indices]]).sum(),
    )
    examples_and_ranks = np.stack([block_T[indices] // 2, ranks_T[indices]])
    stats.never("ranks that occur twice", len(indices) - np.unique(examples_and_ranks, axis=1).shape[1])
    starts_second_T = (np.diff(block_T, prepend=block_T[:1]) == 1) & (block_T % 2 == 1)
    highest_B = np.full(len(highest_unpredicted_B) + 1, -1)
    np.maximum.at(highest_B, block_T, ranks_T)
    lowest_B = np.full(len(highest_unpredicted_B) + 1, np.iinfo(np.int64).max)
    np.minimum.at(lowest_B, block_T, ranks_T)
    second_blocks = block_T[starts_second_T]
    stats.never(
        "second parts that do not come after the first part",
        (lowest_B[second_blocks] <= highest_B[second_blocks - 1]).sum(),
    )


def draw_streams(pieces: list[str], ranks: list[int], predicted_positions: set[int]) -> list[tuple[str, str]]:
    """Returns the lines of a diagram: the order of the predicted tokens, and for each token of the content stream and
    of the query stream the tokens to which it attends (`x`). Only predicted tokens are in the query stream.

    Args:
        pieces: The tokens as text.
        ranks: The rank of each token.
        predicted_positions: The positions of the predicted tokens.

    Returns:
        For each line, its heading (usually a token) and its text.
    """
    rank_L, count = np.array(ranks), len(pieces)
    content_LL, query_LL = rank_L[None, :] <= rank_L[:, None], rank_L[None, :] < rank_L[:, None]

    def rows(attended_LL: np.ndarray, positions: Iterable[int]) -> Iterator[tuple[str, str]]:
        for row in positions:
            yield (
                pieces[row],
                f"{rank_L[row]:03d} " + "".join("x" if attended else "." for attended in attended_LL[row]),
            )

    predicted = [position for position in range(count) if position in predicted_positions]
    in_order = sorted(predicted, key=lambda position: int(rank_L[position]))
    return [
        ("order", " ".join(pieces[position] for position in in_order) or "none of these tokens is predicted"),
        ("content stream", "rank, and tokens attended to"),
        *rows(content_LL, range(count)),
        ("query stream", "the same, for predicted tokens"),
        *rows(query_LL, predicted),
    ]
