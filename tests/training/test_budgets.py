"""Budgets: the first one spent ends the run, and sets the horizon of the schedule."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest

from lmtool.errors import UserError
from lmtool.training import loop
from lmtool.training.budgets import (
    COUNTED_EPOCHS,
    MEASURED_STEPS,
    MOST_STEPS,
    Budget,
    is_logged,
    steps_of_epochs,
)
from lmtool.training.configs import LinearConfig
from lmtool.training.loop import train
from lmtool.training.progress import Progress

from .fakes import FakeLearner, FakeLoader, evaluator, open_run, settings


class CountedLoader(FakeLoader):
    def metadata(self) -> dict[str, Any]:
        return {"tokens_per_epoch": 1000}


def run_training(path: Path, loader: FakeLoader | None = None, **changes: Any) -> Any:
    learner = FakeLearner()
    with open_run(path) as run:
        return train(
            learner, loader or FakeLoader(), evaluator(learner), run, settings(**changes, schedule=LinearConfig())
        )


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("epochs, steps", [(1, 5), (2, 10), (0.5, 3), (1.2, 6), (0.0001, 1)])
def test_epochs_are_converted_to_steps(tmp_path: Path, epochs: float, steps: int) -> None:
    assert steps_of_epochs(FakeLoader(), epochs) == steps
    result = run_training(tmp_path / "run", max_steps=None, max_epochs=epochs)
    assert (result.steps, result.ended) == (steps, "max_epochs")
    assert result.epochs == pytest.approx(steps / 5)


class UnevenLoader(FakeLoader):
    """Epochs of 3, 5 and 4 steps in turn; records the planned epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.planned: list[int] = []

    def steps_in_epoch(self, epoch: int) -> int:
        self.planned.append(epoch)
        return (3, 5, 4)[epoch % 3]


def test_epochs_beyond_other_budget_are_not_planned() -> None:
    loader = UnevenLoader()
    budget = Budget(settings(max_steps=9, max_epochs=1e9), loader)
    assert budget.horizon(Progress()) == 9 and loader.planned == [0, 1, 2]
    assert budget.spent(Progress(step=8)) is None and budget.spent(Progress(step=9)) == "max_steps"
    assert Budget(settings(max_steps=9, max_epochs=2), loader).horizon(Progress()) == 8
    both = Budget(settings(max_steps=12, max_epochs=3), loader)
    assert both.horizon(Progress()) == 12 and both.spent(Progress(step=12)) == "max_steps"


def test_steps_of_very_many_epochs_are_extrapolated() -> None:
    loader = UnevenLoader()
    assert steps_of_epochs(loader, COUNTED_EPOCHS) == sum((3, 5, 4)[epoch % 3] for epoch in range(COUNTED_EPOCHS))
    loader.planned.clear()
    assert steps_of_epochs(loader, 1e9) == pytest.approx(4e9, rel=1e-3)
    assert len(loader.planned) <= COUNTED_EPOCHS
    assert steps_of_epochs(loader, 1e308) == MOST_STEPS


def test_first_spent_budget_ends_run(tmp_path: Path) -> None:
    assert run_training(tmp_path / "a", max_steps=3, max_epochs=9, max_tokens=10**9).ended == "max_steps"
    assert run_training(tmp_path / "b", max_steps=30, max_epochs=1, max_tokens=10**9).ended == "max_epochs"
    result = run_training(tmp_path / "c", max_steps=30, max_tokens=200, max_flops=1e9, flops_per_token=10.0)
    assert result.ended == "max_tokens" and result.tokens >= 200
    train = [row for row in rows(tmp_path / "c") if row["split"] == "train"]
    assert train[-2]["tokens"] < 200
    result = run_training(tmp_path / "d", max_steps=30, max_tokens=10**9, max_flops=3000.0, flops_per_token=10.0)
    assert result.ended == "max_flops" and result.tokens >= 300


def test_steps_and_epochs_set_horizon_at_start() -> None:
    progress = Progress()
    assert Budget(settings(max_steps=12, max_epochs=2), FakeLoader()).horizon(progress) == 10
    assert (progress.total_steps, progress.horizon) == (10, "max_epochs")


def test_horizon_follows_most_spent_budget(tmp_path: Path) -> None:
    progress = Progress()
    budget = Budget(settings(max_steps=40, max_minutes=10), FakeLoader())
    assert (budget.horizon(progress), progress.total_steps) == (40, None)
    advance(budget, progress, 4, seconds=30.0)
    assert (budget.horizon(progress), progress.horizon) == (20, "max_minutes")
    advance(budget, progress, 8, seconds=0.0)  # faster steps
    assert (budget.horizon(progress), progress.horizon) == (40, "max_steps")
    run_training(tmp_path / "run", max_steps=20, max_minutes=10)
    rates = [row["learning_rate"] for row in rows(tmp_path / "run") if row["split"] == "train"]
    assert rates[1] == pytest.approx(1e-2) and min(rates) > 0


def test_token_budget_with_known_epoch_sets_horizon() -> None:
    progress = Progress()
    assert Budget(settings(max_steps=None, max_tokens=2000), CountedLoader()).horizon(progress) == 10


def advance(budget: Budget, progress: Progress, steps: int, seconds: float, tokens: int = 100) -> None:
    for _ in range(steps):
        budget.measure(progress)
        progress.step, progress.tokens = progress.step + 1, progress.tokens + tokens
        progress.seconds += seconds


@pytest.mark.parametrize("late", [0.2, 1.0, 3.0])
def test_schedule_over_minutes_is_smooth_at_any_speed(late: float) -> None:
    """A linear schedule with a warm-up of 10%; the first 60 steps take half a second each, later steps `late`."""
    budget, progress = Budget(settings(max_steps=6000, max_minutes=5), FakeLoader()), Progress()
    schedule, factors = LinearConfig(warmup_fraction=0.1).factor, []
    while budget.spent(progress) is None:
        factors.append(schedule(progress.step + 1, budget.horizon(progress)))
        progress.step += 1
        progress.seconds += 0.5 if progress.step < 60 else late
    assert 300 <= progress.seconds < 300 + late and progress.horizon == "max_minutes"
    steps = [after - before for before, after in itertools.pairwise(factors)]
    top = factors.index(max(factors))
    assert max(factors) > 0.9 and factors[-1] < 0.02
    # Tolerances, because horizon and warm-up are whole steps.
    assert min(steps[1:top]) > -0.002 and max(steps[top:]) < 0.002 and max(map(abs, steps[1:])) < 0.11 * max(late, 0.5)


def test_each_tenth_of_minutes_is_reported_once() -> None:
    budget, progress = Budget(settings(max_steps=None, max_minutes=1), FakeLoader()), Progress()
    tenths = []
    while budget.spent(progress) is None:
        total = budget.horizon(progress)
        progress.step, progress.seconds = progress.step + 1, progress.seconds + (0.5 if progress.step < 40 else 2.5)
        tenths += [progress.seconds] if budget.completes_tenth(progress, total) else []
    assert tenths == [6, 12, 18, 25, 30, 37.5, 42.5, 50, 55, 60]
    resumed, total = Budget(settings(max_steps=None, max_minutes=1), FakeLoader()), budget.horizon(progress)
    progress.seconds = 13.0
    resumed.horizon(progress)
    progress.seconds = 13.5
    assert not resumed.completes_tenth(progress, total)


def test_resumed_horizon_of_phases_ends_run() -> None:
    progress = Progress.from_plain({**Progress(step=400, total_steps=500, horizon="max_minutes").to_plain()})
    budget = Budget(settings(max_steps=None, max_minutes=10), PhasedFake())
    assert budget.horizon(progress) == 500
    progress.step = 500
    assert budget.spent(progress) == "max_minutes"


def test_token_horizon_is_measured_from_steps() -> None:
    budget, progress = Budget(settings(max_steps=None, max_tokens=10_000), FakeLoader()), Progress()
    advance(budget, progress, MEASURED_STEPS + 1, seconds=1e-9)
    assert budget.horizon(progress) == 100


def test_max_minutes_ends_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(float(tick) for tick in range(10**6))  # two readings per step, so a step takes a second
    monkeypatch.setattr(loop.time, "perf_counter", lambda: next(clock))
    result = run_training(tmp_path / "run", max_steps=None, max_minutes=0.5)
    assert (result.ended, result.steps, result.seconds) == ("max_minutes", 30, 30.0)
    state = json.loads((tmp_path / "run/checkpoints/step_00000030/state.json").read_text())
    assert (state["total_steps"], state["horizon"]) == (30, "max_minutes")
    rates = [row["learning_rate"] for row in rows(tmp_path / "run") if row["split"] == "train"]
    assert rates[0] == 0.0 and max(rates) == pytest.approx(1e-2, rel=0.2) and rates[-1] < 1e-3


def test_missing_budget_or_flops_per_token_is_refused() -> None:
    with pytest.raises(UserError, match="no budget"):
        Budget(settings(max_steps=None), FakeLoader())
    with pytest.raises(ValueError, match="flops_per_token"):
        Budget(settings(max_flops=1e9), FakeLoader())


def test_default_evaluates_about_ten_times(tmp_path: Path) -> None:
    run_training(tmp_path / "run", max_steps=42, evaluate_every=None)
    validation = [row["step"] for row in rows(tmp_path / "run") if row["split"] == "validation"]
    assert validation == [5, 10, 15, 20, 25, 30, 35, 40, 42]


class PhasedFake(FakeLoader):
    """Mean of 50 tokens per step; a time budget allows twice as many steps as the first phase suggests."""

    fixed: tuple[int, str] | None = None

    def mean_tokens(self, budget: str) -> float:
        return 50.0

    def stretch(self, budget: str) -> float:
        return 2.0

    def fix(self, steps: int, budget: str) -> None:
        self.fixed = steps, budget


def test_token_horizon_uses_mean_tokens_of_phases() -> None:
    loader = PhasedFake()
    budget = Budget(settings(max_steps=None, max_tokens=1000), loader)
    assert budget.horizon(Progress()) == 20 and loader.fixed == (20, "max_tokens")


def test_minutes_horizon_includes_later_phases() -> None:
    loader, progress = PhasedFake(), Progress()
    budget = Budget(settings(max_steps=None, max_minutes=1), loader)
    for step in range(7):  # half a second each; the first step is not measured
        progress.step, progress.seconds = step, step / 2
        assert loader.fixed is None
        budget.horizon(progress)
    assert loader.fixed == (6 + 2 * (120 - 3), "max_minutes") == (progress.total_steps, progress.horizon)
    resumed = PhasedFake()
    Budget(settings(max_steps=None, max_minutes=1), resumed).horizon(Progress(total_steps=240, horizon="max_minutes"))
    assert resumed.fixed == (240, "max_minutes")


@pytest.mark.parametrize(
    ("log_every", "steps", "count"),
    [(10, 7, 7), (10, 50, 50), (10, 120, 60), (500, 6000, 60), (997, 40_000, 80), (10, 5000, 500), (100, 1000, 50)],
)
def test_run_logs_at_least_fifty_rows_or_every_step(log_every: int, steps: int, count: int) -> None:
    logged = [step for step in range(1, steps + 1) if is_logged(step, log_every, steps)]
    assert abs(len(logged) - count) <= 1 and logged[0] == 1
    assert set(range(log_every, steps + 1, log_every)) <= {*logged}
    assert len({after - before for before, after in itertools.pairwise(logged[1:])}) <= 2  # evenly


def test_unknown_horizon_logs_at_log_every() -> None:
    assert [step for step in range(1, 31) if is_logged(step, 10, math.inf)] == [1, 10, 20, 30]
