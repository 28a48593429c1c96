"""Training schemes of a tuning method: when parameters are trained, and what regularizes them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lmtool.learners.base import BaseLearner
from lmtool.models.heads.lm import LMHead
from lmtool.nn.dropout import matrix_factors
from lmtool.random_streams import key
from lmtool.training.optimizers import levels
from lmtool.tuning.base import replace_module
from lmtool.tuning.configs.base import GradualUnfreezingConfig, L2SpConfig, MixoutConfig, SchemeConfig
from lmtool.types import ParameterGroup, part_of, send


class Scheme:
    """The base of every scheme; it does nothing. All effects in a step are functions of the step's number and of
    weights, so that a run can resume."""

    def __init__(self, config: SchemeConfig):
        self.config = config

    def attach(self, learner: BaseLearner, new: Collection[str] | None) -> None:
        """Called after the method's edit, when the weights are those that the run starts from. new: the parts that are
        not from a checkpoint; None: unknown, and the learner is not trained."""

    def begin(self, steps_in_epoch: Callable[[int], int]) -> None:
        """Called before training. steps_in_epoch: optimizer steps of a pass over the training examples, by its number
        from 0."""

    def first_step(self, name: str, steps: int) -> int | None:
        """The first step in which a parameter is trained; None if not within `steps`."""
        return 1

    def groups(self, groups: list[ParameterGroup]) -> list[ParameterGroup]:
        """The trainable groups, from the method's."""
        return groups

    def on_step(self, learner: BaseLearner, step: int) -> None:
        """Called before the forward of each optimizer step, with its number from 1."""

    def penalties(self, learner: BaseLearner) -> dict[str, Tensor]:
        """Loss terms added once per step."""
        return {}


# L2-SP: Li, Grandvalet and Davoine, "Explicit Inductive Bias for Transfer Learning with Convolutional Networks", ICML
# 2018, equation 3.


class L2Sp(Scheme):
    """Adds alpha/2 times the squared distance from the pretrained weights, and beta/2 times the squares of new ones, to
    the loss. It replaces weight decay, which pulls towards zero and is disabled."""

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
        self._starts = [send(start, learner.device) for start in self._starts]
        moved = [
            (parameter - start).square().sum()
            for parameter, start in zip(self._pretrained, self._starts, strict=True)
            if parameter.requires_grad  # a frozen one has not moved
        ]
        squares = [parameter.square().sum() for parameter in self._new if parameter.requires_grad]
        terms = [self.config.alpha / 2 * term for term in moved] + [self.config.beta / 2 * term for term in squares]
        return {"l2_sp": torch.stack(terms).sum()} if terms else {}


# Mixout: Lee, Cho and Kang, "Mixout: Effective Regularization to Finetune Large-scale Pretrained Language Models",
# ICLR 2020, equation 5.
#
# Shape letters: T tokens, R rows of a weight (outputs), C its columns (inputs).


def mixed(weight_RC: Tensor, start_RC: Tensor, probability: float, draw: int) -> Tensor:
    """(R, C): each weight is reset to its initial value with this probability, and otherwise rescaled around it so that
    the expectation is the weight. draw: seeds the selection."""
    if probability == 1:
        return start_RC
    return torch.lerp(start_RC, weight_RC, matrix_factors(weight_RC, draw, probability))


class MixedLinear(nn.Linear):
    """A linear map whose weight is mixed in training with its initial value; with the parameters of `linear`.

    draw: set before each step. start_RC: not saved in checkpoints.
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
    """Mixes the weights of the checkpoint's linear maps; biases, norms, tables and new weights are not mixed. The
    published code has no additional dropout (model.dropout=0 model.attention_dropout=0).

    The selection is a function of the seed, the step and the name of the weight.
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
                replace_module(learner, name, mixed_module)
                self._mixed[zlib.crc32(name.encode())] = mixed_module

    def on_step(self, learner: BaseLearner, step: int) -> None:
        for position, module in self._mixed.items():
            module.draw = key(learner.seed, "dropout", step, position)


# Gradual unfreezing: Howard and Ruder, "Universal Language Model Fine-tuning for Text Classification", ACL 2018,
# section 3.3.


class GradualUnfreezing(Scheme):
    """Trains the head first, then one more level from the top after each epoch or every few steps: the layers from the
    last to the first (in an encoder-decoder the decoder's before the encoder's), and the embeddings. Levels without
    trainable parameters are skipped.

    The optimizer receives all parameters from the start; frozen ones have no gradient, and no optimizer state.
    """

    config: GradualUnfreezingConfig

    def __init__(self, config: GradualUnfreezingConfig):
        super().__init__(config)
        self._levels: list[dict[str, nn.Parameter]] = []
        self._starts = [1]
        self._steps_in_epoch: Callable[[int], int] | None = None

    def attach(self, learner: BaseLearner, new: Collection[str] | None) -> None:
        named = dict(learner.named_parameters())
        learning = {name: tensor for name, tensor in named.items() if name in learner.learning}
        ordered = [{name: learning[name] for name in members if name in learning} for members in levels(named).values()]
        self._levels = [members for members in ordered if members]

    def begin(self, steps_in_epoch: Callable[[int], int]) -> None:
        self._steps_in_epoch = steps_in_epoch

    def first_step(self, name: str, steps: int) -> int | None:
        number = next(number for number, members in enumerate(self._levels) if name in members)
        reached = all(self._start(above) <= steps for above in range(number + 1))
        return self._start(number) if reached else None

    def on_step(self, learner: BaseLearner, step: int) -> None:
        learns = True
        for number, members in enumerate(self._levels):
            # Later levels are frozen if this one is: epochs that are never reached are not planned.
            learns = learns and self._start(number) <= step
            for parameter in members.values():
                parameter.requires_grad_(learns)

    def _start(self, number: int) -> int:
        """The first step of a level, by its number from 0, the head's."""
        if self.config.every_steps is not None:
            return 1 + number * self.config.every_steps
        while len(self._starts) <= number:
            assert self._steps_in_epoch is not None, "the length of an epoch is unknown: call begin"
            self._starts.append(self._starts[-1] + self._steps_in_epoch(len(self._starts) - 1))
        return self._starts[number]
