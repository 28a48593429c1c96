"""Feature extraction: the backbone is frozen, the task's head learns."""

from __future__ import annotations

from collections.abc import Collection

from lmtool.learners.base import BaseLearner
from lmtool.tuning.base import TuningMethod


class HeadTuning(TuningMethod):
    """Only heads learn.

    A pooler stands between backbone and head. A pretrained one belongs to the features and is frozen with them; a new
    one is random, so it is part of the head and learns.
    """

    def edit(self, learner: BaseLearner, seed: int, new: Collection[str] | None = None) -> None:
        pooler_learns = new is None or "heads.pooler" in new
        for name, parameter in learner.named_parameters():
            in_pooler = name.startswith("heads.pooler.")
            parameter.requires_grad_(name.startswith("heads.") and (pooler_learns or not in_pooler))
