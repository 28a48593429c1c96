"""Checks of denoising examples: BART's noises and T5's span corruption.

The checks repeat the corruption of the inspected examples, and compare the texts before and after it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np

from lmtool.data.formats import ragged_ranges
from lmtool.learners.inspection import RunningStatistics, SampledBatch
from lmtool.learners.model import labels_of
from lmtool.objectives.checks.language import StreamInspector, without_special_tokens
from lmtool.objectives.corruption.masking import PackedTexts, budget
from lmtool.objectives.corruption.noises import (
    CorruptedTexts,
    infill,
    mask_each,
    noise_counts,
    poisson_probabilities,
    restore,
)
from lmtool.objectives.examples.denoising import NoisyWindows
from lmtool.types import Packed


class NoisyInspector(StreamInspector):
    """Inspects `NoisyWindows`."""

    def main_finding(self, stats: RunningStatistics) -> str:
        """Describes each noise, in the order in which the noises are applied."""
        fractions = {
            "masked fraction of words": "of the words are masked, with one mask per span",
            "masked fraction of tokens": "of the tokens are masked",
            "deleted fraction of tokens": "of the tokens are deleted without a mask",
        }
        measured = ((stats.measured(name), words) for name, words in fractions.items())
        noises = [f"{fraction:.1%} {words}" for fraction, words in measured if fraction is not None]
        noises += ["sentences are put in a random order"] * (self.examples.config.sentence_permutation > 0)
        noises += ["texts are rotated around a random token"] * (self.examples.config.document_rotation > 0)
        return "; ".join([*noises, "the output is the original text"])

    def check(self, stats: RunningStatistics, sample: SampledBatch) -> None:
        """Checks each configured noise separately, from the texts before and after the noise."""
        examples = self.examples
        texts = examples.texts(sample.rows, sample.numbers, sample.epoch)
        before = texts
        for name, after in examples.stages(texts, sample.rows["start"]).items():
            if name == "sentence_permutation":
                _check_sentence_permutation(stats, examples, before, after, sample.rows)
            elif name == "text_infilling":
                _check_infilling(stats, examples, before, after)
            elif name == "token_masking":
                _check_token_masking(stats, examples, before, after)
            elif name == "token_deletion":
                deleted = before.lengths - after.lengths
                expected = np.minimum(budget(before.lengths, examples.config.token_deletion), before.lengths - 1)
                stats.exact("deleted fraction of tokens", deleted.sum(), expected.sum(), before.lengths.sum())
                stats.never("texts with a wrong number of deleted tokens", (deleted != expected).sum())
            elif name == "document_rotation":
                _check_rotation(stats, examples.config.document_rotation, before, after)
            before = after
        labels = labels_of(sample.batch, examples.config.name).numpy()
        special = examples.vocabulary.special
        stats.never(
            "outputs that differ from the original text",
            not np.array_equal(labels[~special[labels]], texts.tokens[~special[texts.tokens]]),
        )


def _check_sentence_permutation(
    stats: RunningStatistics, examples: NoisyWindows, before: PackedTexts, after: PackedTexts, rows: np.ndarray
) -> None:
    order = np.lexsort((before.tokens, before.owners)), np.lexsort((after.tokens, after.owners))
    stats.never("tokens that the permutation lost", (before.tokens[order[0]] != after.tokens[order[1]]).sum())
    sentences = examples.sentences(before, rows["start"])
    stays_first, probabilities = [], []
    numbers_by_text = np.split(sentences, before.starts[1:])
    for tokens, noised, numbers in zip(_split_texts(before), _split_texts(after), numbers_by_text, strict=True):
        all_sentences = [sentence.tobytes() for sentence in np.split(tokens, np.flatnonzero(np.diff(numbers)) + 1)]
        # The first sentence is recognizable only if no other sentence begins like it.
        first, others = all_sentences[0], all_sentences[1:]
        if others and not any(sentence.startswith(first) or first.startswith(sentence) for sentence in others):
            permuted = np.ceil(len(all_sentences) * examples.config.sentence_permutation - 1e-9)
            stays_first.append(noised.tobytes().startswith(first))
            # The first sentence is among the permuted ones with probability permuted / n, and then another sentence is
            # first with probability (permuted - 1) / permuted.
            probabilities.append(1 - max(permuted - 1, 0) / len(all_sentences))
    if stays_first:
        stats.fraction("first sentences that stay first", sum(stays_first), len(stays_first), np.array(probabilities))


def _check_infilling(stats: RunningStatistics, examples: NoisyWindows, before: PackedTexts, after: PackedTexts) -> None:
    config, vocabulary = examples.config, examples.vocabulary
    infilled = examples.infilled(before)
    probabilities, mean = poisson_probabilities(config.poisson_mean), config.poisson_mean
    lengths, count = infilled.sampled_lengths, len(infilled.sampled_lengths)
    # Lengths are sampled until their sum is large enough, so their number depends on them. The interval remains valid,
    # because each length has the same distribution given the previous lengths.
    stats.mean("words of a span, as sampled", lengths.sum(), count, count * mean, count * mean, 1.0)
    for length in range(int(2 * mean) + 2):
        stats.fraction(
            f"spans of length {length}, as sampled", (lengths == length).sum(), count, float(probabilities[length])
        )
    opens = vocabulary.starts_word[before.tokens] | (before.positions == 0)
    words = np.bincount(before.owners[opens], minlength=len(before.lengths))
    expected = np.ceil(words * config.text_infilling - 1e-9)
    stats.exact("masked fraction of words", infilled.masked.sum(), expected.sum(), words.sum())
    stats.never("texts with a wrong number of masked words", (infilled.masked != expected).sum())
    if config.random:
        unrandomized = infill(before, vocabulary, config.text_infilling, config.poisson_mean, 0.0, examples.capacity)
        _check_random_masks(stats, examples, "spans", after, unrandomized.texts.tokens == vocabulary.mask)


def _check_token_masking(
    stats: RunningStatistics, examples: NoisyWindows, before: PackedTexts, after: PackedTexts
) -> None:
    config, mask = examples.config, examples.vocabulary.mask
    unrandomized = mask_each(before, examples.vocabulary, config.token_masking, 0.0)
    new = unrandomized.tokens != before.tokens
    eligible = np.bincount(before.owners, before.tokens != mask, len(before.lengths)).astype(np.int64)
    masked, expected = np.bincount(after.owners, new, len(before.lengths)), budget(eligible, config.token_masking)
    stats.exact("masked fraction of tokens", masked.sum(), expected.sum(), eligible.sum())
    stats.never("texts with a wrong number of masks", (masked != expected).sum())
    stats.never("tokens changed but not masked", (~new & (after.tokens != before.tokens)).sum())
    if config.random:
        _check_random_masks(stats, examples, "tokens", after, new)
    else:
        stats.never("masked tokens that are not the mask token", (after.tokens[new] != mask).sum())


def _check_random_masks(
    stats: RunningStatistics, examples: NoisyWindows, unit: str, after: PackedTexts, masks_T: np.ndarray
) -> None:
    is_random = after.tokens[masks_T] != examples.vocabulary.mask
    stats.fraction(f"masked {unit} that are a random token", is_random.sum(), masks_T.sum(), examples.config.random)


def _check_rotation(stats: RunningStatistics, rate: float, before: PackedTexts, after: PackedTexts) -> None:
    """A text's period is its shortest rotation without effect; rotating by a multiple of it counts as none."""
    invalid, unchanged, periods = 0, 0, []
    for original_tokens, rotated_tokens in zip(_split_texts(before), _split_texts(after), strict=True):
        # Tokens as characters, so that strings can be searched: a text written twice contains all of its rotations.
        text, rotated = ("".join(map(chr, tokens.tolist())) for tokens in (original_tokens, rotated_tokens))
        invalid += len(rotated) != len(text) or rotated not in text * 2
        unchanged += rotated == text
        periods.append((text * 2).find(text, 1))
    stats.never("texts that are not a rotation of the original", invalid)
    stats.fraction("texts that are not rotated", unchanged, len(periods), 1 - rate * (1 - 1 / np.array(periods)))


def _split_texts(texts: PackedTexts) -> list[np.ndarray]:
    return np.split(texts.tokens, texts.starts[1:])


# Checks of span corruption: the number of tokens and spans, the sentinels, and that the text can be restored from
# inputs and targets.


class CorruptedSpansInspector(StreamInspector):
    """Inspects `CorruptedSpans`."""

    drops_single_tokens = True

    def main_finding(self, stats: RunningStatistics) -> str:
        fraction, length = stats.measured("corrupted fraction of text"), stats.measured("tokens of a span")
        if fraction is None or length is None:
            return ""
        return (
            f"{fraction:.1%} of the tokens are replaced, in spans of {length:.1f} tokens, each by a sentinel; the "
            "output is the replaced tokens"
        )

    def check(self, stats: RunningStatistics, sample: SampledBatch) -> None:
        examples, batch = self.examples, sample.batch
        lengths = sample.rows["length"].astype(np.int64)
        corrupted = examples.corrupted(sample.rows, sample.numbers, sample.epoch)
        # Check the inputs and targets of the batch itself, without the special tokens of the text format.
        template, outputs = examples.sides.template, cast(Packed, batch.outputs)
        corrupted = replace(
            corrupted,
            inputs=without_special_tokens(template, batch.inputs, batch.inputs.tokens),
            targets=without_special_tokens(template, outputs, labels_of(batch, examples.config.name)),
        )
        noise, spans = noise_counts(lengths, examples.config)
        stats.exact("corrupted fraction of text", corrupted.noise.sum(), noise.sum(), lengths.sum())
        stats.report("tokens of a span", noise.sum(), spans.sum())
        documents = np.repeat(np.arange(len(lengths)), lengths)
        stats.never(
            "examples with a wrong number of corrupted tokens", (np.bincount(documents, corrupted.noise) != noise).sum()
        )
        text = examples.stream.read(sample.rows["start"], lengths)
        for name, side, sizes in (
            ("inputs", corrupted.inputs, corrupted.input_lengths),
            ("targets", corrupted.targets, corrupted.target_lengths),
        ):
            is_sentinel = np.isin(side, examples.sentinels)
            counts = np.bincount(np.repeat(np.arange(len(lengths)), sizes), is_sentinel, len(lengths)).astype(np.int64)
            stats.never(f"examples with a wrong number of sentinels in the {name}", (counts != spans).sum())
            number = ragged_ranges(np.zeros_like(counts), counts) % len(examples.sentinels)
            stats.never(
                f"sentinels out of order in the {name}", (side[is_sentinel] != examples.sentinels[number]).sum()
            )
        stats.never(
            "batches from which the text cannot be restored", not _restores(corrupted, examples.sentinels, text)
        )
        # The first span follows a single token if the first of k pieces of unmasked text has one token. This is the
        # case for (k-1)/(n-1) of all ways to split n tokens into k pieces.
        starts = np.cumsum(lengths) - lengths
        several = spans > 1
        probabilities = ((spans - 1) / np.maximum(lengths - noise - 1, 1))[several]
        stats.fraction(
            "first spans that follow a single token",
            corrupted.noise[starts + 1][several].sum(),
            several.sum(),
            probabilities,
        )


def _restores(corrupted: CorruptedTexts, sentinels: np.ndarray, text: np.ndarray) -> bool:
    try:
        return np.array_equal(restore(corrupted, sentinels), text)
    except ValueError:
        return False
