"""The figures of the benchmark of tuning methods, from made-up turns: nothing is timed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmark_tuning.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("benchmark_tuning", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class MadeUp:
    """Answers at a made-up rate; the machine is twice as slow in the second round, for all alike."""

    def __init__(self, method, seconds, peak):
        self.method, self.seconds, self.peak, self.turns = method, seconds, peak, 0

    def take(self, steps):
        self.turns += 1
        slow = 2 if self.turns == 4 else 1
        return {"method": self.method, "steps": steps, "seconds": steps * self.seconds * slow, "peak_bytes": self.peak}


def test_a_ratio_is_taken_within_its_round(benchmark):
    workers = {"full": MadeUp("full", 0.3, 100e6), "lora": MadeUp("lora", 0.2, 40e6)}
    rows = benchmark.measure(workers, 3, 1.2)
    # Steps by the slowest; every second round goes backwards.
    assert {row["steps"] for row in rows} == {4}
    assert [row["method"] for row in rows] == ["full", "lora", "lora", "full", "full", "lora"]
    found = benchmark.summary(rows)
    assert found["lora"]["faster"] == pytest.approx((1.5, 1.5, 1.5)) and found["full"]["faster"] == (1, 1, 1)
    assert found["lora"]["milliseconds"] == pytest.approx(200)
    table = benchmark.compose(found, {"full": {"trainable": 1000}, "lora": {"trainable": 12}})
    assert "1.50x" in table and "0.40x" in table and "12" in table


def test_every_method_is_one(benchmark):
    import lmtool.tuning.configs  # noqa: F401 (enters the methods into the table)
    from lmtool.config.tables import names

    assert set(benchmark.METHODS) < set(names("tuning"))
    assert benchmark.parse(["--methods", "lora"]).methods == ["lora"]
