"""Whole models with the variable-length kernel, which a CPU emulates (`kernel_stand_ins`): forward and backward equal
those of tiled attention and of separate texts, compiled or not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from lmtool.config.registry import build
from lmtool.nn import attention
from lmtool.nn.attention import CrossAttention
from lmtool.nn.positions import Position
from lmtool.nn.stack import Stack, recompute_layers
from lmtool.training.compiling import compiled
from lmtool.types import Packed
from tests.models.test_read import ATTENDING, config_of

sys.path.insert(0, str(Path(__file__).parents[1] / "nn"))
from kernel_stand_ins import flash_on_cpu  # noqa: E402

LENGTHS = (5, 1, 19, 7)


@pytest.fixture
def paths(monkeypatch):
    """Selects the kernel wherever supported, in double precision; returns the list of paths that were taken."""
    names = []
    for name in ("flash_attention", "tiled_attention"):
        real = getattr(attention, name)
        monkeypatch.setattr(attention, name, lambda *rest, real=real, name=name: (names.append(name), real(*rest))[1])
    monkeypatch.setattr(attention, "kernel_for", lambda device, dtype, size, dropout: None if dropout else "flash")
    with flash_on_cpu():
        yield names


def outcome(model, lengths, first=0):
    """Hidden states (T, H) and gradients of texts whose tokens depend only on their number, counted from `first`."""

    def side(lengths, seed):
        parts = [
            torch.randint(0, 40, (length,), generator=torch.Generator().manual_seed(seed + first + number))
            for number, length in enumerate(lengths)
        ]
        return Packed(torch.cat(parts), lengths, {"segment": torch.zeros(sum(lengths), dtype=torch.int64)})

    device = model.embed.token.weight.device
    sides = [side(lengths, 0)]
    if model.config.architecture == "encoder_decoder":
        sides.append(side(tuple(length % 7 + 2 for length in lengths), 50))
    model.zero_grad()
    first_side, *others = [side.to(device) for side in sides]
    hidden_TH = model(first_side, None, *others)
    hidden_TH.sin().sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"hidden": hidden_TH.detach()} | gradients


def applied(model):
    """The attention modules of a model, repeated as often as they are applied."""
    layers = [layer for stack in model.modules() if isinstance(stack, Stack) for layer in stack.applied_layers()]
    return [part for layer in layers for part in layer.children() if isinstance(part, attention.MultiHead)]


def assert_equal(mine, theirs):
    assert mine.keys() == theirs.keys()
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", ATTENDING)
def test_kernel_matches_tiles_and_separate_texts(family, paths, monkeypatch):
    model = build(config_of(family, dropout=0.0, attention_dropout=0.0), 0).double()
    own = outcome(model, LENGTHS)
    biased = any(isinstance(part, Position) and part.scores for part in model.modules())
    # Positions that add to the scores of self-attention (T5, DeBERTa) do not add to those of cross-attention.
    kind = CrossAttention if biased else attention.MultiHead
    if family == "bigbird":
        kind = CrossAttention  # the kernel does not support blocks
    assert paths.count("flash_attention") == sum(isinstance(layer, kind) for layer in applied(model))
    # A packed batch equals its separate texts: the same states, and the sum of the gradients.
    alone = [outcome(model, (length,), number) for number, length in enumerate(LENGTHS)]
    joined = {name: torch.stack([one[name] for one in alone]).sum(0) for name in own if name != "hidden"}
    assert_equal(own, {"hidden": torch.cat([one["hidden"] for one in alone])} | joined)
    monkeypatch.setattr(attention, "kernel_for", lambda *rest: None)
    paths.clear()
    assert_equal(own, outcome(model, LENGTHS))
    assert "flash_attention" not in paths


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "gpt", "modernbert"])
def test_compiled_recomputing_model_with_kernel_matches_eager(family, paths):
    model = build(config_of(family, dropout=0.0, attention_dropout=0.0), 0).double()
    batches = [LENGTHS, (3, 3), (30,), (2, 2, 8, 11)]
    plain = [outcome(model, lengths) for lengths in batches]
    recompute_layers(model)
    torch._dynamo.reset()
    with compiled(True, "aot_eager"):
        outcome(model, batches[0])
        with torch._dynamo.config.patch(error_on_recompile=True):
            for lengths, wanted in zip(batches, plain, strict=True):
                assert_equal(outcome(model, lengths), wanted)
    assert set(paths) == {"flash_attention"}


# On a device.


@pytest.mark.gpu
@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("family", ["bert", "gpt", "modernbert", "llama", "bart"])
def test_cuda_kernel_matches_float64(family, compiles, monkeypatch):
    """In bf16 with the kernel, a packed batch equals its separate texts and float64 within rounding; compiled, one
    graph per region serves all batches."""
    sizes = {"hidden_size": 128, "feedforward_size": 256, "num_heads": 2, "dropout": 0.0, "attention_dropout": 0.0}
    model = build(config_of(family, **sizes), 0).double()
    batches = [LENGTHS, (3, 3), (30,), (2, 2, 8, 11)]
    wanted = [outcome(model, lengths)["hidden"] for lengths in batches]
    model.float().cuda()
    paths = []
    for name in ("flash_attention", "tiled_attention"):
        real = getattr(attention, name)
        monkeypatch.setattr(attention, name, lambda *rest, real=real, name=name: (paths.append(name), real(*rest))[1])
    torch._dynamo.reset()
    with torch.autocast("cuda", torch.bfloat16), compiled(compiles):
        outcome(model, batches[0])
        with torch._dynamo.config.patch(error_on_recompile=True):
            for lengths, hidden in zip(batches, wanted, strict=True):
                own = outcome(model, lengths)["hidden"].double().cpu()
                alone = [outcome(model, (length,), number)["hidden"] for number, length in enumerate(lengths)]
                for other in (hidden, torch.cat(alone).double().cpu()):
                    torch.testing.assert_close(own, other, rtol=0, atol=3e-2 * hidden.abs().max().item())
    assert set(paths) == {"flash_attention"}
