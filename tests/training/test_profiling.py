"""Profiling: ranges around a learner's parts, and the time and operations of each part."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from lmtool.config.registry import build
from lmtool.models.configs import BertConfig
from lmtool.nn.regions import is_plain
from lmtool.training import profiling
from lmtool.training.attribution import CLIP, LOSS, MOVE, ZERO, attribute, flops_of
from lmtool.training.profiling import (
    ATTENTION,
    DATA,
    HEAD,
    LEARNER,
    PROJECTIONS,
    STEP,
    profiled_modules,
    profiler_range,
    ranges,
)

TOKENS, WIDTH, INNER, ROWS = 48, 64, 128, 40


class _Part(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.into(x).relu())


class _Layer(nn.Module):
    """Attention scores and a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.ffn = _Scores(), _Part()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ffn(x + self.self_attn(x))


class _Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_proj(x)
        return torch.bmm(torch.bmm(q[None], x[None].transpose(1, 2)).softmax(-1), x[None])[0]


class _Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Layer()])
        self.heads = nn.ModuleDict({"classes": nn.Linear(WIDTH, ROWS)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.heads["classes"](x), torch.arange(len(x)) % ROWS)


def test_profile_matches_known_flops_and_parts() -> None:
    torch.manual_seed(0)
    model, steps = _Whole(), 2
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    events = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
    # Without a gradient of the input, the backward would skip some products.
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    with ranges(model), events:
        for _ in range(steps):
            with profiler_range(STEP):
                with profiler_range(DATA):
                    torch.randn(500, 500)
                model(x).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    costs = attribute(events.events())
    maps = WIDTH * WIDTH + 2 * WIDTH * INNER + WIDTH * ROWS
    scores = 2 * TOKENS * WIDTH
    # Forward, and gradients of both factors.
    assert costs.flops == 3 * 2 * TOKENS * (maps + scores)
    assert 0 < costs.products < costs.milliseconds
    assert sum(cost.operators for cost in costs.parts.values()) == pytest.approx(costs.milliseconds)
    for part in ("attention: projections", "attention: scores", "feed-forward", "norms, dropout, residuals", HEAD):
        assert costs.parts[part].forward > 0 and costs.parts[part].backward > 0, part
    assert all(costs.parts[part].forward > 0 for part in (LOSS, CLIP, MOVE, ZERO, DATA))
    assert costs.parts[LOSS].backward > 0 and costs.parts[DATA].backward == 0
    # A linear layer calls linear, t, transpose, as_strided and addmm, and their own operators.
    assert costs.parts["feed-forward"].calls > 10 and costs.parts["feed-forward"].calls % 1 == 0


def test_backward_time_is_attributed_to_part() -> None:
    """Not to the part before it, and not to the last called part."""
    first, second = _Part(), _Part()
    events = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
    x = torch.randn(256, WIDTH)
    with events, profiler_range(STEP):
        with profiler_range("small"):
            hidden = x * 2
        with profiler_range("large"):
            hidden = first(hidden) + second(hidden)
        with profiler_range("last"):
            loss = hidden.sum()
        loss.backward()
    parts = attribute(events.events()).parts
    assert parts["large"].backward > 10 * parts["small"].backward
    assert parts["large"].backward > parts["last"].backward > 0


@pytest.mark.parametrize(
    ("name", "shapes", "flops"),
    [
        ("aten::mm", [[3, 5], [5, 7]], 2 * 3 * 5 * 7),
        ("aten::addmm", [[7], [3, 5], [5, 7]], 2 * 3 * 5 * 7),
        ("aten::bmm", [[2, 3, 5], [2, 5, 7]], 2 * 2 * 3 * 5 * 7),
        ("aten::baddbmm", [[2, 3, 7], [2, 3, 5], [2, 5, 7]], 2 * 2 * 3 * 5 * 7),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", [[2, 4, 6, 8]] * 3, 2 * 2 * (2 * 4 * 6 * 6 * 8)),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", [[2, 4, 6, 8]] * 4, 5 * 2 * (2 * 4 * 6 * 6 * 8)),
        ("aten::add", [[3, 5], [3, 5]], None),
        ("aten::linear", [[3, 5], [7, 5]], None),
    ],
)
def test_flops_of_operators_match_shapes(name: str, shapes: list[list[int]], flops: int | None) -> None:
    assert flops_of(name, shapes) == flops


def test_profiled_methods_exist() -> None:
    """The tables name methods as strings, so a renamed method would silently lose its range."""
    names = {method for _, methods in profiling._PARTS_BY_NAME.values() for method in methods}
    names |= {*profiling._NETWORK_METHODS, *profiling._BACKBONE_METHODS, "leave"}
    package = Path(profiling.__file__).parents[1]
    defined = set(re.findall(r"def (\w+)\(", "\n".join(file.read_text() for file in package.rglob("*.py"))))
    assert names <= defined


def test_ranges_restore_modules_and_skip_joined_projections() -> None:
    backbone = build(BertConfig(num_layers=1, hidden_size=32, num_heads=2, feedforward_size=64, vocab_size=50), 0)
    learner = nn.Module()
    learner.backbone = backbone
    learner.forward = lambda: None
    before = {name: dict(vars(module)) for name, module in learner.named_modules()}
    named_parts = [part for _, part, _ in profiled_modules(learner)]
    assert {LEARNER, ATTENTION, "feed-forward", "embedding", "batch layout"} <= set(named_parts)
    assert ATTENTION + PROJECTIONS not in named_parts, "joined projections are never called"
    with ranges(learner):
        attention = backbone.layers[0].self_attn
        assert "forward" in vars(attention) and "finish" in vars(backbone.embed)
        assert all(is_plain(getattr(attention, name), nn.Linear) for name in ("q_proj", "k_proj", "v_proj"))
        assert all("forward" not in vars(module) for module in (attention.q_proj, attention.out_proj))
    assert {name: dict(vars(module)) for name, module in learner.named_modules()} == before
