"""Checks of masked examples: masked tokens, segment pairs, and the tokens that a generator samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import nn

from lmtool.config.base import JsonObject
from lmtool.learners.inspection import Inspector, RunningStatistics, SampledBatch
from lmtool.learners.model import indices_of
from lmtool.objectives.checks.language import StreamInspector
from lmtool.objectives.configs import MaskingConfig, TokenMaskingConfig
from lmtool.objectives.corruption.masking import MaskedTexts, Vocabulary, budget
from lmtool.objectives.examples.masked import MaskedExamples

# Masked tokens: how many tokens are masked, what replaces them, and that no other token changes.
# Shape letters: N examples of a batch, T their tokens, M predicting positions.


@dataclass(frozen=True)
class Masks:
    """The masks of a batch.

    Attributes:
        masked: The masked texts, computed once more from the same random numbers.
        tokens: (T,) the original tokens.
        inputs: (T,) the input tokens of the batch.
        is_text_T: Whether each token may be masked.
        eligible_N: The number of tokens of each example that may be masked.
        selected_N: The number of tokens of each example that are masked.
    """

    masked: MaskedTexts
    tokens: np.ndarray
    inputs: np.ndarray
    is_text_T: np.ndarray
    eligible_N: np.ndarray
    selected_N: np.ndarray


# The names of the statistics that count the replacements of predicted tokens.
BRANCHES = (
    "predicted tokens replaced by [MASK]",
    "predicted tokens replaced by another token",
    "predicted tokens left unchanged",
)


class MaskingInspector(Inspector):
    """Inspects examples with masks over single tokens or words."""

    def __init__(self, learner: nn.Module, examples: MaskedExamples, max_length: int):
        super().__init__(learner, examples, max_length)
        self.config, self.vocabulary = cast(MaskingConfig, examples.config), examples.masks.vocabulary

    def main_finding(self, stats: RunningStatistics) -> str:
        fractions = [stats.measured(name) for name in BRANCHES]
        words = ("[MASK]", "another token", "the original token")
        fractions_text = ", ".join(
            f"{fraction:.1%} {word}" for fraction, word in zip(fractions, words, strict=True) if fraction
        )
        return super().main_finding(stats) + (
            f"; in their place the model reads {fractions_text}" if fractions_text else ""
        )

    def repeats(self, epoch: int) -> bool:
        """Returns whether an epoch repeats the masks of an earlier epoch, as with masking=static."""
        return self.config.sampling_epoch(epoch) != epoch

    def check(self, stats: RunningStatistics, sample: SampledBatch) -> None:
        original = self.examples.assemble(sample.rows)
        masked = self.examples.mask(original, sample.numbers, sample.epoch)
        inputs, at = sample.batch.inputs.tokens.numpy(), masked.at
        documents = np.repeat(np.arange(len(original.lengths)), original.lengths)
        is_text_T = ~self.vocabulary.special[original.tokens]
        eligible_N, selected_N = (
            np.bincount(documents[indices], minlength=len(sample.rows)) for indices in (np.flatnonzero(is_text_T), at)
        )
        stats.never("special tokens predicted", (~is_text_T[at]).sum())
        stats.never("labels that differ from the original tokens", (masked.labels != original.tokens[at]).sum())
        changed_indices = np.flatnonzero(inputs != original.tokens)
        stats.never("tokens changed but not predicted", (~np.isin(changed_indices, at)).sum())
        self.check_masks(stats, Masks(masked, original.tokens, inputs, is_text_T, eligible_N, selected_N))

    def check_masks(self, stats: RunningStatistics, masks: Masks) -> None:
        """Checks which tokens are masked, and which tokens replace them."""
        config, vocabulary = cast(TokenMaskingConfig, self.config), self.vocabulary
        indices, is_text_T = masks.masked.at, masks.is_text_T
        check_branches(stats, config, vocabulary, masks.inputs[indices], masks.masked.labels)
        if config.whole_word:
            stats.report("predicted fraction of text", len(indices), is_text_T.sum())
            starts_word_T = is_text_T & (vocabulary.starts_word[masks.tokens] | ~np.append(False, is_text_T[:-1]))
            word = np.cumsum(starts_word_T)[is_text_T]
            predicted = np.isin(np.flatnonzero(is_text_T), indices)
            fraction = np.bincount(word, predicted) / np.maximum(np.bincount(word), 1)
            stats.never("words partly predicted", ((fraction > 0) & (fraction < 1)).sum())
        elif config.select == "bernoulli":
            stats.fraction("predicted fraction of text", len(indices), is_text_T.sum(), config.probability)
        else:
            budget_N = budget(masks.eligible_N, config.probability)
            check_budget(stats, masks.selected_N, budget_N, masks.eligible_N)


class MaskedWindowsInspector(MaskingInspector, StreamInspector):
    """Inspects `MaskedWindows`."""

    def check(self, stats: RunningStatistics, sample: SampledBatch) -> None:
        super().check(stats, sample)
        probability, rows = self.config.short_window_probability, sample.rows
        if not probability:
            return
        short, capacity = rows["short"] == 1, self.examples.capacity
        stats.fraction("windows with a shorter target length", short.sum(), len(rows), probability)
        ends = np.isin(rows["start"] + rows["length"], self.examples.stream.boundaries)
        stats.never("windows that end too early", (~short & ~ends & (rows["length"] != capacity)).sum())
        stats.report(
            "mean length of the shorter windows, as a fraction of the maximum",
            rows["length"][short].sum(),
            short.sum() * capacity,
        )


def check_budget(
    stats: RunningStatistics, selected_N: np.ndarray, budget_N: np.ndarray, eligible_N: np.ndarray
) -> None:
    """Checks the number of predicted tokens of each example.

    Args:
        stats: The statistics to add to.
        selected_N: The number of tokens of each example that are predicted.
        budget_N: The number of tokens of each example that must be predicted.
        eligible_N: The number of tokens of each example that may be predicted.
    """
    stats.exact("predicted fraction of text", selected_N.sum(), budget_N.sum(), eligible_N.sum())
    stats.never("examples with a wrong number of predicted tokens", (selected_N != budget_N).sum())


def check_branches(
    stats: RunningStatistics, config: MaskingConfig, vocabulary: Vocabulary, visible_M: np.ndarray, labels_M: np.ndarray
) -> None:
    """Checks the replacements of predicted tokens. A random token that equals the original token counts as unchanged.

    Args:
        stats: The statistics to add to.
        config: The configured probability of each replacement.
        vocabulary: The vocabulary.
        visible_M: The input token at each predicted position.
        labels_M: The original token at each predicted position.
    """
    mask, random, regular_count = config.mask, config.random, len(vocabulary.regular)
    is_mask, unchanged = visible_M == vocabulary.mask, visible_M == labels_M
    stats.fraction(BRANCHES[0], is_mask.sum(), len(labels_M), mask)
    stats.fraction(BRANCHES[1], (~is_mask & ~unchanged).sum(), len(labels_M), random * (1 - 1 / regular_count))
    stats.fraction(BRANCHES[2], (~is_mask & unchanged).sum(), len(labels_M), 1 - mask - random + random / regular_count)


# Segment pairs: their classes, the documents that their segments come from, and truncation.


# How the classes 0 and 1 of each term are shown.
_CLASSES = {"nsp": ("the second follows", "the second is random"), "sop": ("in order", "swapped")}


class MaskedPairsInspector(MaskingInspector):
    """Inspects `MaskedPairs`."""

    def label(self, value: int, of_token: bool) -> object:
        return super().label(value, True) if of_token else _CLASSES[self.examples.config.pairs][value]

    def texts(self, sample: SampledBatch) -> list[list[str]]:
        """Returns the two segments of each pair."""
        tokens = self.examples.store.tokens
        spans = [[(int(row[f"{side}_start"]), int(row[f"{side}_length"])) for side in "ab"] for row in sample.rows]
        return [
            [self.tokenizer.decode(tokens[first : first + length].tolist()) for first, length in pair] for pair in spans
        ]

    def main_finding(self, stats: RunningStatistics) -> str:
        """Adds how many pairs belong to class 1."""
        names = {"nsp": "random second segments in all", "sop": "pairs that are swapped"}
        fraction = stats.measured(names[self.examples.config.pairs])
        pairs = {"nsp": "the second text of {} of the pairs is a random one", "sop": "{} of the pairs are swapped"}
        words = "" if fraction is None else pairs[self.examples.config.pairs].format(f"{fraction:.1%}")
        return "; ".join(filter(None, (super().main_finding(stats), words)))

    def check(self, stats: RunningStatistics, sample: SampledBatch) -> None:
        super().check(stats, sample)
        self.check_pairs(stats, sample)

    def check_pairs(self, stats: RunningStatistics, sample: SampledBatch) -> None:
        """Checks the documents that segments come from, and that only pairs that are too long are truncated."""
        truncated = self.examples.truncated(sample.rows)
        length = sample.rows["a_length"].astype(np.int64) + sample.rows["b_length"]
        stats.report("truncated fraction", truncated.sum(), len(sample.rows))
        stats.never("pairs truncated although they fit", (truncated & (length != self.examples.capacity)).sum())
        self._check_classes(stats, sample.rows)
        config = self.examples.config
        if config.pair_of == "segments":
            probability = config.short_sequence_probability
            stats.fraction(
                "pairs with a shorter target length", sample.rows["short"].sum(), len(sample.rows), probability
            )

    def _check_classes(self, stats: RunningStatistics, rows: np.ndarray) -> None:
        """Checks the fraction of each class, and that the segments of a pair agree with its class."""
        label, choice = rows["label"] == 1, rows["choice"] == 1
        offsets = self.examples.store.document_offsets
        document_a, document_b = (np.searchsorted(offsets, rows[f"{side}_start"], side="right") for side in "ab")
        if self.examples.config.pairs == "sop":
            stats.fraction("pairs that are swapped", label.sum(), len(rows), 0.5)
            stats.never("pairs from two documents", (document_a != document_b).sum())
            in_order = rows["a_start"] < rows["b_start"]
            swapped = rows["b_start"] < rows["a_start"]
            stats.never("pairs whose order contradicts their class", (~np.where(label, swapped, in_order)).sum())
            return
        stats.fraction("random second segments where there is a choice", (label & choice).sum(), choice.sum(), 0.5)
        stats.report("random second segments in all", label.sum(), len(rows), is_fraction=True)
        stats.never("pairs without a choice whose second segment is not random", (~choice & ~label).sum())
        stats.never("random segments of the same document", (label & (document_a == document_b)).sum())
        stats.never("following segments of another document", (~label & (document_a != document_b)).sum())


# Replaced-token detection: the tokens that the generator samples, compared with the generator's own probabilities.


class GeneratorInspector(MaskedWindowsInspector):
    """Inspects the examples of a learner with a generator, whose weights must be loaded. The learner's method
    `generator_samples` returns the text that the model reads; its method `original` returns the original text."""

    def main_finding(self, stats: RunningStatistics) -> str:
        fraction = stats.measured("replaced fraction of tokens")
        words = super().main_finding(stats).replace("the model reads", "it reads")
        if fraction is None:
            return words
        return f"{fraction:.1%} of the tokens that the model reads are replaced by a generator, for which {words}"

    def entries(self, sample: SampledBatch) -> Iterator[JsonObject]:
        """Adds `filled`, the text that the model reads. If the model detects replaced tokens, the targets are the
        replaced tokens."""
        batch, host = sample.batch, torch.device("cpu")
        filled = self.learner.generator_samples(batch.to(self.learner.device), sample.epoch).filled.to(host)
        replaced_T = filled.tokens != self.learner.original(batch)
        detection_terms = [term for term, target in batch.targets.items() if target.labels is None]
        for number, entry in enumerate(super().entries(sample)):
            start = batch.inputs.starts[number]
            replaced = (replaced_T & (batch.inputs.documents == number)).nonzero()[:, 0]
            positions = [{"position": int(index) - start, "label": "replaced"} for index in replaced]
            targets = entry.pop("targets") | dict.fromkeys(detection_terms, positions)
            yield {**entry, "filled": self.side(filled, range(number, number + 1)), "targets": targets}

    def check(self, stats: RunningStatistics, sample: SampledBatch) -> None:
        super().check(stats, sample)
        stats.remarks["replaced fraction of tokens"] = (
            "masked fraction x the generator's probability that a sample differs from the original token"
        )
        stats.remarks["negative log-probability of a sample, nats"] = "entropy of the generator's probabilities"
        batch = sample.batch.to(self.learner.device)
        samples = self.learner.generator_samples(batch, sample.epoch)
        replaced = (samples.filled.tokens != self.learner.original(batch)).cpu().numpy()
        indices = indices_of(batch, "mlm").cpu().numpy()
        probabilities = samples.replaced_probability_M.cpu().numpy()
        variance = (probabilities * (1 - probabilities)).sum()
        stats.mean("replaced fraction of tokens", replaced.sum(), len(replaced), probabilities.sum(), variance, 1.0)
        stats.report("samples that are the original token", (~replaced[indices]).sum(), len(indices), is_fraction=True)
        stats.never("replaced tokens that were not masked", replaced.sum() - replaced[indices].sum())
        surprise, entropy, variance = (
            float(values.sum()) for values in (samples.surprise_M, samples.entropy_M, samples.variance_M)
        )
        stats.mean(
            "negative log-probability of a sample, nats", surprise, len(indices), entropy, variance, samples.bound
        )
