"""Every parameter learns."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from lmtool.tuning.configs import FullConfig


class FullTuning:
    """Leaves the model as it is, every parameter learning."""

    def __init__(self, config: FullConfig):
        self.config = config

    def apply(self, learner: nn.Module, new: Collection[str] | None = None) -> None:
        """Set `requires_grad` of every parameter. `new` is read by other methods."""
        learner.requires_grad_(True)
