"""Virtual tokens (Lester et al. 2021) and adapters after the layers (Houlsby et al. 2019) in one method, with separate
parameter names, a separate learning rate, a penalty, and a first trained step."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from lmtool.learners.base import BaseLearner, decayed_groups
from lmtool.nn.prefix import VirtualTokens
from lmtool.tuning.base import TuningMethod
from lmtool.types import ParameterGroup

PROMPT = "backbone.embed.virtual.weight"


class Adapter(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.down, self.up = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x_TH: Tensor) -> Tensor:
        return x_TH + self.up(torch.relu(self.down(x_TH)))


def adapted(layer: nn.Module, given: object, x_TH: Tensor) -> Tensor:
    return layer.adapter(x_TH)


class PromptedTuning(TuningMethod):
    def edit(self, learner: BaseLearner, seed: int, new: Collection[str] | None = None) -> None:
        backbone, device = learner.backbone, learner.device
        backbone.requires_grad_(False)
        width = backbone.embed.token.weight.shape[1]
        backbone.embed.virtual = VirtualTokens(self.config.tokens, width, after=1).to(device)
        backbone.initialize(backbone.embed.virtual, seed, "backbone.embed.virtual.")
        for number, layer in enumerate(backbone.layers):
            layer.adapter = Adapter(backbone.hidden_size, self.config.width).to(device)
            backbone.initialize(layer.adapter, seed, f"backbone.layers.{number}.adapter.")
            layer.register_forward_hook(adapted)

    def parameter_groups(self, learner: BaseLearner) -> list[ParameterGroup]:
        prompt = learner.backbone.embed.virtual.weight
        groups = decayed_groups(learner)
        for group in groups:
            group.parameters = [pair for pair in group.parameters if pair[0] != PROMPT]
        return [*groups, ParameterGroup("prompt", [(PROMPT, prompt)], self.config.scale, 0.0)]

    def penalties(self, learner: BaseLearner) -> dict[str, Tensor]:
        return {"prompt": self.config.decay * learner.backbone.embed.virtual.weight.square().sum()}

    def on_step(self, learner: BaseLearner, step: int) -> None:
        """Train the virtual tokens from the second step on."""
        learner.backbone.embed.virtual.requires_grad_(step > 1)
