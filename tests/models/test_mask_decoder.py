"""The enhanced mask decoder against a plain implementation of its definition."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from lmtool.config.registry import build
from lmtool.errors import UserError
from lmtool.models.configs import BertConfig
from lmtool.models.heads.lm import EnhancedMaskedLMHead, masked_lm_head
from lmtool.nn.stack import Tap, TapPoint
from lmtool.types import Packed
from tests.models.parity import CASES

CONFIGS = {name: CASES[name].config for name in ("deberta", "deberta_v3")}
PACKED = Packed(torch.arange(1, 60), (31, 5, 23))
both = pytest.mark.parametrize("family", CONFIGS)


class Before(Tap):
    """Records the states before the last layer."""

    def __init__(self, layers):
        self.place = TapPoint(layers - 1)

    def wants(self, place):
        return place == self.place

    def __call__(self, place, x_TH):
        self.states = x_TH
        return x_TH


def made(family):
    backbone = build(CONFIGS[family], 0)
    head = masked_lm_head(backbone, enhanced=True)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in (*backbone.parameters(), *head.parameters()):
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return backbone.double(), head.double()


def plain_layer(backbone, states_LH, queries_LH):
    """One text: softmax((q k + q kr + k qr) / sqrt(3 D)) v, then the rest of the layer; queries are the residual."""
    layer, places = backbone.layers[-1], backbone.relative
    attention, heads, length = layer.self_attn, backbone.config.num_heads, len(states_LH)
    rows = places.rows()

    def split(x):
        return x.unflatten(-1, (heads, -1)).transpose(0, 1)

    q, k, v = (
        split(part) for part in (attention.q_proj(queries_LH), attention.k_proj(states_LH), attention.v_proj(states_LH))
    )
    keys, queries = split(attention.keys_of(rows)), split(attention.queries_of(rows))
    out = torch.zeros_like(q)
    for i in range(length):
        index = places.index(torch.tensor(i) - torch.arange(length))
        for head in range(heads):
            scores = k[head] @ q[head, i] + keys[head, index] @ q[head, i] + (queries[head, index] * k[head]).sum(-1)
            out[head, i] = (scores / math.sqrt(3 * q.shape[-1])).softmax(-1) @ v[head]
    attended = layer.norm1(queries_LH + attention.out_proj(out.transpose(0, 1).flatten(1)))
    fed = layer.ffn.fc_out(F.gelu(layer.ffn.fc_in(attended)))
    return layer.norm2(attended + fed)


def plain(backbone, head):
    """The states before the last layer plus absolute positions are the queries, applied twice to the same states."""
    before = Before(backbone.config.num_layers)
    backbone(PACKED, tap=before)
    texts = []
    for states_LH in before.states.split(PACKED.lengths):
        queries_LH = states_LH + head.absolute.weight[: len(states_LH)]
        for _ in range(2):
            queries_LH = plain_layer(backbone, states_LH, queries_LH)
        texts.append(queries_LH)
    return torch.cat(texts)


@both
def test_states_and_gradients_match_a_plain_implementation(family):
    backbone, head = made(family)
    at = torch.tensor([0, 4, 30, 33, 58])
    parameters = [*backbone.parameters(), head.absolute.weight]
    wanted, states = plain(backbone, head), head.states(backbone, PACKED)
    torch.testing.assert_close(states, wanted, rtol=1e-9, atol=1e-9)
    read = head.states(backbone, PACKED, read_M=at)
    torch.testing.assert_close(read, states[at], rtol=1e-9, atol=1e-9)
    directions = torch.randn(len(at), 36, dtype=torch.float64)
    theirs = torch.autograd.grad((wanted[at] * directions).sum(), parameters)
    for ours, gradient in zip(torch.autograd.grad((read * directions).sum(), parameters), theirs, strict=True):
        torch.testing.assert_close(ours, gradient, rtol=1e-6, atol=1e-8)


@both
def test_decoder_parameters_belong_to_the_head_only(family):
    """The backbone has none of its parameters, and the states of the backbone do not depend on it."""
    backbone, head = made(family)
    assert set(dict(backbone.named_parameters())) == set(dict(build(CONFIGS[family], 0).named_parameters()))
    states, decoded = backbone(PACKED), head.states(backbone, PACKED)
    with torch.no_grad():
        head.absolute.weight.normal_()
    assert torch.equal(backbone(PACKED), states) and not torch.allclose(head.states(backbone, PACKED), decoded)
    # A head without it reads the last layer.
    assert torch.equal(masked_lm_head(backbone).states(backbone, PACKED), states)


@both
def test_gradients_with_recomputed_layers_are_equal(family):
    backbone, head = made(family)
    wanted = torch.autograd.grad(head.states(backbone, PACKED).square().sum(), [*backbone.parameters()])
    backbone.recomputes = True
    again = torch.autograd.grad(head.states(backbone, PACKED).square().sum(), [*backbone.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(wanted, again, strict=True))


def test_enhanced_decoder_of_bert_is_refused():
    backbone = build(BertConfig(num_layers=1, hidden_size=8, num_heads=2, feedforward_size=8, vocab_size=20), 0)
    with pytest.raises(UserError, match="enhanced_decoder=true: model=bert"):
        masked_lm_head(backbone, enhanced=True)
    assert not isinstance(masked_lm_head(backbone), EnhancedMaskedLMHead)
