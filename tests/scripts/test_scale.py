"""docs/scale.md agrees with scripts/scale.py, its formulas hold, and the quick measurements are repeated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def scale(script: Any) -> Any:
    return script("scale")


@pytest.fixture(scope="module")
def measured() -> Any:
    return json.loads((ROOT / "scripts" / "scale.json").read_text(encoding="utf-8"))


def test_page_numbers_are_up_to_date(scale: Any, measured: Any) -> None:
    """On failure the plan has changed: run python scripts/scale.py."""
    page = scale.PAGE.read_text(encoding="utf-8")
    assert scale.updated_page(measured, page) == (page, [])
    other = page.replace("| 10.3 GFLOP |", "| 11 GFLOP |").replace("0.21 restarts", "0.22 restarts")
    text, lacking = scale.updated_page(measured, other)
    assert "| 10.3 GFLOP |" in text and lacking == ["one in 792 hours: 0.21 restarts per week"]


@pytest.mark.slow
def test_plan_memory_matches_measurement(scale: Any, measured: Any) -> None:
    """The proportional set size depends on the kernel, so this test does not suit every machine."""
    small, large = (scale.node_memory(tokens, 2048, processes=2) for tokens in (10**9, 2 * 10**9))
    rates = [
        (two["held"] - one["held"]) / (two["examples"] - one["examples"])
        for one, two in ((small, large), measured["node"]["2048"])
    ]
    assert rates[0] == pytest.approx(rates[1], rel=0.5)


def test_order_statistics_match_measurement(scale: Any) -> None:
    ordering = scale.ordering(2048, steps=20)
    assert ordering["distinct"] == 1.0 and 0.8 < ordering["chi_square"] < 1.2 and 1 <= ordering["spread"] < 1.02


def test_best_interval_minimizes_lost_time(scale: Any) -> None:
    best = scale.best_interval(34, 800)
    lost = [scale.lost_share(best * factor, 34, 0, 800) for factor in (0.7, 1, 1.4)]
    assert lost[1] < lost[0] and lost[1] < lost[2]
    assert best == pytest.approx((2 * 34 / 3600 * 800) ** 0.5, rel=0.01)


def test_failure_rate_matches_published_rate(scale: Any) -> None:
    """One every three hours on 16,384 GPUs."""
    assert pytest.approx(3.09, abs=0.01) == scale.GPU_HOURS_A_FAILURE / 16384
