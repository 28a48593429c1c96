"""Feature extraction: the backbone is frozen, the task's head learns."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from lmtool.tuning.configs import HeadConfig


class HeadTuning:
    """Only heads learn.

    A pooler stands between backbone and head. A pretrained one belongs to the features and is frozen with them; a new
    one is random, so it is part of the head and learns.
    """

    def __init__(self, config: HeadConfig):
        self.config = config

    def apply(self, learner: nn.Module, new: Collection[str] | None = None) -> None:
        """Freeze everything but the heads.

        new: the parts that did not come from the checkpoint ("heads.pooler", ...); None: not known, and every head
        is taken to be new.
        """
        pooler_learns = new is None or "heads.pooler" in new
        for name, parameter in learner.named_parameters():
            in_pooler = name.startswith("heads.pooler.")
            parameter.requires_grad_(name.startswith("heads.") and (pooler_learns or not in_pooler))
