"""Every parameter learns."""

from __future__ import annotations

from collections.abc import Collection

from lmtool.learners.base import BaseLearner
from lmtool.tuning.base import TuningMethod


class FullTuning(TuningMethod):
    """Leaves the model as it is, every parameter learning."""

    def edit(self, learner: BaseLearner, seed: int, new: Collection[str] | None = None) -> None:
        learner.requires_grad_(True)

    def delta(self, learner: BaseLearner) -> set[str]:
        """Everything: its checkpoints stand alone."""
        return set(learner.state_dict())
