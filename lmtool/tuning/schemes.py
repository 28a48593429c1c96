"""Training schemes, which a tuning method may be combined with: gradual unfreezing, and regularization towards the
pretrained weights."""

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
from lmtool.tuning.configs.base import GradualUnfreezingConfig, L2SpConfig, MixoutConfig, SchemeConfig
from lmtool.types import ParameterGroup, part_of, send


class Scheme:
    """Base class of the schemes. It has no effect itself and is the scheme `none`. The effects of a scheme in a step
    depend only on the number of the step and on weights, so that a run can resume at any step."""

    def __init__(self, config: SchemeConfig):
        self.config = config

    def attach(self, learner: BaseLearner, new_parts: Collection[str] | None) -> None:
        """Called after the tuning method has edited the learner, with the initial weights of the run. learner: the
        edited learner. new_parts: names of the parts that were not loaded from a checkpoint; None if the learner is
        built for inference, on which most schemes have no effect."""

    def set_steps_in_epoch(self, steps_in_epoch: Callable[[int], int]) -> None:
        """Called before training. steps_in_epoch: returns the number of optimizer steps of an epoch, given the number
        of the epoch from 0."""

    def first_step(self, name: str, steps: int) -> int | None:
        """Returns the first step that trains the parameter `name`, or None if the run of `steps` steps ends before."""
        return 1

    def groups(self, groups: list[ParameterGroup]) -> list[ParameterGroup]:
        """Returns the parameter groups of the tuning method, with changed settings if the scheme requires them."""
        return groups

    def on_step(self, learner: BaseLearner, step: int) -> None:
        """Called before the forward pass of each optimizer step. Steps count from 1."""

    def penalties(self, learner: BaseLearner) -> dict[str, Tensor]:
        """Returns loss terms by name, which are added to the loss once per step."""
        return {}


def first_step(learner: BaseLearner, name: str, steps: int) -> int | None:
    """Returns the first step that trains a parameter under all schemes of a learner, or None if the parameter stays
    frozen in a run of `steps` steps. name: the name of the parameter."""
    first_steps = [scheme.first_step(name, steps) for scheme in learner.schemes]
    return max((first or 0 for first in first_steps), default=1) if None not in first_steps else None


# L2-SP: Li, Grandvalet and Davoine, "Explicit Inductive Bias for Transfer Learning with Convolutional Networks", ICML
# 2018, equation 3.


class L2Sp(Scheme):
    """Adds to the loss alpha / 2 times the squared distance of the pretrained weights from their initial values, and
    beta / 2 times the squares of the new weights.

    Weight decay is disabled, because it would pull pretrained weights towards zero.
    """

    config: L2SpConfig

    def __init__(self, config: L2SpConfig):
        super().__init__(config)
        self._pretrained: list[nn.Parameter] = []
        self._starts: list[Tensor] = []
        self._new: list[nn.Parameter] = []

    def attach(self, learner: BaseLearner, new_parts: Collection[str] | None) -> None:
        if new_parts is None:
            return
        for name, parameter in learner.named_parameters():
            if name not in learner.trainable_names:
                continue
            if part_of(name) in new_parts or name in learner.added_names:
                self._new.append(parameter)
            else:
                self._pretrained.append(parameter)
                self._starts.append(parameter.detach().clone())

    def groups(self, groups: list[ParameterGroup]) -> list[ParameterGroup]:
        return [replace(group, weight_decay_scale=0.0) for group in groups]

    def penalties(self, learner: BaseLearner) -> dict[str, Tensor]:
        self._starts = [send(start, learner.device) for start in self._starts]
        distances = [
            (parameter - start).square().sum()
            for parameter, start in zip(self._pretrained, self._starts, strict=True)
            if parameter.requires_grad  # a frozen parameter still has its initial values
        ]
        squares = [parameter.square().sum() for parameter in self._new if parameter.requires_grad]
        terms = [self.config.alpha / 2 * term for term in distances] + [self.config.beta / 2 * term for term in squares]
        return {"l2_sp": torch.stack(terms).sum()} if terms else {}


# Mixout: Lee, Cho and Kang, "Mixout: Effective Regularization to Finetune Large-scale Pretrained Language Models",
# ICLR 2020, equation 5.
#
# Shape letters: T tokens, R rows of a weight (outputs), C its columns (inputs).


def mix_weights(weight_RC: Tensor, start_RC: Tensor, probability: float, draw: int) -> Tensor:
    """Resets random weights, (R, C), to their initial values with this probability. The distance of all other weights
    from their initial values is divided by 1 - probability, so that the expectation of each result is the weight
    (equation 5). draw: seed of the random selection."""
    if probability == 1:
        return start_RC
    # The factors: 0 for a weight that is reset, 1 / (1 - probability) for the others.
    return torch.lerp(start_RC, weight_RC, matrix_factors(weight_RC, draw, probability))


class MixedLinear(nn.Linear):
    """A linear map, in place of `linear` and with its parameters (no copies), that in training uses a mixture of its
    weight with the weight's initial value, `start_RC`, which checkpoints do not contain. draw: seed of the random
    selection, which `Mixout` sets before each step."""

    start_RC: Tensor

    def __init__(self, linear: nn.Linear, probability: float):
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.probability, self.draw = probability, 0
        self.register_buffer("start_RC", linear.weight.detach().clone(), persistent=False)

    def forward(self, x_TC: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x_TC)
        return F.linear(x_TC, mix_weights(self.weight, self.start_RC, self.probability, self.draw), self.bias)


class Mixout(Scheme):
    """Replaces every trainable linear map that was loaded from a checkpoint by a `MixedLinear`. Biases, norms,
    embeddings and new weights stay unmixed. The random selection depends only on the seed, the step and the name of
    the map.

    The published code disables dropout (model.dropout=0 model.attention_dropout=0).
    """

    config: MixoutConfig

    def __init__(self, config: MixoutConfig):
        super().__init__(config)
        # The maps by the hash of their names in checkpoints, which selects their random streams.
        self._mixed: dict[int, MixedLinear] = {}

    def attach(self, learner: BaseLearner, new_parts: Collection[str] | None) -> None:
        if new_parts is None:
            return
        # The output of a head that predicts tokens may be tied to the embedding, which is not mixed.
        lm_output_ids = {id(head.output) for head in learner.modules() if isinstance(head, LMHead)}
        for name, module in list(learner.named_modules()):
            pretrained = (
                type(module) is nn.Linear and part_of(name) not in new_parts and id(module) not in lm_output_ids
            )
            if pretrained and f"{name}.weight" in learner.trainable_names:
                mixed_linear = MixedLinear(module, self.config.probability)
                learner.set_submodule(name, mixed_linear)
                self._mixed[zlib.crc32(name.encode())] = mixed_linear

    def on_step(self, learner: BaseLearner, step: int) -> None:
        for name_hash, module in self._mixed.items():
            module.draw = key(learner.seed, "dropout", step, name_hash)


# Gradual unfreezing: Howard and Ruder, "Universal Language Model Fine-tuning for Text Classification", ACL 2018,
# section 3.3.


class GradualUnfreezing(Scheme):
    """Trains the head first, and unfreezes one more level after each epoch, or after every `every_steps` steps.

    The levels are the head, the layers from the top down (in an encoder-decoder, the decoder's layers before the
    encoder's), and the embeddings. Levels without trainable parameters are skipped.

    The optimizer receives all parameters from the start. While a parameter is frozen, it has no gradient and no
    optimizer state.
    """

    config: GradualUnfreezingConfig

    def __init__(self, config: GradualUnfreezingConfig):
        super().__init__(config)
        self._levels: list[dict[str, nn.Parameter]] = []
        self._starts = [1]
        self._steps_in_epoch: Callable[[int], int] | None = None

    def attach(self, learner: BaseLearner, new_parts: Collection[str] | None) -> None:
        named = dict(learner.named_parameters())
        trainable = {name: tensor for name, tensor in named.items() if name in learner.trainable_names}
        by_level = [{name: trainable[name] for name in names if name in trainable} for names in levels(named).values()]
        self._levels = [parameters for parameters in by_level if parameters]

    def set_steps_in_epoch(self, steps_in_epoch: Callable[[int], int]) -> None:
        self._steps_in_epoch = steps_in_epoch

    def first_step(self, name: str, steps: int) -> int | None:
        level = next(number for number, parameters in enumerate(self._levels) if name in parameters)
        # `all` stops at the first level that is not reached, because the start of a later one would plan more epochs.
        reached = all(self._start(number) <= steps for number in range(level + 1))
        return self._start(level) if reached else None

    def on_step(self, learner: BaseLearner, step: int) -> None:
        unfrozen = True
        for number, parameters in enumerate(self._levels):
            # If this level is frozen, so are all lower levels. Their first steps are not computed, because this would
            # plan epochs that the run may never reach.
            unfrozen = unfrozen and self._start(number) <= step
            for parameter in parameters.values():
                parameter.requires_grad_(unfrozen)

    def _start(self, number: int) -> int:
        """Levels count from 0, the head."""
        if self.config.every_steps is not None:
            return 1 + number * self.config.every_steps
        while len(self._starts) <= number:
            assert self._steps_in_epoch is not None, "the length of an epoch is unknown: call set_steps_in_epoch"
            self._starts.append(self._starts[-1] + self._steps_in_epoch(len(self._starts) - 1))
        return self._starts[number]
