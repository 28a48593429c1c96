"""StableAdamW (Wortsman et al. 2023, "Stable and low-precision training for large-scale vision-language models",
algorithm 2): AdamW with the update clipping of Adafactor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lmtool.training.configs import StableAdamWConfig
from lmtool.training.directions import AdamDirections
from lmtool.training.optimizers import torch_groups
from lmtool.types import ParameterGroup


def build_stable_adamw(config: StableAdamWConfig, groups: Sequence[ParameterGroup]) -> Optimizer:
    """StableAdamW over the groups."""
    return StableAdamW(torch_groups(groups, config.lr, config.weight_decay), config.betas, config.epsilon)


class StableAdamW(AdamDirections):
    """A parameter's learning rate is divided by the root mean square of gradient / root of the mean square, where that
    is above 1: a gradient much larger than those before does not meet a mean that lags behind."""

    def move(self, group: dict[str, Any], parameters: list[Tensor], updates: list[Tensor]) -> None:
        for parameter, update in zip(parameters, updates, strict=True):
            rate = group["lr"] / self._surprise(group, parameter).clamp(min=1.0)
            parameter.mul_(1 - rate * group["weight_decay"]).sub_(update.mul_(rate))

    def _surprise(self, group: dict[str, Any], parameter: Tensor) -> Tensor:
        """sqrt(mean(g^2 / max(v, epsilon^2))), v corrected for its start at zero; a scalar on the device."""
        state = self.state[parameter]
        assert parameter.grad is not None
        corrected = state["exp_avg_sq"] / (1 - group["betas"][1] ** int(state["step"]))
        return (parameter.grad.square() / corrected.clamp(min=group["epsilon"] ** 2)).mean().sqrt()
