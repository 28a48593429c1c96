"""Mutual information of states with tokens, and projection-weighted CCA, on planted data."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import mutual_info_score

from lmtool.data.formats import FormatTemplate, text_format
from lmtool.learners.representations import evolution
from lmtool.learners.representations.evolution import (
    MASKED_FRACTION,
    VARIANCE,
    MaskedTargets,
    _shuffles,
    blocks_of,
    entropy,
    k_means,
    mutual_information,
    pwcca,
    state_similarity,
    token_information,
)
from lmtool.learners.representations.layers import TERM, TokenTargets

N, TYPES = 3000, 8
TEXTS = np.arange(N) // 20


def draw(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_mutual_information_matches_scikit_learn() -> None:
    first, second = draw().integers(0, 7, 500), draw(1).integers(0, 9, 500)
    second[:300] = first[:300]
    assert mutual_information(first, second) == pytest.approx(mutual_info_score(first, second), abs=1e-12)
    assert entropy(first) == pytest.approx(stats.entropy(np.bincount(first)))


def test_states_that_determine_the_token_have_its_entropy() -> None:
    labels = draw().choice(TYPES, N, p=np.arange(1, TYPES + 1) / 36)
    states = torch.from_numpy(10 * np.eye(TYPES)[labels] + draw(1).normal(0, 0.1, (N, TYPES))).float()
    found = token_information(states, labels, TEXTS, TYPES, seed=0)
    assert found.value == pytest.approx(entropy(labels)) and found.shuffled_high < 0.02
    assert found.low < found.value < found.high


def test_unrelated_states_have_no_more_information_than_shuffled_tokens() -> None:
    above = 0
    for seed in range(20):
        labels = draw(seed).integers(0, TYPES, N)
        states = torch.from_numpy(draw(100 + seed).normal(size=(N, 4))).float()
        found = token_information(states, labels, TEXTS, 20, seed)
        # (TYPES - 1) * (20 - 1) / 2N: the bias of counting (Miller 1955)
        assert found.shuffled == pytest.approx(7 * 19 / (2 * N), rel=0.1)
        above += found.value > found.shuffled_high
    assert above <= 3  # of 20, one is expected in the upper 2.5%


def test_information_of_noisy_states_is_between_both() -> None:
    labels = draw().integers(0, TYPES, N)
    seen = np.where(draw(1).random(N) < 0.5, labels, draw(2).integers(0, TYPES, N))
    states = torch.from_numpy(10.0 * np.eye(TYPES)[seen]).float()
    found = token_information(states, labels, TEXTS, TYPES, seed=0)
    # Each token keeps its type with 0.5 + 0.5 / 8, and has each other type with 0.5 / 8.
    same, other = 0.5 + 0.5 / TYPES, 0.5 / TYPES
    expected = np.log(TYPES) + same * np.log(same) + (TYPES - 1) * other * np.log(other)
    assert found.low < expected < found.high and found.high - found.low < 0.15


def test_jackknife_interval_covers_the_true_information(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interval of the value above the shuffled value: of 100 intervals of 95%, 88 or more cover. All have the same
    shuffles, which are computed once."""
    monkeypatch.setattr(evolution, "_shuffles", cache(lambda count, seed: [*_shuffles(count, seed)]))
    same, other = 0.5 + 0.5 / TYPES, 0.5 / TYPES
    expected = np.log(TYPES) + same * np.log(same) + (TYPES - 1) * other * np.log(other)
    covered = 0
    for seed in range(100):
        chance = draw(seed)
        labels = chance.integers(0, TYPES, 1000)
        seen = np.where(chance.random(1000) < 0.5, labels, chance.integers(0, TYPES, 1000))
        found = token_information(torch.from_numpy(10.0 * np.eye(TYPES)[seen]).float(), labels, TEXTS[:1000], TYPES, 0)
        covered += found.low - found.shuffled <= expected <= found.high - found.shuffled
    assert covered >= 88


def test_k_means_finds_planted_clusters() -> None:
    labels = draw().integers(0, 12, N)
    centers = draw(1).normal(0, 10, (12, 6))
    states = torch.from_numpy(centers[labels] + draw(2).normal(0, 0.2, (N, 6))).float()
    found = k_means(states, 12, seed=3).numpy()
    assert mutual_information(found, labels) == pytest.approx(entropy(labels))
    assert torch.equal(k_means(states, 12, seed=3), torch.from_numpy(found))
    # Two distinct states are two clusters, whatever the number of clusters.
    assert len(k_means(torch.tensor([[0.0], [1.0]]).repeat(20, 1), 5, seed=0).unique()) == 2


def plain_pwcca(x: np.ndarray, y: np.ndarray) -> float:
    """Morcos, Raghu and Bengio 2018, section 2.1, from singular value decompositions of the states."""

    def reduced(states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        centered = states - states.mean(0)
        left, values, _ = np.linalg.svd(centered, full_matrices=False)
        kept = int(np.searchsorted(np.cumsum(values**2) / np.sum(values**2), VARIANCE)) + 1
        return left[:, :kept], centered

    (left_x, x), (left_y, y) = reduced(x), reduced(y)
    first, correlations, second = np.linalg.svd(left_x.T @ left_y, full_matrices=False)
    variates, states = (left_x @ first, x) if left_x.shape[1] <= left_y.shape[1] else (left_y @ second.T, y)
    weights = np.abs(variates.T @ states).sum(1)
    return float((weights * correlations).sum() / weights.sum())


@pytest.mark.parametrize(("width", "other"), [(6, 6), (5, 9), (9, 5)])
def test_pwcca_matches_its_definition(width: int, other: int) -> None:
    x = draw().normal(3.0, 1.0, (400, width)) * np.arange(1, width + 1)
    y = np.tanh(x @ draw(1).normal(size=(width, other)) / 5) + draw(2).normal(size=(400, other))
    assert pwcca(torch.from_numpy(x), torch.from_numpy(y)) == pytest.approx(plain_pwcca(x, y), abs=1e-9)


def test_rotated_scaled_and_shifted_states_are_the_same() -> None:
    x = draw().normal(size=(N, 10)) * np.linspace(1, 3, 10)
    rotation = np.linalg.qr(draw(1).normal(size=(10, 10)))[0]
    assert pwcca(torch.from_numpy(x), torch.from_numpy(3 * x @ rotation + 5)) == pytest.approx(1.0, abs=1e-6)
    # So are affine images, if no direction of either has less than 1% of the variance.
    affine = rotation @ np.diag(np.linspace(1, 2, 10)) @ rotation
    assert pwcca(torch.from_numpy(x), torch.from_numpy(x @ affine)) == pytest.approx(1.0, abs=1e-6)
    assert np.isnan(pwcca(torch.from_numpy(x), torch.ones(N, 3)))


def test_independent_states_have_the_similarity_of_shuffled_ones() -> None:
    x, y = (torch.from_numpy(draw(seed).normal(size=(N, 10))) for seed in (5, 6))
    found = state_similarity(x, y, TEXTS, seed=0)
    assert abs(found.value - found.shuffled) < 0.02 and found.value < 0.1
    half = state_similarity(x, torch.cat([x[:, :5], y[:, :5]], 1), TEXTS, seed=0)
    assert half.value == pytest.approx(0.5, abs=0.1) and half.low > half.shuffled_high


def test_blocks_hold_whole_texts() -> None:
    texts = np.repeat(draw().permutation(57), 3)
    blocks = blocks_of(texts)
    assert len(np.unique(blocks)) == 20
    assert all(len(np.unique(blocks[texts == text])) == 1 for text in range(57))
    one = token_information(torch.randn(50, 2), np.arange(50) % 2, np.zeros(50), 2, seed=0)
    assert np.isnan(one.low) and np.isfinite(one.value)


def test_masked_targets_mask_some_tokens_and_predict_them() -> None:
    class Words:
        vocab_size, special_ids, roles = 10, frozenset({0, 1, 2}), {"cls": 0, "sep": 1}

        def role(self, name):
            return self.roles[name]

    tokens = np.tile(np.arange(5, 10), 400).astype(np.uint16)
    windows = np.array([(start, 20) for start in range(0, 2000, 20)], dtype=[("start", "i8"), ("length", "i4")])
    classes = np.array([-1] * 6 + [0, 1, 2, 3])  # 5 is rare
    template = FormatTemplate.of(text_format("bert", Words()), 1)
    whole = TokenTargets(SimpleNamespace(tokens=tokens), windows, Words(), template, 0, classes)
    masked = MaskedTargets(whole, 2, seed=0)
    rows, examples = masked.plan(0).rows, np.arange(100)
    batch, original = masked.batch(rows, examples, 0), whole.batch(rows, examples, 0)
    at = batch.targets[TERM].at
    assert set(batch.inputs.tokens[at].tolist()) == {2}
    assert torch.equal(batch.targets[TERM].labels, torch.from_numpy(classes)[original.inputs.tokens[at]])
    changed = batch.inputs.tokens != original.inputs.tokens
    assert int(changed.sum()) == len(at) and len(at) / 1600 == pytest.approx(MASKED_FRACTION, abs=0.03)
    # The masks of a text do not depend on the other texts of the batch.
    alone = masked.batch(rows[7:8], examples[7:8], 0)
    assert torch.equal(alone.inputs.tokens, batch.inputs.tokens[7 * 22 : 8 * 22])
