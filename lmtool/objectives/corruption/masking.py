"""Selection of the tokens that a masked language model predicts: single tokens, whole words, and spans (SpanBERT,
ALBERT)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from lmtool import random_streams
from lmtool.data.formats import ragged_ranges
from lmtool.objectives.configs import MaskingConfig, SpanConfig, TokenMaskingConfig
from lmtool.tokenizers.tokenizer import Tokenizer

# Shape letters: T tokens of the packed batch, N examples in it, M predicted positions, W words, V vocabulary.


# Random numbers per position: selection, replacement branch, random token.
_DRAWS = 4
_SELECT, _BRANCH, _RANDOM = 0, 1, 2


@dataclass(frozen=True)
class Vocabulary:
    """The properties of a vocabulary that masking needs.

    mask: the id of [MASK]. special: (V,) bool, tokens never selected and never sampled. starts_word: (V,) bool.
    """

    mask: int
    special: np.ndarray
    starts_word: np.ndarray

    @classmethod
    def of(cls, tokenizer: Tokenizer, mask: int | None = None) -> Vocabulary:
        """mask: the id that masks; None: the tokenizer's mask token."""
        special: np.ndarray = np.zeros(tokenizer.vocab_size, dtype=bool)
        special[list(tokenizer.special_ids)] = True
        mask = tokenizer.role("mask") if mask is None else mask
        return cls(mask, special, np.asarray(tokenizer.starts_word, dtype=bool))

    @cached_property
    def regular(self) -> np.ndarray:
        """The ids that are not special."""
        return np.flatnonzero(~self.special)

    def sample(self, uniform: np.ndarray) -> np.ndarray:
        """Regular ids for random numbers in [0, 1)."""
        return self.regular[(uniform * len(self.regular)).astype(np.int64)]


@dataclass(frozen=True)
class PackedTexts:
    """N concatenated texts and the keys of their random numbers, (seed, epoch, example, number), which do not depend on
    the batch. tokens: (T,). lengths, examples: (N,)."""

    tokens: np.ndarray
    lengths: np.ndarray
    examples: np.ndarray
    seed: int
    epoch: int

    @cached_property
    def owners(self) -> np.ndarray:
        """(T,) the text of each token."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    @cached_property
    def starts(self) -> np.ndarray:
        """(N,) first position of each text."""
        return np.cumsum(self.lengths) - self.lengths

    @cached_property
    def positions(self) -> np.ndarray:
        """(T,) position of each token in its text."""
        return np.arange(len(self.tokens)) - self.starts[self.owners]

    def uniform(self, owners: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Random numbers by text and number."""
        return random_streams.uniform_at(self.seed, "corrupt", self.epoch, self.examples[owners], numbers)

    def of(self, tokens: np.ndarray, lengths: np.ndarray) -> PackedTexts:
        """Other tokens with the same keys."""
        return replace(self, tokens=tokens, lengths=lengths)


@dataclass(frozen=True)
class Masked:
    """tokens: (T,) the inputs. at: (M,) flat positions, ascending. labels: (M,) original tokens."""

    tokens: np.ndarray
    at: np.ndarray
    labels: np.ndarray


def budget(eligible_N: np.ndarray, probability: float) -> np.ndarray:
    """(N,) how many of an example's eligible tokens are predicted: round(probability x n), at least one if any.

    Halves round to even, as Python's round does in BERT's data script.
    """
    return np.minimum(np.maximum(np.rint(eligible_N * probability).astype(np.int64), 1), eligible_N)


def mask_tokens(config: TokenMaskingConfig, vocabulary: Vocabulary, texts: PackedTexts) -> Masked:
    """Selects and replaces tokens of a packed batch, special tokens excepted. Under masking=static the random numbers
    repeat every `duplicates` epochs."""
    texts = replace(texts, epoch=config.sampling_epoch(texts.epoch))
    tokens_T, count = texts.tokens, len(texts.lengths)

    def draw(which: int, at: np.ndarray) -> np.ndarray:
        return texts.uniform(texts.owners[at], texts.positions[at] * _DRAWS + which)

    eligible = np.flatnonzero(~vocabulary.special[tokens_T])
    owners = texts.owners[eligible]
    if config.whole_word:
        starts = vocabulary.starts_word[tokens_T[eligible]]
        starts |= np.diff(eligible, prepend=-2) != 1  # after a special token or at the start of an example
        word_of = np.cumsum(starts) - 1
        first = np.flatnonzero(starts)
        sizes = np.bincount(word_of, minlength=len(first))
        chosen = _choose(config, draw(_SELECT, eligible[first]), owners[first], sizes, count)
        selected = chosen[word_of] if len(first) else np.zeros(0, dtype=bool)
    else:
        selected = _choose(config, draw(_SELECT, eligible), owners, None, count)

    at = eligible[selected]
    tokens = replace_tokens(config, vocabulary, tokens_T, at, draw(_BRANCH, at), draw(_RANDOM, at))
    return Masked(tokens, at, tokens_T[at])


def replace_tokens(
    config: MaskingConfig,
    vocabulary: Vocabulary,
    tokens_T: np.ndarray,
    at: np.ndarray,
    branch_M: np.ndarray,
    uniform_M: np.ndarray,
) -> np.ndarray:
    """(T,) the tokens with [MASK], a random token or the original at the M positions `at`.

    branch_M: random numbers that choose the replacement. uniform_M: those of the random tokens.
    """
    unmasked = np.where(branch_M < config.mask + config.random, vocabulary.sample(uniform_M), tokens_T[at])
    tokens = tokens_T.copy()
    tokens[at] = np.where(branch_M < config.mask, vocabulary.mask, unmasked)
    return tokens


def _choose(
    config: TokenMaskingConfig, uniform: np.ndarray, owners: np.ndarray, sizes: np.ndarray | None, count: int
) -> np.ndarray:
    """Selects units (tokens, or words of these sizes) of `count` examples: a bool per unit.

    exact: units in random order while they fit the rest of the example's budget (BERT's data script). A word larger
    than the whole budget is selected if nothing else was, so that every example has a target.
    """
    if config.select == "bernoulli":
        return uniform < config.probability
    tokens = np.bincount(owners, weights=sizes, minlength=count).astype(np.int64)
    left = budget(tokens, config.probability)
    order = np.lexsort((uniform, owners))
    units = np.bincount(owners, minlength=count)
    first = np.cumsum(units) - units
    chosen = np.zeros(len(uniform), dtype=bool)
    if sizes is None:
        rank = np.arange(len(order)) - first[owners[order]]
        chosen[order[rank < left[owners[order]]]] = True
        return chosen
    whole = left.copy()
    for rank in range(int(units.max(initial=0))):
        unfinished = np.flatnonzero((left > 0) & (units > rank))
        if not len(unfinished):
            break
        unit = order[first[unfinished] + rank]
        fits = sizes[unit] <= left[unfinished]
        chosen[unit[fits]] = True
        left[unfinished[fits]] -= sizes[unit[fits]]
    untouched = np.flatnonzero((left == whole) & (units > 0))
    chosen[order[first[untouched]]] = True
    return chosen


# Masks over runs of words: SpanBERT's spans and ALBERT's n-grams.
# Joshi, Chen, Liu, Weld, Zettlemoyer, Levy, "SpanBERT: Improving Pre-training by Representing and Predicting Spans",
# TACL 2020, section 3.1, and masking.py of its published code: until ceil(probability x tokens) are masked, a length
# in words is sampled, and a token that is not masked yet; the span begins with that token's word, and ends after the
# sampled number of words or at the end of the text or the budget. Lengths are geometric, *renormalized* over 1 to
# `longest`: a mean of 3.80 words for 0.2 and 10. Spans that touch are one span. ALBERT's n-grams (Lan et al. 2020,
# section 4.1): the probability of length n is proportional to 1/n.
#
# Shape letters: T tokens, N examples, P tokens that may be masked, W words, M masked positions, S spans, D sampled
# lengths, K lengths.


# Random numbers of one round of an example; those of a span or a token are numbered by position, far beyond.
_SPAN_DRAWS = 4
_LENGTH, _ANCHOR = 0, 1
_BY_POSITION = 1 << 40


@dataclass(frozen=True)
class MaskedSpans(Masked):
    """spans: (S, 2) flat inclusive boundaries, ascending. span_of: (M,) the span of each position. bordered: (S,)
    whether both neighbors of a span are text, so that its boundary can predict it. drawn: (D,) sampled lengths in
    words, before text and budget truncate them."""

    spans: np.ndarray
    span_of: np.ndarray
    bordered: np.ndarray
    drawn: np.ndarray


def length_probabilities(config: SpanConfig) -> np.ndarray:
    """(K,) probability of each length, from 1 word."""
    lengths = np.arange(1, config.longest + 1)
    fractions = (1 - config.geometric) ** (lengths - 1.0) if config.lengths == "geometric" else 1.0 / lengths
    return fractions / fractions.sum()


def mask_spans(config: SpanConfig, vocabulary: Vocabulary, texts: PackedTexts) -> MaskedSpans:
    """Masks spans of a packed batch; see `mask_tokens`."""
    texts = replace(texts, epoch=config.sampling_epoch(texts.epoch))
    tokens_T, text = texts.tokens, _Text(vocabulary, texts)
    masked_P, drawn = _draw_spans(config, text, texts)
    inside = np.flatnonzero(masked_P)
    opens = (np.diff(inside, prepend=-2) != 1) | text.broken_P[inside]
    span_of = np.cumsum(opens) - 1
    first = inside[opens]
    last = inside[np.append(np.flatnonzero(opens)[1:], len(inside))[: len(first)] - 1] if len(first) else first
    at = text.indices[inside]
    keyed_by = text.indices[first][span_of] if config.replace == "span" else at

    def draw(which: int, keys_M: np.ndarray) -> np.ndarray:
        return texts.uniform(texts.owners[keys_M], _BY_POSITION + texts.positions[keys_M] * _SPAN_DRAWS + which)

    tokens = replace_tokens(config, vocabulary, tokens_T, at, draw(0, keyed_by), draw(1, at))
    ends_P = np.append(text.broken_P[1:], True)
    spans = np.stack([text.indices[first], text.indices[last]], axis=1)
    return MaskedSpans(tokens, at, tokens_T[at], spans, span_of, ~text.broken_P[first] & ~ends_P[last], drawn)


class _Text:
    """The maskable tokens of a batch, and their words.

    indices: (P,) flat index of each. owners_P: its example. broken_P: whether the previous token is not text of the
    same example. word_P: its word. word_first: (W+1,) word boundaries among the P. run_end_W: the word after the
    unbroken run that contains a word.
    """

    def __init__(self, vocabulary: Vocabulary, texts: PackedTexts):
        self.indices = np.flatnonzero(~vocabulary.special[texts.tokens])
        self.owners_P = texts.owners[self.indices]
        self.broken_P = (np.diff(self.indices, prepend=-2) != 1) | (np.diff(self.owners_P, prepend=-1) != 0)
        starts = vocabulary.starts_word[texts.tokens[self.indices]] | self.broken_P
        self.word_P = np.cumsum(starts) - 1
        first = np.flatnonzero(starts)
        self.word_first = np.append(first, len(self.indices))
        run_W = np.cumsum(self.broken_P[first]) - 1
        self.run_end_W = np.searchsorted(run_W, run_W, side="right")
        self.counts_N = np.bincount(self.owners_P, minlength=len(texts.lengths))
        self.starts_N = np.cumsum(self.counts_N) - self.counts_N


def _draw_spans(config: SpanConfig, text: _Text, texts: PackedTexts) -> tuple[np.ndarray, np.ndarray]:
    """(P,) masked tokens, and (D,) sampled lengths: each round samples one span for each example below its budget."""
    cumulative = np.cumsum(length_probabilities(config))[:-1]
    masked_P = np.zeros(len(text.indices), dtype=bool)
    left_N = np.ceil(text.counts_N * config.probability - 1e-9).astype(np.int64)
    drawn: list[np.ndarray] = [np.zeros(0, dtype=np.int64)]
    number = 0
    while len(active := np.flatnonzero(left_N > 0)):
        uniform = [
            texts.uniform(active, np.full(len(active), number * _SPAN_DRAWS + which)) for which in (_LENGTH, _ANCHOR)
        ]
        number += 1
        anchor = text.starts_N[active] + (uniform[1] * text.counts_N[active]).astype(np.int64)
        fresh = ~masked_P[anchor]
        active, anchor = active[fresh], anchor[fresh]
        length = 1 + np.searchsorted(cumulative, uniform[0][fresh], side="right")
        drawn.append(length)
        word = text.word_P[anchor]
        begin = text.word_first[word]
        size = text.word_first[np.minimum(word + length, text.run_end_W[word])] - begin
        inside = ragged_ranges(begin, size)
        owner = np.repeat(np.arange(len(active)), size)
        new = ~masked_P[inside]
        before = np.cumsum(new) - new  # new tokens before each, from the start of its own span
        before = before - before[np.cumsum(size) - size][owner]
        retained = new & (before < left_N[active][owner])
        masked_P[inside[retained]] = True
        left_N[active] -= np.bincount(owner[retained], minlength=len(active))
    return masked_P, np.concatenate(drawn)
