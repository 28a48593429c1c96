"""Every parameter learns, but for the lowest ones where these are frozen."""

from __future__ import annotations

from collections.abc import Collection

from lmtool.learners.base import BaseLearner
from lmtool.training.depth import EMBEDDINGS, HEAD, levels
from lmtool.tuning.base import TuningMethod
from lmtool.tuning.configs import FullConfig


class FullTuning(TuningMethod):
    """Leaves the model as it is, every parameter learning that is not frozen."""

    config: FullConfig

    def edit(self, learner: BaseLearner, seed: int, new: Collection[str] | None = None) -> None:
        learner.requires_grad_(True)
        named = dict(learner.named_parameters())
        by_level = levels(named)
        embeddings = by_level.pop(EMBEDDINGS, [])
        layers = [members for title, members in by_level.items() if title != HEAD]
        frozen = layers[len(layers) - self.config.freeze_layers :] if self.config.freeze_layers else []
        for members in (*frozen, embeddings if self.config.freeze_embeddings else []):
            for name in members:
                named[name].requires_grad_(False)

    def delta(self, learner: BaseLearner) -> set[str]:
        """Everything: its checkpoints stand alone."""
        return set(learner.state_dict())
