"""Embeddings: the sum of their tables, default segments, and positions beyond the table."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lmtool.errors import UserError
from lmtool.nn.embeddings import Embeddings
from lmtool.nn.positions import Learned, Position
from lmtool.nn.stack import enter
from lmtool.types import Packed


def test_embedding_is_the_normalized_sum_of_three_tables():
    embed = Embeddings(10, 6, Learned(8, 6), 0.0, segments=2, norm=nn.LayerNorm(6))
    segment = torch.tensor([0, 0, 1, 1, 1])
    packed = Packed(torch.tensor([1, 2, 3, 4, 5]), (2, 3), {"segment": segment})
    out = embed.finish(embed.tokens(packed.tokens), packed, packed.positions)
    wanted = embed.token.weight[packed.tokens] + embed.position.weight[torch.tensor([0, 1, 0, 1, 2])]
    torch.testing.assert_close(out, embed.norm(wanted + embed.segment.weight[segment]))


def test_missing_segment_column_means_segment_zero():
    embed = Embeddings(10, 6, Learned(8, 6), 0.0, segments=2)
    packed = Packed(torch.tensor([1, 2]), (2,), {"segment": torch.zeros(2, dtype=torch.int64)})
    bare = Packed(packed.tokens, packed.lengths)
    vectors = embed.tokens(packed.tokens)
    torch.testing.assert_close(
        embed.finish(vectors, bare, bare.positions), embed.finish(vectors, packed, packed.positions)
    )


def test_text_longer_than_max_positions_is_refused():
    embed = Embeddings(10, 6, Learned(8, 6), 0.0)
    packed = Packed(torch.zeros(12, dtype=torch.int64), (3, 9))
    with pytest.raises(UserError, match="model.max_positions=8, but a sequence has 9 tokens") as caught:
        enter(embed, embed.tokens(packed.tokens), packed)
    assert "max_length=8" in caught.value.hint


def test_position_none_changes_nothing():
    x, q = torch.randn(4, 6), torch.randn(4, 2, 3)
    position = Position()
    assert position.embed(x, torch.arange(4)) is x
    assert position.turns(torch.arange(4), q.dtype) is None
    assert not position.scores
