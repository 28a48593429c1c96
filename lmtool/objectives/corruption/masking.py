"""Masks of masked language models: single tokens, whole words, and spans of words (SpanBERT, ALBERT)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from lmtool import random_streams
from lmtool.data.formats import ragged_ranges
from lmtool.objectives.configs import MaskingConfig, SpanConfig, TokenMaskingConfig
from lmtool.tokenizers.tokenizer import Tokenizer

# Shape letters: T tokens of the packed batch, N examples in it, M predicted positions, W words, V vocabulary.


# Each position has four random numbers, of which three are used: for the selection, for the kind of replacement, and
# for the random token.
_DRAWS = 4
_SELECT, _BRANCH, _RANDOM = 0, 1, 2


@dataclass(frozen=True)
class Vocabulary:
    """The properties of a vocabulary that masking needs.

    Attributes:
        mask: The id of the mask token.
        special: (V,) whether a token is special. Special tokens are never masked, and never sampled as random tokens.
        starts_word: (V,) whether a token begins a word.
    """

    mask: int
    special: np.ndarray
    starts_word: np.ndarray

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer, mask: int | None = None) -> Vocabulary:
        """Returns the vocabulary of a tokenizer. mask: the id of the mask token; None means the tokenizer's mask
        token."""
        special: np.ndarray = np.zeros(tokenizer.vocab_size, dtype=bool)
        special[list(tokenizer.special_ids)] = True
        mask = tokenizer.role("mask") if mask is None else mask
        return cls(mask, special, np.asarray(tokenizer.starts_word, dtype=bool))

    @cached_property
    def regular(self) -> np.ndarray:
        """The ids of the tokens that are not special."""
        return np.flatnonzero(~self.special)

    def sample(self, uniform: np.ndarray) -> np.ndarray:
        """Returns random tokens that are not special. uniform: random numbers in [0, 1)."""
        return self.regular[(uniform * len(self.regular)).astype(np.int64)]


@dataclass(frozen=True)
class PackedTexts:
    """N concatenated texts, with the keys of their random numbers: (seed, epoch, example, number). The random numbers
    of a text do not depend on the other texts of the batch.

    Attributes:
        tokens: (T,) the tokens of all texts.
        lengths: (N,) the number of tokens of each text.
        examples: (N,) the number of the example that each text belongs to.
        seed: The seed of the run.
        epoch: The number of the epoch.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    examples: np.ndarray
    seed: int
    epoch: int

    @cached_property
    def owners(self) -> np.ndarray:
        """The index (T,) of the text that each token belongs to."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    @cached_property
    def starts(self) -> np.ndarray:
        """The index (N,) of the first token of each text."""
        return np.cumsum(self.lengths) - self.lengths

    @cached_property
    def positions(self) -> np.ndarray:
        """The position (T,) of each token in its text."""
        return np.arange(len(self.tokens)) - self.starts[self.owners]

    def uniform(self, owners: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Returns random numbers in [0, 1). owners: the indices of the texts. numbers: which of the random numbers of
        these texts."""
        return random_streams.uniform_at(self.seed, "corrupt", self.epoch, self.examples[owners], numbers)

    def with_tokens(self, tokens: np.ndarray, lengths: np.ndarray) -> PackedTexts:
        """Returns texts with other tokens and the same random numbers."""
        return replace(self, tokens=tokens, lengths=lengths)


@dataclass(frozen=True)
class Masked:
    """Masked texts.

    Attributes:
        tokens: (T,) the tokens after masking.
        at: (M,) the flat indices of the predicted tokens, ascending.
        labels: (M,) the original tokens there.
    """

    tokens: np.ndarray
    at: np.ndarray
    labels: np.ndarray


def budget(eligible_N: np.ndarray, probability: float) -> np.ndarray:
    """Returns how many tokens (N,) of each example are predicted: round(probability x n) of n eligible tokens, but at
    least one if there are any. Halves are rounded to even, as by Python's round in BERT's data script."""
    return np.minimum(np.maximum(np.rint(eligible_N * probability).astype(np.int64), 1), eligible_N)


def mask_tokens(config: TokenMaskingConfig, vocabulary: Vocabulary, texts: PackedTexts) -> Masked:
    """Masks tokens or whole words of packed texts, but no special tokens. With masking=static, the masks repeat after
    `duplicates` epochs."""
    texts = replace(texts, epoch=config.sampling_epoch(texts.epoch))
    tokens_T, count = texts.tokens, len(texts.lengths)

    def uniform(draw: int, indices: np.ndarray) -> np.ndarray:
        return texts.uniform(texts.owners[indices], texts.positions[indices] * _DRAWS + draw)

    eligible = np.flatnonzero(~vocabulary.special[tokens_T])
    owners = texts.owners[eligible]
    if config.whole_word:
        starts = vocabulary.starts_word[tokens_T[eligible]]
        starts |= np.diff(eligible, prepend=-2) != 1  # after a special token or at the start of an example
        word_of = np.cumsum(starts) - 1
        first = np.flatnonzero(starts)
        sizes = np.bincount(word_of, minlength=len(first))
        is_selected = _choose(config, uniform(_SELECT, eligible[first]), owners[first], sizes, count)
        selected = is_selected[word_of] if len(first) else np.zeros(0, dtype=bool)
    else:
        selected = _choose(config, uniform(_SELECT, eligible), owners, None, count)

    indices = eligible[selected]
    tokens = replace_tokens(config, vocabulary, tokens_T, indices, uniform(_BRANCH, indices), uniform(_RANDOM, indices))
    return Masked(tokens, indices, tokens_T[indices])


def replace_tokens(
    config: MaskingConfig,
    vocabulary: Vocabulary,
    tokens_T: np.ndarray,
    indices: np.ndarray,
    branch_M: np.ndarray,
    uniform_M: np.ndarray,
) -> np.ndarray:
    """Replaces each of some tokens by the mask token or by a random token, or leaves it unchanged.

    Args:
        config: The probability of each replacement.
        vocabulary: The vocabulary.
        tokens_T: The tokens.
        indices: (M,) the flat indices of the tokens to replace.
        branch_M: Random numbers, which choose the kind of replacement.
        uniform_M: Random numbers, which choose the random tokens.

    Returns:
        (T,) the tokens after replacement.
    """
    unmasked = np.where(branch_M < config.mask + config.random, vocabulary.sample(uniform_M), tokens_T[indices])
    tokens = tokens_T.copy()
    tokens[indices] = np.where(branch_M < config.mask, vocabulary.mask, unmasked)
    return tokens


def _choose(
    config: TokenMaskingConfig, uniform: np.ndarray, owners: np.ndarray, sizes: np.ndarray | None, count: int
) -> np.ndarray:
    """Chooses the units to mask. A unit is a token or a word.

    With select=exact, units are chosen in random order as long as they fit into the remaining budget of the example, as
    in BERT's data script. If no word of an example fits, the first word is chosen, so that every example has a target.
    config: the configuration of masks. uniform: a random number for each unit. owners: the index of the text that each
    unit belongs to. sizes: the number of tokens of each word; None if units are tokens. count: the number of texts.
    Returns whether each unit is chosen.
    """
    if config.select == "bernoulli":
        return uniform < config.probability
    tokens = np.bincount(owners, weights=sizes, minlength=count).astype(np.int64)
    remaining = budget(tokens, config.probability)
    order = np.lexsort((uniform, owners))
    units = np.bincount(owners, minlength=count)
    first = np.cumsum(units) - units
    is_selected = np.zeros(len(uniform), dtype=bool)
    if sizes is None:
        rank = np.arange(len(order)) - first[owners[order]]
        is_selected[order[rank < remaining[owners[order]]]] = True
        return is_selected
    full_budget = remaining.copy()
    for rank in range(int(units.max(initial=0))):
        unfinished = np.flatnonzero((remaining > 0) & (units > rank))
        if not len(unfinished):
            break
        unit = order[first[unfinished] + rank]
        fits = sizes[unit] <= remaining[unfinished]
        is_selected[unit[fits]] = True
        remaining[unfinished[fits]] -= sizes[unit[fits]]
    untouched = np.flatnonzero((remaining == full_budget) & (units > 0))
    is_selected[order[first[untouched]]] = True
    return is_selected


# Masks over spans of words: SpanBERT's spans (Joshi, Chen, Liu, Weld, Zettlemoyer, Levy, "SpanBERT: Improving
# Pre-training by Representing and Predicting Spans", TACL 2020, section 3.1; masking.py of the published code), and
# ALBERT's n-grams (Lan et al. 2020, section 4.1).
#
# Until ceil(probability x tokens) tokens are masked, a length in words is sampled, and a token that is not masked yet.
# The span begins with the word of this token, and has the sampled number of words, unless the text or the budget ends
# before. Adjacent spans become one span. SpanBERT's lengths have a geometric distribution, *renormalized* over 1 to
# `longest`: the mean is 3.80 words for 0.2 and 10. In ALBERT, the probability of length n is proportional to 1/n.
#
# Shape letters: T tokens, N examples, P tokens that may be masked, W words, M masked positions, S spans, D sampled
# lengths, K lengths.


# Each round of an example has a few random numbers, for the length and for the token that a span begins at. The random
# numbers of replacements are numbered by position, after those of all rounds.
_SPAN_DRAWS = 4
_LENGTH, _ANCHOR = 0, 1
_REPLACEMENT_OFFSET = 1 << 40


@dataclass(frozen=True)
class MaskedSpans(Masked):
    """Texts with masked spans.

    Attributes:
        spans: (S, 2) the flat indices of the first and the last token of each span, ascending.
        span_of: (M,) the index of the span that each masked token belongs to.
        bordered: (S,) whether both tokens next to a span are text, so that they can predict the span.
        sampled_lengths: (D,) the sampled lengths in words, before spans are truncated by the text or the budget.
    """

    spans: np.ndarray
    span_of: np.ndarray
    bordered: np.ndarray
    sampled_lengths: np.ndarray


def length_probabilities(config: SpanConfig) -> np.ndarray:
    """Returns the probability (K,) of each length in words, from 1."""
    lengths = np.arange(1, config.longest + 1)
    fractions = (1 - config.geometric) ** (lengths - 1.0) if config.lengths == "geometric" else 1.0 / lengths
    return fractions / fractions.sum()


def mask_spans(config: SpanConfig, vocabulary: Vocabulary, texts: PackedTexts) -> MaskedSpans:
    """Masks spans of words in packed texts. With masking=static, the masks repeat after `duplicates` epochs."""
    texts = replace(texts, epoch=config.sampling_epoch(texts.epoch))
    tokens_T, text = texts.tokens, _Text(vocabulary, texts)
    masked_P, sampled_lengths = _sample_spans(config, text, texts)
    inside = np.flatnonzero(masked_P)
    opens = (np.diff(inside, prepend=-2) != 1) | text.begins_run_P[inside]
    span_of = np.cumsum(opens) - 1
    first = inside[opens]
    last = inside[np.append(np.flatnonzero(opens)[1:], len(inside))[: len(first)] - 1] if len(first) else first
    indices = text.indices[inside]
    keyed_by = text.indices[first][span_of] if config.replace == "span" else indices

    def uniform(draw: int, keys_M: np.ndarray) -> np.ndarray:
        return texts.uniform(texts.owners[keys_M], _REPLACEMENT_OFFSET + texts.positions[keys_M] * _SPAN_DRAWS + draw)

    tokens = replace_tokens(config, vocabulary, tokens_T, indices, uniform(0, keyed_by), uniform(1, indices))
    ends_P = np.append(text.begins_run_P[1:], True)
    spans = np.stack([text.indices[first], text.indices[last]], axis=1)
    bordered = ~text.begins_run_P[first] & ~ends_P[last]
    return MaskedSpans(tokens, indices, tokens_T[indices], spans, span_of, bordered, sampled_lengths)


class _Text:
    """The P tokens of a batch that may be masked, and their words.

    A *run* is a sequence of such tokens without a special token in between. indices: (P,) the flat index of each token.
    owners_P: the example that each token belongs to. begins_run_P: whether a token begins a run: the previous token is
    special, or belongs to another example. word_P: the index of each token's word. word_first: (W+1,) the boundaries of
    words, as indices of the P tokens. run_end_W: the index of the word after the run that contains a word. counts_N:
    the number of such tokens in each example. starts_N: the index of each example's first such token.
    """

    def __init__(self, vocabulary: Vocabulary, texts: PackedTexts):
        self.indices = np.flatnonzero(~vocabulary.special[texts.tokens])
        self.owners_P = texts.owners[self.indices]
        self.begins_run_P = (np.diff(self.indices, prepend=-2) != 1) | (np.diff(self.owners_P, prepend=-1) != 0)
        starts = vocabulary.starts_word[texts.tokens[self.indices]] | self.begins_run_P
        self.word_P = np.cumsum(starts) - 1
        first = np.flatnonzero(starts)
        self.word_first = np.append(first, len(self.indices))
        run_W = np.cumsum(self.begins_run_P[first]) - 1
        self.run_end_W = np.searchsorted(run_W, run_W, side="right")
        self.counts_N = np.bincount(self.owners_P, minlength=len(texts.lengths))
        self.starts_N = np.cumsum(self.counts_N) - self.counts_N


def _sample_spans(config: SpanConfig, text: _Text, texts: PackedTexts) -> tuple[np.ndarray, np.ndarray]:
    """Samples spans in rounds. Each round samples one span for each example whose budget is not exhausted. Returns
    whether each token is masked, (P,), and the sampled lengths (D,)."""
    cumulative = np.cumsum(length_probabilities(config))[:-1]
    masked_P = np.zeros(len(text.indices), dtype=bool)
    remaining_N = np.ceil(text.counts_N * config.probability - 1e-9).astype(np.int64)
    sampled_lengths: list[np.ndarray] = [np.zeros(0, dtype=np.int64)]
    number = 0
    while len(active := np.flatnonzero(remaining_N > 0)):
        uniform = [
            texts.uniform(active, np.full(len(active), number * _SPAN_DRAWS + draw)) for draw in (_LENGTH, _ANCHOR)
        ]
        number += 1
        anchor = text.starts_N[active] + (uniform[1] * text.counts_N[active]).astype(np.int64)
        unmasked = ~masked_P[anchor]
        active, anchor = active[unmasked], anchor[unmasked]
        length = 1 + np.searchsorted(cumulative, uniform[0][unmasked], side="right")
        sampled_lengths.append(length)
        word = text.word_P[anchor]
        begin = text.word_first[word]
        size = text.word_first[np.minimum(word + length, text.run_end_W[word])] - begin
        inside = ragged_ranges(begin, size)
        owner = np.repeat(np.arange(len(active)), size)
        new = ~masked_P[inside]
        before = np.cumsum(new) - new  # the number of new tokens before each token, counted from the start of its span
        before = before - before[np.cumsum(size) - size][owner]
        within_budget = new & (before < remaining_N[active][owner])
        masked_P[inside[within_budget]] = True
        remaining_N[active] -= np.bincount(owner[within_budget], minlength=len(active))
    return masked_P, np.concatenate(sampled_lengths)
