"""BigBird's block pattern against transformers, and block-sparse attention against dense attention with its mask."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import BigBirdConfig
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention

from lmtool.nn.attention import attend, reference_attention
from lmtool.nn.block_sparse import BlockPattern, Blocks, block_plan
from lmtool.nn.dropout import TokenRng
from lmtool.nn.layout import Layout
from lmtool.types import Packed

# A text that fills its blocks, dense texts, an empty text, and long texts with free positions in their last block.
LENGTHS = (60, 5, 90, 1, 0, 28, 61)


def layout_of(pattern: BlockPattern, ahead: int = 0, lengths: tuple[int, ...] = LENGTHS) -> Layout:
    packed = Packed(torch.arange(sum(lengths)), lengths)
    return Layout.of(packed, Blocks(pattern, lengths, ahead), ahead)


def states(layout: Layout, heads: int, width: int = 5) -> list[torch.Tensor]:
    """Queries, keys and values."""
    generator = torch.Generator().manual_seed(3)
    tokens = (sum(layout.query.lengths), *[sum(layout.key.lengths)] * 2)
    return [
        torch.randn(count, heads, width, dtype=torch.float64, generator=generator, requires_grad=True)
        for count in tokens
    ]


@pytest.mark.parametrize("random,heads,blocks,seed", [(3, 4, 12, 0), (3, 2, 40, 5), (2, 3, 17, 7), (1, 2, 9, 1)])
def test_pattern_matches_transformers(random, heads, blocks, seed):
    size = 4
    config = BigBirdConfig(num_attention_heads=heads, hidden_size=heads * 4, block_size=size, num_random_blocks=random)
    theirs = BigBirdBlockSparseAttention(config, seed).train()
    np.random.seed(seed)
    plan = theirs._get_rand_attn_plan(blocks * size, size, random)
    drawn = theirs._bigbird_block_rand_mask_with_head(blocks * size, blocks * size, size, size, heads, *plan)
    ours = BlockPattern(size, random, heads, seed)
    assert np.array_equal(ours.random_blocks(blocks)[1:-1], np.stack(drawn, 1))
    # Numbers of keys of global, edge and inner blocks, without duplicates.
    seen = ours.connections(blocks).sum(-1)
    assert (seen[:, [0, -1]] == blocks).all() and (seen[:, [1, -2]] == 4 + random).all()
    assert (seen[:, 2:-2] == 5 + random).all()
    assert ours.connections(2 * random + 5).all() and not ours.connections(2 * random + 6).all()


def test_pattern_depends_on_the_seed_only():
    pattern = BlockPattern(4, 2, 3, 7)
    assert np.array_equal(pattern.random_blocks(70)[:29], pattern.random_blocks(30)[:29])
    assert not np.array_equal(pattern.random_blocks(30), BlockPattern(4, 2, 3, 8).random_blocks(30))
    # Frozen values: a run that is resumed later or elsewhere has the same pattern.
    assert pattern.random_blocks(12)[5].tolist() == [[2, 1], [1, 3], [2, 1]]


@pytest.mark.parametrize("ahead", [0, 3])
@pytest.mark.parametrize("random", [1, 3])
def test_blocks_match_dense_attention_with_the_same_mask(random, ahead):
    layout = layout_of(BlockPattern(4, random, 3, 7), ahead)
    inputs = states(layout, 3)
    given, wanted = attend(*inputs, layout), reference_attention(*inputs, layout)
    torch.testing.assert_close(given, wanted, rtol=0, atol=1e-12)
    upstream = torch.randn_like(given)
    for ours, theirs in zip(*(torch.autograd.grad(out, inputs, upstream) for out in (given, wanted)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_packed_texts_match_separate_texts():
    pattern = BlockPattern(4, 2, 3, 7)
    layout = layout_of(pattern)
    inputs = states(layout, 3)
    together = attend(*inputs, layout).split(LENGTHS)
    for number, length in enumerate(LENGTHS):
        alone = attend(*(part.split(LENGTHS)[number] for part in inputs), layout_of(pattern, 0, (length,)))
        torch.testing.assert_close(alone, together[number], rtol=0, atol=1e-13)


def test_dropout_has_the_rate_and_depends_on_the_text_only():
    """At the configured rate, and independently of other texts in the batch."""
    pattern, rate = BlockPattern(4, 1, 2, 0), 0.25
    layout = layout_of(pattern)
    queries, keys, values = (part.detach() for part in states(layout, 2))
    tokens = torch.arange(len(queries))
    rng = [TokenRng(tokens * 7919 + number * 104729).at(1) for number in range(50)]
    out = [attend(queries, keys, values, layout, None, None, rate, draw) for draw in rng]
    assert not torch.equal(out[0], out[1])
    # With values of 1, the output is the sum of the weights after dropout, whose mean is 1.
    ones = torch.ones_like(values)
    left = torch.stack([attend(queries, keys, ones, layout, None, None, rate, draw)[..., 0] for draw in rng])
    torch.testing.assert_close(left.mean(), torch.tensor(1.0, dtype=torch.float64), rtol=0, atol=0.01)
    part = slice(65, 155)
    alone = attend(
        queries[part], keys[part], values[part], layout_of(pattern, 0, (90,)), None, None, rate,
        TokenRng(tokens[part] * 7919).at(1),
    )  # fmt: skip
    torch.testing.assert_close(out[0][part], alone, rtol=0, atol=1e-13)


def test_gathered_keys_grow_linearly_with_length():
    """Gathered key blocks: eight for an inner block, all for the two global ones."""
    for blocks in (32, 64, 128):
        plan = block_plan(layout_of(BlockPattern(4, 3, 2, 0), 0, (4 * blocks,)))
        assert sum(len(tile.keys) for tile in plan.tiles) == 2 * (blocks + 2 * 7 + (blocks - 4) * 8)
