"""Feature extraction: the backbone is frozen, the task's head learns."""

from __future__ import annotations

from collections.abc import Collection

from lmtool.errors import UserError
from lmtool.heads.features import LAYERS, LastFour, ScalarMix
from lmtool.learners.base import BaseLearner
from lmtool.models.base import Backbone
from lmtool.tuning.base import TuningMethod
from lmtool.tuning.configs import HeadConfig
from lmtool.tuning.places import stacks

_FEATURES = {"scalar_mix": ScalarMix, "concat_last_4": LastFour}


class HeadTuning(TuningMethod):
    """Only heads learn, and how the layers that they read are mixed.

    A pooler stands between backbone and head. A pretrained one belongs to the features of the last layer and is frozen
    with them; a new one is random, so it is part of the head and learns, and so does one that reads other features.
    """

    config: HeadConfig

    def prepare(self, backbone: Backbone) -> None:
        if self.config.layers != "last":
            backbone.states_read = _FEATURES[self.config.layers].states

    def edit(self, learner: BaseLearner, seed: int, new: Collection[str] | None = None) -> None:
        several = self.config.layers != "last"
        pooler_learns = several or new is None or "heads.pooler" in new
        for name, parameter in learner.named_parameters():
            in_pooler = name.startswith("heads.pooler.")
            parameter.requires_grad_(name.startswith("heads.") and (pooler_learns or not in_pooler))
        if several:
            depth = next(
                len(list(stack.depth())) for _, stack in stacks(learner.backbone) if stack.side == learner.head_side
            )
            learner.add_head(LAYERS, _FEATURES[self.config.layers](depth))

    def merge(self, learner: BaseLearner) -> None:
        """UserError where the head reads several layers: no published model does."""
        if self.config.layers != "last":
            raise UserError(
                f"tuning.layers={self.config.layers}: the head reads several layers, as no published model does",
                "use the run with lmtool, or train one with tuning.layers=last",
            )
