"""Checks of masked and permuted examples: masked tokens and spans, segment pairs, the tokens that a generator samples,
and permutations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import nn

from lmtool.config.base import JsonObject
from lmtool.learners.inspection import Inspector, RunningStatistics, SampledBatch
from lmtool.learners.model import indices_of, labels_of
from lmtool.objectives.checks.language import StreamInspector
from lmtool.objectives.configs import MaskingConfig, ReplacementConfig, SpanConfig, TokenMaskingConfig
from lmtool.objectives.corruption.masking import MaskedSpans, MaskedTexts, Vocabulary, budget, length_probabilities
from lmtool.objectives.corruption.permutation import PermutedTexts, ngram_probabilities
from lmtool.objectives.examples.language import CAUSAL, MASKED, MaskedNextTokenWindows
from lmtool.objectives.examples.masked import MaskedExamples, MaskedWindows
from lmtool.objectives.examples.pairs import MaskedPairs

# Masked tokens: how many tokens are masked, what replaces them, and that no other token changes.
# Shape letters: N examples of a batch, T their tokens, M predicting positions.


@dataclass(frozen=True)
class Masks:
    """The masks of a batch. masked: the masked texts, computed once more from the same random numbers. tokens, inputs:
    (T,) the original tokens and those of the batch. is_text_T: whether each token may be masked. eligible_N,
    selected_N: the numbers of tokens of each example that may be masked and that are masked."""

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


class MaskingInspector(StreamInspector):
    """Inspects windows and segment pairs with masks over single tokens or words."""

    def __init__(self, learner: nn.Module, examples: MaskedExamples, max_length: int):
        super().__init__(learner, examples, max_length)
        self.config, self.vocabulary = cast(MaskingConfig, examples.config), examples.masks.vocabulary
        self.has_pairs = isinstance(examples, MaskedPairs)

    def texts(self, sample: SampledBatch) -> list[list[str]]:
        """Returns the documents in each window, or the two segments of each pair."""
        if not self.has_pairs:
            return super().texts(sample)
        tokens = self.examples.store.tokens
        spans = [[(int(row[f"{side}_start"]), int(row[f"{side}_length"])) for side in "ab"] for row in sample.rows]
        return [
            [self.tokenizer.decode(tokens[first : first + length].tolist()) for first, length in pair] for pair in spans
        ]

    def label(self, value: int, of_token: bool) -> object:
        return super().label(value, True) if of_token else _CLASSES[self.examples.config.pairs][value]

    def check_plan(self, stats: RunningStatistics) -> None:
        if self.has_pairs:
            Inspector.check_plan(self, stats)
            if self.examples.config.pairs != "sop":  # all pairs, as in the warning about them
                label = self.examples.plan(0).rows["label"]
                stats.report(_RANDOM, label.sum(), len(label), is_fraction=True)
        else:
            super().check_plan(stats)

    def main_finding(self, stats: RunningStatistics) -> str:
        """Returns how many tokens are predicted, what replaces them, and how many pairs belong to class 1."""
        fractions = [stats.measured(name) for name in BRANCHES]
        words = ("[MASK]", "another token", "the original token")
        fractions_text = ", ".join(
            f"{fraction:.1%} {word}" for fraction, word in zip(fractions, words, strict=True) if fraction
        )
        finding = super().main_finding(stats)
        finding += f"; in their place the model reads {fractions_text}" if fractions_text else ""
        random, swapped = stats.measured(_RANDOM), stats.measured(_SWAPPED)
        pairs = "" if random is None else f"the second text of {random:.1%} of the pairs is a random one"
        pairs = pairs if swapped is None else f"{swapped:.1%} of the pairs are swapped"
        return "; ".join(filter(None, (finding, pairs)))

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
        self.check_texts(stats, sample)

    def check_texts(self, stats: RunningStatistics, sample: SampledBatch) -> None:
        """Checks which text the examples have."""
        check = check_pairs if self.has_pairs else check_short_windows
        check(stats, self.examples, sample.rows)

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


def check_budget(
    stats: RunningStatistics, selected_N: np.ndarray, budget_N: np.ndarray, eligible_N: np.ndarray
) -> None:
    """Checks the number of predicted tokens of each example. selected_N, budget_N, eligible_N: how many tokens are,
    must be and may be predicted."""
    stats.exact("predicted fraction of text", selected_N.sum(), budget_N.sum(), eligible_N.sum())
    stats.never("examples with a wrong number of predicted tokens", (selected_N != budget_N).sum())


def check_branches(
    stats: RunningStatistics,
    config: ReplacementConfig,
    vocabulary: Vocabulary,
    visible_M: np.ndarray,
    labels_M: np.ndarray,
) -> None:
    """Checks that predicted tokens are replaced with the configured probabilities. A random token that equals the
    original token counts as unchanged. visible_M, labels_M: the input token and the original token at each predicted
    position."""
    mask, random, regular_count = config.mask, config.random, len(vocabulary.regular)
    is_mask, unchanged = visible_M == vocabulary.mask, visible_M == labels_M
    stats.fraction(BRANCHES[0], is_mask.sum(), len(labels_M), mask)
    stats.fraction(BRANCHES[1], (~is_mask & ~unchanged).sum(), len(labels_M), random * (1 - 1 / regular_count))
    stats.fraction(BRANCHES[2], (~is_mask & unchanged).sum(), len(labels_M), 1 - mask - random + random / regular_count)


# Masked next-token prediction: which windows are read causally, and the masks of the others.


_CAUSAL_SHARE = "texts read causally"


class MaskedNextTokensInspector(StreamInspector):
    """Inspects `MaskedNextTokenWindows`."""

    def __init__(self, learner: nn.Module, examples: MaskedNextTokenWindows, max_length: int):
        super().__init__(learner, examples, max_length)
        self.config = examples.config

    def main_finding(self, stats: RunningStatistics) -> str:
        finding = "masked tokens are predicted from the position before them, with the whole text in view"
        mean = stats.measured("tokens of a span, as sampled")
        finding += "" if mean is None else f", in spans of {mean:.1f} tokens on average"
        share = stats.measured(_CAUSAL_SHARE)
        return f"{share:.1%} of the texts are read causally; in the others, {finding}" if share else finding

    def repeats(self, epoch: int) -> bool:
        """Returns whether an epoch repeats the masks of an earlier epoch, as with masking=static."""
        return self.config.sampling_epoch(epoch) != epoch

    def check(self, stats: RunningStatistics, sample: SampledBatch) -> None:
        inputs, config, vocabulary = sample.batch.inputs, self.config, self.examples.vocabulary
        tokens, lengths = inputs.tokens.numpy(), np.array(inputs.lengths)
        starts, prefixes = np.cumsum(lengths) - lengths, np.array(inputs.prefixes)
        original = self.examples.stream.read(sample.rows["start"], lengths)
        is_causal = prefixes == 0
        if config.causal:
            stats.fraction(_CAUSAL_SHARE, is_causal.sum(), len(lengths), config.causal)
        stats.never("masked texts that are not read in both directions", (prefixes != lengths)[~is_causal].sum())
        in_causal = np.repeat(is_causal, lengths)
        at, labels = (values.numpy() for values in (indices_of(sample.batch, MASKED), labels_of(sample.batch, MASKED)))
        changed = np.flatnonzero(tokens != original)
        stats.never("labels that are not the next token", (original[at + 1] != labels).sum())
        stats.never("tokens changed but not predicted", (~np.isin(changed, at + 1)).sum())
        stats.never("tokens masked in texts that are read causally", in_causal[at + 1].sum())
        is_text = ~vocabulary.special[original] & ~in_causal
        is_text[starts] = False  # no position comes before a first token
        stats.never("special or first tokens predicted as masked", (~is_text[at + 1]).sum())
        if config.longest_span > 1:
            masked = cast(MaskedSpans, self.examples.mask(sample.rows, sample.numbers, sample.epoch))
            self._check_spans(stats, masked, ~in_causal, at + 1, tokens)
        else:
            check_branches(stats, config, vocabulary, tokens[at + 1], labels)
        documents = np.repeat(np.arange(len(lengths)), lengths)
        eligible, selected = (
            np.bincount(documents[indices], minlength=len(lengths)) for indices in (np.flatnonzero(is_text), at)
        )
        budget_N = budget(eligible, config.probability)
        if config.longest_span > 1 and config.select == "exact":
            stats.report("predicted fraction of masked text", selected.sum(), eligible.sum(), is_fraction=True)
            excess = selected - budget_N
            stats.never(
                "texts with a wrong number of predicted tokens", ((excess < 0) | (excess >= config.longest_span)).sum()
            )
        elif config.whole_word or config.longest_span > 1:
            stats.report("predicted fraction of masked text", selected.sum(), eligible.sum())
        elif config.select == "bernoulli":
            stats.fraction("predicted fraction of masked text", selected.sum(), eligible.sum(), config.probability)
        else:
            check_budget(stats, selected, budget_N, eligible)
        if config.causal:
            at = indices_of(sample.batch, CAUSAL).numpy()
            stats.never(
                "causal labels that are not the next token",
                (labels_of(sample.batch, CAUSAL).numpy() != tokens[at + 1]).sum(),
            )
            stats.never("causal tokens without a prediction", (lengths - 1)[is_causal].sum() - len(np.unique(at)))

    def _check_spans(
        self, stats: RunningStatistics, masked: MaskedSpans, is_used_T: np.ndarray, at: np.ndarray, tokens: np.ndarray
    ) -> None:
        """masked: the spans of all texts. is_used_T: whether a token's text is read with masks. at: the predicted
        tokens."""
        longest = self.config.longest_span
        check_lengths(stats, "tokens of a span", "spans", masked.sampled_lengths, np.full(longest, 1 / longest))
        is_used_S, is_used_M = is_used_T[masked.spans[:, 0]], is_used_T[masked.at]
        stats.never("spans partly predicted", len(np.setxor1d(masked.at[is_used_M], at)))
        span_of = (np.cumsum(is_used_S) - 1)[masked.span_of[is_used_M]]
        labels, visible = masked.labels[is_used_M], tokens[masked.at[is_used_M]]
        check_span_branches(stats, self.config, self.examples.vocabulary, span_of, labels, visible)


# Segment pairs: their classes, the documents that their segments come from, and truncation.


# How the classes 0 and 1 of each term are shown.
_CLASSES = {"nsp": ("the second follows", "the second is random"), "sop": ("in order", "swapped")}
# The name of the statistic of class 1. Without sentence-order prediction, the second segment of some pairs is random.
_RANDOM, _SWAPPED = "random second segments of an epoch", "pairs that are swapped"


def check_pairs(stats: RunningStatistics, examples: MaskedPairs, rows: np.ndarray) -> None:
    """Checks the classes of pairs, the documents that segments come from, and that only pairs that are too long are
    truncated. rows: the rows of the plan."""
    truncated = examples.truncated(rows)
    length = rows["a_length"].astype(np.int64) + rows["b_length"]
    stats.report("truncated fraction", truncated.sum(), len(rows))
    stats.never("pairs truncated although they fit", (truncated & (length != examples.capacity)).sum())
    _check_classes(stats, examples, rows)
    if examples.config.pair_of == "segments":
        probability = examples.config.short_sequence_probability
        stats.fraction("pairs with a shorter target length", rows["short"].sum(), len(rows), probability)


def _check_classes(stats: RunningStatistics, examples: MaskedPairs, rows: np.ndarray) -> None:
    label, choice = rows["label"] == 1, rows["choice"] == 1
    offsets = examples.store.document_offsets
    document_a, document_b = (np.searchsorted(offsets, rows[f"{side}_start"], side="right") for side in "ab")
    if examples.config.pairs == "sop":
        stats.fraction(_SWAPPED, label.sum(), len(rows), 0.5)
        stats.never("pairs from two documents", (document_a != document_b).sum())
        in_order = rows["a_start"] < rows["b_start"]
        swapped = rows["b_start"] < rows["a_start"]
        stats.never("pairs whose order contradicts their class", (~np.where(label, swapped, in_order)).sum())
        return
    stats.fraction("random second segments where there is a choice", (label & choice).sum(), choice.sum(), 0.5)
    stats.never("pairs without a choice whose second segment is not random", (~choice & ~label).sum())
    stats.never("random segments of the same document", (label & (document_a == document_b)).sum())
    stats.never("following segments of another document", (~label & (document_a != document_b)).sum())


def check_short_windows(stats: RunningStatistics, examples: MaskedExamples, rows: np.ndarray) -> None:
    """Checks the lengths of windows, if some of them are short. rows: the rows of the plan."""
    probability = examples.config.short_window_probability
    if not probability:
        return
    short, capacity = rows["short"] == 1, examples.capacity
    stats.fraction("windows with a shorter target length", short.sum(), len(rows), probability)
    ends = np.isin(rows["start"] + rows["length"], cast(MaskedWindows, examples).stream.boundaries)
    stats.never("windows that end too early", (~short & ~ends & (rows["length"] != capacity)).sum())
    stats.report(
        "mean length of the shorter windows, as a fraction of the maximum",
        rows["length"][short].sum(),
        short.sum() * capacity,
    )


# Replaced-token detection: the tokens that the generator samples, compared with the generator's own probabilities.


class GeneratorInspector(MaskingInspector):
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
        visible_M = masks.inputs[spans.at]
        if self.config.replace == "token":
            check_branches(stats, self.config, self.vocabulary, visible_M, spans.labels)
        else:
            check_span_branches(stats, self.config, self.vocabulary, spans.span_of, spans.labels, visible_M)
        first_tokens = spans.labels[np.searchsorted(spans.at, spans.spans[:, 0])]
        starts_word = self.vocabulary.starts_word[first_tokens]
        # A window may begin within a word. If so, a span at the start of the window begins within the word too.
        within_word = ~starts_word & masks.is_text_T[spans.spans[:, 0] - 1]
        stats.never("spans that begin within a word", within_word.sum())
        budget_N = np.ceil(masks.eligible_N * self.config.probability - 1e-9)
        check_budget(stats, masks.selected_N, budget_N, masks.eligible_N)


def check_span_branches(
    stats: RunningStatistics,
    config: ReplacementConfig,
    vocabulary: Vocabulary,
    span_of: np.ndarray,
    labels_M: np.ndarray,
    visible_M: np.ndarray,
) -> None:
    """Checks the replacements of spans, each of which has one kind. span_of: (M,) the index of each token's span,
    ascending from 0. labels_M, visible_M: the original and the input tokens."""
    sizes = np.bincount(span_of)
    count, regular_count = len(sizes), len(vocabulary.regular)
    masked = np.bincount(span_of, visible_M == vocabulary.mask, count)
    unchanged = np.bincount(span_of, visible_M == labels_M, count)
    stats.never("spans partly replaced by [MASK]", ((masked > 0) & (masked < sizes)).sum())
    stats.fraction("spans replaced by [MASK]", (masked > 0).sum(), count, config.mask)
    # A span is unchanged by decision, or if all of its random tokens happen to equal the original tokens.
    probabilities = 1 - config.mask - config.random + config.random * float(regular_count) ** -sizes.astype(float)
    stats.fraction("unchanged spans", ((masked == 0) & (unchanged == sizes)).sum(), count, probabilities)


def check_lengths(
    stats: RunningStatistics, length_name: str, plural: str, sampled_D: np.ndarray, probabilities_K: np.ndarray
) -> None:
    """Checks that sampled lengths have the defined distribution: `probabilities_K` for the lengths from 1 to K.
    Lengths are sampled until their sum is large enough, so their number depends on them. The intervals remain valid,
    because each length has the same distribution given the previous lengths. length_name: name of the mean length, such
    as "words of a span". plural: name of the items that have the lengths, such as "spans"."""
    lengths, count = np.arange(1, len(probabilities_K) + 1), len(sampled_D)
    mean = float(probabilities_K @ lengths)
    variance = float(probabilities_K @ lengths**2 - mean**2)
    total, bound = sampled_D.sum(), len(lengths)
    stats.mean(f"{length_name}, as sampled", total, count, count * mean, count * variance, bound)
    for length, probability in zip(lengths, probabilities_K, strict=True):
        stats.fraction(
            f"{plural} of length {length}, as sampled", (sampled_D == length).sum(), count, float(probability)
        )


# Permuted examples: the number of predicted tokens, the lengths of n-grams, the random order, and attention masks.
# Shape letters: N examples of a batch, T tokens of a batch, B blocks of a batch, M predicted positions, L tokens of a
# diagram, K possible lengths.


# Maximum tokens in an attention diagram.
_DIAGRAM_TOKENS = 32


class PermutationInspector(MaskingInspector):
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

    def check(self, stats: RunningStatistics, sample: SampledBatch) -> None:
        """Checks the predicted tokens, the n-grams and the random order."""
        config, vocabulary = self.examples.config, self.vocabulary
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
        self.check_texts(stats, sample)


def _check_order(
    stats: RunningStatistics, permuted: PermutedTexts, ranks_T: np.ndarray, special_T: np.ndarray, block_T: np.ndarray
) -> None:
    """Each of two neighbors comes first in half of the cases; disjoint pairs of neighbors are independent."""
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
    """Returns the lines of a diagram, each with its heading (usually a token) and its text: the order of the predicted
    tokens, and for each token of the content stream and of the query stream the tokens to which it attends (`x`). Only
    predicted tokens are in the query stream."""
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
