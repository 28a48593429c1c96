"""A run of two processes matches a run of one in data, losses and decisions."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lmtool.errors import Diverged, Stopped, UserError
from lmtool.runs.run_folder import FollowedFolder, RunFolder
from lmtool.training.group import ProcessGroup, require_same_training
from lmtool.training.loop import train
from lmtool.types import Batch, StepOutput

from .fakes import FakeLearner, FakeLoader, evaluator, open_run, settings
from .ranks import Ranks, alone, started


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with started(2) as ranks:
        yield ranks


class CutOff(Exception):
    """Simulates an interrupted run."""


class StopAfterCheckpoint:
    """Ends the run after the checkpoint of a step."""

    def __init__(self, last: int | None):
        self.last = last

    def on_checkpoint(self, step: int, path: str) -> None:
        if step == self.last:
            raise CutOff

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


class FaultyLearner(FakeLearner):
    """On rank 1 alone, the loss is nan or a signal arrives in a given step, or steps are slow."""

    def __init__(self, rank: int, *, bad_step: int = 0, signal_step: int = 0, slow: float = 0.0):
        super().__init__(dropout=0.0)
        self.rank, self.bad_step, self.signal_step, self.slow = rank, bad_step, signal_step, slow

    def forward(self, batch: Batch, step: int) -> StepOutput:
        output = super().forward(batch, step)
        if self.training and self.rank == 1:
            time.sleep(self.slow)
            if step == self.bad_step:
                output.sums["kind"] = output.sums["kind"] * torch.nan
            if step == self.signal_step:
                self.signal_step = 0  # a second signal would stop this process immediately
                os.kill(os.getpid(), signal.SIGUSR1)
        return output


def folder(group: ProcessGroup, path: Path) -> RunFolder:
    run = open_run(path) if group.rank == 0 else None
    return run or FollowedFolder(path, {"model": {"name": "fake", "hidden": 16}, "max_steps": 20}, None)


def run(
    group: ProcessGroup, path: Path, odd: dict[str, Any], last: int | None = None, **changes: Any
) -> dict[str, Any]:
    """Train in a folder. Returns the outcome as plain values."""
    learner, loader = FaultyLearner(group.rank, **odd), FakeLoader()
    chosen = settings(checkpoint_every=1, keep="all", **changes)
    with folder(group, path) as place:
        try:
            result = train(
                learner, loader, evaluator(learner), place, chosen, [StopAfterCheckpoint(last)], group=group
            )  # fmt: skip
        except (CutOff, Diverged, Stopped) as end:
            return {"end": type(end).__name__, "message": str(end), "status": getattr(end, "exit_status", None)}
    weights = {name: tensor.numpy().copy() for name, tensor in learner.state_dict().items()}
    return {"end": result.ended, "tokens": result.tokens, "steps": result.steps, "best": result.best_step} | {
        "metrics": result.metrics, "weights": weights,
    }  # fmt: skip


def losses(path: Path) -> list[tuple[float, ...]]:
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["split"] == "train"]
    assert [row["step"] for row in steps] == list(range(1, len(steps) + 1))
    return [tuple(row[key] for key in ("loss", "loss_word", "loss_kind", "grad_norm", "tokens")) for row in steps]


def test_resume_with_changed_rank_count_matches(tmp_path: Path, two: Ranks) -> None:
    """Resumed by two processes and then by one, a run has the losses of an uninterrupted run."""
    expected = alone(run, tmp_path / "one", {})
    assert alone(run, tmp_path / "run", {}, 7)["end"] == "CutOff"
    assert {answer["end"] for answer in two.run(run, tmp_path / "run", {}, 14)} == {"CutOff"}
    result = alone(run, tmp_path / "run", {})
    assert (result["end"], result["tokens"], result["best"]) == ("max_steps", expected["tokens"], expected["best"])
    one, several = losses(tmp_path / "one"), losses(tmp_path / "run")
    assert len(one) == len(several) == 20 and one[-1][0] < 0.9 * one[0][0]
    for before, after in zip(one, several, strict=True):
        assert after == pytest.approx(before, rel=1e-5)
    assert one[:7] == several[:7]
    result = two.run(run, tmp_path / "two", {})
    assert result[0]["tokens"] == result[1]["tokens"] == expected["tokens"]
    for name, tensor in result[0]["weights"].items():
        assert (tensor == result[1]["weights"][name]).all()
        assert tensor == pytest.approx(expected["weights"][name], abs=1e-5)


def test_nan_loss_on_one_rank_ends_all(tmp_path: Path, two: Ranks) -> None:
    answers = two.run(run, tmp_path / "run", {"bad_step": 6})
    assert [answer["end"] for answer in answers] == ["Diverged"] * 2 and "step 6" in answers[0]["message"]
    metadata = json.loads((tmp_path / "run/diverged/step_00000006.json").read_text())
    assert len(metadata["lengths"]) == 4  # two micro-batches per rank
    assert not (tmp_path / "run/checkpoints/step_00000006").exists()


def test_signal_to_one_rank_stops_all_after_checkpoint(tmp_path: Path, two: Ranks) -> None:
    answers = two.run(run, tmp_path / "run", {"signal_step": 4})
    assert [(answer["end"], answer["status"]) for answer in answers] == [("Stopped", 75)] * 2
    assert "a checkpoint of step 4 is saved" in answers[0]["message"]
    assert (tmp_path / "run/checkpoints/last").read_text() == "step_00000004\n"


def test_clock_of_rank_0_ends_all(tmp_path: Path, two: Ranks) -> None:
    first, second = two.run(run_with_time_limit, tmp_path / "run")
    assert first["end"] == second["end"] == "max_minutes" and first["steps"] == second["steps"] >= 1


def run_with_time_limit(group: ProcessGroup, path: Path) -> dict[str, Any]:
    return run(group, path, {"slow": 0.005}, max_steps=None, max_minutes=0.2 / 60)


def refusal_of_rank_difference(group: ProcessGroup, kind: str) -> str | None:
    learner, loader = FakeLearner(), FakeLoader()
    if group.rank == 1 and kind == "weights":
        with torch.no_grad():
            learner.dense.weight[0, 0] += 1e-6
    if group.rank == 1 and kind == "training data":
        loader.metadata = lambda: {"examples": 41}  # type: ignore[method-assign]
    try:
        require_same_training(group, learner, loader)
    except UserError as refused:
        return refused.message
    return None


@pytest.mark.parametrize(
    ("kind", "difference"),
    [("weights", "dense.weight is "), ("training data", "examples is 41, not 40"), ("nothing", None)],
)
def test_differing_ranks_are_refused(two: Ranks, kind: str, difference: str | None) -> None:
    messages = two.run(refusal_of_rank_difference, kind)
    if difference is None:
        assert messages == [None, None]
    else:
        assert messages[0] == messages[1] and messages[0].startswith(
            f"rank 1 differs from rank 0: {kind}: {difference}"
        )
