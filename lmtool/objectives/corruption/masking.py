"""Masks of masked language models: single tokens, whole words, and spans of words (SpanBERT, ALBERT) or tokens
(GPT-BERT)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from lmtool import random_streams
from lmtool.data.formats import ragged_ranges
from lmtool.objectives.configs import MntpConfig, ReplacementConfig, SpanConfig, TokenMaskingConfig
from lmtool.tokenizers.tokenizer import Tokenizer

# Shape letters: T tokens of the packed batch, N examples in it, M predicted positions, W words, V vocabulary.


# Each position has four random numbers: for the selection, for the kind of replacement, for the random token, and for
# the length of a span of tokens.
_DRAWS = 4
_SELECT, _BRANCH, _RANDOM, _TILE = 0, 1, 2, 3


@dataclass(frozen=True)
class Vocabulary:
    """The properties of a vocabulary that masking needs. mask: the id of the mask token. special: (V,) whether a token
    is special; such tokens are never masked, and never sampled as random tokens. starts_word: (V,) whether a token
    begins a word."""

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
    """N concatenated texts. The keys of their random numbers are (seed, epoch, example, number), so the random numbers
    of a text do not depend on the other texts of the batch.

    Attributes:
        tokens: (T,) the tokens of all texts.
        lengths: (N,) the number of tokens of each text.
        examples: (N,) the number of the example that each text belongs to.
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
        """Returns the same texts, with the same random numbers, but with other tokens."""
        return replace(self, tokens=tokens, lengths=lengths)


@dataclass(frozen=True)
class MaskedTexts:
    """Masked texts. tokens: (T,) after masking. at: (M,) the flat indices of the predicted tokens, ascending. labels:
    (M,) the original tokens at these indices."""

    tokens: np.ndarray
    at: np.ndarray
    labels: np.ndarray


def budget(eligible_N: np.ndarray, probability: float) -> np.ndarray:
    """Returns how many tokens (N,) of each example are predicted. Of n > 0 eligible tokens, round(probability x n) are
    predicted, but at least one. Halves are rounded to even, as by Python's round in BERT's data script."""
    return np.minimum(np.maximum(np.rint(eligible_N * probability).astype(np.int64), 1), eligible_N)


def mask_tokens(config: TokenMaskingConfig, vocabulary: Vocabulary, texts: PackedTexts) -> MaskedTexts:
    """Masks tokens or whole words of packed texts, never special tokens. With masking=static, the masks repeat after
    `duplicates` epochs."""
    texts = replace(texts, epoch=config.sampling_epoch(texts.epoch))
    tokens_T, text_count = texts.tokens, len(texts.lengths)

    def uniform(draw: int, indices: np.ndarray) -> np.ndarray:
        return texts.uniform(texts.owners[indices], texts.positions[indices] * _DRAWS + draw)

    eligible = np.flatnonzero(~vocabulary.special[tokens_T])
    owners = texts.owners[eligible]
    if config.whole_word:
        starts = vocabulary.starts_word[tokens_T[eligible]]
        starts |= np.diff(eligible, prepend=-2) != 1  # after a special token
        starts |= np.diff(owners, prepend=-1) != 0  # or at the start of an example
        word_of = np.cumsum(starts) - 1
        first = np.flatnonzero(starts)
        sizes = np.bincount(word_of, minlength=len(first))
        is_selected = _choose(config, uniform(_SELECT, eligible[first]), owners[first], sizes, text_count)
        selected = is_selected[word_of] if len(first) else np.zeros(0, dtype=bool)
    else:
        selected = _choose(config, uniform(_SELECT, eligible), owners, None, text_count)

    indices = eligible[selected]
    tokens = replace_tokens(config, vocabulary, tokens_T, indices, uniform(_BRANCH, indices), uniform(_RANDOM, indices))
    return MaskedTexts(tokens, indices, tokens_T[indices])


def replace_tokens(
    config: ReplacementConfig,
    vocabulary: Vocabulary,
    tokens_T: np.ndarray,
    indices: np.ndarray,
    branch_M: np.ndarray,
    uniform_M: np.ndarray,
) -> np.ndarray:
    """Returns the tokens (T,), of which those at the indices (M,) are replaced by the mask token or by a random token,
    or left unchanged, with the configured probabilities. branch_M, uniform_M: random numbers, which choose the kind of
    replacement and the random tokens."""
    unmasked = np.where(branch_M < config.mask + config.random, vocabulary.sample(uniform_M), tokens_T[indices])
    tokens = tokens_T.copy()
    tokens[indices] = np.where(branch_M < config.mask, vocabulary.mask, unmasked)
    return tokens


def _choose(
    config: TokenMaskingConfig, uniform: np.ndarray, owners: np.ndarray, sizes: np.ndarray | None, text_count: int
) -> np.ndarray:
    """With select=exact, units are chosen in random order as long as they fit into the example's budget, as in BERT's
    data script; if no word fits, the first word is chosen."""
    if config.select == "bernoulli":
        return uniform < config.probability
    tokens_N = np.bincount(owners, weights=sizes, minlength=text_count).astype(np.int64)
    remaining_N = budget(tokens_N, config.probability)
    order = np.lexsort((uniform, owners))
    units_N = np.bincount(owners, minlength=text_count)
    first_N = np.cumsum(units_N) - units_N
    is_selected = np.zeros(len(uniform), dtype=bool)
    if sizes is None:
        ranks = np.arange(len(order)) - first_N[owners[order]]
        is_selected[order[ranks < remaining_N[owners[order]]]] = True
        return is_selected
    budget_N = remaining_N.copy()
    for rank in range(int(units_N.max(initial=0))):
        unfinished = np.flatnonzero((remaining_N > 0) & (units_N > rank))
        if not len(unfinished):
            break
        unit = order[first_N[unfinished] + rank]
        fits = sizes[unit] <= remaining_N[unfinished]
        is_selected[unit[fits]] = True
        remaining_N[unfinished[fits]] -= sizes[unit[fits]]
    untouched = np.flatnonzero((remaining_N == budget_N) & (units_N > 0))
    is_selected[order[first_N[untouched]]] = True
    return is_selected


# Masks over spans of words: SpanBERT's spans (Joshi, Chen, Liu, Weld, Zettlemoyer, Levy, "SpanBERT: Improving
# Pre-training by Representing and Predicting Spans", TACL 2020, section 3.1; masking.py of the published code), and
# ALBERT's n-grams (Lan et al. 2020, section 4.1).
#
# Spans are sampled until ceil(probability x tokens) tokens are masked. For each span, a length in words and a token
# that is not masked yet are sampled. The span begins with the word of this token, and has the sampled number of words,
# unless the text or the budget ends before. Adjacent spans become one span. SpanBERT's lengths have a geometric
# distribution, *renormalized* over 1 to `longest`; for geometric=0.2 and longest=10, the mean is 3.80 words. In ALBERT,
# the probability of length n is proportional to 1/n.
#
# Shape letters: T tokens, N examples, P tokens that may be masked, W words, M masked positions, S spans, D sampled
# lengths, K lengths.


# Each round of an example has four random numbers, of which two are used: for the length of a span, and for the token
# whose word the span begins with. After those of all rounds, each position has four random numbers, of which two are
# used: for the kind of replacement, and for the random token.
_SPAN_DRAWS = 4
_LENGTH, _ANCHOR = 0, 1
_REPLACEMENT_OFFSET = 1 << 40
_SPAN_BRANCH, _SPAN_RANDOM = 0, 1


@dataclass(frozen=True)
class MaskedSpans(MaskedTexts):
    """Texts with masked spans. spans: (S, 2) the flat indices of the first and the last token of each span, ascending.
    span_of: (M,) the index of the span that each masked token belongs to. sampled_lengths: (D,) the sampled lengths in
    words or tokens, before spans are truncated by the text or the budget."""

    spans: np.ndarray
    span_of: np.ndarray
    sampled_lengths: np.ndarray


@dataclass(frozen=True)
class BorderedSpans(MaskedSpans):
    """Texts with masked spans. bordered: (S,) whether both tokens next to a span are text, so that they can predict the
    span."""

    bordered: np.ndarray


def length_probabilities(config: SpanConfig) -> np.ndarray:
    """Returns the probability (K,) of each length in words, from 1."""
    lengths = np.arange(1, config.longest + 1)
    fractions = (1 - config.geometric) ** (lengths - 1.0) if config.lengths == "geometric" else 1.0 / lengths
    return fractions / fractions.sum()


def mask_spans(config: SpanConfig, vocabulary: Vocabulary, texts: PackedTexts) -> BorderedSpans:
    """Masks spans of words in packed texts. With masking=static, the masks repeat after `duplicates` epochs."""
    texts = replace(texts, epoch=config.sampling_epoch(texts.epoch))
    tokens_T, text = texts.tokens, _MaskableText(vocabulary, texts)
    masked_P, sampled_lengths = _sample_spans(config, text, texts)
    masked = np.flatnonzero(masked_P)
    begins_span = (np.diff(masked, prepend=-2) != 1) | text.begins_run_P[masked]
    span_of = np.cumsum(begins_span) - 1
    first = masked[begins_span]
    ends = np.append(np.flatnonzero(begins_span)[1:], len(masked))[: len(first)]
    last = masked[ends - 1] if len(first) else first
    indices = text.indices[masked]
    # With replace=span, all tokens of a span have the same kind of replacement, by the random number of its first
    # token.
    branch_keys = text.indices[first][span_of] if config.replace == "span" else indices

    def uniform(draw: int, keys: np.ndarray) -> np.ndarray:
        return texts.uniform(texts.owners[keys], _REPLACEMENT_OFFSET + texts.positions[keys] * _SPAN_DRAWS + draw)

    branch_M, uniform_M = uniform(_SPAN_BRANCH, branch_keys), uniform(_SPAN_RANDOM, indices)
    tokens = replace_tokens(config, vocabulary, tokens_T, indices, branch_M, uniform_M)
    ends_P = np.append(text.begins_run_P[1:], True)
    spans = np.stack([text.indices[first], text.indices[last]], axis=1)
    bordered = ~text.begins_run_P[first] & ~ends_P[last]
    return BorderedSpans(tokens, indices, tokens_T[indices], spans, span_of, sampled_lengths, bordered)


class _MaskableText:
    """The P tokens of a batch that may be masked, and their words. A *run* is a sequence of these tokens in one
    example, without a special token in between."""

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


def _sample_spans(config: SpanConfig, text: _MaskableText, texts: PackedTexts) -> tuple[np.ndarray, np.ndarray]:
    cumulative = np.cumsum(length_probabilities(config))[:-1]
    masked_P = np.zeros(len(text.indices), dtype=bool)
    remaining_N = np.ceil(text.counts_N * config.probability - 1e-9).astype(np.int64)
    sampled_lengths: list[np.ndarray] = [np.zeros(0, dtype=np.int64)]
    round_number = 0
    while len(active := np.flatnonzero(remaining_N > 0)):
        length_uniform, anchor_uniform = (
            texts.uniform(active, np.full(len(active), round_number * _SPAN_DRAWS + draw))
            for draw in (_LENGTH, _ANCHOR)
        )
        round_number += 1
        anchor = text.starts_N[active] + (anchor_uniform * text.counts_N[active]).astype(np.int64)
        unmasked = ~masked_P[anchor]
        active, anchor = active[unmasked], anchor[unmasked]
        length = 1 + np.searchsorted(cumulative, length_uniform[unmasked], side="right")
        sampled_lengths.append(length)
        word = text.word_P[anchor]
        begin = text.word_first[word]
        size = text.word_first[np.minimum(word + length, text.run_end_W[word])] - begin
        in_span = ragged_ranges(begin, size)
        owner = np.repeat(np.arange(len(active)), size)
        is_new = ~masked_P[in_span]
        before = np.cumsum(is_new) - is_new  # how many tokens of the same span before each token are newly masked
        before = before - before[np.cumsum(size) - size][owner]
        within_budget = is_new & (before < remaining_N[active][owner])
        masked_P[in_span[within_budget]] = True
        remaining_N[active] -= np.bincount(owner[within_budget], minlength=len(active))
    return masked_P, np.concatenate(sampled_lengths)


# Masks over spans of tokens: GPT-BERT (Charpentier and Samuel 2024; SpanMaskingStrategy of the published code).
#
# A text is divided, from its first token on, into spans whose lengths are uniform from 1 to `longest_span` tokens. They
# are masked in random order until the budget is reached, the last one whole, and each has one kind of replacement. The
# budget is that of `mask_tokens`, where the published code rounds at random; the published code also prefers tokens
# that were masked less often in earlier epochs, of which the masks here are independent. No span contains a special
# token: the text after it begins a span.
#
# Shape letters: T tokens, N examples, P tokens that may be masked, M masked positions, S spans, D sampled lengths.


def mask_tiles(config: MntpConfig, vocabulary: Vocabulary, texts: PackedTexts) -> MaskedSpans:
    """Masks spans of tokens in packed texts. With masking=static, the masks repeat after `duplicates` epochs."""
    texts = replace(texts, epoch=config.sampling_epoch(texts.epoch))
    tokens_T = texts.tokens

    def uniform(draw: int, indices: np.ndarray) -> np.ndarray:
        return texts.uniform(texts.owners[indices], texts.positions[indices] * _DRAWS + draw)

    begins_T, sampled_lengths = _tiles(config.longest_span, texts)
    eligible = np.flatnonzero(~vocabulary.special[tokens_T])
    begins_P = begins_T[eligible] | (np.diff(eligible, prepend=-2) != 1)
    span_of_P, first_S = np.cumsum(begins_P) - 1, eligible[begins_P]
    sizes_S = np.bincount(span_of_P, minlength=len(first_S))
    owners_S, uniform_S = texts.owners[first_S], uniform(_SELECT, first_S)
    if config.select == "bernoulli":
        is_selected_S = uniform_S < config.probability
    else:
        tokens_N = np.bincount(owners_S, weights=sizes_S, minlength=len(texts.lengths)).astype(np.int64)
        order = np.lexsort((uniform_S, owners_S))
        owners = owners_S[order]
        before_S = np.cumsum(sizes_S[order]) - sizes_S[order] - (np.cumsum(tokens_N) - tokens_N)[owners]
        is_selected_S = np.zeros(len(first_S), dtype=bool)
        is_selected_S[order] = before_S < budget(tokens_N, config.probability)[owners]
    is_masked_P = is_selected_S[span_of_P] if len(first_S) else np.zeros(0, dtype=bool)
    indices, first_M = eligible[is_masked_P], first_S[span_of_P[is_masked_P]]
    tokens = replace_tokens(config, vocabulary, tokens_T, indices, uniform(_BRANCH, first_M), uniform(_RANDOM, indices))
    first = first_S[is_selected_S]
    spans = np.stack([first, first + sizes_S[is_selected_S] - 1], axis=1)
    span_of = np.searchsorted(first, first_M)
    return MaskedSpans(tokens, indices, tokens_T[indices], spans, span_of, sampled_lengths)


def _tiles(longest: int, texts: PackedTexts) -> tuple[np.ndarray, np.ndarray]:
    """Returns whether a span begins at each token, (T,) bool, and the sampled length of each span, (D,)."""
    # The random number at position i is that of span i: a text has at most as many spans as tokens.
    fractions_T = texts.uniform(texts.owners, texts.positions * _DRAWS + _TILE)
    lengths_T = 1 + (fractions_T * longest).astype(np.int64)
    before_T = np.cumsum(lengths_T) - lengths_T
    starts_T = texts.starts[texts.owners]
    offsets_T = before_T - before_T[starts_T]
    is_inside_T = offsets_T < texts.lengths[texts.owners]
    begins_T = np.zeros(len(texts.tokens), dtype=bool)
    begins_T[(starts_T + offsets_T)[is_inside_T]] = True
    return begins_T, lengths_T[is_inside_T]
