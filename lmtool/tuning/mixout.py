"""Mixout: Lee, Cho and Kang, "Mixout: Effective Regularization to Finetune Large-scale Pretrained Language Models",
ICLR 2020, equation 5.

Shape letters: T tokens, R rows of a weight (outputs), C its columns (inputs).
"""

from __future__ import annotations

import zlib
from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lmtool.heads.lm import LMHead
from lmtool.learners.base import BaseLearner
from lmtool.nn.dropout import matrix_factors
from lmtool.streams import key
from lmtool.tuning.configs.schemes import MixoutConfig
from lmtool.tuning.places import replace
from lmtool.tuning.schemes import Scheme
from lmtool.types import part_of


def mixed(weight_RC: Tensor, start_RC: Tensor, probability: float, draw: int) -> Tensor:
    """(R, C): each weight is, with this probability, the one it started from, and otherwise so much further from it
    that the mean over all draws is the weight. draw: the same one chooses the same weights."""
    if probability == 1:
        return start_RC
    return torch.lerp(start_RC, weight_RC, matrix_factors(weight_RC, draw, probability))


class MixedLinear(nn.Linear):
    """A linear map whose weight is mixed in training with the one it started from; with the parameters of `linear`.

    draw: set before each step. start_RC: no part of a checkpoint.
    """

    start_RC: Tensor

    def __init__(self, linear: nn.Linear, probability: float):
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.probability, self.draw = probability, 0
        self.register_buffer("start_RC", linear.weight.detach().clone(), persistent=False)

    def forward(self, x_TC: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x_TC)
        return F.linear(x_TC, mixed(self.weight, self.start_RC, self.probability, self.draw), self.bias)


class Mixout(Scheme):
    """The weights of the linear maps that came from the checkpoint are mixed, not their biases, norms or tables, nor
    what is new. The published code has no dropout beside it (model.dropout=0 model.attention_dropout=0).

    What is drawn is a function of the seed, the step and the name of the weight.
    """

    config: MixoutConfig

    def __init__(self, config: MixoutConfig):
        super().__init__(config)
        self._mixed: dict[int, MixedLinear] = {}

    def attach(self, learner: BaseLearner, new: Collection[str] | None) -> None:
        if new is None:
            return
        tables = {id(head.output) for head in learner.modules() if isinstance(head, LMHead)}
        for name, module in list(learner.named_modules()):
            pretrained = type(module) is nn.Linear and part_of(name) not in new and id(module) not in tables
            if pretrained and f"{name}.weight" in learner.learning:
                mixed_module = MixedLinear(module, self.config.probability)
                replace(learner, name, mixed_module)
                self._mixed[zlib.crc32(name.encode())] = mixed_module

    def on_step(self, learner: BaseLearner, step: int) -> None:
        for place, module in self._mixed.items():
            module.draw = key(learner.seed, "dropout", step, place)
