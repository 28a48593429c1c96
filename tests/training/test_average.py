"""Moving average of the weights: evaluated and saved, but not used in training."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lmtool.runs.checkpoints import read_tensors
from lmtool.training.group import ALONE
from lmtool.training.loop import train
from tests.training.fakes import FakeLearner, FakeLoader, open_run, settings
from tests.training.ranks import Ranks
from tests.training.test_sharded import assert_same_files, run_on
from tests.training.test_sharded import two as two

DECAY = 0.9


class Snapshots:
    """A checkpoint extension that copies the trained weights after each update."""

    excluded: frozenset[str] = frozenset()

    def __init__(self, learner: FakeLearner):
        self.learner, self.weights = learner, list[dict[str, torch.Tensor]]()

    def on_update(self, step: int) -> None:
        self.weights.append({name: tensor.detach().clone() for name, tensor in self.learner.named_parameters()})

    def write(self, folder: Path) -> None:
        """Adds no file."""


def run(folder: Path, stop: int = 0, **changes: Any) -> tuple[FakeLearner, Snapshots, list[float]]:
    """A run of a small learner, interrupted in the evaluation of step `stop`.

    Returns:
        The learner, its weights after each update, and one weight at each evaluation.
    """
    learner, seen = FakeLearner(), list[float]()
    snapshots = Snapshots(learner)

    def evaluate(step: int) -> dict[str, float]:
        if step == stop:
            raise KeyboardInterrupt
        seen.append(learner.dense.weight[0, 0].item())
        return {"loss": 1.0 / step, "accuracy": step / 100}

    with open_run(folder) as opened:
        train(learner, FakeLoader(), evaluate, opened, settings(**changes), extensions=[snapshots])
    return learner, snapshots, seen


def average_of(weights: list[torch.Tensor]) -> torch.Tensor:
    """The moving average by definition, in double precision."""
    average = weights[0].double()
    for step, value in enumerate(weights[1:], 2):
        decay = min(DECAY, (1 + step) / (10 + step))
        average = decay * average + (1 - decay) * value.double()
    return average


def test_average_is_saved_without_changing_training(tmp_path: Path) -> None:
    often = {"max_steps": 12, "evaluate_every": 4, "checkpoint_every": 4, "keep": "all"}
    _, plain, _ = run(tmp_path / "plain", **often)
    learner, averaged, seen = run(tmp_path / "averaged", **often, weight_average=DECAY)
    for expected, actual in zip(plain.weights, averaged.weights, strict=True):
        assert all(torch.equal(expected[name], actual[name]) for name in expected)
    for index, step in enumerate((4, 8, 12)):
        expected = average_of([weights["dense.weight"] for weights in averaged.weights[:step]])
        folder = tmp_path / f"averaged/checkpoints/step_{step:08d}"
        saved = read_tensors(folder, "model.safetensors")["dense.weight"]
        torch.testing.assert_close(saved.double(), expected, rtol=1e-5, atol=1e-7)
        assert seen[index] == saved[0, 0].item()
        raw = read_tensors(folder, "optimizer.safetensors")["average.dense.weight"]
        assert torch.equal(raw, averaged.weights[step - 1]["dense.weight"])
    assert torch.equal(learner.dense.weight, saved)


def test_resumed_average_matches_uninterrupted_run(tmp_path: Path) -> None:
    often = {"evaluate_every": 4, "checkpoint_every": 3, "weight_average": DECAY}
    whole, _, _ = run(tmp_path / "whole", max_steps=12, **often)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", max_steps=12, stop=8, **often)
    resumed, _, _ = run(tmp_path / "parts", max_steps=12, **often)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_sharded_average_matches_single_process(optimizer: str, two: Ranks, tmp_path: Path) -> None:
    own = {"max_steps": 6, "checkpoint_every": 3, "evaluate_every": 3, "weight_average": DECAY}
    _, scores = run_on(ALONE, str(tmp_path / "alone"), "mlm", "ddp", optimizer, **own)
    two.run(partial(run_on, stop=4, **own), str(tmp_path / "two"), "mlm", "fsdp", optimizer)
    _, sharded_scores = two.run(partial(run_on, **own), str(tmp_path / "two"), "mlm", "fsdp", optimizer)[0]
    np.testing.assert_allclose(sharded_scores, scores[-1:], rtol=1e-5)
    assert_same_files(tmp_path / "alone", tmp_path / "two", 6)
