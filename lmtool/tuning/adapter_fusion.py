"""Trained adapters are frozen; an attention over them learns, and the head (Pfeiffer et al. 2021, "AdapterFusion")."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from lmtool.learners.base import BaseLearner
from lmtool.nn.adapters import FusedAdapters
from lmtool.nn.initialization import Draw, initialize_each, materialize, normal
from lmtool.tuning.adapter import slots, take, trained_adapter
from lmtool.tuning.base import TuningMethod, freeze
from lmtool.tuning.configs.adapter import PUBLISHED, AdapterFusionConfig
from lmtool.tuning.places import replace

PENALTY = "value_penalty"


class AdapterFusionTuning(TuningMethod):
    """Puts all trained adapters of a slot into it, and what mixes them."""

    config: AdapterFusionConfig

    def edit(self, learner: BaseLearner, seed: int, new: Collection[str] | None = None) -> None:
        freeze(learner, new)
        trained, size = self.config.adapters, learner.backbone.hidden_size

        def fused() -> FusedAdapters:
            return FusedAdapters(size, [trained_adapter(adapter) for adapter in trained])

        for name in slots(learner.backbone, PUBLISHED[trained[0].placement].slots):
            with torch.device(learner.device):
                module = materialize(fused)
            initialize_each(module, seed, _draw_of, f"{name}.")
            module.adapters.requires_grad_(False)
            replace(learner, name, module)

    def build_on(self, learner: BaseLearner, earlier: Sequence[tuple[str, Mapping[str, Tensor]]]) -> None:
        for number, (origin, tensors) in enumerate(earlier):
            take(learner, tensors, f"adapters.{number}.", origin)

    def penalties(self, learner: BaseLearner) -> dict[str, Tensor]:
        """The distance of the values' maps from the identity, see `FusedAdapters.distance`."""
        fusions = [module for module in learner.modules() if isinstance(module, FusedAdapters)]
        if not self.config.value_penalty:
            return {}
        return {PENALTY: self.config.value_penalty * torch.stack([fusion.distance() for fusion in fusions]).sum()}


def _identity(tensor: Tensor, generator: torch.Generator) -> None:
    """As published: 1 on the diagonal, 1e-6 beside it."""
    tensor.fill_(1e-6).fill_diagonal_(1.0)


def _draw_of(name: str, part: nn.Module) -> Draw:
    return _identity if name == "value" else normal(0.02)
