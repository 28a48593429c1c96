"""Attention weights of a text, and the patterns of heads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lmtool.config.registry import build
from lmtool.errors import UserError
from lmtool.learners.representations.attention import attention_of, heads_of
from lmtool.training.precision import select_device, select_precision
from lmtool.types import Packed
from tests.models.test_read import config_of

# The summands of an attention score in families whose positions add to it.
TERMS = {
    "deberta": {"content", "content to position", "position to content"},
    **{family: {"content", "places"} for family in ("t5", "xlnet", "transformer_xl")},
}
PRECISION = select_precision("fp32", select_device("cpu"))


@pytest.mark.parametrize("family", ["bert", "gpt", "t5", "modernbert", "deberta", "xlnet", "transformer_xl"])
def test_attention_weights_are_masked_softmax_of_the_scores(family: str) -> None:
    config = config_of(family)
    backbone = build(config, 0).eval()
    tokens = torch.arange(3, 12)
    inputs = Packed(tokens, (9,), {"segment": torch.zeros_like(tokens)})
    attention = attention_of(backbone, inputs, PRECISION)
    weights_WALL = attention.weights
    assert weights_WALL.shape[1:] == (config.num_heads, 9, 9) and weights_WALL.min() >= 0
    np.testing.assert_allclose(weights_WALL.sum(-1), 1, rtol=1e-5)
    ahead = np.triu(weights_WALL, 1).max()
    assert ahead == 0 if config.architecture == "decoder" else ahead > 0
    assert set(attention.terms) == TERMS.get(family, set())
    if attention.terms:
        scores_WALL = np.nan_to_num(sum(attention.terms.values()), nan=-np.inf)
        np.testing.assert_allclose(torch.from_numpy(scores_WALL).softmax(-1), weights_WALL, atol=1e-6)


def test_disentangled_terms_depend_on_content_or_distance_only() -> None:
    """In the first layer of disentangled attention, content scores ignore positions and the other terms depend on
    distance only."""
    backbone = build(config_of("deberta"), 0).eval()
    tokens = torch.tensor([3, 5, 7, 9, 5, 7])
    terms = attention_of(backbone, Packed(tokens, (6,), {"segment": torch.zeros(6)}), PRECISION).terms
    words, asking, asked = (terms[name][0] for name in ("content", "content to position", "position to content"))
    np.testing.assert_allclose(words[:, 1], words[:, 4], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(asking[:, 1, :3], asking[:, 4, 3:], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(asked[:, :3, 1], asked[:, 3:, 4], rtol=1e-4, atol=1e-6)
    assert np.abs(asking[:, 1] - asking[:, 4]).max() > 1e-4


def test_model_without_attention_is_refused() -> None:
    backbone = build(config_of("lstm"), 0).eval()
    with pytest.raises(UserError, match="model=lstm has no self-attention"):
        attention_of(backbone, Packed(torch.arange(3, 8), (5,)), PRECISION)


def test_head_pattern_is_the_target_of_half_the_weight() -> None:
    """Tokens [CLS] a b c [SEP]: heads on the previous, next and first token, on the separator, and uniform."""
    eye = np.eye(5)
    back, ahead = np.roll(eye, -1, 1), np.roll(eye, 1, 1)
    first, last, even = (np.zeros((5, 5)) for _ in range(3))
    first[:, 0], last[:, 4], even[:] = 1, 1, 0.2
    heads = heads_of(np.stack([back, ahead, first, last, even])[None], np.array([True, False, False, False, True]))
    assert [head.pattern for head in heads] == ["previous", "next", "first", "separators", ""]
    assert heads[0].fractions["previous"] == 1 and heads[3].fractions["separators"] == 1
    assert heads[4].entropy == pytest.approx(1) and heads[0].entropy == pytest.approx(0, abs=1e-9)
