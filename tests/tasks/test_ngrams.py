"""The n-gram baseline, beside a plain loop over its definition."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from lmtool.tasks.ngrams import NgramModel

RNG = np.random.default_rng(3)
TRAINING = [RNG.integers(0, 7, size=length) for length in (1, 12, 30, 5, 40)]
QUERIES = [RNG.integers(0, 9, size=length) for length in (1, 2, 8, 15)]  # two tokens do not occur in training


def expected(query: np.ndarray, order: int) -> float:
    grams: list[Counter[tuple[int, ...]]] = [Counter() for _ in range(order + 1)]
    for text in TRAINING:
        tokens = [-1, *text.tolist()]
        for length in range(1, order + 1):
            for end in range(1, len(tokens)):
                if end - length + 1 >= 0:
                    grams[length][tuple(tokens[end - length + 1 : end + 1])] += 1

    def probability(context: tuple[int, ...], token: int) -> float:
        shorter = probability(context[1:], token) if context else 1 / 9
        after = {gram: count for gram, count in grams[len(context) + 1].items() if gram[:-1] == context}
        total, types = sum(after.values()), len(after)
        return (after.get((*context, token), 0) + types * shorter) / (total + types) if total else shorter

    tokens = [-1, *query.tolist()]
    return sum(
        math.log(probability(tuple(tokens[max(0, end - order + 1) : end]), tokens[end]))
        for end in range(1, len(tokens))
    )


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_log_probabilities_follow_the_definition(order: int) -> None:
    model = NgramModel(TRAINING, order, vocab_size=9)
    assert np.allclose(model.log_probabilities(QUERIES), [expected(query, order) for query in QUERIES], rtol=1e-12)


def test_probabilities_of_next_tokens_sum_to_one() -> None:
    model = NgramModel(TRAINING, 3, vocab_size=9)
    before = TRAINING[2][:6]
    texts = [np.append(before, token) for token in range(9)]
    logs = model.log_probabilities(texts) - model.log_probabilities([before])
    assert np.exp(logs).sum() == pytest.approx(1.0)
