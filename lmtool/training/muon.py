"""Muon (Jordan et al. 2024) for the matrices of the layers, AdamW beside it: two optimizers that look like one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch.optim import AdamW, Muon, Optimizer

from lmtool.errors import UserError
from lmtool.training.configs import MuonConfig, is_hidden_matrix
from lmtool.training.optimizers import torch_groups
from lmtool.types import ParameterGroup


def build_muon(config: MuonConfig, groups: Sequence[ParameterGroup]) -> Optimizer:
    """torch's Muon over the matrices of the layers, torch's AdamW over embeddings, heads, norms and biases.

    Steps are as long as AdamW's usual ones (`match_rms_adamw`, Liu et al. 2025), so both read one learning rate.
    UserError where no matrix of a layer learns.
    """
    matrices = torch_groups([_part(group, hidden=True) for group in groups], config.lr, config.weight_decay)
    rest = torch_groups([_part(group, hidden=False) for group in groups], config.lr, config.weight_decay)
    if not matrices:
        raise UserError("optimizer=muon moves the matrices of the layers, and none of them learns", "optimizer=adamw")
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
    if rest:
        parts.append(AdamW(rest, lr=config.lr, betas=config.betas, eps=config.epsilon, fused=True))
    return Together(parts)


class Together(Optimizer):
    """Optimizers of different parameters as one: their groups, one after the other, and a state in common."""

    def __init__(self, parts: Sequence[Optimizer]):
        super().__init__([{"params": group["params"]} for part in parts for group in part.param_groups], {})
        self.parts = parts
        self.param_groups = [group for part in parts for group in part.param_groups]
        for part in parts:
            part.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


def _part(group: ParameterGroup, hidden: bool) -> ParameterGroup:
    chosen = [
        (name, parameter) for name, parameter in group.parameters if is_hidden_matrix(name, parameter.ndim) == hidden
    ]
    return replace(group, parameters=chosen)
