"""Dropout keyed by token: its rate, its independence, and invariance to packing and micro-batches."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lmtool.nn.attention import SelfAttention
from lmtool.nn.blocks import PreNormLayer
from lmtool.nn.context import Context
from lmtool.nn.dropout import DeviceRng, Dropout, TokenRng, mix, name_dropouts, token_keys
from lmtool.nn.feedforward import FeedForward
from lmtool.nn.layout import Causal, Full
from lmtool.types import Packed


def packed_of(*lengths: int) -> Packed:
    return Packed(torch.zeros(sum(lengths), dtype=torch.int64), lengths)


def rng_for(lengths, examples, parts=None, step=1, seed=0) -> TokenRng:
    parts = [0] * len(lengths) if parts is None else parts
    return TokenRng(token_keys(seed, step, torch.tensor(examples), torch.tensor(parts), packed_of(*lengths)))


def kept(rng: TokenRng, tokens: int, channels: int, rate: float = 0.5) -> torch.Tensor:
    return rng.drop(torch.ones(tokens, channels), rate) > 0


def test_dropout_without_rng_or_rate_is_the_identity():
    x = torch.randn(5, 8)
    assert Dropout(0.5)(x, None) is x
    assert Dropout(0.0)(x, rng_for((5,), (0,))) is x


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5])
def test_dropout_has_the_rate_and_scale(rate):
    x = torch.ones(2000, 250, dtype=torch.float64)
    out = rng_for((1000, 1000), (3, 4)).drop(x, rate)
    deviation = (rate * (1 - rate) / x.numel()) ** 0.5
    assert abs((out == 0).double().mean() - rate) < 4 * deviation + 1e-5
    torch.testing.assert_close(out[out > 0], torch.full_like(out[out > 0], 1 / (1 - rate)), rtol=2e-5, atol=0)
    # Each token and each channel has the rate.
    for dim in (0, 1):
        fraction = (out == 0).double().mean(dim)
        assert (fraction - rate).abs().max() < 5.5 * (rate * (1 - rate) / x.shape[dim]) ** 0.5


def test_masks_of_different_keys_are_independent():
    rng = rng_for((500, 500), (0, 1))
    site0, site1 = kept(rng.at(0), 1000, 256), kept(rng.at(1), 1000, 256)
    others = {
        "site": (site0, site1),
        "nested site": (site0, kept(rng.at(0).at(0), 1000, 256)),
        "order of sites": (kept(rng.at(0).at(1), 1000, 256), kept(rng.at(1).at(0), 1000, 256)),
        "channel": (site0[:, :-1], site0[:, 1:]),
        "lane": (site0[:, :-4], site0[:, 4:]),
        "position": (site0[:-1], site0[1:]),
        "example": (site0[:500], site0[500:]),
        "step": (site0, kept(rng_for((500, 500), (0, 1), step=2).at(0), 1000, 256)),
        "seed": (site0, kept(rng_for((500, 500), (0, 1), seed=1).at(0), 1000, 256)),
        "part": (site0, kept(rng_for((500, 500), (0, 1), parts=(1, 1)).at(0), 1000, 256)),
    }
    for name, (kept_here, other) in others.items():
        agree = (kept_here == other).double().mean()
        assert abs(agree - 0.5) < 4.5 * 0.5 / kept_here.numel() ** 0.5, name


def test_masks_match_frozen_values():
    first = kept(rng_for((3,), (7,), seed=5).at(2), 3, 16)
    assert ["".join("01"[int(bit)] for bit in row) for row in first] == [
        "1000111001101000",
        "1001101000101110",
        "0101100011100111",
    ]


def test_packing_does_not_change_the_masks():
    together = kept(rng_for((4, 6, 3), (10, 11, 12), (0, 1, 0)), 13, 20)
    assert torch.equal(together[4:10], kept(rng_for((6,), (11,), (1,)), 6, 20))
    assert torch.equal(together[10:], kept(rng_for((3, 6), (12, 11), (0, 1)), 9, 20)[:3])


def test_rows_have_the_masks_of_their_tokens():
    rng = rng_for((4, 6), (1, 2)).at(3)
    rows = rng.rows(torch.tensor([0, 4]))
    assert torch.equal(kept(rows, 2, 20), kept(rng, 10, 20)[[0, 4]])
    assert torch.equal(kept(rows.at(1), 2, 20), kept(rng.at(1), 10, 20)[[0, 4]])


def test_gradient_has_the_mask_of_the_output():
    x = torch.randn(6, 10, dtype=torch.float64, requires_grad=True)
    out = rng_for((6,), (0,)).drop(x, 0.3)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(gradient, out.detach() / x.detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_dtype_has_the_same_mask_and_rounded_scale(dtype):
    x = torch.randn(6, 10).to(dtype).requires_grad_()
    out = rng_for((6,), (0,)).drop(x, 0.1)
    (gradient,) = torch.autograd.grad(out, x, torch.ones_like(out))
    wanted = rng_for((6,), (0,)).drop(torch.ones(6, 10, dtype=torch.float64), 0.1).to(dtype)
    assert torch.equal(gradient, wanted) and torch.equal(out, x * wanted)


def test_dropout_saves_one_byte_per_activation():
    x = torch.randn(6, 12, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        rng_for((6,), (0,)).drop(x, 0.3)
    assert sum(tensor.untyped_storage().nbytes() for tensor in saved) == x.numel()


def test_hash_does_not_depend_on_the_batch():
    values = torch.arange(300_001)
    assert torch.equal(mix(values.clone()), torch.cat([mix(part.clone()) for part in values.split(1_000)]))


@pytest.mark.parametrize("mask", [Full(), Causal()])
def test_attention_dropout_has_the_rate_and_depends_on_the_token(mask):
    torch.manual_seed(0)
    attention = SelfAttention(24, 3, 0.25).double()
    name_dropouts(attention)
    x = torch.randn(40, 24, dtype=torch.float64)
    together = attention(x, Context.of(packed_of(11, 29), mask, rng=rng_for((11, 29), (5, 6))))
    alone = attention(x[11:], Context.of(packed_of(29), mask, rng=rng_for((29,), (6,))))
    torch.testing.assert_close(together[11:], alone, rtol=0, atol=1e-13)
    assert not torch.allclose(alone, attention(x[11:], Context.of(packed_of(29), mask)))
    weights = torch.ones(2, 3, 40, 40)
    dropped = rng_for((40, 40), (0, 1)).drop_weights(weights, torch.arange(80).view(2, 40), 0.25)
    assert abs((dropped == 0).double().mean() - 0.25) < 4 * (0.25 * 0.75 / weights.numel()) ** 0.5


def layer_of(rate: float) -> PreNormLayer:
    torch.manual_seed(0)
    parts = SelfAttention(24, 3, rate), FeedForward(24, 32, "gelu", dropout=rate), torch.nn.LayerNorm(24)
    layer = PreNormLayer(*parts, torch.nn.LayerNorm(24), rate).double()
    name_dropouts(layer, "layers.0.")
    return layer


def test_micro_batches_have_the_same_gradient():
    layer = layer_of(0.2)
    lengths, examples = (5, 20, 1, 18), (9, 2, 4, 7)
    x = torch.randn(sum(lengths), 24, dtype=torch.float64)
    layer(x, Context.of(packed_of(*lengths), Causal(), rng=rng_for(lengths, examples))).square().sum().backward()
    whole = [parameter.grad.clone() for parameter in layer.parameters()]
    layer.zero_grad()
    parts = dict(zip(range(4), x.split(lengths), strict=True))
    for members in ((3, 1), (2,), (0,)):
        some = tuple(lengths[member] for member in members)
        part = torch.cat([parts[member] for member in members])
        rng = rng_for(some, tuple(examples[member] for member in members))
        layer(part, Context.of(packed_of(*some), Causal(), rng=rng)).square().sum().backward()
    for parameter, wanted in zip(layer.parameters(), whole, strict=True):
        torch.testing.assert_close(parameter.grad, wanted, rtol=0, atol=1e-11)


SOURCES = {
    "by token": lambda seed: rng_for((11, 29), (5, 6), seed=seed),
    "by device": lambda seed: DeviceRng(seed, torch.device("cpu")),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_recomputed_layer_has_the_same_masks(source):
    """With another layer between forward pass and recomputation, and without restoring a generator."""
    first, second, rng = layer_of(0.3), layer_of(0.3), source(1)
    own = [Context.of(packed_of(11, 29), Causal(), rng=rng.at(number)) for number in (0, 1)]
    without = Context.of(packed_of(11, 29), Causal())
    gradients = []
    for recompute in (False, True):
        x = torch.randn(40, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        if recompute:
            out = checkpoint(first, x, own[0], use_reentrant=False, preserve_rng_state=False)
        else:
            out = first(x, own[0])
        out = second(out, own[1])
        gradients.append(torch.autograd.grad(out.square().sum(), [x, *first.parameters()]))
        assert not torch.allclose(out, second(first(x, without), without))
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_masks_do_not_depend_on_the_order_of_calls(source):
    x, places = torch.ones(40, 24), ("norm", "ffn", "head")
    parts = torch.nn.ModuleDict({name: Dropout(0.5) for name in places})
    name_dropouts(parts)
    there, back = source(1), source(1)
    dropped = {name: parts[name](x, there) for name in places}
    other = {name: parts[name](x, back) for name in reversed(places)}
    assert all(torch.equal(dropped[name], other[name]) for name in places)
    assert len({tuple(dropped[name].flatten().tolist()) for name in places}) == 3
    assert not torch.equal(dropped["norm"], parts["norm"](x, source(2)))


def test_unnamed_dropout_is_refused():
    with pytest.raises(ValueError, match="without a name"):
        Dropout(0.5)(torch.ones(3, 4), rng_for((3,), (0,)))
    assert Dropout(0.5).rng(None) is None
