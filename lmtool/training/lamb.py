"""LAMB (You et al. 2020, "Large Batch Optimization for Deep Learning", algorithm 2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lmtool.training.configs import LambConfig
from lmtool.training.directions import AdamDirections
from lmtool.training.optimizers import torch_groups
from lmtool.types import ParameterGroup


def build_lamb(config: LambConfig, groups: Sequence[ParameterGroup]) -> Optimizer:
    """LAMB over the groups."""
    return Lamb(torch_groups(groups, config.lr, config.weight_decay), config.betas, config.epsilon)


class Lamb(AdamDirections):
    """A step is Adam's plus the decay, made as long as the parameter's norm, times the learning rate.

    Groups that never decay keep Adam's length, as in the published code (`exclude_from_layer_adaptation`); so does a
    parameter or an update of norm zero.
    """

    def move(self, group: dict[str, Any], parameters: list[Tensor], updates: list[Tensor]) -> None:
        torch._foreach_add_(updates, parameters, alpha=group["weight_decay"])
        if group["weight_decay_scale"]:
            norms, lengths = torch._foreach_norm(parameters), torch._foreach_norm(updates)
            ratios = [_trust(norm, length) for norm, length in zip(norms, lengths, strict=True)]
            torch._foreach_mul_(updates, ratios)
        torch._foreach_add_(parameters, updates, alpha=-group["lr"])


def _trust(norm: Tensor, length: Tensor) -> Tensor:
    """norm / length, 1 where either is zero; no value is read from the device."""
    return torch.where((norm > 0) & (length > 0), norm / length, torch.ones_like(norm))
