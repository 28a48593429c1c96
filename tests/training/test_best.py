"""Choice of the best evaluation."""

from __future__ import annotations

import math

import pytest

from lmtool.training.loop import note_best
from lmtool.training.progress import Progress, TrainingSettings

from .fakes import OPTIMIZER, SCHEDULE


@pytest.mark.parametrize(
    ("evaluations", "best"),
    [
        ([(0.5, 1.0), (0.6, 2.0), (0.6, 1.9), (0.6, 1.95)], 3),
        ([(0.5, 1.0), (0.5, 1.0), (0.4, 0.1)], 1),
        ([(0.5, math.nan), (0.5, 1.0)], 1),
        ([(0.5, None), (math.nan, 0.1)], 1),
    ],
)
def test_lower_loss_breaks_ties_of_best_score(evaluations: list, best: int) -> None:
    progress, settings = Progress(), TrainingSettings(0, "accuracy", True, OPTIMIZER, SCHEDULE)
    for step, (accuracy, loss) in enumerate(evaluations, 1):
        progress.step, progress.metrics = step, {"accuracy": accuracy, "loss": loss}
        note_best(progress, settings)
    assert progress.best_step == best
