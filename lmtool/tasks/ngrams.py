"""An n-gram model of tokens, as a baseline for language models.

Shape letters: T tokens of all texts, each text preceded by a boundary, K different n-grams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_BOUNDARY = 0  # tokens are shifted by one
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def _joined(texts: Sequence[np.ndarray]) -> np.ndarray:
    """Returns (T,) uint64: the tokens of texts, shifted by one, with a boundary before each text."""
    boundary = np.array([_BOUNDARY], dtype=np.uint64)
    return np.concatenate([part for text in texts for part in (boundary, np.asarray(text).astype(np.uint64) + 1)])


def _hashes(tokens_T: np.ndarray, order: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns hashes of the n-grams that end at each token from index order - 1 on, and of their contexts."""
    count = len(tokens_T) - order + 1
    context = np.zeros(max(count, 0), dtype=np.uint64)
    for place in range(order - 1):
        context = context * _MULTIPLIER + tokens_T[place : place + count] + 1
    return context * _MULTIPLIER + tokens_T[order - 1 :] + 1, context


def _within_text(tokens_T: np.ndarray, order: int) -> np.ndarray:
    count = len(tokens_T) - order + 1
    inside = np.ones(max(count, 0), dtype=bool)
    for place in range(1, order):
        inside &= tokens_T[place : place + count] != _BOUNDARY
    return inside if order > 1 else tokens_T != _BOUNDARY


def _looked_up(values: np.ndarray, keys: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Returns the value of each query in a sorted table; 0 for a key that it lacks."""
    places = np.searchsorted(keys, queries).clip(max=len(keys) - 1)
    return np.where(keys[places] == queries, values[places], 0)


@dataclass(frozen=True)
class _Counts:
    """Counts of one order: (K,) sorted hashes of n-grams and contexts, and the different tokens after each context."""

    grams: np.ndarray
    counts: np.ndarray
    contexts: np.ndarray
    totals: np.ndarray
    types: np.ndarray

    @classmethod
    def of(cls, tokens_T: np.ndarray, order: int) -> _Counts:
        grams, contexts = (values[_within_text(tokens_T, order)] for values in _hashes(tokens_T, order))
        unique_grams, first, counts = np.unique(grams, return_index=True, return_counts=True)
        unique_contexts, inverse = np.unique(contexts[first], return_inverse=True)
        totals = np.bincount(inverse, counts, len(unique_contexts))
        return cls(unique_grams, counts, unique_contexts, totals, np.bincount(inverse, minlength=len(unique_contexts)))


class NgramModel:
    """An interpolated n-gram model (Witten and Bell 1991): the probability of a token after a context is (c(context
    token) + t(context) p(token after the shorter context)) / (c(context) + t(context)), where t counts the different
    tokens after a context. The shortest context gives equal probabilities to the vocabulary.

    texts: the ids of the training texts. order: the length of the longest n-grams.
    """

    def __init__(self, texts: Sequence[np.ndarray], order: int, vocab_size: int):
        tokens_T = _joined(texts)
        self.vocab_size = vocab_size
        self._counts = [_Counts.of(tokens_T, length) for length in range(1, order + 1)]

    def log_probabilities(self, texts: Sequence[np.ndarray]) -> np.ndarray:
        """Returns (N,) float64: the log-probability of each text in nats, including its first token."""
        tokens_T = _joined(texts)
        probabilities_T = np.full(len(tokens_T), 1 / self.vocab_size)
        for length, counts in enumerate(self._counts, 1):
            inside = _within_text(tokens_T, length)
            grams, contexts = (values[inside] for values in _hashes(tokens_T, length))
            ends = np.flatnonzero(inside) + length - 1
            gram_counts = _looked_up(counts.counts, counts.grams, grams)
            totals = _looked_up(counts.totals, counts.contexts, contexts)
            types = _looked_up(counts.types, counts.contexts, contexts)
            seen = totals > 0
            shorter = probabilities_T[ends]
            longer = (gram_counts + types * shorter) / np.maximum(totals + types, 1)
            probabilities_T[ends] = np.where(seen, longer, shorter)
        is_token = tokens_T != _BOUNDARY
        numbers = np.cumsum(~is_token) - 1
        return np.bincount(numbers[is_token], np.log(probabilities_T[is_token]), len(texts))
