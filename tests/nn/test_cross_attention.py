"""Cross-attention, decoder layers, gated feed-forward layers, and dropout keys of the outputs."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from lmtool.nn.attention import CrossAttention, SelfAttention
from lmtool.nn.blocks import PostNormCrossLayer, PreNormCrossLayer
from lmtool.nn.context import Context, EncoderState
from lmtool.nn.dropout import TokenRng, name_dropouts, token_keys
from lmtool.nn.feedforward import FeedForward, GatedFeedForward
from lmtool.nn.layout import Causal
from lmtool.types import Packed, Segments

INPUTS, OUTPUTS = (3, 20, 1, 17), (5, 1, 18, 2)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def packed(lengths):
    return Packed(torch.arange(sum(lengths)), lengths)


def context_of(hidden, keep=False):
    """The context of a decoder layer with these encoder states."""
    encoded, outputs = EncoderState(hidden, Segments(packed(INPUTS).starts, INPUTS), keep), packed(OUTPUTS)
    return Context.of(outputs, Causal(), encoded=encoded, cross_layout=encoded.layout(outputs))


@pytest.mark.parametrize("scale", [None, 1.0])
def test_cross_attention_matches_the_formula_per_document(scale):
    attention = CrossAttention(12, 3, 0.0, head_size=5, bias=False, scale=scale).double()
    assert attention.q_proj.weight.shape == (15, 12) and attention.out_proj.weight.shape == (12, 15)
    hidden, x = torch.randn(sum(INPUTS), 12).double(), torch.randn(sum(OUTPUTS), 12).double()
    out = attention(x, context_of(hidden)).split(OUTPUTS)
    for number, (memory, queries) in enumerate(zip(hidden.split(INPUTS), x.split(OUTPUTS), strict=True)):
        q, k, v = (
            projected.unflatten(-1, (3, 5)).transpose(0, 1)
            for projected in (attention.q_proj(queries), attention.k_proj(memory), attention.v_proj(memory))
        )
        weights = (q @ k.transpose(1, 2) * (1 / math.sqrt(5) if scale is None else scale)).softmax(-1)
        wanted = attention.out_proj((weights @ v).transpose(0, 1).flatten(1))
        torch.testing.assert_close(out[number], wanted, rtol=0, atol=1e-12)


def test_cross_attention_covers_the_whole_paired_input_only():
    attention = CrossAttention(8, 2, 0.0).double()
    hidden = torch.randn(sum(INPUTS), 8, dtype=torch.float64, requires_grad=True)
    x = torch.randn(sum(OUTPUTS), 8).double()
    context = context_of(hidden)
    out = attention(x, context)
    (gradient,) = torch.autograd.grad(out[7], hidden, torch.ones(8).double())  # in document 2, whose input is 1 token
    seen = gradient.abs().sum(1) > 0
    assert seen.nonzero().flatten().tolist() == [23]
    (gradient,) = torch.autograd.grad(attention(x, context)[5], hidden, torch.ones(8).double())
    assert (gradient.abs().sum(1) > 0).nonzero().flatten().tolist() == list(range(3, 23))


@torch.no_grad()
def test_keys_are_cached_on_request():
    attention = CrossAttention(8, 2, 0.0)
    calls = []
    attention.k_proj.register_forward_hook(lambda *_: calls.append(1))
    for keep, wanted in ((False, 2), (True, 1)):
        calls.clear()
        context = context_of(torch.randn(sum(INPUTS), 8), keep)
        for _ in range(2):
            attention(torch.randn(sum(OUTPUTS), 8), context)
        assert len(calls) == wanted


@pytest.mark.parametrize("kind", [PostNormCrossLayer, PreNormCrossLayer])
def test_decoder_layers_match_torch(kind):
    ours = kind(
        SelfAttention(12, 3, 0.0),
        CrossAttention(12, 3, 0.0),
        FeedForward(12, 20, "relu"),
        (torch.nn.LayerNorm(12), torch.nn.LayerNorm(12), torch.nn.LayerNorm(12)),
        0.0,
    ).double()
    theirs = torch.nn.TransformerDecoderLayer(
        12, 3, 20, 0.0, batch_first=True, norm_first=kind is PreNormCrossLayer, dtype=torch.float64
    )
    with torch.no_grad():
        for attention, other in ((ours.self_attn, theirs.self_attn), (ours.cross_attn, theirs.multihead_attn)):
            other.in_proj_weight.copy_(
                torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
            )
            other.in_proj_bias.copy_(torch.cat([attention.q_proj.bias, attention.k_proj.bias, attention.v_proj.bias]))
            other.out_proj.load_state_dict(attention.out_proj.state_dict())
        theirs.linear1.load_state_dict(ours.ffn.fc_in.state_dict())
        theirs.linear2.load_state_dict(ours.ffn.fc_out.state_dict())
    hidden, x = torch.randn(sum(INPUTS), 12).double(), torch.randn(sum(OUTPUTS), 12).double()
    out = ours(x, context_of(hidden)).split(OUTPUTS)
    for number, (memory, document) in enumerate(zip(hidden.split(INPUTS), x.split(OUTPUTS), strict=True)):
        mask = torch.nn.Transformer.generate_square_subsequent_mask(len(document), dtype=torch.float64)
        wanted = theirs(document[None], memory[None], tgt_mask=mask)[0]
        torch.testing.assert_close(out[number], wanted, rtol=0, atol=1e-12)


def test_gated_feed_forward_matches_the_formula():
    part = GatedFeedForward(6, 10, "gelu_tanh", bias=False)
    x = torch.randn(4, 6)
    gate, linear = x @ part.fc_gate.weight.T, x @ part.fc_in.weight.T
    wanted = (F.gelu(gate, approximate="tanh") * linear) @ part.fc_out.weight.T
    torch.testing.assert_close(part(x), wanted)
    assert {name for name, _ in part.named_parameters()} == {"fc_gate.weight", "fc_in.weight", "fc_out.weight"}


def test_feed_forward_dropout_has_the_rate():
    part = FeedForward(6, 4096, "relu", dropout=0.25)
    x, keys = torch.randn(3, 6), token_keys(0, 1, torch.arange(1), torch.zeros(1), packed((3,)))
    part.fc_out = torch.nn.Identity()
    name_dropouts(part)
    dropped = part(x, TokenRng(keys))
    kept = part(x)
    zero = (dropped == 0) & (kept != 0)
    assert zero.sum() / (kept != 0).sum() == pytest.approx(0.25, abs=0.02)
    torch.testing.assert_close(dropped[~zero], kept[~zero] / 0.75)
    assert torch.equal(part(x), kept)


def test_outputs_have_separate_dropout_keys():
    examples, parts, sides = torch.arange(4), torch.zeros(4, dtype=torch.int64), (packed(INPUTS), packed(OUTPUTS))
    keys = token_keys(3, 1, examples, parts, sides[0])
    output_keys = token_keys(3, 1, examples, parts, sides[1], outputs=True)
    assert len({*keys.tolist(), *output_keys.tolist()}) == sum(INPUTS) + sum(OUTPUTS)
    # Independent of the other documents in the batch.
    alone = token_keys(3, 1, examples[2:3], parts[2:3], packed(OUTPUTS[2:3]), outputs=True)
    assert torch.equal(alone, output_keys[6:24])
    rng, x = TokenRng(keys, output_keys), torch.ones(sum(INPUTS), 64)
    assert sum(INPUTS) > sum(OUTPUTS)
    # At the same site of the model, in either order of calls.
    first = rng.at(3).for_outputs().drop(x[: sum(OUTPUTS)], 0.5)
    assert not torch.equal(first, rng.at(3).drop(x, 0.5)[: sum(OUTPUTS)])
    assert torch.equal(first, rng.for_outputs().at(3).drop(x[: sum(OUTPUTS)], 0.5))
    with pytest.raises(ValueError, match="keys of the outputs"):
        TokenRng(keys).for_outputs()
