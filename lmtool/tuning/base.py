"""The base class of tuning methods, and helpers that find, replace, initialize and freeze modules.

A tuning method edits a learner (a model with its heads) after it is built, and selects the trainable parameters.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from lmtool.learners.base import BaseLearner, decayed_groups
from lmtool.learners.model import is_exit
from lmtool.models.base import Backbone
from lmtool.nn.initialization import generator_for, materialize
from lmtool.nn.stack import Stack
from lmtool.tuning.configs.base import TuningConfig
from lmtool.types import ParameterGroup, part_of

BACKBONE = "backbone"


class NamedLayer(NamedTuple):
    """A layer of a backbone. name: in a checkpoint, such as "backbone.decoder.layers.3". stack: the one that contains
    the layer. number: the layer's index in `stack.layers`, from 0."""

    name: str
    layer: nn.Module
    stack: Stack
    number: int


def stacks(backbone: Backbone) -> Iterator[tuple[str, Stack]]:
    """Yields the checkpoint name and the module of each stack of layers, the encoder before the decoder."""
    for name, module in backbone.named_modules(prefix=BACKBONE):
        if isinstance(module, Stack):
            yield name, module


def layers(backbone: Backbone) -> Iterator[NamedLayer]:
    """Yields the distinct layers of all stacks, in each stack from the bottom up. A layer that is applied at several
    depths (ALBERT) occurs once."""
    for name, stack in stacks(backbone):
        for number, layer in enumerate(stack.layers):
            yield NamedLayer(f"{name}.layers.{number}", layer, stack, number)


def norms(backbone: Backbone) -> Iterator[nn.Module]:
    """Yields the normalization modules of the layers, and the final norm of each stack. The embedding's norm is
    excluded: training it would require the backward pass of the lowest layer's attention."""
    for named_layer in layers(backbone):
        yield from (module for name, module in named_layer.layer.named_children() if name.startswith("norm"))
    yield from (stack.final_norm for _, stack in stacks(backbone) if stack.final_norm is not None)


def linears(backbone: Backbone, names: Collection[str]) -> Iterator[tuple[str, nn.Linear]]:
    """Yields the checkpoint name and the module of each linear map of the layers whose attribute name is among `names`,
    such as "q_proj" or "fc_out"."""
    for named_layer in layers(backbone):
        for name, module in named_layer.layer.named_modules(prefix=named_layer.name):
            if isinstance(module, nn.Linear) and name.rpartition(".")[2] in names:
                yield name, module


# Modules that tuning methods add: created on the model's device; each tensor is initialized from a random stream that
# depends on the seed and on the tensor's name only.


AnyModule = TypeVar("AnyModule", bound=nn.Module)


def new_module(learner: nn.Module, kind: Callable[..., AnyModule], *arguments: object) -> AnyModule:
    """Creates `kind(*arguments)` on the learner's device, with uninitialized values."""
    return materialize(partial(kind, *arguments)).to(next(learner.parameters()).device)


@torch.no_grad()
def initialize_like_torch(module: nn.Module, seed: int, prefix: str) -> None:
    """Initializes a module with torch's default distributions, but with a generator per tensor. Linear maps and LSTMs
    are uniform within 1 / sqrt(number of inputs, or for an LSTM of states); all other parameters are standard normal.
    Parameters on the meta device are skipped. prefix: checkpoint name of the module with a final dot; with the tensor's
    name, it selects the random stream."""
    for path, submodule in module.named_modules():
        for name, parameter in submodule.named_parameters(recurse=False):
            if parameter.is_meta:
                continue
            generator = generator_for(seed, f"{prefix}{path}.{name}" if path else prefix + name)
            values = torch.empty(parameter.shape)
            if isinstance(submodule, nn.Linear | nn.LSTM):
                width = submodule.in_features if isinstance(submodule, nn.Linear) else submodule.hidden_size
                bound = 1 / math.sqrt(width)
                parameter.copy_(values.uniform_(-bound, bound, generator=generator))
            else:
                parameter.copy_(values.normal_(generator=generator))


class TuningMethod(ABC):
    """Base class of the tuning methods. A method may freeze parameters, add modules, add loss terms, and act before
    each step. Existing parameters keep their checkpoint names."""

    def __init__(self, config: TuningConfig):
        self.config = config

    def prepare(self, backbone: Backbone) -> None:  # noqa: B027 most methods leave the heads unchanged
        """Called before the heads are built. Selects the hidden states that the heads read, if these are not the states
        of the last layer."""

    @abstractmethod
    def edit(self, learner: BaseLearner, seed: int, new: Collection[str] | None = None) -> None:
        """Edits a learner after its base weights are loaded. seed: for the initialization of added parameters. new:
        names of the parts that were not loaded from a checkpoint, such as "heads.pooler"; None means unknown, so that
        every head counts as new."""

    def build_on(  # noqa: B027 most methods do not build on earlier runs
        self, learner: BaseLearner, earlier: Sequence[tuple[str, Mapping[str, Tensor]]]
    ) -> None:
        """Loads the parameters that earlier runs (`earlier_runs` in the configuration) added to the model: the name of
        each run for messages, and all its tensors. Called once, after `edit` and before training; a learner that is
        rebuilt from a checkpoint gets these parameters from the checkpoint. Raises UserError if the tensors do not fit
        the learner."""

    def merge(self, learner: BaseLearner) -> None:  # noqa: B027 most methods add nothing
        """Merges the added parameters into the base weights, so that an untuned model of the same family can hold the
        result. Raises UserError if this is impossible; the hint names another way to export the weights."""

    def fold(self, learner: BaseLearner) -> TuningConfig:
        """Replaces modules that only training needs (such as the MLP that computes a prefix) by their result. Outputs
        do not change. Returns the configuration that builds the changed learner."""
        return self.config

    def parameter_groups(self, learner: BaseLearner) -> list[ParameterGroup]:
        """Returns the trainable parameters in groups with their learning rates and weight decay."""
        return decayed_groups(learner)

    def penalties(self, learner: BaseLearner) -> dict[str, Tensor]:
        """Returns loss terms by name, which are added to the loss once per step; none by default."""
        return {}

    def on_step(self, learner: BaseLearner, step: int) -> None:  # noqa: B027 most methods do nothing here
        """Called before the forward pass of each optimizer step."""

    def delta_names(self, learner: BaseLearner) -> set[str]:
        """Returns the names of the tensors that distinguish the tuned learner from its base: trained or added
        tensors."""
        return {*learner.trainable_names, *learner.added_names}


def freeze(learner: BaseLearner, new: Collection[str] | None) -> None:
    """Freezes all parameters except those of the heads that the run trains, of early exits, and of new parts (see
    `TuningMethod.edit`). A randomly initialized pooler is a new part and is trained. A pretrained pooler, and the
    pretrained head of a language model that the task does not use, are frozen."""
    for name, parameter in learner.named_parameters():
        part = part_of(name)
        trained = new is None or part in new or _is_trained_head(part, learner)
        parameter.requires_grad_(part != "backbone" and trained)


def learn_biases(learner: BaseLearner, modules: Collection[str] | None = None) -> None:
    """Makes the biases of these modules (checkpoint names) trainable. None means all biases, including those of norms
    and of a pretrained pooler."""
    for name, parameter in learner.named_parameters():
        module, _, attribute = name.rpartition(".")
        if attribute == "bias" and (modules is None or module in modules):
            parameter.requires_grad_(True)


def _is_trained_head(part: str, learner: BaseLearner) -> bool:
    return is_exit(part) or part.removeprefix("heads.") in learner.loss_weights
