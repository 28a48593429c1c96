"""Every path of `attend` equals the reference attention, forward and backward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import lmtool.nn.attention
from lmtool.nn.attention import SelfAttention, attend, project, reference_attention
from lmtool.nn.context import Context
from lmtool.nn.dropout import TokenRng, name_dropouts
from lmtool.nn.kernels import fused_attention, fused_attention_of
from lmtool.nn.layout import Causal, Full, Layout, PrefixLM, Window
from lmtool.nn.positions import Alibi, Position, Shaw, T5Buckets
from lmtool.nn.tiled import tiled_attention
from lmtool.types import Packed, Segments

LENGTHS = (7, 70, 1, 0, 16, 33, 7, 32, 17)
HEADS, SIZE = 3, 8


class Distance(Position):
    """A learned bias per head and clipped distance, like T5's and ALiBi's."""

    scores = True

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(HEADS, 21, dtype=torch.float64))

    def score(self, q, k, query_positions_RL, key_positions_RK):
        distance = (key_positions_RK[:, None, :] - query_positions_RL[:, :, None]).clamp(-10, 10) + 10
        return self.table[:, distance].transpose(0, 1)


BIASES = {
    "plain": None,
    "bias": Distance(),
    "shaw": Shaw(3, SIZE).double(),
    "t5": T5Buckets(8, 20, HEADS, causal=False).double(),
    "alibi": Alibi(HEADS),
}


def tensors(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(length, HEADS, SIZE, dtype=torch.float64, generator=generator).requires_grad_()
        for length in lengths
    ]


def assert_same(layout: Layout, queries: int, keys: int, bias: Position | None = None, scale: float | None = None):
    inputs = tensors(queries, keys, keys)
    leaves = [*inputs, *(bias.parameters() if bias is not None else ())]
    weights = torch.randn(queries, HEADS, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    got, wanted = attend(*inputs, layout, bias, scale), reference_attention(*inputs, layout, bias, scale)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
    got_gradients = torch.autograd.grad((got * weights).sum(), leaves)
    for mine, theirs in zip(got_gradients, torch.autograd.grad((wanted * weights).sum(), leaves), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES)
@pytest.mark.parametrize("scale", [None, 1.0])
@pytest.mark.parametrize("mask", [Full(), Causal(), PrefixLM((3, 20, 1, 0, 16, 9, 0, 5, 2))])
def test_self_attention_matches_reference(mask, scale, bias):
    segments = Segments.packed(LENGTHS)
    assert_same(Layout(segments, segments, mask), sum(LENGTHS), sum(LENGTHS), bias, scale)


@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES)
@pytest.mark.parametrize("mask", [Full(), Causal(), PrefixLM((3, 20, 1, 0, 16, 9, 0, 5, 2))])
def test_keyed_dropout_path_matches_reference(mask, bias):
    segments = Segments.packed(LENGTHS)
    layout = Layout(segments, segments, mask)
    inputs = tensors(*[sum(LENGTHS)] * 3)
    # The rate is too small to drop anything.
    got = attend(*inputs, layout, bias, dropout=1e-6, rng=TokenRng(torch.arange(sum(LENGTHS))))
    wanted = reference_attention(*inputs, layout, bias)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
    for mine, theirs in zip(
        torch.autograd.grad(got.square().sum(), inputs), torch.autograd.grad(wanted.square().sum(), inputs), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11)


@pytest.mark.parametrize("lengths", [tuple(range(1, 71)), (16, 16, 16), (5,), (16, 32, 3, 0, 0)])
@pytest.mark.parametrize("mask", [Full(), Causal()])
def test_all_lengths_match_reference(mask, lengths):
    segments = Segments.packed(lengths)
    assert_same(Layout(segments, segments, mask), sum(lengths), sum(lengths))


@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES)
def test_cross_attention_matches_reference(bias):
    keys = (3, 40, 0, 5, 61, 2, 17, 16, 1)
    layout = Layout(Segments.packed(LENGTHS), Segments.packed(keys), Full())
    assert_same(layout, sum(LENGTHS), sum(keys), bias)


@pytest.mark.parametrize("queries", [(1, 1, 1), (4, 2, 7)])
@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES)
def test_decoding_from_a_cache_buffer_matches_reference(queries, bias):
    before, capacity = (30, 0, 12), 50
    total = tuple(old + new for old, new in zip(before, queries, strict=True))
    layout = Layout(Segments.packed(queries), Segments((0, capacity, 2 * capacity), total), Causal(), before)
    assert_same(layout, sum(queries), 3 * capacity, bias)


def test_padded_rows_match_reference_and_padding_is_zero():
    rows = Segments((0, 20, 40), (20, 3, 11))
    layout = Layout(rows, rows, Causal())
    inputs = tensors(60, 60, 60)
    out = attend(*inputs, layout)
    torch.testing.assert_close(out, reference_attention(*inputs, layout), rtol=0, atol=1e-12)
    assert not out[23:40].any()


def test_bf16_attention_matches_fp64_reference():
    segments = Segments.packed(LENGTHS)
    layout = Layout(segments, segments, Full())
    inputs = [tensor.detach().bfloat16() for tensor in tensors(*[sum(LENGTHS)] * 3)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attend(*inputs, layout)
    wanted = reference_attention(*(tensor.double() for tensor in inputs), layout)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, wanted.bfloat16(), rtol=2**-8, atol=1e-6)


def test_bf16_keyed_attention_matches_fp32():
    segments = Segments.packed(LENGTHS)
    layout, rng = Layout(segments, segments, Full()), TokenRng(torch.arange(sum(LENGTHS)))
    joined = torch.randn(sum(LENGTHS), 3 * HEADS * SIZE).bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = fused_attention(joined, HEADS, layout, None, 0.3, rng)
    wanted = fused_attention(joined.float(), HEADS, layout, None, 0.3, rng)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, wanted.bfloat16(), rtol=0, atol=0)
    gradients = [torch.autograd.grad(out.float().sum(), joined)[0] for out in (got, wanted)]
    torch.testing.assert_close(*gradients, rtol=2**-7, atol=1e-2)


def test_causal_token_depends_on_itself_and_earlier_tokens():
    segments = Segments.packed((6, 5))
    q, k, v = tensors(11, 11, 11)
    out = attend(q, k, v, Layout(segments, segments, Causal()))
    gradients = [torch.autograd.grad(row.sum(), v, retain_graph=True)[0] for row in out]
    support = torch.stack([gradient.abs().sum((1, 2)) > 0 for gradient in gradients])
    assert torch.equal(support, torch.block_diag(torch.ones(6, 6).tril(), torch.ones(5, 5).tril()).bool())


def test_documents_of_similar_length_share_a_tile():
    segments = Segments.packed((3, 9, 16, 17, 31, 100, 0))
    assert sorted(tuple(tile.query_RL.shape) for tile in Layout(segments, segments, Full()).tiles) == [
        (1, 100),
        (2, 31),
        (3, 16),
    ]


def test_packed_documents_do_not_attend_to_each_other():
    attention = SelfAttention(24, 3, 0.0).double()
    x = torch.randn(20, 24, dtype=torch.float64)
    packed = Packed(torch.zeros(20, dtype=torch.int64), (8, 12))
    together = attention(x, Context.of(packed, Full()))
    for part, length in zip(x.split((8, 12)), (8, 12), strict=True):
        alone = attention(part, Context.of(Packed(torch.zeros(length, dtype=torch.int64), (length,)), Full()))
        torch.testing.assert_close(alone, together[:8] if length == 8 else together[8:], rtol=0, atol=1e-13)


def test_joined_projection_matches_separate_ones():
    x = torch.randn(9, 24)
    linears = [nn.Linear(24, 24) for _ in range(3)]
    for mine, linear in zip(project(x, *linears), linears, strict=True):
        torch.testing.assert_close(mine, linear(x), rtol=0, atol=1e-6)


def test_modified_projection_is_called_separately():
    class Shifted(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    x = torch.randn(9, 24)
    q_proj, k_proj, v_proj = Shifted(24, 24), nn.Linear(24, 24), nn.Linear(24, 24)
    v_proj.register_forward_hook(lambda module, inputs, output: output * 2)
    q, _, v = project(x, q_proj, k_proj, v_proj)
    torch.testing.assert_close(q, nn.functional.linear(x, q_proj.weight, q_proj.bias) + 1)
    torch.testing.assert_close(v, nn.functional.linear(x, v_proj.weight, v_proj.bias) * 2)


@pytest.mark.parametrize("lengths", [LENGTHS, (5,), (16, 16, 16)])
@pytest.mark.parametrize("mask", [Full(), Causal(), Window(2), PrefixLM((3, 20, 1, 0, 16, 9, 0, 5, 2))])
def test_fused_attention_with_dropout_matches_tiled_attention(mask, lengths):
    segments = Segments.packed(lengths)
    mask = PrefixLM(mask.prefixes[: len(lengths)]) if isinstance(mask, PrefixLM) else mask
    layout, tokens, width = Layout(segments, segments, mask), sum(lengths), HEADS * SIZE
    generator = torch.Generator().manual_seed(5)
    rng = TokenRng(torch.randint(-(2**60), 2**60, (tokens,), generator=generator)).at(3)
    joined = torch.randn(tokens, 3 * width, dtype=torch.float64, generator=generator).requires_grad_()
    got = fused_attention(joined, HEADS, layout, None, 0.3, rng)
    q, k, v = (part.unflatten(-1, (HEADS, SIZE)) for part in joined.split(width, -1))
    wanted = tiled_attention(q, k, v, layout, None, None, 0.3, rng).flatten(-2)
    undropped = reference_attention(q, k, v, layout).flatten(-2)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
    assert (got - undropped).abs().max() > 0.01
    weights = torch.randn(tokens, width, dtype=torch.float64, generator=generator)
    gradients = [torch.autograd.grad((out * weights).sum(), joined)[0] for out in (got, wanted)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mask", [Full(), Causal(), Window(2), PrefixLM((3, 20, 1, 0, 16, 9, 0, 5, 2))])
@pytest.mark.parametrize("read", [(6,), (3, 80, 182, 8, 7, 81, 9), tuple(range(0, 183, 3)), (5, 5, 4)])
def test_fused_attention_of_selected_tokens_matches_all_tokens(mask, read):
    segments = Segments.packed(LENGTHS)
    layout, tokens, width = Layout(segments, segments, mask), sum(LENGTHS), HEADS * SIZE
    generator = torch.Generator().manual_seed(6)
    rng = TokenRng(torch.randint(-(2**60), 2**60, (tokens,), generator=generator)).at(3)
    joined = torch.randn(tokens, 3 * width, dtype=torch.float64, generator=generator).requires_grad_()
    read_M = torch.tensor(read, dtype=torch.int64)
    wanted = fused_attention(joined, HEADS, layout, None, 0.3, rng)[read_M]
    query = joined[read_M, :width]
    got = fused_attention_of(query, joined[:, width:], read_M, HEADS, layout, None, 0.3, rng)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
    weights = torch.randn(len(read), width, dtype=torch.float64, generator=generator)
    gradients = [torch.autograd.grad((out * weights).sum(), joined)[0] for out in (got, wanted)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


def test_fused_attention_is_used_without_hooks_only(monkeypatch):
    calls = []
    counted = lambda *given: calls.append(1) or fused_attention(*given)  # noqa: E731
    monkeypatch.setattr(lmtool.nn.attention, "fused_attention", counted)
    packed = Packed(torch.zeros(20, dtype=torch.int64), (8, 12))
    attention = SelfAttention(24, 3, 0.2)
    name_dropouts(attention)
    x_TH, rng = torch.randn(20, 24), TokenRng(torch.arange(20))
    whole = attention(x_TH, replace(Context.of(packed, Full()), rng=rng))
    some = attention(x_TH, replace(Context.of(packed, Full()), rng=rng), torch.tensor([8, 0]))
    torch.testing.assert_close(some, whole[[8, 0]])
    attention.q_proj.register_forward_hook(lambda *_: None)
    torch.testing.assert_close(attention(x_TH, replace(Context.of(packed, Full()), rng=rng)), whole)
    assert len(calls) == 1
