"""Adapters, stacked and fused ones, against their published formulas, and empty slots."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lmtool.nn.feedforward import AdapterSlot, BottleneckAdapter, FusedAdapters, StackedAdapters

WIDTH, INNER, TOKENS = 12, 4, 7


def states(seed: int) -> torch.Tensor:
    return torch.randn(TOKENS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


OUT, RESIDUAL, READ = states(1), states(2), states(3)
NORM = torch.nn.LayerNorm(WIDTH, dtype=torch.float64)
torch.nn.init.uniform_(NORM.weight, 0.5, 2.0, generator=torch.Generator().manual_seed(4))


def adapter(reads: str, scale: float | None = 1.0, seed: int = 0) -> BottleneckAdapter:
    made = BottleneckAdapter(WIDTH, INNER, "relu", reads, scale).double()
    for number, values in enumerate(made.parameters()):
        torch.nn.init.normal_(values, generator=torch.Generator().manual_seed(10 * seed + number))
    return made


def change(made: BottleneckAdapter, seen: torch.Tensor) -> torch.Tensor:
    return F.linear(F.linear(seen, made.down.weight, made.down.bias).relu(), made.up.weight, made.up.bias) * made.scale


def test_empty_slot_returns_the_input() -> None:
    slot = AdapterSlot()
    assert slot(OUT, RESIDUAL, NORM, READ) is OUT
    assert not list(slot.parameters()) and not slot.state_dict()


@pytest.mark.parametrize("scale", [1.0, 4.0, None])
@pytest.mark.parametrize(
    ("reads", "norm", "read", "seen"),
    [
        ("output", NORM, None, OUT),
        ("sum", NORM, None, NORM(OUT + RESIDUAL)),
        ("sum", None, READ, OUT + RESIDUAL),
        ("input", NORM, None, RESIDUAL),
        ("input", None, READ, READ),
    ],
)
def test_adapter_matches_the_formula(reads, norm, read, seen, scale) -> None:
    made = adapter(reads, scale)
    torch.testing.assert_close(made(OUT, RESIDUAL, norm, read), OUT + change(made, seen), rtol=0, atol=1e-12)
    assert {name for name, _ in made.named_parameters()} >= {"down.weight", "down.bias", "up.weight", "up.bias"}
    assert isinstance(made.scale, torch.nn.Parameter) == (scale is None)


def test_stacked_adapters_apply_in_sequence() -> None:
    below, top = adapter("sum", seed=1), adapter("sum", seed=2)
    first = OUT + change(below, NORM(OUT + RESIDUAL))
    wanted = first + change(top, NORM(first + RESIDUAL))
    torch.testing.assert_close(StackedAdapters([below], top)(OUT, RESIDUAL, NORM), wanted, rtol=0, atol=1e-12)


def test_fusion_weights_adapters_per_token() -> None:
    """Against section 3.2 of AdapterFusion, one token and one adapter at a time."""
    adapters = [adapter("sum", seed=seed) for seed in (1, 2, 3)]
    fused = FusedAdapters(WIDTH, adapters).double()
    seen, wanted = NORM(OUT + RESIDUAL), []
    for token in range(TOKENS):
        changes = [change(part, seen[token]) for part in adapters]
        scores = torch.stack([fused.query(seen[token]) @ fused.key(added) for added in changes])
        values = torch.stack([fused.value(added) for added in changes])
        wanted.append(OUT[token] + (scores.softmax(0)[:, None] * values).sum(0))
    torch.testing.assert_close(fused(OUT, RESIDUAL, NORM), torch.stack(wanted), rtol=0, atol=1e-12)
    with torch.no_grad():
        fused.value.weight.copy_(torch.eye(WIDTH))
        fused.value.weight[0, 1] = 3.0
    assert fused.distance().item() == 9.0
