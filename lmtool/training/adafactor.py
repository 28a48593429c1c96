"""Adafactor (Shazeer and Stern 2018, "Adaptive Learning Rates with Sublinear Memory Cost", algorithms 4 and 5).

Shape letters: R rows, C columns; a parameter of more dimensions is a stack of matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lmtool.training.configs import AdafactorConfig
from lmtool.training.directions import SMALLEST_SCALE
from lmtool.training.optimizers import torch_groups
from lmtool.types import ParameterGroup


def build_adafactor(config: AdafactorConfig, groups: Sequence[ParameterGroup]) -> Optimizer:
    """Adafactor over the groups."""
    return Adafactor(torch_groups(groups, config.lr, config.weight_decay), config)


class Adafactor(Optimizer):
    """Divides a gradient by the root of a rank-one estimate of its mean square, and clips the result.

    The numbers are those of transformers' `Adafactor`. torch's own always scales by the parameter, caps the learning
    rate at 1/sqrt(step) and keeps no first moment.
    """

    def __init__(self, groups: list[dict[str, Any]], config: AdafactorConfig):
        super().__init__(groups, {})
        self.config = config

    def state_shape(self, kind: str, parameter: Tensor) -> torch.Size:
        """The shape of a tensor of the state: row and column means leave one dimension out."""
        if kind == "row_mean_sq":
            return parameter.shape[:-1]
        if kind == "column_mean_sq":
            return parameter.shape[:-2] + parameter.shape[-1:]
        return parameter.shape

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group["lr"], group["weight_decay"])

    def _move(self, parameter: Tensor, gradient: Tensor, learning_rate: float, weight_decay: float) -> None:
        state, config = self._state(parameter), self.config
        count = int(state["step"].add_(1))
        update = self._direction(gradient, state, count**-config.decay_rate)
        update.div_((_root_mean_square(update) / config.clip_threshold).clamp_(min=1.0))
        rate: float | Tensor = learning_rate
        if config.scale_parameter:
            rate = _root_mean_square(parameter).clamp_(min=SMALLEST_SCALE).mul_(learning_rate)
        update.mul_(rate)
        if config.beta1 is not None:
            update = state["mean_update"].lerp_(update, 1 - config.beta1)
        if weight_decay:
            parameter.mul_(1 - weight_decay * rate)
        parameter.sub_(update)

    def _state(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())  # on the host: nothing waits for the device
            kinds = ["row_mean_sq", "column_mean_sq"] if parameter.ndim > 1 else ["mean_sq"]
            if self.config.beta1 is not None:
                kinds.append("mean_update")
            for kind in kinds:
                state[kind] = parameter.new_zeros(self.state_shape(kind, parameter))
        return state

    def _direction(self, gradient: Tensor, state: dict[str, Tensor], share: float) -> Tensor:
        """The gradient over the root of its mean square, of which this step's squares are a `share`."""
        squares = gradient.square().add_(self.config.epsilon)
        if "mean_sq" in state:
            return state["mean_sq"].lerp_(squares, share).rsqrt().mul_(gradient)
        rows_R = state["row_mean_sq"].lerp_(squares.mean(-1), share)
        columns_C = state["column_mean_sq"].lerp_(squares.mean(-2), share)
        relative_R = rows_R / rows_R.mean(-1, keepdim=True)
        return relative_R.rsqrt().unsqueeze(-1) * columns_C.rsqrt().unsqueeze(-2) * gradient


def _root_mean_square(tensor: Tensor) -> Tensor:
    return tensor.norm(2) / tensor.numel() ** 0.5
