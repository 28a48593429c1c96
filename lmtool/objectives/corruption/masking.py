"""Which tokens a masked language model predicts: single tokens, whole words, and spans (SpanBERT, ALBERT)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lmtool import random_streams
from lmtool.data.formats import ragged_ranges
from lmtool.objectives.configs import MaskingConfig, SpanConfig, TokenMaskingConfig
from lmtool.tokenizers.tokenizer import Tokenizer

# Which tokens a masked language model predicts, and what stands in their place: a pure function, vectorised.
#
# Every draw is keyed by (seed, epoch, example, position), so masks do not depend on how examples are batched.
# Shape letters: T tokens of the packed batch, N examples in it, M predicted places, W words.


# Draws of one position, side by side: is it selected, which branch, which random token.
_DRAWS = 4
_SELECT, _BRANCH, _RANDOM = 0, 1, 2


@dataclass(frozen=True)
class Vocabulary:
    """What masking knows of a vocabulary.

    mask: the id of [MASK]. special: (V,) bool, the tokens never selected and never drawn. starts_word: (V,) bool.
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
    """tokens: (T,) what the model reads. at: (M,) flat places, rising. labels: (M,) what stood there."""

    tokens: np.ndarray
    at: np.ndarray
    labels: np.ndarray


def budget(eligible_N: np.ndarray, probability: float) -> np.ndarray:
    """(N,) how many of an example's eligible tokens are predicted: round(probability x n), at least one of any.

    Half is rounded to even, as Python's round does in BERT's data script.
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
    """Select and replace tokens of a packed batch.

    tokens_T: ids of N examples laid end to end, of lengths lengths_N; special ones are never selected.
    examples_N: the numbers of the examples, which key the draws. epoch: of the draws; under masking=static they
    repeat every `duplicates` epochs.
    """
    epoch = config.drawn_epoch(epoch)
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
        starts |= np.diff(places, prepend=-2) != 1  # behind a special token or at the start of an example
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
    """(T,) the tokens with [MASK], a random token or themselves at the M places `at`.

    branch_M: the draw that decides which. uniform_M: the draw of the random token.
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
    """Which units (tokens, or words of given sizes) are selected: bool, a unit each.

    exact: units in the order of their draws while they fit what is left of the example's budget (BERT's data
    script). A word larger than the whole budget is taken where nothing else was, so that no example goes without.
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


# Masks over runs of words: SpanBERT's spans and ALBERT's n-grams. A pure function, vectorised over a batch.
#
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


# Draws of one round of an example; those of a span or a token are numbered by position, far beyond.
_SPAN_DRAWS = 4
_LENGTH, _ANCHOR = 0, 1
_BY_POSITION = 1 << 40


@dataclass(frozen=True)
class MaskedSpans(Masked):
    """spans: (S, 2) flat inclusive borders, rising. span_of: (M,) the span each place lies in. bordered: (S,) whether
    both neighbours of a span are text, so that its border can predict it. drawn: (D,) lengths in words as they were
    drawn, before text and budget cut them."""

    spans: np.ndarray
    span_of: np.ndarray
    bordered: np.ndarray
    drawn: np.ndarray


def length_shares(config: SpanConfig) -> np.ndarray:
    """(K,) probability of each length, 1 word first."""
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
    """Mask spans of a packed batch; the arguments are those of `mask_tokens`."""
    epoch = config.drawn_epoch(epoch)
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
    """The tokens of a batch that may be masked, and their words.

    places: (P,) flat index of each. documents_P: its example. broken_P: whether what is before it is no text of the
    same example. word_P: its word. word_first: (W+1,) borders of words among the P. run_end_W: the word behind the
    unbroken run that a word lies in.
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
    """(P,) which tokens are masked, and (D,) the lengths drawn: a round draws one span of each open example."""
    cumulative = np.cumsum(length_shares(config))[:-1]
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
        kept = new & (before < left_N[active][owner])
        masked_P[inside[kept]] = True
        left_N[active] -= np.bincount(owner[kept], minlength=len(active))
    return masked_P, np.concatenate(drawn)
