"""The optimizers: Adam and AdamW, Adafactor, LAMB, StableAdamW and Muon."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.optim import Adam as TorchAdam
from torch.optim import AdamW as TorchAdamW
from torch.optim import Muon, Optimizer

from lmtool.errors import UserError
from lmtool.training.configs import (
    AdafactorConfig,
    AdamConfig,
    AdamWConfig,
    LambConfig,
    MuonConfig,
    StableAdamWConfig,
    is_hidden_matrix,
)
from lmtool.training.optimizers import PlainOptimizer, TorchGroup, torch_groups
from lmtool.types import ParameterGroup

SMALLEST_SCALE = 1e-3
"""Minimum root mean square of a parameter, so that one near zero can grow (Shazeer and Stern 2018, epsilon 2)."""


class AdamDirections(PlainOptimizer, ABC):
    """Base of optimizers that scale Adam's update themselves, in `move`."""

    def __init__(self, config: AdamWConfig | LambConfig | StableAdamWConfig, groups: Sequence[ParameterGroup]):
        torch_param_groups = torch_groups(groups, config.lr, config.weight_decay)
        super().__init__(torch_param_groups, {"betas": config.betas, "epsilon": config.epsilon})

    @abstractmethod
    def move(self, group: TorchGroup, parameters: list[Tensor], updates: list[Tensor]) -> None:
        """Moves the parameters of a group. updates: bias-corrected mean / (root of the mean square + epsilon); may be
        changed in place."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self.move(group, parameters, self._directions(group, parameters))

    def _directions(self, group: TorchGroup, parameters: list[Tensor]) -> list[Tensor]:
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
    """Returns the root mean square of each parameter, at least `SMALLEST_SCALE`: scalars on the device."""
    norms = torch._foreach_norm(parameters)
    return [
        (norm / math.sqrt(parameter.numel())).clamp(min=SMALLEST_SCALE)
        for norm, parameter in zip(norms, parameters, strict=True)
    ]


class AdamW(PlainOptimizer, TorchAdamW):
    """torch's AdamW, with a step that does not import the compiler (`PlainOptimizer`)."""

    step = torch.no_grad()(inspect.unwrap(TorchAdamW.step))


class Adam(PlainOptimizer, TorchAdam):
    """torch's Adam, with a step that does not import the compiler (`PlainOptimizer`)."""

    step = torch.no_grad()(inspect.unwrap(TorchAdam.step))


def build_adamw(config: AdamWConfig, groups: Sequence[ParameterGroup]) -> Optimizer:
    """Returns torch's fused AdamW, or `ScaledAdamW`."""
    if config.scale_parameter:
        return ScaledAdamW(config, groups)
    torch_param_groups = torch_groups(groups, config.lr, config.weight_decay)
    return AdamW(torch_param_groups, lr=config.lr, betas=config.betas, eps=config.epsilon, fused=True)


def build_adam(config: AdamConfig, groups: Sequence[ParameterGroup]) -> Optimizer:
    """Returns torch's fused Adam. Parameters that do not decay have no L2 penalty."""
    torch_param_groups = torch_groups(groups, config.lr, config.l2)
    return Adam(torch_param_groups, lr=config.lr, betas=config.betas, eps=config.epsilon, fused=True)


class ScaledAdamW(AdamDirections):
    """AdamW with a learning rate that is multiplied by each parameter's root mean square, at least 1e-3; weight decay
    is not multiplied (nanoT5's `AdamWScale`, Nawrot 2023, after Shazeer and Stern 2018)."""

    def move(self, group: TorchGroup, parameters: list[Tensor], updates: list[Tensor]) -> None:
        torch._foreach_mul_(updates, root_mean_squares(parameters))
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(parameters, updates, alpha=-group["lr"])


class Adafactor(PlainOptimizer):
    """Adafactor (Shazeer and Stern 2018, "Adaptive Learning Rates with Sublinear Memory Cost", algorithms 4 and 5): the
    gradient divided by the root of a rank-one estimate of its mean square, then clipped.

    Its numbers equal those of transformers' `Adafactor`. torch's Adafactor always scales by the parameter, limits the
    learning rate to 1/sqrt(step) and has no first moment. Shape letters: R rows, C columns; a parameter with more
    dimensions is a stack of matrices.
    """

    def __init__(self, config: AdafactorConfig, groups: Sequence[ParameterGroup]):
        super().__init__(torch_groups(groups, config.lr, config.weight_decay), {})
        self.config = config

    def state_shape(self, kind: str, parameter: Tensor) -> torch.Size:
        """Returns the shape of a state tensor: row and column means have one dimension less than the parameter."""
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

    def _direction(self, gradient: Tensor, state: dict[str, Tensor], fraction: float) -> Tensor:
        """Returns the gradient divided by the root of its mean square. fraction: weight of this step in the mean."""
        squares = gradient.square().add_(self.config.epsilon)
        if "mean_sq" in state:
            return state["mean_sq"].lerp_(squares, fraction).rsqrt().mul_(gradient)
        rows_R = state["row_mean_sq"].lerp_(squares.mean(-1), fraction)
        columns_C = state["column_mean_sq"].lerp_(squares.mean(-2), fraction)
        relative_R = rows_R / rows_R.mean(-1, keepdim=True)
        return relative_R.rsqrt().unsqueeze(-1) * columns_C.rsqrt().unsqueeze(-2) * gradient


def _root_mean_square(tensor: Tensor) -> Tensor:
    return tensor.norm(2) / tensor.numel() ** 0.5


class Lamb(AdamDirections):
    """LAMB (You et al. 2020, "Large Batch Optimization for Deep Learning", algorithm 2): Adam's update plus the decay,
    scaled to the norm of the parameter.

    Groups that never decay are not scaled, as in the published code (`exclude_from_layer_adaptation`), and neither is a
    parameter or an update with norm zero.
    """

    def move(self, group: TorchGroup, parameters: list[Tensor], updates: list[Tensor]) -> None:
        torch._foreach_add_(updates, parameters, alpha=group["weight_decay"])
        if group["weight_decay_scale"]:
            parameter_norms, update_norms = torch._foreach_norm(parameters), torch._foreach_norm(updates)
            ratios = [_trust_ratio(*norms) for norms in zip(parameter_norms, update_norms, strict=True)]
            torch._foreach_mul_(updates, ratios)
        torch._foreach_add_(parameters, updates, alpha=-group["lr"])


def _trust_ratio(parameter_norm: Tensor, update_norm: Tensor) -> Tensor:
    """1 if either norm is zero, without reading a value from the device."""
    nonzero = (parameter_norm > 0) & (update_norm > 0)
    return torch.where(nonzero, parameter_norm / update_norm, torch.ones_like(parameter_norm))


class StableAdamW(AdamDirections):
    """StableAdamW (Wortsman et al. 2023, "Stable and low-precision training for large-scale vision-language models",
    algorithm 2): AdamW with Adafactor's update clipping.

    The learning rate of a parameter is divided by max(1, RMS(g / sqrt(v))), where v is the running mean of the squared
    gradient g. This ratio is large if v lags behind a sudden rise of the gradient.
    """

    def move(self, group: TorchGroup, parameters: list[Tensor], updates: list[Tensor]) -> None:
        for parameter, update in zip(parameters, updates, strict=True):
            rate = group["lr"] / self._gradient_ratio(group, parameter).clamp(min=1.0)
            parameter.mul_(1 - rate * group["weight_decay"]).sub_(update.mul_(rate))

    def _gradient_ratio(self, group: TorchGroup, parameter: Tensor) -> Tensor:
        """Returns sqrt(mean(g^2 / max(v, epsilon^2))) with bias-corrected v: a scalar on the device."""
        state = self.state[parameter]
        assert parameter.grad is not None
        corrected = state["exp_avg_sq"] / (1 - group["betas"][1] ** int(state["step"]))
        return (parameter.grad.square() / corrected.clamp(min=group["epsilon"] ** 2)).mean().sqrt()


def build_muon(config: MuonConfig, groups: Sequence[ParameterGroup]) -> Optimizer:
    """Returns torch's Muon (Jordan et al. 2024) for the matrices of the layers, and torch's AdamW for embeddings,
    heads, norms and biases. Muon's steps are as large as AdamW's (`match_rms_adamw`, Liu et al. 2025), so both use one
    learning rate. Raises UserError if no matrix of a layer is trained."""
    matrices = torch_groups([_subgroup(group, hidden=True) for group in groups], config.lr, config.weight_decay)
    adamw_groups = torch_groups([_subgroup(group, hidden=False) for group in groups], config.lr, config.weight_decay)
    if not matrices:
        raise UserError(
            "optimizer=muon is for the matrices of the layers, but none of them is trained", "set optimizer=adamw"
        )
    parts: list[Optimizer] = [
        Muon(
            matrices,
            lr=config.lr,
            momentum=config.momentum,
            nesterov=config.nesterov,
            ns_steps=config.newton_schulz_steps,
            adjust_lr_fn="match_rms_adamw",
        )
    ]
    if adamw_groups:
        parts.append(AdamW(adamw_groups, lr=config.lr, betas=config.betas, eps=config.epsilon, fused=True))
    return CombinedOptimizer(parts)


class CombinedOptimizer(PlainOptimizer):
    """Optimizers of different parameters as one, with their groups in order and a shared state."""

    def __init__(self, parts: Sequence[Optimizer]):
        super().__init__([{"params": group["params"]} for part in parts for group in part.param_groups], {})
        self.parts = parts
        self.param_groups = [group for part in parts for group in part.param_groups]
        for part in parts:
            part.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


def _subgroup(group: ParameterGroup, hidden: bool) -> ParameterGroup:
    parameters = group.parameters
    return replace(group, parameters=[pair for pair in parameters if is_hidden_matrix(pair[0], pair[1].ndim) == hidden])
