"""Adam, with an L2 penalty or with decoupled weight decay. torch's own where it has them, fused: one kernel a step, on
CPUs and on CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from lmtool.training.configs import AdamConfig, AdamWConfig
from lmtool.training.directions import AdamDirections, root_mean_squares
from lmtool.training.optimizers import torch_groups
from lmtool.types import ParameterGroup


def build_adamw(config: AdamWConfig, groups: Sequence[ParameterGroup]) -> Optimizer:
    """AdamW over the groups."""
    own = torch_groups(groups, config.lr, config.weight_decay)
    if config.scale_parameter:
        return ScaledAdamW(own, config.betas, config.epsilon)
    return AdamW(own, lr=config.lr, betas=config.betas, eps=config.epsilon, fused=True)


def build_adam(config: AdamConfig, groups: Sequence[ParameterGroup]) -> Optimizer:
    """Adam over the groups; what does not decay has no penalty either."""
    own = torch_groups(groups, config.lr, config.l2)
    return Adam(own, lr=config.lr, betas=config.betas, eps=config.epsilon, fused=True)


class ScaledAdamW(AdamDirections):
    """AdamW whose learning rate is multiplied by each parameter's root mean square, at least 1e-3 (nanoT5's
    `AdamWScale`, Nawrot 2023, after Shazeer and Stern 2018). Weight decay is not."""

    def move(self, group: dict[str, Any], parameters: list[Tensor], updates: list[Tensor]) -> None:
        torch._foreach_mul_(updates, root_mean_squares(parameters))
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(parameters, updates, alpha=-group["lr"])
