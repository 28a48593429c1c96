"""Masks over runs of words: SpanBERT's spans and ALBERT's n-grams. A pure function, vectorised over a batch.

Joshi, Chen, Liu, Weld, Zettlemoyer, Levy, "SpanBERT: Improving Pre-training by Representing and Predicting Spans",
TACL 2020, section 3.1, and masking.py of its published code: until ceil(probability x tokens) are masked, a length in
words is drawn and a token that is not masked yet; the span begins with that token's word and ends with its words, the
text or the budget. Lengths are geometric, *renormalised* over 1 to `longest`: a mean of 3.80 words for 0.2 and 10.
Spans that touch are one span. ALBERT's n-grams: Lan et al. 2020, section 4.1, a length n with a share of 1/n.

Every draw is keyed by (seed, epoch, example, number of the draw or position), so spans do not depend on the batch.
Shape letters: T tokens, N examples, P tokens that may be masked, W words, M masked places, S spans, D draws, K
lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lmtool import streams
from lmtool.data.assembly import ragged_ranges
from lmtool.objectives.configs import SpanConfig
from lmtool.objectives.corruption.masking import Masked, Vocabulary, replace_tokens

# Draws of one round of an example; those of a span or a token are numbered by position, far beyond.
_DRAWS = 4
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
    shares = (1 - config.geometric) ** (lengths - 1.0) if config.lengths == "geometric" else 1.0 / lengths
    return shares / shares.sum()


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
        number = _BY_POSITION + (places - starts_N[documents_M]) * _DRAWS + which
        return streams.uniform_at(seed, "corrupt", epoch, examples_N[documents_M], number)

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
            streams.uniform_at(
                seed, "corrupt", epoch, examples_N[active], np.full(len(active), number * _DRAWS + which)
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
