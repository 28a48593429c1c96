"""BigBird's block pattern against transformers, and block-sparse attention against dense attention with its mask."""

from __future__ import annotations

from dataclasses import replace

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
    ours = BlockPattern(size, random, heads, seed, "transformers")
    assert np.array_equal(ours.random_blocks(blocks)[1:-1], np.stack(drawn, 1))
    # Numbers of keys of global, edge and inner blocks, without duplicates.
    seen = ours.connections(blocks).sum(-1)
    assert (seen[:, [0, -1]] == blocks).all() and (seen[:, [1, -2]] == 4 + random).all()
    assert (seen[:, 2:-2] == 5 + random).all()
    assert ours.connections(2 * random + 5).all() and not ours.connections(2 * random + 6).all()


def test_pattern_of_transformers_depends_on_the_seed_only():
    pattern = BlockPattern(4, 2, 3, 7, "transformers")
    assert np.array_equal(pattern.random_blocks(70)[:29], pattern.random_blocks(30)[:29])
    assert not np.array_equal(pattern.random_blocks(30), replace(pattern, seed=8).random_blocks(30))
    # Frozen values: a run that is resumed later or elsewhere has the same pattern.
    assert pattern.random_blocks(12)[5].tolist() == [[2, 1], [1, 3], [2, 1]]


@pytest.mark.parametrize("random,blocks", [(1, 8), (1, 40), (2, 10), (3, 12), (3, 13), (3, 70)])
def test_uniform_blocks_are_new_and_cover_the_whole_text(random, blocks):
    """Every block that a row does not see anyway is equally probable: chi-square tests over all rows at 4 sigma."""
    heads, seeds = 64, 40
    drawn = np.concatenate([BlockPattern(4, random, heads, seed).random_blocks(blocks) for seed in range(seeds)], 1)
    assert (drawn[[0, -1]] == -1).all()
    statistic, freedom = 0.0, 0
    for row in range(1, blocks - 1):
        allowed = [block for block in range(blocks) if block not in {0, row - 1, row, row + 1, blocks - 1}]
        assert set(drawn[row].ravel().tolist()) == set(allowed), "the whole text is covered, and nothing else"
        assert all(len(set(own)) == random for own in drawn[row].tolist()), "a block is drawn once"
        counts, wanted = np.bincount(drawn[row].ravel())[allowed], heads * seeds * random / len(allowed)
        # Blocks are drawn without replacement, so their counts vary less than those of independent draws.
        variance = wanted * (len(allowed) - random) / (len(allowed) - 1)
        statistic, freedom = statistic + ((counts - wanted) ** 2).sum() / variance, freedom + len(allowed) - 1
    assert abs(statistic - freedom) < 4 * np.sqrt(2 * freedom)


def test_uniform_blocks_are_equally_probable_sets():
    drawn = np.concatenate([BlockPattern(4, 3, 50, seed).random_blocks(12) for seed in range(60)], 1)
    _, counts = np.unique(np.sort(drawn[5]), axis=0, return_counts=True)
    wanted = 50 * 60 / 35  # sets of 3 of the 7 blocks 1, 2, 3, 7, 8, 9 and 10
    assert len(counts) == 35 and ((counts - wanted) ** 2 / wanted).sum() < 34 + 4 * np.sqrt(2 * 34)


def test_uniform_pattern_depends_on_seed_and_length():
    pattern = BlockPattern(4, 2, 3, 7)
    assert not np.array_equal(pattern.random_blocks(30), replace(pattern, seed=8).random_blocks(30))
    assert not np.array_equal(pattern.random_blocks(31)[:29], pattern.random_blocks(30)[:29])
    assert pattern.random_blocks(12)[5].tolist() == [[3, 1], [3, 9], [3, 10]]
    seen = pattern.connections(30).sum(-1)
    assert (seen[:, [0, -1]] == 30).all() and (seen[:, [1, -2]] == 6).all() and (seen[:, 2:-2] == 7).all()
    assert pattern.connections(9).all() and not pattern.connections(10).all()


@pytest.mark.parametrize("ahead", [0, 3])
@pytest.mark.parametrize("random", [1, 3])
@pytest.mark.parametrize("plan", ["uniform", "transformers"])
def test_blocks_match_dense_attention_with_the_same_mask(plan, random, ahead):
    layout = layout_of(BlockPattern(4, random, 3, 7, plan), ahead)
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
