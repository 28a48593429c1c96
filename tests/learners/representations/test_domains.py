"""Telling two texts apart by their words or states: planted and absent differences, intervals and distances."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

from lmtool.learners.representations.domains import (
    Passages,
    mean_distance,
    separate,
    separate_by_words,
    wilson_interval,
)

WORDS = [f"word{number}" for number in range(60)]


def texts(seed: int, count: int = 400, planted: str = "", fraction: float = 0.0) -> list[str]:
    """Passages of random words; a fraction of them also has a planted word."""
    draws = np.random.default_rng(seed)
    passages = [" ".join(draws.choice(WORDS, 12)) for _ in range(count)]
    has_word = draws.random(count) < fraction
    return [f"{passage} {planted}" if has else passage for passage, has in zip(passages, has_word, strict=True)]


@pytest.mark.parametrize(("right", "count"), [(0, 30), (17, 40), (500, 1000), (30, 30)])
def test_interval_is_that_of_wilson(right: int, count: int) -> None:
    expected = binomtest(right, count).proportion_ci(method="wilson")
    assert wilson_interval(right, count) == pytest.approx((expected.low, expected.high), abs=1e-6)


def test_halves_have_equally_many_passages_and_no_text_is_in_both() -> None:
    shared = texts(9, 50)
    passages = Passages.of([*texts(1, 300), *shared, shared[0], " "], [*shared, *texts(2, 500)], limit=200)
    assert len(passages.texts) == 400 and passages.second_N.sum() == 200
    for half in (passages.trains_N, ~passages.trains_N):
        assert half.sum() == 200 and passages.second_N[half].sum() == 100
    by_half = [
        {text for text, trains in zip(passages.texts, passages.trains_N, strict=True) if trains == half}
        for half in (True, False)
    ]
    assert not by_half[0] & by_half[1]
    assert len(by_half[0] | by_half[1]) < 400, "some passages are in both texts"
    assert Passages.of(texts(1, 19), texts(2)) is None and Passages.of(["a"] * 50, texts(2)) is None


def test_same_distribution_is_told_apart_by_chance_only() -> None:
    """Of 20 intervals of 95%, at least 17 hold one half with a probability of 98%."""
    results = [separate_by_words(Passages.of(texts(2 * seed), texts(2 * seed + 1)))[0] for seed in range(20)]
    assert sum(not result.differs for result in results) >= 17
    assert abs(np.mean([result.accuracy for result in results]) - 0.5) < 0.02
    assert all(result.count == 400 for result in results)


def test_same_texts_are_not_told_apart() -> None:
    (separation, _), same = separate_by_words(Passages.of(texts(1), texts(1))), texts(1)
    assert separation.accuracy == 0.5 and not separation.differs and separation.proxy_distance == 0
    assert Passages.of(same, same[::-1]).trains_N.sum() == 400


@pytest.mark.parametrize(("fraction", "least", "most"), [(1.0, 1.0, 1.0), (0.5, 0.67, 0.8)])
def test_planted_word_tells_texts_apart(fraction: float, least: float, most: float) -> None:
    """With the word in half of the passages of one text, the best classifier is right in three of four, and a trained
    one in slightly fewer."""
    passages = Passages.of(texts(1), texts(2, planted="Planted", fraction=fraction))
    separation, (first, second) = separate_by_words(passages)
    assert least <= separation.accuracy <= most and separation.differs
    assert separation.proxy_distance == pytest.approx(4 * separation.accuracy - 2)
    assert second[0] == "planted" and "planted" not in first


def test_states_are_compared_by_their_means_and_by_a_classifier() -> None:
    passages = Passages.of(texts(1), texts(2))
    draws = torch.Generator().manual_seed(0)
    nulls = [torch.randn(800, 16, generator=draws) for _ in range(20)]
    within = [(means := mean_distance(passages, x_NF)).distance < means.chance for x_NF in nulls]
    assert sum(within) >= 17 and sum(not separate(passages, x_NF)[0].differs for x_NF in nulls) >= 17
    same_NF = nulls[0]
    moved_NF = same_NF + torch.from_numpy(passages.second_N)[:, None] * torch.eye(16)[3] * 4.0
    separation, means = separate(passages, moved_NF)[0], mean_distance(passages, moved_NF)
    assert separation.accuracy > 0.95 and separation.proxy_distance > 1.8
    # 4 in one of 16 dimensions of variance 1.
    assert means.distance == pytest.approx(1.0, abs=0.08) and means.chance < 0.2
    scaled = mean_distance(passages, moved_NF * 7 + 3)
    assert scaled.distance == pytest.approx(means.distance)
