"""Trains only vectors and heads (after BitFit, Ben Zaken et al. 2022)."""

from __future__ import annotations

from collections.abc import Collection

from lmtool.learners.base import BaseLearner
from lmtool.tuning.base import TuningMethod


class VectorTuning(TuningMethod):
    def edit(self, learner: BaseLearner, seed: int, new: Collection[str] | None = None) -> None:
        for name, parameter in learner.named_parameters():
            parameter.requires_grad_(name.startswith("heads.") or parameter.ndim == 1)
