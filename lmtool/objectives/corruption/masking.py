"""Selection of the tokens that a masked language model predicts: single tokens, whole words, and spans (SpanBERT,
ALBERT)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lmtool import random_streams
from lmtool.data.formats import ragged_ranges
from lmtool.objectives.configs import MaskingConfig, SpanConfig, TokenMaskingConfig
from lmtool.tokenizers.tokenizer import Tokenizer

# Selection and replacement of masked tokens: a pure, vectorized function. Random numbers are keyed by (seed, epoch,
# example, position), so masks do not depend on the batch.
# Shape letters: T tokens of the packed batch, N examples in it, M predicted positions, W words.


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
    def of(cls, tokenizer: Tokenizer) -> Vocabulary:
        special: np.ndarray = np.zeros(tokenizer.vocab_size, dtype=bool)
        special[list(tokenizer.special_ids)] = True
        return cls(tokenizer.role("mask"), special, np.asarray(tokenizer.starts_word, dtype=bool))


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


def mask_tokens(
    config: TokenMaskingConfig,
    vocabulary: Vocabulary,
    tokens_T: np.ndarray,
    lengths_N: np.ndarray,
    examples_N: np.ndarray,
    seed: int,
    epoch: int,
) -> Masked:
    """Selects and replaces tokens of a packed batch.

    Args:
        config: Which tokens are predicted, and their replacements.
        vocabulary: See `Vocabulary`.
        tokens_T: Concatenated ids of N examples; special tokens are never selected.
        lengths_N: Tokens of each example.
        examples_N: Example numbers, which key the random numbers.
        seed: Of the run.
        epoch: Keys the random numbers; under masking=static they repeat every `duplicates` epochs.
    """
    epoch = config.sampling_epoch(epoch)
    documents_T = np.repeat(np.arange(len(lengths_N)), lengths_N)
    positions_T = np.arange(len(tokens_T)) - np.repeat(np.cumsum(lengths_N) - lengths_N, lengths_N)
    eligible_T = ~vocabulary.special[tokens_T]

    def draw(which: int, at: np.ndarray) -> np.ndarray:
        return random_streams.uniform_at(
            seed, "corrupt", epoch, examples_N[documents_T[at]], positions_T[at] * _DRAWS + which
        )

    places = np.flatnonzero(eligible_T)
    documents = documents_T[places]
    if config.whole_word:
        starts = vocabulary.starts_word[tokens_T[places]]
        starts |= np.diff(places, prepend=-2) != 1  # after a special token or at the start of an example
        word_of = np.cumsum(starts) - 1
        first = np.flatnonzero(starts)
        chosen = _choose(
            config,
            draw(_SELECT, places[first]),
            documents[first],
            np.bincount(word_of, minlength=len(first)),
            len(lengths_N),
        )
        selected = chosen[word_of] if len(first) else np.zeros(0, dtype=bool)
    else:
        selected = _choose(config, draw(_SELECT, places), documents, None, len(lengths_N))

    at = places[selected]
    labels = tokens_T[at]
    tokens = replace_tokens(config, vocabulary, tokens_T, at, draw(_BRANCH, at), draw(_RANDOM, at))
    return Masked(tokens, at, labels)


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
    regular = np.flatnonzero(~vocabulary.special)
    drawn = regular[(uniform_M * len(regular)).astype(np.int64)]
    random = branch_M < config.mask + config.random
    tokens = tokens_T.copy()
    tokens[at] = np.where(branch_M < config.mask, vocabulary.mask, np.where(random, drawn, tokens_T[at]))
    return tokens


def _choose(
    config: TokenMaskingConfig, uniform: np.ndarray, documents: np.ndarray, sizes: np.ndarray | None, count: int
) -> np.ndarray:
    """Selects units (tokens, or words of given sizes): a bool per unit.

    exact: units in random order while they fit the rest of the example's budget (BERT's data script). A word larger
    than the whole budget is selected if nothing else was, so that every example has a target.
    """
    if config.select == "bernoulli":
        return uniform < config.probability
    tokens = np.bincount(documents, weights=sizes, minlength=count).astype(np.int64)
    left = budget(tokens, config.probability)
    order = np.lexsort((uniform, documents))
    units = np.bincount(documents, minlength=count)
    first = np.cumsum(units) - units
    chosen = np.zeros(len(uniform), dtype=bool)
    if sizes is None:
        rank = np.arange(len(order)) - first[documents[order]]
        chosen[order[rank < left[documents[order]]]] = True
        return chosen
    whole = left.copy()
    for rank in range(int(units.max(initial=0))):
        open_ = np.flatnonzero((left > 0) & (units > rank))
        if not len(open_):
            break
        unit = order[first[open_] + rank]
        fits = sizes[unit] <= left[open_]
        chosen[unit[fits]] = True
        left[open_[fits]] -= sizes[unit[fits]]
    untouched = np.flatnonzero((left == whole) & (units > 0))
    chosen[order[first[untouched]]] = True
    return chosen


# Masks over runs of words: SpanBERT's spans and ALBERT's n-grams. A pure function, vectorized over a batch.
# Joshi, Chen, Liu, Weld, Zettlemoyer, Levy, "SpanBERT: Improving Pre-training by Representing and Predicting Spans",
# TACL 2020, section 3.1, and masking.py of its published code: until ceil(probability x tokens) are masked, a length
# in words is drawn and a token that is not masked yet; the span begins with that token's word and ends with its
# words, the text or the budget. Lengths are geometric, *renormalized* over 1 to `longest`: a mean of 3.80 words for
# 0.2 and 10. Spans that touch are one span. ALBERT's n-grams: Lan et al. 2020, section 4.1, a length n with a share
# of 1/n.
#
# Every draw is keyed by (seed, epoch, example, number of the draw or position), so spans do not depend on the batch.
# Shape letters: T tokens, N examples, P tokens that may be masked, W words, M masked places, S spans, D draws, K
# lengths.


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


def mask_spans(
    config: SpanConfig,
    vocabulary: Vocabulary,
    tokens_T: np.ndarray,
    lengths_N: np.ndarray,
    examples_N: np.ndarray,
    seed: int,
    epoch: int,
) -> MaskedSpans:
    """Masks spans of a packed batch; arguments as in `mask_tokens`."""
    epoch = config.sampling_epoch(epoch)
    text = _Text(vocabulary, tokens_T, lengths_N)
    masked_P, drawn = _draw_spans(config, text, examples_N, seed, epoch)
    inside = np.flatnonzero(masked_P)
    opens = (np.diff(inside, prepend=-2) != 1) | text.broken_P[inside]
    span_of = np.cumsum(opens) - 1
    first = inside[opens]
    last = inside[np.append(np.flatnonzero(opens)[1:], len(inside))[: len(first)] - 1] if len(first) else first
    at = text.places[inside]
    keyed_by = text.places[first][span_of] if config.replace == "span" else at
    starts_N = np.cumsum(lengths_N) - lengths_N
    documents_M = text.documents_P[inside]

    def draw(which: int, places: np.ndarray) -> np.ndarray:
        number = _BY_POSITION + (places - starts_N[documents_M]) * _SPAN_DRAWS + which
        return random_streams.uniform_at(seed, "corrupt", epoch, examples_N[documents_M], number)

    tokens = replace_tokens(config, vocabulary, tokens_T, at, draw(0, keyed_by), draw(1, at))
    ends_P = np.append(text.broken_P[1:], True)
    spans = np.stack([text.places[first], text.places[last]], axis=1)
    return MaskedSpans(tokens, at, tokens_T[at], spans, span_of, ~text.broken_P[first] & ~ends_P[last], drawn)


class _Text:
    """The maskable tokens of a batch, and their words.

    places: (P,) flat index of each. documents_P: its example. broken_P: whether the previous token is not text of the
    same example. word_P: its word. word_first: (W+1,) word boundaries among the P. run_end_W: the word after the
    unbroken run that contains a word.
    """

    def __init__(self, vocabulary: Vocabulary, tokens_T: np.ndarray, lengths_N: np.ndarray):
        documents_T = np.repeat(np.arange(len(lengths_N)), lengths_N)
        self.places = np.flatnonzero(~vocabulary.special[tokens_T])
        self.documents_P = documents_T[self.places]
        self.broken_P = (np.diff(self.places, prepend=-2) != 1) | (np.diff(self.documents_P, prepend=-1) != 0)
        starts = vocabulary.starts_word[tokens_T[self.places]] | self.broken_P
        self.word_P = np.cumsum(starts) - 1
        first = np.flatnonzero(starts)
        self.word_first = np.append(first, len(self.places))
        run_W = np.cumsum(self.broken_P[first]) - 1
        self.run_end_W = np.searchsorted(run_W, run_W, side="right")
        self.counts_N = np.bincount(self.documents_P, minlength=len(lengths_N))
        self.starts_N = np.cumsum(self.counts_N) - self.counts_N


def _draw_spans(
    config: SpanConfig, text: _Text, examples_N: np.ndarray, seed: int, epoch: int
) -> tuple[np.ndarray, np.ndarray]:
    """(P,) masked tokens, and (D,) sampled lengths: each round samples one span for each example below its budget."""
    cumulative = np.cumsum(length_probabilities(config))[:-1]
    masked_P = np.zeros(len(text.places), dtype=bool)
    left_N = np.ceil(text.counts_N * config.probability - 1e-9).astype(np.int64)
    drawn: list[np.ndarray] = [np.zeros(0, dtype=np.int64)]
    number = 0
    while len(active := np.flatnonzero(left_N > 0)):
        uniform = [
            random_streams.uniform_at(
                seed, "corrupt", epoch, examples_N[active], np.full(len(active), number * _SPAN_DRAWS + which)
            )
            for which in (_LENGTH, _ANCHOR)
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
