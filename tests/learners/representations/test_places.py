"""The effect of each kind of positions on the attention scores of equal words."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lmtool.learners.representations.attention import position_scores
from lmtool.nn.positions import Alibi, Learned, Position, Rotary, Shaw, Sinusoidal, T5Buckets

L, H, A = 12, 32, 4
DISTANCES = np.arange(L)[:, None] - np.arange(L)[None]


def test_position_scores_match_their_formulas() -> None:
    assert position_scores(Position(), L, H, A) is None
    rotary = position_scores(Rotary(H // A), L, H, A)
    steps = 10000.0 ** (-np.arange(0, H // A, 2) / (H // A))
    np.testing.assert_allclose(rotary[0], np.cos(DISTANCES[..., None] * steps).mean(-1), atol=1e-6)
    alibi = position_scores(Alibi(A), L, H, A)
    np.testing.assert_allclose(alibi, -np.abs(DISTANCES) * np.array([0.25, 0.0625, 2**-6, 2**-8])[:, None, None])
    sinusoidal = position_scores(Sinusoidal(), L, H, A)
    steps = 10000.0 ** (-np.arange(0, H, 2) / H)
    np.testing.assert_allclose(sinusoidal[0], np.cos(DISTANCES[..., None] * steps).mean(-1), atol=1e-6)
    learned = Learned(L, H)
    vectors = learned.weight.detach().numpy()
    wanted = vectors @ vectors.T / np.linalg.norm(vectors, axis=1)[:, None] / np.linalg.norm(vectors, axis=1)
    np.testing.assert_allclose(position_scores(learned, L, H, A)[0], wanted, atol=1e-5)


@pytest.mark.parametrize("position, maps", [(T5Buckets(8, 16, A, False), A), (Shaw(3, H // A), 1)])
def test_relative_position_scores_are_constant_along_diagonals(position: Position, maps: int) -> None:
    torch.manual_seed(0)
    scores = position_scores(position, L, H, A)
    assert scores.shape == (maps, L, L) and scores.std() > 0
    np.testing.assert_array_equal(scores[:, 1:, 1:], scores[:, :-1, :-1])
