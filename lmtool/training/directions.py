"""Adam's directions, for optimizers that choose the length of a parameter's step themselves."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

SMALLEST_SCALE = 1e-3
"""What a parameter near zero counts as, so that it can grow (Shazeer and Stern 2018, epsilon 2)."""


class AdamDirections(Optimizer, ABC):
    """Keeps Adam's two means, corrected for their start at zero; a subclass's `move` makes steps of them."""

    def __init__(self, groups: Iterable[dict[str, Any]], betas: tuple[float, float], epsilon: float):
        super().__init__(groups, {"betas": betas, "epsilon": epsilon})

    @abstractmethod
    def move(self, group: dict[str, Any], parameters: list[Tensor], updates: list[Tensor]) -> None:
        """Move the parameters of a group. updates: mean / (root of the mean square + epsilon), free to be changed."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self.move(group, parameters, self._directions(group, parameters))

    def _directions(self, group: dict[str, Any], parameters: list[Tensor]) -> list[Tensor]:
        states = [self._state(parameter) for parameter in parameters]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        means, squares = [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states]
        counts = [int(state["step"].add_(1)) for state in states]  # on the host: nothing waits for the device
        mean_beta, square_beta = group["betas"]
        torch._foreach_lerp_(means, gradients, 1 - mean_beta)
        torch._foreach_mul_(squares, square_beta)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - square_beta)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, [math.sqrt(1 - square_beta**count) for count in counts])
        torch._foreach_add_(roots, group["epsilon"])
        updates = torch._foreach_div(means, roots)
        torch._foreach_div_(updates, [1 - mean_beta**count for count in counts])
        return list(updates)

    def _state(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state


def root_mean_squares(parameters: list[Tensor]) -> list[Tensor]:
    """Of each parameter's values, at least `SMALLEST_SCALE`; scalars on its device."""
    norms = torch._foreach_norm(parameters)
    return [
        (norm / math.sqrt(parameter.numel())).clamp(min=SMALLEST_SCALE)
        for norm, parameter in zip(norms, parameters, strict=True)
    ]
