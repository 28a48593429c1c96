"""Jobs for the kill harness, imported by name in a separate process."""

from __future__ import annotations

from pathlib import Path

import torch

from lmtool.training.loop import train
from tests.training.fakes import FakeLearner, FakeLoader, TokenizerFile, evaluator, open_run, settings

torch.set_num_threads(1)


def fake(folder: Path) -> None:
    """30 steps with a checkpoint after each, so that many kills hit a save; 30 thousand weights."""
    learner = FakeLearner(hidden=96)
    with open_run(folder) as run:
        train(
            learner, FakeLoader(), evaluator(learner), run,
            settings(max_steps=30, evaluate_every=4, checkpoint_every=1),
            extensions=[TokenizerFile("{}" * 5000)],
        )  # fmt: skip
