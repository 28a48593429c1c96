"""Only vectors and the heads learn (after BitFit, Ben Zaken et al. 2022)."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from outsider.configs import VectorsConfig


class VectorTuning:
    def __init__(self, config: VectorsConfig):
        self.config = config

    def apply(self, learner: nn.Module, new: Collection[str] | None = None) -> None:
        for name, parameter in learner.named_parameters():
            parameter.requires_grad_(name.startswith("heads.") or parameter.ndim == 1)
