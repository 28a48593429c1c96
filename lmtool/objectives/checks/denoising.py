"""Checks of denoising examples: BART's noises and T5's span corruption."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np

from lmtool.data.formats import ragged_ranges
from lmtool.learners.inspection import RunningStatistics, SampledBatch
from lmtool.learners.model import labels_of
from lmtool.objectives.checks.language import StreamInspector, within
from lmtool.objectives.corruption.masking import PackedTexts, budget
from lmtool.objectives.corruption.noises import (
    Corrupted,
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

    def fact(self, stats: RunningStatistics) -> str:
        """Describes each noise in order."""
        fractions = {
            "masked share of words": "of the words are masked, with one mask per span",
            "masked share of tokens": "of the tokens are masked",
            "deleted share of tokens": "of the tokens are deleted without a mask",
        }
        measured = ((stats.measured(name), words) for name, words in fractions.items())
        noises = [f"{fraction:.1%} {words}" for fraction, words in measured if fraction is not None]
        noises += ["sentences are put in a random order"] * (self.examples.config.sentence_permutation > 0)
        noises += ["texts are rotated around a random token"] * (self.examples.config.document_rotation > 0)
        return "; ".join([*noises, "the output is the original text"])

    def check(self, stats: RunningStatistics, drawn: SampledBatch) -> None:
        """Checks each configured noise separately, from the texts before and after it."""
        examples = self.examples
        texts = examples.texts(drawn.rows, drawn.numbers, drawn.epoch)
        before = texts
        for name, after in examples.stages(texts, drawn.rows["start"]).items():
            if name == "sentence_permutation":
                _permuted(stats, examples, before, after, drawn.rows)
            elif name == "text_infilling":
                _infilled(stats, examples, before, after)
            elif name == "token_masking":
                _masked(stats, examples, before, after)
            elif name == "token_deletion":
                gone = before.lengths - after.lengths
                expected = np.minimum(budget(before.lengths, examples.config.token_deletion), before.lengths - 1)
                stats.exact("deleted share of tokens", gone.sum(), expected.sum(), before.lengths.sum())
                stats.never("texts off their number of deletions", (gone != expected).sum())
            elif name == "document_rotation":
                _rotated(stats, examples.config.document_rotation, before, after)
            before = after
        labels = labels_of(drawn.batch, examples.config.name).numpy()
        special = examples.vocabulary.special
        stats.never(
            "outputs that are not the text",
            not np.array_equal(labels[~special[labels]], texts.tokens[~special[texts.tokens]]),
        )


def _permuted(
    stats: RunningStatistics, examples: NoisyWindows, before: PackedTexts, after: PackedTexts, rows: np.ndarray
) -> None:
    order = np.lexsort((before.tokens, before.owners)), np.lexsort((after.tokens, after.owners))
    stats.never("tokens lost by the permutation", (before.tokens[order[0]] != after.tokens[order[1]]).sum())
    sentences = examples.sentences(before, rows["start"])
    retained, chances = [], []
    sentences_of = np.split(sentences, before.starts[1:])
    for tokens, noised, numbers in zip(_each(before), _each(after), sentences_of, strict=True):
        parts = [sentence.tobytes() for sentence in np.split(tokens, np.flatnonzero(np.diff(numbers)) + 1)]
        # The first sentence is recognizable only if no other sentence begins like it.
        first, rest = parts[0], parts[1:]
        if rest and not any(sentence.startswith(first) or first.startswith(sentence) for sentence in rest):
            moved = np.ceil(len(parts) * examples.config.sentence_permutation - 1e-9)
            retained.append(noised.tobytes().startswith(first))
            chances.append(1 - max(moved - 1, 0) / len(parts))
    if retained:
        stats.fraction("first sentences that stay first", sum(retained), len(retained), np.array(chances))


def _infilled(stats: RunningStatistics, examples: NoisyWindows, before: PackedTexts, after: PackedTexts) -> None:
    config, vocabulary = examples.config, examples.vocabulary
    infilled = examples.infilled(before)
    probabilities, drawn, mean = poisson_probabilities(config.poisson_mean), infilled.drawn, config.poisson_mean
    # Lengths are sampled until their sum suffices, so their number depends on them: each is compared with its
    # conditional distribution given the previous ones; the bound needs only the variance.
    stats.mean("words of a span as drawn", drawn.sum(), len(drawn), len(drawn) * mean, len(drawn) * mean, 1.0)
    for length in range(int(2 * mean) + 2):
        stats.fraction(f"spans of {length} as drawn", (drawn == length).sum(), len(drawn), float(probabilities[length]))
    opens = vocabulary.starts_word[before.tokens] | (before.positions == 0)
    words = np.bincount(before.owners[opens], minlength=len(before.lengths))
    expected = np.ceil(words * config.text_infilling - 1e-9)
    stats.exact("masked share of words", infilled.masked.sum(), expected.sum(), words.sum())
    stats.never("texts off their number of masked words", (infilled.masked != expected).sum())
    if config.random:
        plain = infill(before, vocabulary, config.text_infilling, config.poisson_mean, 0.0, examples.capacity)
        _randomised(stats, examples, "spans", after, plain.texts.tokens == vocabulary.mask)


def _masked(stats: RunningStatistics, examples: NoisyWindows, before: PackedTexts, after: PackedTexts) -> None:
    config, mask = examples.config, examples.vocabulary.mask
    plain = mask_each(before, examples.vocabulary, config.token_masking, 0.0)
    new = plain.tokens != before.tokens
    some = np.bincount(before.owners, before.tokens != mask, len(before.lengths)).astype(np.int64)
    masked, expected = np.bincount(after.owners, new, len(before.lengths)), budget(some, config.token_masking)
    stats.exact("masked share of tokens", masked.sum(), expected.sum(), some.sum())
    stats.never("texts off their number of masks", (masked != expected).sum())
    stats.never("tokens changed but not masked", (~new & (after.tokens != before.tokens)).sum())
    if config.random:
        _randomised(stats, examples, "tokens", after, new)
    else:
        stats.never("masked tokens that show another", (after.tokens[new] != mask).sum())


def _randomised(
    stats: RunningStatistics, examples: NoisyWindows, unit: str, after: PackedTexts, masks_T: np.ndarray
) -> None:
    visible = after.tokens[masks_T] != examples.vocabulary.mask
    stats.fraction(f"masked {unit} that show a random token", visible.sum(), masks_T.sum(), examples.config.random)


def _rotated(stats: RunningStatistics, rate: float, before: PackedTexts, after: PackedTexts) -> None:
    """A text may look unrotated by chance, if it is rotated by a multiple of its period."""
    strange, retained, periods = 0, 0, []
    for original, other in zip(_each(before), _each(after), strict=True):
        # As text with one character per token: repeated twice, it contains every rotation of itself.
        text, visible = ("".join(map(chr, tokens.tolist())) for tokens in (original, other))
        strange += len(visible) != len(text) or visible not in text * 2
        retained += visible == text
        periods.append((text * 2).find(text, 1))
    stats.never("texts that are no rotation of what they were", strange)
    stats.fraction("texts that begin as they did", retained, len(periods), 1 - rate * (1 - 1 / np.array(periods)))


def _each(texts: PackedTexts) -> list[np.ndarray]:
    return np.split(texts.tokens, texts.starts[1:])


# Checks of span corruption: numbers of tokens and spans, sentinels, and that both sides restore the text.


class CorruptedSpansInspector(StreamInspector):
    """Inspects `CorruptedSpans`."""

    drops_single_tokens = True

    def fact(self, stats: RunningStatistics) -> str:
        fraction, length = stats.measured("corrupted share of text"), stats.measured("tokens of a span")
        if fraction is None or length is None:
            return ""
        return (
            f"{fraction:.1%} of the tokens are replaced, in spans of {length:.1f} tokens, each by a sentinel; the "
            "output is the replaced tokens"
        )

    def check(self, stats: RunningStatistics, drawn: SampledBatch) -> None:
        examples, batch = self.examples, drawn.batch
        lengths = drawn.rows["length"].astype(np.int64)
        corrupted = examples.corrupted(drawn.rows, drawn.numbers, drawn.epoch)
        # Both sides without the format's special tokens.
        template, outputs = examples.sides.template, cast(Packed, batch.outputs)
        corrupted = replace(
            corrupted,
            inputs=within(template, batch.inputs, batch.inputs.tokens),
            targets=within(template, outputs, labels_of(batch, examples.config.name)),
        )
        noise, spans = noise_counts(lengths, examples.config)
        stats.exact("corrupted share of text", corrupted.noise.sum(), noise.sum(), lengths.sum())
        stats.report("tokens of a span", noise.sum(), spans.sum())
        documents = np.repeat(np.arange(len(lengths)), lengths)
        stats.never(
            "examples off their number of corrupted tokens", (np.bincount(documents, corrupted.noise) != noise).sum()
        )
        text = examples.stream.read(drawn.rows["start"], lengths)
        for name, side, sizes in (
            ("inputs", corrupted.inputs, corrupted.input_lengths),
            ("targets", corrupted.targets, corrupted.target_lengths),
        ):
            marks = np.isin(side, examples.sentinels)
            counts = np.bincount(np.repeat(np.arange(len(lengths)), sizes), marks, len(lengths)).astype(np.int64)
            stats.never(f"examples off their number of sentinels in the {name}", (counts != spans).sum())
            number = ragged_ranges(np.zeros_like(counts), counts) % len(examples.sentinels)
            stats.never(f"sentinels out of order in the {name}", (side[marks] != examples.sentinels[number]).sum())
        stats.never("batches whose sides do not give back the text", not _restores(corrupted, examples.sentinels, text))
        # (k-1)/(n-1) of all ways to split n tokens into k pieces begin with a piece of one token.
        starts = np.cumsum(lengths) - lengths
        several = spans > 1
        chances = ((spans - 1) / np.maximum(lengths - noise - 1, 1))[several]
        stats.fraction(
            "first spans behind one token", corrupted.noise[starts + 1][several].sum(), several.sum(), chances
        )


def _restores(corrupted: Corrupted, sentinels: np.ndarray, text: np.ndarray) -> bool:
    """Whether both sides restore the text; unmatched spans restore nothing."""
    try:
        return np.array_equal(restore(corrupted, sentinels), text)
    except ValueError:
        return False
