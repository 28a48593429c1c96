from __future__ import annotations

from typing import Any

import pytest

from lmtool.costs.plan import ModelShape, Work, plan
from lmtool.reporting.plan import RunPlan, plan_rows

SHAPE = ModelShape(12, 768, 3072, 30522)
WORKS = (Work(1.0, 85e6, 12 * 768, 128), Work(0.15, 24e6))


def plan_with(**fields: Any) -> RunPlan:
    sizes = {
        "shapes": [SHAPE], "works": WORKS, "steps": 1000, "tokens_per_step": 4096, "predicted_fraction": 0.15,
        "parameters": {"backbone": 108_000_000, "heads": 2_000_000}, "trainable_parameters": 110_000_000,
        "optimizer_values": 220_000_000,
    }  # fmt: skip
    return plan(**{**sizes, **fields})


def test_work_is_two_operations_a_value_and_four_a_seen_token():
    assert Work(1.0, 10).flops == 60 and Work(0.5, 10, passes=1).flops == 10
    assert Work(1.0, 0, attention=8, context=5).flops == 3 * 4 * 8 * 5


def test_plan_adds_up():
    plan = plan_with(flops_per_second=1e12)
    assert plan.flops_per_token == pytest.approx(3 * (2 * 85e6 + 4 * 12 * 768 * 128 + 0.15 * 2 * 24e6))
    assert plan.tokens == 4_096_000 and plan.total_parameters == 110_000_000
    assert plan.flops == pytest.approx(4_096_000 * plan.flops_per_token)
    assert plan.seconds == pytest.approx(plan.flops / 1e12)
    assert plan.memory_bytes["weights and gradients"] == 8 * 110_000_000
    assert plan.memory_bytes["optimizer"] == 8 * 110_000_000
    assert plan.disk_bytes == 12 * 110_000_000
    assert dict(plan_rows(plan))["time"].startswith("about 37 min")


def test_recomputed_layers_keep_their_input_and_one_layer_all():
    kept, again = (plan_with(recomputes=recomputes).memory_bytes["activations"] for recomputes in (False, True))
    layer = 4 * (8 * 768 + 2 * 3072) + 2 * 768
    assert kept - again == 4096 * (11 * layer - 12 * 4 * 768)


def test_micro_batches_halves_and_frozen_parts_take_less_memory():
    whole = plan_with().memory_bytes["activations"]
    assert plan_with(micro_batch_tokens=1024).memory_bytes["activations"] == pytest.approx(whole / 4)
    assert plan_with(half=True).memory_bytes["activations"] < whole
    assert plan_with(shapes=[SHAPE, SHAPE]).memory_bytes["activations"] == 2 * whole
    frozen = plan_with(body_trains=False, trainable_parameters=1000, optimizer_values=2000)
    assert frozen.memory_bytes == {
        "weights and gradients": 4 * 110_001_000, "optimizer": 8000, "activations": 0
    }  # fmt: skip
    assert frozen.checkpoint_bytes == 4 * 110_002_000


def test_without_a_rate_the_time_is_unknown():
    plan = plan_with()
    assert plan.seconds is None and dict(plan_rows(plan))["time"] == "unknown: no rate was measured"


def test_measured_rate_is_a_rate():
    from lmtool.costs.rate import measure_rate

    assert 1e7 < measure_rate(32, 64, "bf16", "cpu", seconds=0.02) < 1e15
