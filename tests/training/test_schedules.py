"""Learning rate schedules: formulas of transformers and the papers, and edge cases."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from lmtool.config import groups
from lmtool.config.registry import build
from lmtool.training.configs import (
    AdamWConfig,
    BatchScaling,
    ConstantConfig,
    CosineConfig,
    InverseSqrtConfig,
    LambConfig,
    LinearConfig,
    PolynomialConfig,
    ScheduleConfig,
    WsdConfig,
)


def factors(config: Any, total: float, steps: range) -> list[float]:
    schedule = build(config)
    return [schedule(step, total) for step in steps]


def test_linear_schedule_rises_and_falls() -> None:
    actual = factors(LinearConfig(warmup_steps=4), 12, range(1, 13))
    assert actual[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert actual[5:] == pytest.approx([1 - done / 8 for done in range(1, 8)])
    assert min(actual) > 0


@pytest.mark.parametrize("total, warmup", [(100, 10), (37, 5), (10, 0)])
def test_decay_matches_transformers(total: int, warmup: int) -> None:
    # transformers/optimization.py with index = step - 1, after the warm-up.
    for step in range(warmup + 1, total + 1):
        index = step - 1
        linear = max(0.0, (total - index) / max(1, total - warmup))
        cosine = 0.5 * (1 + math.cos(math.pi * (index - warmup) / max(1, total - warmup)))
        assert build(LinearConfig(warmup_steps=warmup))(step, total) == pytest.approx(linear)
        assert build(CosineConfig(warmup_steps=warmup))(step, total) == pytest.approx(cosine)


def test_final_fraction_is_minimum() -> None:
    for kind in (LinearConfig, CosineConfig, PolynomialConfig):
        config = kind(final_fraction=0.1)
        assert build(config)(101, 100) == pytest.approx(0.1) == pytest.approx(build(config)(500, 100))
    assert build(InverseSqrtConfig(warmup_steps=4, final_fraction=0.2))(10**6, 10**6) == 0.2


def test_inverse_sqrt_and_constant_factors() -> None:
    assert factors(InverseSqrtConfig(warmup_steps=4), 100, range(4, 17, 12)) == [1.0, 0.5]
    assert factors(ConstantConfig(), 5, range(1, 6)) == [1.0] * 5
    assert factors(ConstantConfig(warmup_steps=2), 5, range(1, 6)) == [0.5, 1.0, 1.0, 1.0, 1.0]


def test_warmup_steps_override_warmup_fraction() -> None:
    assert factors(LinearConfig(warmup_fraction=0.5), 4, range(1, 4)) == [0.5, 1.0, 1.0]
    assert factors(LinearConfig(warmup_fraction=0.5, warmup_steps=1), 4, range(1, 3)) == [1.0, 1.0]
    assert factors(LinearConfig(warmup_fraction=None), 4, range(1, 2)) == [1.0]
    assert factors(LinearConfig(warmup_fraction=0.0), math.inf, range(1, 3)) == [1.0, 1.0]


def test_unknown_horizon_keeps_fractional_warmup_at_zero() -> None:
    for config in (LinearConfig(), CosineConfig(), InverseSqrtConfig()):
        assert factors(config, math.inf, range(1, 6)) == [0.0] * 5
    assert factors(LinearConfig(warmup_steps=2), math.inf, range(1, 5)) == [0.5, 1.0, 1.0, 1.0]


def test_polynomial_decay_matches_transformers() -> None:
    # transformers/optimization.py, get_polynomial_decay_schedule_with_warmup, with index = step - 1.
    schedule = build(PolynomialConfig(warmup_steps=4, power=2.0, final_fraction=0.1))
    for step in range(5, 21):
        left = 1 - (step - 1 - 4) / (20 - 4)
        assert schedule(step, 20) == pytest.approx((1.0 - 0.1) * left**2 + 0.1)
    assert factors(PolynomialConfig(), 30, range(1, 31)) == pytest.approx(factors(LinearConfig(), 30, range(1, 31)))
    assert build(PolynomialConfig(power=0.5))(500, 100) == 0.0


def test_warmup_start_raises_first_factors() -> None:
    assert factors(LinearConfig(warmup_steps=4, warmup_start=0.5), 12, range(1, 5)) == [0.625, 0.75, 0.875, 1.0]
    assert factors(ConstantConfig(warmup_steps=2, warmup_start=1.0), 4, range(1, 5)) == [1.0] * 4


@pytest.mark.parametrize(
    ("schedule", "steps", "message"),
    [
        (LinearConfig(warmup_steps=999_999), 2, "warmup_steps=999999: in a run of 2 steps .* to 2e-06 of"),
        (LinearConfig(warmup_steps=4, warmup_start=0.5), 2, "to 0.75 of optimizer.lr"),
        (LinearConfig(warmup_steps=4), 5, None),
        (InverseSqrtConfig(warmup_steps=10_000, warmup_start=1.0), 2, None),
        (WsdConfig(warmup_steps=2, decay_steps=9), 10, "decay_steps=9: the run has only 8 steps after"),
        (WsdConfig(warmup_fraction=0.5, decay_steps=9), 10, "the run has only 5 steps after"),
        (WsdConfig(warmup_steps=2, decay_steps=8), 10, None),
        (WsdConfig(warmup_steps=20, decay_steps=8), 10, "only rises"),
    ],
)
def test_run_shorter_than_schedule_warns(schedule: ScheduleConfig, steps: int, message: str | None) -> None:
    remarks = list(schedule.remarks(steps))
    assert len(remarks) == (message is not None) and (message is None or re.search(message, remarks[0]))


def test_inverse_sqrt_matches_vaswani_et_al() -> None:
    # Vaswani et al. 2017, equation 3: width^-0.5 min(step^-0.5, step warmup^-1.5).
    width, warmup = 512, 4000
    schedule = build(InverseSqrtConfig(warmup_steps=warmup))
    for step in (1, 100, 3_999, 4_000, 4_001, 100_000):
        expected = width**-0.5 * min(step**-0.5, step * warmup**-1.5)
        assert (width * warmup) ** -0.5 * schedule(step, 100_000) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["linear", "cosine", "constant", "inverse_sqrt", "polynomial", "wsd"])
def test_factors_are_between_zero_and_one(name: str) -> None:
    config = {"linear": LinearConfig, "cosine": CosineConfig, "constant": ConstantConfig,
              "inverse_sqrt": InverseSqrtConfig, "polynomial": PolynomialConfig, "wsd": WsdConfig}[name]()  # fmt: skip
    for total in (1, 2, 3, 10, 101):
        assert all(0 < factor <= 1 for factor in factors(config, total, range(1, total + 1)))


@pytest.mark.parametrize("change", [{"lr": 0.0}, {"betas": (0.9, 1.0)}, {"clip_norm": 0.0}, {"weight_decay": -1.0}])
def test_invalid_optimizer_values_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        AdamWConfig(**change)


def test_rates_of_batches_match_published_tables() -> None:
    """LAMB (You et al. 2020, table in the appendix): 5 / (2^3 x 10^3) for 512 examples, 5 / (2^2.5 x 10^3) for 1024, up
    to 5 / 10^3 for 32768. Goyal et al. 2017, section 5.1: 0.1 for 256 examples, 3.2 for 8192."""
    lamb = LambConfig(batch_scaling=BatchScaling(rule="sqrt", examples=512))
    for doublings in range(7):
        expected = 5 / (2 ** (3 - doublings / 2) * 1e3)
        assert lamb.scaled(512 * 2**doublings, None).lr == pytest.approx(expected)
    goyal = AdamWConfig(lr=0.1, batch_scaling=BatchScaling(rule="linear", examples=256))
    assert goyal.scaled(8192, None).lr == pytest.approx(3.2) and goyal.scaled(64, None).lr == pytest.approx(0.025)
    tokens = AdamWConfig(lr=0.1, batch_scaling=BatchScaling(rule="linear", tokens=1000))
    assert tokens.scaled(None, 500).lr == pytest.approx(0.05)
    assert AdamWConfig(lr=0.1).scaled(7, None).lr == 0.1
    with pytest.raises(ValueError, match="different units"):
        tokens.scaled(64, None)


@pytest.mark.parametrize("reference", [{}, {"examples": 256, "tokens": 2048}])
def test_reference_batch_has_one_unit(reference: dict[str, int]) -> None:
    with pytest.raises(ValidationError, match="examples: 256"):
        BatchScaling(rule="linear", **reference)


def test_slanted_triangular_preset_matches_paper() -> None:
    """Howard and Ruder 2018, equation 3, with T = 100, cut_frac = 0.1 and ratio = 32; t is the step during the rise and
    the previous step during the decay."""
    preset = yaml.safe_load((groups.conf_dir() / "schedule" / "slanted_triangular.yaml").read_text())
    assert preset.pop("defaults") == ["linear", "_self_"]
    schedule, total, cut, ratio = build(LinearConfig(**preset)), 100, 10, 32
    for step in range(1, total + 2):
        t = step if step <= cut else step - 1
        p = t / cut if t < cut else 1 - (t - cut) / (cut * (1 / 0.1 - 1))
        assert schedule(step, total) == pytest.approx((1 + p * (ratio - 1)) / ratio)
    assert (schedule(10, 100), schedule(101, 100)) == (1.0, 1 / 32)


def test_wsd_schedule_matches_papers() -> None:
    """Hu et al. 2024, section 4; 1-sqrt: Hägele et al. 2024, section 3.2. The stable phase needs no horizon."""
    assert factors(WsdConfig(warmup_steps=2, decay_steps=4), 10, range(1, 12)) == [
        0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0.0,
    ]  # fmt: skip
    root = factors(WsdConfig(decay_fraction=0.4, decay_shape="sqrt", final_fraction=0.1), 10, range(7, 13))
    assert root == pytest.approx([1.0, 0.55, 1 - 0.9 * 0.5**0.5, 1 - 0.9 * 0.75**0.5, 0.1, 0.1])
    assert factors(WsdConfig(decay_steps=100), 4, range(1, 5)) == [1.0, 0.75, 0.5, 0.25]
    level = factors(WsdConfig(warmup_steps=3), math.inf, range(1, 50))
    assert level == factors(WsdConfig(warmup_steps=3), 55, range(1, 50)) and level[3:] == [1.0] * 46
