"""L2-SP: Li, Grandvalet and Davoine, "Explicit Inductive Bias for Transfer Learning with Convolutional Networks", ICML
2018, equation 3."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor, nn

from lmtool.learners.base import BaseLearner
from lmtool.tuning.configs.schemes import L2SpConfig
from lmtool.tuning.schemes import Scheme
from lmtool.types import ParameterGroup, part_of


class L2Sp(Scheme):
    """alpha/2 times the squared distance from the pretrained weights, and beta/2 times the squares of new ones, are
    added to the loss. It stands in the place of weight decay, which draws towards zero: nothing that learns has any."""

    config: L2SpConfig

    def __init__(self, config: L2SpConfig):
        super().__init__(config)
        self._pretrained: list[nn.Parameter] = []
        self._starts: list[Tensor] = []
        self._new: list[nn.Parameter] = []

    def attach(self, learner: BaseLearner, new: Collection[str] | None) -> None:
        if new is None:
            return
        for name, parameter in learner.named_parameters():
            if name not in learner.learning:
                continue
            if part_of(name) in new or name in learner.added:
                self._new.append(parameter)
            else:
                self._pretrained.append(parameter)
                self._starts.append(parameter.detach().clone())

    def groups(self, groups: list[ParameterGroup]) -> list[ParameterGroup]:
        return [replace(group, weight_decay_scale=0.0) for group in groups]

    def penalties(self, learner: BaseLearner) -> dict[str, Tensor]:
        self._starts = [start.to(learner.device) for start in self._starts]
        moved = [
            (parameter - start).square().sum()
            for parameter, start in zip(self._pretrained, self._starts, strict=True)
            if parameter.requires_grad  # one that is still frozen is where it started
        ]
        squares = [parameter.square().sum() for parameter in self._new if parameter.requires_grad]
        terms = [self.config.alpha / 2 * term for term in moved] + [self.config.beta / 2 * term for term in squares]
        return {"l2_sp": torch.stack(terms).sum()} if terms else {}
