"""Calls of CUDA's attention kernels, emulated on a CPU: forward and backward against the reference, and the cases that
use tiled attention instead."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch
from kernel_stand_ins import flash_on_cpu

from lmtool.config.registry import build
from lmtool.models.encoder_configs import ModernbertConfig
from lmtool.nn import attention, kernels
from lmtool.nn.attention import SelfAttention, attend, reference_attention
from lmtool.nn.dropout import DeviceRng, TokenRng
from lmtool.nn.kernels import flash_attention, jagged_attention, kernel_for, serves
from lmtool.nn.layout import Causal, Full, Layout, PrefixLM
from lmtool.nn.positions import Alibi, Position
from lmtool.nn.prefix import KeyPrefix
from lmtool.nn.stack import Stack, attention_path
from lmtool.types import Packed, Segments

LENGTHS = (7, 70, 1, 0, 16, 33, 7, 32, 17)
HEADS, SIZE = 3, 8
CUDA = torch.device("cuda", 0)


@dataclass(frozen=True)
class Near:
    """A window mask, as in local layers."""

    left: int
    right: int

    @property
    def window(self):
        return self.left, self.right

    def allow(self, query_RL1, key_R1K, documents_R):
        ahead = key_R1K - query_RL1
        return (ahead >= -self.left) & (ahead <= self.right)


def layout_of(mask, queries=LENGTHS, keys=None, start=()):
    query = Segments.packed(queries)
    return Layout(query, query if keys is None else Segments.packed(keys), mask, start)


LAYOUTS = {
    "full": layout_of(Full()),
    "causal": layout_of(Causal()),
    "one document": layout_of(Causal(), (40,)),
    "equal lengths": layout_of(Full(), (16,) * 5),
    "window": layout_of(Near(5, 3)),
    "causal window": layout_of(Near(4, 0)),
    "cross": layout_of(Full(), LENGTHS, (3, 40, 5, 0, 61, 2, 17, 16, 1)),
    "cross, keys or queries empty": layout_of(Full(), LENGTHS, (3, 40, 0, 5, 61, 2, 17, 16, 1)),
    "after a prefix": Layout.of(Packed(torch.zeros(sum(LENGTHS)), LENGTHS), Full(), 5),
    "causal after a prefix": Layout.of(Packed(torch.zeros(sum(LENGTHS)), LENGTHS), Causal(), 5),
    "decoding": layout_of(Causal(), (1, 4, 1, 2), (31, 4, 1, 9), (30, 0, 0, 7)),
}
JAGGED = ("full", "causal", "one document", "equal lengths", "cross", "after a prefix")


def projected(layout):
    """Queries, keys and values as in a model: in self-attention they are parts of a joined projection."""
    generator = torch.Generator().manual_seed(3)
    queries, keys = sum(layout.query.lengths), sum(layout.key.lengths)
    if layout.query is layout.key:
        joined = torch.randn(queries, 3 * HEADS * SIZE, dtype=torch.float64, generator=generator).requires_grad_()
        return [joined], [part.unflatten(-1, (HEADS, SIZE)) for part in joined.split(HEADS * SIZE, -1)]
    leaves = [
        torch.randn(count, HEADS, SIZE, dtype=torch.float64, generator=generator).requires_grad_()
        for count in (queries, keys, keys)
    ]
    return leaves, leaves


def assert_matches_reference(kernel, layout, scale=None):
    leaves, (q, k, v) = projected(layout)
    weights = torch.randn(q.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    with flash_on_cpu():
        out = (
            flash_attention(q, k, v, layout, scale)
            if kernel == "flash"
            else jagged_attention(q, k, v, layout, scale, 0.0)
        )
        gradients = torch.autograd.grad((out * weights).sum(), leaves)
    wanted = reference_attention(q, k, v, layout, None, scale)
    assert out.shape == wanted.shape
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-12)
    for mine, theirs in zip(gradients, torch.autograd.grad((wanted * weights).sum(), leaves), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("scale", [None, 1.0])
@pytest.mark.parametrize("name", LAYOUTS)
def test_flash_matches_reference_attention(name, scale):
    assert serves("flash", LAYOUTS[name])
    assert_matches_reference("flash", LAYOUTS[name], scale)


@pytest.mark.parametrize("scale", [None, 1.0])
@pytest.mark.parametrize("name", JAGGED)
def test_jagged_kernel_without_dropout_matches_reference(name, scale):
    assert serves("jagged", LAYOUTS[name])
    assert_matches_reference("jagged", LAYOUTS[name], scale)


@pytest.mark.parametrize("name", LAYOUTS)
def test_jagged_kernel_serves_listed_layouts_only(name):
    assert serves("jagged", LAYOUTS[name]) == (name in JAGGED)


def test_unsupported_layouts_are_not_served_by_kernels():
    padded = Segments((0, 20, 40), (20, 3, 11))
    others = {
        "rows with padding": Layout(padded, padded, Full()),
        "prefixes": layout_of(PrefixLM((3,) * len(LENGTHS))),
        "a causal mask counted from the first key": layout_of(Causal(), (2, 3), (5, 9), (0, 0)),
        "a window counted from the first key": layout_of(Near(4, 0), (2, 3), (5, 9), (0, 0)),
        "nothing to attend": layout_of(Full(), (0, 0)),
        "no keys": layout_of(Full(), (3, 2), (0, 0)),
    }
    for name, layout in others.items():
        assert not serves("flash", layout) and not serves("jagged", layout), name


# Torch's CPU implementation, without stand-ins, which supports the full mask only.


@pytest.mark.parametrize("name", ["full", "cross"])
def test_jagged_tensors_on_cpu_match_reference(name):
    layout = LAYOUTS[name]
    q, k, v = (x.detach().float().contiguous().requires_grad_() for x in projected(layout)[1])
    out, wanted = jagged_attention(q, k, v, layout, None, 0.0), reference_attention(q, k, v, layout)
    torch.testing.assert_close(out, wanted, rtol=0, atol=5e-7)
    for mine, theirs in zip(
        torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(wanted.sum(), (q, k, v)), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=5e-6)


def dropped_weights(rate, seed, real):
    """(T, A, 32) attention weights after dropout, of documents of at most 32 tokens: each value is a unit vector."""
    lengths = (32, 5, 0, 17, 32, 29) * 4
    layout = layout_of(Full(), lengths)
    tokens = sum(lengths)
    q = torch.randn(tokens, 4, 32, generator=torch.Generator().manual_seed(1))
    v = torch.eye(32)[Packed(torch.zeros(tokens), lengths).positions][:, None].expand(-1, 4, -1).contiguous()
    whole = reference_attention(q, q, v, layout)
    torch.manual_seed(seed)
    if real:
        return jagged_attention(q, q, v, layout, None, rate), whole
    with flash_on_cpu():
        return jagged_attention(q, q, v, layout, None, rate), whole


@pytest.mark.parametrize("real", [True, False], ids=["torch", "stand-in"])
def test_jagged_kernel_drops_weights_at_the_rate(real):
    rate = 0.25
    dropped, whole = dropped_weights(rate, 0, real)
    seen = whole > 0
    kept = dropped[seen] != 0
    torch.testing.assert_close(dropped[seen][kept], whole[seen][kept] / (1 - rate), rtol=1e-5, atol=1e-7)
    assert not dropped[~seen].any()
    assert abs(1 - kept.double().mean() - rate) < 4 * (rate * (1 - rate) / kept.numel()) ** 0.5
    # The same seed gives the same mask, another seed an independent one.
    assert torch.equal(dropped, dropped_weights(rate, 0, real)[0])
    other = dropped_weights(rate, 1, real)[0]
    agree = ((other[seen] != 0) == kept).double().mean()
    assert abs(agree - (rate**2 + (1 - rate) ** 2)) < 0.02


@pytest.mark.parametrize("mask", [Full(), Causal()])
def test_jagged_kernel_backward_has_the_forward_dropout(mask):
    layout = layout_of(mask, (9, 0, 30, 4))
    q, k, v = (x.detach().requires_grad_() for x in projected(layout)[1])
    with flash_on_cpu():
        torch.manual_seed(5)
        gradient = torch.autograd.grad(jagged_attention(q, k, v, layout, None, 0.3).sin().sum(), q)[0]

        def total(change):
            torch.manual_seed(5)
            return jagged_attention(q + change, k, v, layout, None, 0.3).sin().sum()

        change = torch.randn_like(q)
        slope = (total(1e-5 * change) - total(-1e-5 * change)) / 2e-5
    torch.testing.assert_close((gradient * change).sum(), slope, rtol=1e-6, atol=1e-8)


# The choice of a path.


@pytest.fixture
def with_flash(monkeypatch):
    """Makes every device support flash attention."""
    monkeypatch.setattr(kernels, "has_flash", lambda device: True)


@pytest.mark.parametrize(
    ("dtype", "head_size", "dropout", "kernel"),
    [
        (torch.bfloat16, 64, 0.0, "flash"),
        (torch.float16, 64, 0.0, "flash"),
        (torch.bfloat16, 256, 0.1, "jagged"),
        (torch.float32, 64, 0.0, None),
        (torch.bfloat16, 60, 0.0, None),
        (torch.bfloat16, 264, 0.1, None),
    ],
)
def test_kernel_for_dtype_head_size_and_dropout(with_flash, dtype, head_size, dropout, kernel):
    assert kernel_for(CUDA, dtype, head_size, dropout) == kernel


@pytest.mark.parametrize(("capability", "kernel"), [((7, 5), None), ((8, 0), "flash"), ((9, 0), "flash")])
def test_flash_attention_needs_compute_capability_8(monkeypatch, capability, kernel):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    kernels.has_flash.cache_clear()
    assert kernel_for(CUDA, torch.bfloat16, 64, 0.0) == kernel
    assert kernel_for(torch.device("cpu"), torch.bfloat16, 64, 0.0) is None
    kernels.has_flash.cache_clear()


RNGS = {
    "none": lambda: None,
    "device": lambda: DeviceRng(0, torch.device("cpu")),
    "token": lambda: TokenRng(torch.arange(sum(LENGTHS))),
}


@pytest.mark.parametrize(
    ("mask", "dtype", "dropout", "rng", "biased", "taken"),
    [
        (Full(), torch.bfloat16, 0.0, "device", False, "flash"),
        (Causal(), torch.bfloat16, 0.0, "device", False, "flash"),
        (Near(3, 3), torch.bfloat16, 0.0, "device", False, "flash"),
        (Causal(), torch.bfloat16, 0.1, "none", False, "flash"),
        (Causal(), torch.bfloat16, 0.0, "token", False, "flash"),
        (Full(), torch.bfloat16, 0.1, "device", False, "jagged"),
        (Causal(), torch.bfloat16, 0.1, "device", False, "jagged"),
        (Near(3, 3), torch.bfloat16, 0.1, "device", False, "tiles"),
        (Full(), torch.bfloat16, 0.1, "token", False, "tiles"),
        (Full(), torch.bfloat16, 0.0, "device", True, "tiles"),
        (Full(), torch.bfloat16, 0.1, "device", True, "tiles"),
        (Full(), torch.float32, 0.0, "device", False, "tiles"),
        (PrefixLM((2,) * len(LENGTHS)), torch.bfloat16, 0.0, "device", False, "tiles"),
    ],
)
def test_attend_chooses_the_path_and_matches_reference(
    with_flash, monkeypatch, mask, dtype, dropout, rng, biased, taken
):
    paths = []
    for name, path in (("flash_attention", "flash"), ("jagged_attention", "jagged"), ("tiled_attention", "tiles")):
        real = getattr(attention, name)
        monkeypatch.setattr(attention, name, lambda *rest, real=real, path=path: (paths.append(path), real(*rest))[1])
    layout = layout_of(mask)
    inputs = [x.detach().to(dtype).contiguous() for x in projected(layout)[1]]
    with flash_on_cpu():
        out = attend(*inputs, layout, Alibi(HEADS) if biased else None, None, dropout, RNGS[rng]())
    assert paths == [taken]
    assert out.shape == inputs[0].shape and out.dtype == dtype and bool(out.isfinite().all())
    if dropout == 0.0 or rng == "none":
        wide = [x.double() for x in inputs]
        wanted = reference_attention(*wide, layout, Alibi(HEADS) if biased else None)
        torch.testing.assert_close(out.double(), wanted, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize(
    ("device", "dtype", "dropout", "biased", "prefixes", "words"),
    [
        ("cpu", torch.bfloat16, 0.1, False, {False}, "documents of similar length together, without padding"),
        ("cuda", torch.bfloat16, 0.0, False, {False}, "variable-length flash"),
        ("cuda", torch.bfloat16, 0.1, False, {False}, "flash of jagged tensors, which has dropout"),
        ("cuda", torch.bfloat16, 0.0, True, {False}, "documents of similar length.*positions add to the scores.*$"),
        ("cuda", torch.float32, 0.0, False, {False}, "documents of similar length.*bf16 or fp16.*$"),
        ("cuda", torch.bfloat16, 0.0, False, {True}, "documents of similar length.*prefix.*$"),
        ("cuda", torch.bfloat16, 0.0, False, {True, False}, "documents of similar.*; variable-length flash$"),
    ],
)
def test_attention_path_describes_the_choice(with_flash, device, dtype, dropout, biased, prefixes, words):
    model = torch.nn.ModuleList([SelfAttention(64, 4, dropout), Alibi(4) if biased else Position()])
    assert re.fullmatch(words, attention_path(model, torch.device(device), dtype, prefixes))


@pytest.mark.parametrize("causal", [False, True])
def test_attention_path_of_a_causal_prefix_is_tiled_with_dropout(with_flash, causal):
    layer = torch.nn.Module()
    layer.self_attn = SelfAttention(64, 4, 0.1)
    stack = Stack([layer], causal)
    stack.prefix = KeyPrefix(3, 1, 64)
    words = "documents of similar.*a causal model has a prefix before" if causal else "flash of jagged tensors"
    assert re.match(words, attention_path(stack, CUDA, torch.bfloat16))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_path_of_windows_is_tiled_with_dropout(with_flash, dropout):
    """In ModernBERT, whose layers after the first attend to a window."""
    sizes = {"vocab_size": 50, "num_layers": 2, "hidden_size": 64, "num_heads": 4, "attention_dropout": dropout}
    model = build(ModernbertConfig(**sizes), 0)
    words = "flash of jagged tensors.*; .*similar.*a layer attends to a window" if dropout else "variable-length flash$"
    assert re.match(words, attention_path(model, CUDA, torch.bfloat16))


def test_batch_without_tokens_has_empty_output(with_flash):
    nothing = torch.zeros(0, HEADS, SIZE, dtype=torch.bfloat16)
    assert attend(nothing, nothing, nothing, layout_of(Full(), ())).shape == (0, HEADS, SIZE)


# On a device.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LAYOUTS)
def test_flash_on_cuda_matches_reference(name, dtype):
    on_cuda(name, dtype, "flash")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", JAGGED)
def test_jagged_kernel_on_cuda_matches_reference(name, dtype):
    on_cuda(name, dtype, "jagged")


def on_cuda(name, dtype, kernel):
    layout = LAYOUTS[name]
    query = Segments.packed(layout.query.lengths, CUDA)
    key = query if layout.key is layout.query else Segments.packed(layout.key.lengths, CUDA)
    layout = Layout(query, key, layout.mask, layout.query_start)
    halves = [x.detach().to(CUDA, dtype).requires_grad_() for x in projected(layout)[1]]
    wide = [x.detach().double().requires_grad_() for x in halves]
    out = attend(*halves, layout) if kernel == "flash" else jagged_attention(*halves, layout, None, 0.0)
    wanted = reference_attention(*wide, layout)
    torch.testing.assert_close(out.double(), wanted, rtol=2e-2, atol=2e-2)
    out.float().square().sum().backward()
    wanted.square().sum().backward()
    for mine, theirs in zip(halves, wide, strict=True):
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=5e-2, atol=5e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("mask", [Full(), Causal()])
def test_dropout_on_cuda_uses_the_jagged_kernel(mask, monkeypatch):
    """Values are unit vectors, so that the output shows the weights: dropped at the rate or scaled, and equal for the
    same seed."""
    taken = []
    real = attention.jagged_attention
    monkeypatch.setattr(attention, "jagged_attention", lambda *rest: (taken.append(1), real(*rest))[1])
    lengths, rate = (64, 5, 33, 64, 1) * 4, 0.25
    segments = Segments.packed(lengths, CUDA)
    layout = Layout(segments, segments, mask)
    q = torch.randn(sum(lengths), 4, 64, device=CUDA, dtype=torch.bfloat16)
    positions = Packed(torch.zeros(sum(lengths), device=CUDA), lengths).positions
    v = torch.eye(64, device=CUDA, dtype=torch.bfloat16)[positions][:, None].expand(-1, 4, -1).contiguous()
    whole = reference_attention(q.double(), q.double(), v.double(), layout)
    dropped = attend(q, q, v, layout, None, None, rate, DeviceRng(7, CUDA))
    assert taken and dropped.shape == whole.shape
    seen = whole > 1e-3
    kept = dropped[seen] != 0
    torch.testing.assert_close(dropped[seen][kept].double(), whole[seen][kept] / (1 - rate), rtol=3e-2, atol=1e-3)
    assert abs(1 - kept.double().mean() - rate) < 5 * (rate * (1 - rate) / kept.numel()) ** 0.5
    assert torch.equal(dropped, attend(q, q, v, layout, None, None, rate, DeviceRng(7, CUDA)))
    assert not torch.equal(dropped, attend(q, q, v, layout, None, None, rate, DeviceRng(8, CUDA)))
