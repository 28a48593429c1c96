"""A stack whose layers have different masks and positions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from lmtool.nn.attention import SelfAttention
from lmtool.nn.blocks import PreNormLayer
from lmtool.nn.cache import Cache
from lmtool.nn.embeddings import Embeddings
from lmtool.nn.feedforward import FeedForward
from lmtool.nn.layout import Causal
from lmtool.nn.positions import Position, Rotary
from lmtool.nn.stack import Stack, enter
from lmtool.types import Packed

WIDTH, HEADS, NEAR, BASES = 24, 3, 4, (10.0, 1000.0)
LENGTHS = (30, 1, 17)


@dataclass(frozen=True)
class Near:
    """A causal window: a token attends to itself and `count` tokens before it."""

    count: int

    @property
    def window(self):
        return (self.count, 0)

    def allow(self, query_RL1, key_R1K, documents_R):
        return (key_R1K <= query_RL1) & (query_RL1 - key_R1K <= self.count)


class LocalAndGlobal(Stack):
    """Every second layer is causal without a window, with another rotary base."""

    def __init__(self, layers):
        super().__init__(layers, causal=True, final_norm=torch.nn.LayerNorm(WIDTH))
        self.positions = [Rotary(WIDTH // HEADS, base) for base in BASES]

    def mask(self, number, packed):
        return Causal() if number % 2 else Near(NEAR)

    def position(self, number, entered):
        return self.positions[number % 2]


def layer_of():
    norms = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
    return PreNormLayer(SelfAttention(WIDTH, HEADS, 0.0), FeedForward(WIDTH, 32, "gelu"), *norms, 0.0)


def embeddings_and_stack():
    torch.manual_seed(0)
    embed = Embeddings(50, WIDTH, Position(), 0.0).double()
    return embed, LocalAndGlobal([layer_of() for _ in range(4)]).double()


def turned(x_ALD, base):
    """Rotates by the formula: dimensions i and i + D/2 of position p by the angle p base^(-2i/D)."""
    half = x_ALD.shape[-1] // 2
    steps = torch.arange(half, dtype=torch.float64)
    angles = torch.arange(x_ALD.shape[1]).double()[:, None] * base ** (-2 * steps / x_ALD.shape[-1])
    first, second = x_ALD[..., :half], x_ALD[..., half:]
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1
    )  # fmt: skip


def by_hand(embed, stack, tokens):
    """The states of one document, with dense attention, layer by layer."""
    x_LH, steps = embed.token.weight[tokens], torch.arange(len(tokens))
    behind = steps[:, None] - steps
    for number, layer in enumerate(stack.layers):
        attention, base = layer.self_attn, BASES[number % 2]
        hidden = layer.norm1(x_LH)
        q, k, v = (
            project(hidden).unflatten(-1, (HEADS, -1)).transpose(0, 1)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        scores = turned(q, base) @ turned(k, base).transpose(1, 2) / math.sqrt(WIDTH // HEADS)
        seen = (behind >= 0) & (behind <= (len(tokens) if number % 2 else NEAR))
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        x_LH = x_LH + attention.out_proj((weights @ v).transpose(0, 1).flatten(1))
        x_LH = x_LH + layer.ffn(layer.norm2(x_LH))
    return stack.final_norm(x_LH)


@torch.no_grad()
def test_local_and_global_layers_match_dense_attention():
    embed, stack = embeddings_and_stack()
    tokens = torch.arange(sum(LENGTHS)) * 7 % 50
    packed = Packed(tokens, LENGTHS)
    out = stack.run(enter(embed, embed.tokens(tokens), packed)).split(LENGTHS)
    for got, document in zip(out, tokens.split(LENGTHS), strict=True):
        torch.testing.assert_close(got, by_hand(embed, stack, document), rtol=0, atol=1e-12)


@torch.no_grad()
def test_cached_chunks_match_the_whole_text():
    embed, stack = embeddings_and_stack()
    tokens = torch.arange(sum(LENGTHS)) * 7 % 50
    whole = stack.run(enter(embed, embed.tokens(tokens), Packed(tokens, LENGTHS))).split(LENGTHS)
    cache, texts = Cache(4, len(LENGTHS), 32), tokens.split(LENGTHS)
    got = [[] for _ in texts]
    for first, last in ((0, 9), (9, 10), (10, 30)):
        parts = [text[first:last] for text in texts]
        packed = Packed(torch.cat(parts), tuple(map(len, parts)))
        out = stack.run(enter(embed, embed.tokens(packed.tokens), packed, cache=cache)).split(packed.lengths)
        for document, part in zip(got, out, strict=True):
            document.append(part)
    for document, wanted in zip(got, whole, strict=True):
        torch.testing.assert_close(torch.cat(document), wanted, rtol=0, atol=1e-12)
