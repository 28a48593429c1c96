"""What several models predict of the same targets, averaged.

Shape letters: M targets, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from lmtool.heads.predicted import Predicted, Shares


@dataclass(frozen=True)
class Averaged(Shares):
    """parts: of at least one model each. weights: adding up to 1. average: of probabilities, at the temperature that is
    asked for; of logits, which predictions alone have."""

    parts: Sequence[Shares]
    weights: Sequence[float]
    average: Literal["probabilities", "logits"] = "probabilities"

    @classmethod
    def of(cls, weighted: Sequence[tuple[float, Shares]], average: Literal["probabilities", "logits"]) -> Averaged:
        """weighted: with any positive weights."""
        total = sum(weight for weight, _ in weighted)
        return cls([part for _, part in weighted], [weight / total for weight, _ in weighted], average)

    def __len__(self) -> int:
        return len(self.parts[0])

    def shares(self, temperature: float = 1.0, first: int = 0, last: int | None = None) -> Tensor:
        if self.average == "logits":
            predicted = [cast(Predicted, part) for part in self.parts]
            return predicted[0].normalized(self._mean([part.scores(first, last) for part in predicted]), temperature)
        return self._mean([part.shares(temperature, first, last) for part in self.parts])

    def completed(self, logs: Tensor, temperature: float, first: int = 0, last: int | None = None) -> Tensor:
        if self.average == "logits":
            return self.shares(temperature, first, last)
        return self._mean([part.completed(logs, temperature, first, last) for part in self.parts])

    def hardened(self, shares: Tensor) -> Tensor:
        return self.parts[0].hardened(shares)

    def _mean(self, each: Sequence[Tensor]) -> Tensor:
        mean = self.weights[0] * each[0]
        for weight, tensor in zip(self.weights[1:], each[1:], strict=True):
            # What cannot be in one of them cannot be in the others: -inf stays.
            mean = torch.add(mean, tensor, alpha=weight)
        return mean
