"""A score: its name, how it is computed, and which direction is better."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Metric:
    """name: in result files and on the screens. function: (N,) gold and (N,) predicted values to the score; None where
    it is no function of single predictions (a loss, F1 over entities): its learner computes it."""

    name: str
    function: Callable[[np.ndarray, np.ndarray], float] | None = None
    smaller_is_better: bool = False

    def __call__(self, gold: np.ndarray, predicted: np.ndarray) -> float:
        if self.function is None:
            raise TypeError(f"{self.name} is no function of single predictions")
        return self.function(gold, predicted)


LOSS = Metric("loss", smaller_is_better=True)
