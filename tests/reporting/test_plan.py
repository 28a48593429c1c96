"""Arithmetic of a run's plan, and its rows in the report."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lmtool.costs.activations import SavedActivations
from lmtool.costs.plan import RESERVE, Forward, Sizes, StepCosts, Work, memory_of
from lmtool.costs.rate import StepWork, seconds_measured, seconds_on
from lmtool.errors import UserError
from lmtool.reporting.costs import RunPlan, plan_rows
from lmtool.training.devices import DEVICES, device_of

WORKS = (Work(1.0, 85e6, 12 * 768, 128), Work(0.15, 24e6))
SIZES = Sizes(
    {"backbone": 108_000_000, "heads": 2_000_000},
    110_000_000,
    220_000_000,
    layer_parameters=84_000_000,
    largest_layer=7_000_000,
)
FORWARD = Forward(4096, SavedActivations(1000.0, 10.0), 5_000_000)


def plan_with(devices: int = 1, **fields: Any) -> RunPlan:
    plan = StepCosts(WORKS, 4096, SIZES, FORWARD, devices).plan()
    return replace(plan, **{"steps": 1000, **fields})


def test_flops_count_weights_and_attention():
    assert Work(1.0, 10).flops == 60 and Work(0.5, 10, passes=1).flops == 10
    assert Work(1.0, 0, attention=8, context=5).flops == 3 * 4 * 8 * 5


def test_plan_totals_match_its_parts():
    plan = plan_with(step_seconds=(2.2, 2.2), time_source="measured")
    assert plan.flops_per_token == pytest.approx(3 * (2 * 85e6 + 4 * 12 * 768 * 128 + 0.15 * 2 * 24e6))
    assert plan.tokens == 4_096_000 and plan.total_parameters == 110_000_000
    assert plan.flops == pytest.approx(4_096_000 * plan.flops_per_token)
    assert plan.seconds == pytest.approx(2200)
    assert plan.memory_bytes == {
        "weights": 440_000_000, "gradients": 440_000_000, "optimizer": 880_000_000, "activations": 4_096_000,
        "attention scores": 40_960, "logits": 5_000_000, "framework": RESERVE[False],
    }  # fmt: skip
    assert plan.disk_bytes == 12 * 110_000_000
    assert dict(plan_rows(plan))["time"] == "about 36 min 40 s: measured"
    assert "1 h" in plan_with(step_seconds=(2.2, 3.6)).time_text and " to " in plan_with(step_seconds=(1, 2)).time_text


def test_sharded_memory_is_divided_by_devices():
    """fsdp: an eighth of the state, plus gathered weights and gradients of three layers and of the other parameters."""
    whole, share = memory_of(SIZES, FORWARD), memory_of(SIZES, FORWARD, 8, sharded=True)
    for part in ("weights", "gradients", "optimizer"):
        assert share[part] == whole[part] / 8
    assert share["gathered weights"] == 4 * (3 * 7_000_000 + 2 * 26_000_000)
    assert memory_of(SIZES, FORWARD, 8) == whole
    assert "per device" in dict(plan_rows(plan_with(devices=8)))["memory"]


def test_plan_that_does_not_fit_gives_advice():
    room = replace(plan_with(), capacity_bytes=10**9, advice=("micro_batch_tokens=512: 0.9 GB",))
    rows = dict(plan_rows(room))
    assert not room.fits and rows["fits"].startswith("no: ") and "1 GB available" in rows["fits"]
    assert rows["would fit"] == "micro_batch_tokens=512: 0.9 GB"
    assert "smaller model" in dict(plan_rows(replace(room, advice=())))["would fit"]
    assert dict(plan_rows(replace(room, capacity_bytes=10**10)))["fits"].startswith("yes: ")


@pytest.mark.parametrize(
    ("budgets", "ends_by", "text"),
    [
        ({"max_steps": 6000}, "max_steps", "after 6,000 steps (max_steps)"),
        ({"max_epochs": 1.0}, "max_epochs", "after 1 epoch (max_epochs)"),
        (
            {"max_steps": 10_000, "max_tokens": 10**8},
            "max_steps",
            "after 10,000 steps (max_steps) before max_tokens=100 M",
        ),
        (
            {"max_minutes": 9.0, "max_steps": 6000},
            "max_minutes",
            "after 9 minutes (max_minutes), estimated before max_steps=6,000",
        ),
        ({"max_flops": 5e12}, "max_flops", "after 5 TFLOP (max_flops)"),
    ],
)
def test_ending_budget_is_named(budgets: dict[str, float], ends_by: str, text: str) -> None:
    rows = dict(plan_rows(replace(plan_with(), budgets=budgets, ends_by=ends_by)))
    assert rows["ends"] == text and "epochs" not in rows


def test_time_without_rate_is_unknown():
    plan = plan_with()
    assert plan.seconds is None and dict(plan_rows(plan))["time"] == "unknown"


def test_step_time_sums_products_memory_and_calls():
    work = StepWork(1e12, 1e9, 1e8, 12)
    assert seconds_measured(work, 1e12, 1e10) == pytest.approx(1 + 0.6 + 0.28 + 12 * 125 * 20e-6)
    assert seconds_measured(work, 1e12, 1e10, cuda=True) == pytest.approx(1.88)
    low, high = seconds_on(work, DEVICES["h100"], "bf16")
    assert low == pytest.approx(12 * 125 * 5e-6 + 28e8 / 3.35e12) and high > 1500 * 20e-6  # kernel calls dominate
    large = replace(work, flops=1e15, devices=8)
    low, high = seconds_on(large, DEVICES["h100"], "bf16")
    assert low == pytest.approx(1e15 / 989e12 / 0.5, rel=1e-2)
    assert high == pytest.approx(1e15 / 989e12 / 0.25 + large.communicated_bytes / 450e9, rel=1e-2)
    assert (
        large.communicated_bytes == 2 * 4e8 * 7 / 8
        and replace(large, sharded=True).communicated_bytes == 3 * 4e8 * 7 / 8
    )


def test_unknown_device_suggests_known_one():
    with pytest.raises(UserError, match="device=h1000") as refused:
        device_of("h1000")
    assert "device=h100?" in str(refused.value.hint) and "t4" in str(refused.value.hint)
    assert DEVICES["t4"].rate("bf16") == DEVICES["t4"].fp32  # a T4 has no bf16


def test_measured_rates_are_plausible():
    from lmtool.costs.rate import measure_bandwidth, measure_rate

    assert 1e7 < measure_rate(32, 64, "bf16", "cpu", seconds=0.02) < 1e15
    assert 1e8 < measure_bandwidth(runs=1) < 1e13
