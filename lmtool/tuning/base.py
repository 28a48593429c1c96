"""The base of tuning methods, which edit a built learner and select its trainable parameters."""

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
from lmtool.tuning.configs import TuningConfig
from lmtool.types import ParameterGroup, part_of

BACKBONE = "backbone"


class NamedLayer(NamedTuple):
    """A layer, its name in a checkpoint ("backbone.decoder.layers.3"), its stack, and its index there from 0. A layer
    applied at several depths (ALBERT) occurs once."""

    name: str
    layer: nn.Module
    stack: Stack
    number: int


def stacks(backbone: Backbone) -> Iterator[tuple[str, Stack]]:
    """The stacks of a backbone by their checkpoint names, the encoder before the decoder."""
    for name, module in backbone.named_modules(prefix=BACKBONE):
        if isinstance(module, Stack):
            yield name, module


def layers(backbone: Backbone) -> Iterator[NamedLayer]:
    """The distinct layers of all stacks, from the embedding of each stack upwards."""
    for name, stack in stacks(backbone):
        for number, layer in enumerate(stack.layers):
            yield NamedLayer(f"{name}.layers.{number}", layer, stack, number)


def norms(backbone: Backbone) -> Iterator[nn.Module]:
    """The norms of the layers, and those after the last layers. The embedding's norm is excluded: training it would
    require the backward pass of the lowest layer's attention."""
    for position in layers(backbone):
        yield from (part for name, part in position.layer.named_children() if name.startswith("norm"))
    yield from (stack.final_norm for _, stack in stacks(backbone) if stack.final_norm is not None)


def linears(backbone: Backbone, names: Collection[str]) -> Iterator[tuple[str, nn.Linear]]:
    """The linear maps in the layers with one of these names ("q_proj", "fc_out", ...), with their checkpoint names."""
    for position in layers(backbone):
        for name, module in position.layer.named_modules(prefix=position.name):
            if isinstance(module, nn.Linear) and name.rpartition(".")[2] in names:
                yield name, module


def replace_module(learner: nn.Module, name: str, module: nn.Module) -> None:
    """Replaces the module of this name. Parameters keep their names if the new module has them too."""
    learner.set_submodule(name, module)


# Modules that tuning methods add: created on the model's device, and initialized from keyed streams.


AnyModule = TypeVar("AnyModule", bound=nn.Module)


def new_module(learner: nn.Module, kind: Callable[..., AnyModule], *arguments: object) -> AnyModule:
    """A new module, `kind(*arguments)`, on the device of a learner, with uninitialized values."""
    return materialize(partial(kind, *arguments)).to(next(learner.parameters()).device)


@torch.no_grad()
def draw_as_torch(module: nn.Module, seed: int, prefix: str) -> None:
    """Torch's default initialization: tables standard normal, maps and LSTMs uniform within 1/sqrt of their inputs or
    states; each tensor seeded by its name. prefix: precedes the names of this module's tensors."""
    for position, part in module.named_modules():
        for kind, parameter in part.named_parameters(recurse=False):
            if parameter.is_meta:
                continue
            generator = generator_for(seed, f"{prefix}{position}.{kind}" if position else prefix + kind)
            values = torch.empty(parameter.shape)
            if isinstance(part, nn.Linear | nn.LSTM):
                bound = 1 / math.sqrt(part.in_features if isinstance(part, nn.Linear) else part.hidden_size)
                parameter.copy_(values.uniform_(-bound, bound, generator=generator))
            else:
                parameter.copy_(values.normal_(generator=generator))


class TuningMethod(ABC):
    """The base of every method. It may freeze parameters, add modules under new names (existing names never change),
    add penalties, and act on each step."""

    def __init__(self, config: TuningConfig):
        self.config = config

    def prepare(self, backbone: Backbone) -> None:  # noqa: B027 most methods leave the heads as they are
        """Called before the heads are built: configures the states that heads read, if not the last hidden states."""

    @abstractmethod
    def edit(self, learner: BaseLearner, seed: int, new: Collection[str] | None = None) -> None:
        """Edits a learner after its base weights are loaded.

        seed: of the run, for added parameters. new: the parts that are not from the checkpoint ("heads.pooler", ...);
        None: unknown, so that every head counts as new.
        """

    def build_on(  # noqa: B027 most methods build on nothing
        self, learner: BaseLearner, earlier: Sequence[tuple[str, Mapping[str, Tensor]]]
    ) -> None:
        """Loads, before training, the parameters that the runs in the configuration's `builds_on` added to the model;
        not called when a trained learner is rebuilt, whose checkpoint has them. earlier: the origin of each run, and
        its tensors. UserError if they do not fit."""

    def merge(self, learner: BaseLearner) -> None:  # noqa: B027 most methods add nothing
        """Merges added parameters into the base weights, which gives a plain model. UserError, with an alternative for
        export, if that is impossible."""

    def fold(self, learner: BaseLearner) -> TuningConfig:
        """Replaces parameters used in training only (the map of a prefix) by their result; outputs do not change.
        Returns the configuration that builds the new learner."""
        return self.config

    def parameter_groups(self, learner: BaseLearner) -> list[ParameterGroup]:
        """The trainable parameters, with their learning rates and decay."""
        return decayed_groups(learner)

    def penalties(self, learner: BaseLearner) -> dict[str, Tensor]:
        """Loss terms added once per step; none by default."""
        return {}

    def on_step(self, learner: BaseLearner, step: int) -> None:  # noqa: B027 most methods do nothing here
        """Called before the forward of each optimizer step."""

    def delta(self, learner: BaseLearner) -> set[str]:
        """Names of the tensors by which the tuned learner differs from its base: trained or added ones."""
        return {*learner.learning, *learner.added}


def freeze(learner: BaseLearner, new: Collection[str] | None) -> None:
    """Freezes the parameters of the checkpoint, except for the heads being trained, early exits included, and new parts
    (a randomly initialized pooler belongs to the head). A pretrained pooler and a pretrained language model's head stay
    frozen. new: as in `TuningMethod.edit`."""
    for name, parameter in learner.named_parameters():
        part = part_of(name)
        parameter.requires_grad_(part != "backbone" and (new is None or part in new or _is_learned(part, learner)))


def learn_biases(learner: BaseLearner, modules: Collection[str] | None = None) -> None:
    """Makes biases trainable: those of the modules of these names, or all, including norms and a pretrained pooler."""
    for name, parameter in learner.named_parameters():
        module, _, kind = name.rpartition(".")
        if kind == "bias" and (modules is None or module in modules):
            parameter.requires_grad_(True)


def _is_learned(part: str, learner: BaseLearner) -> bool:
    """Whether a part is the head of one of the learner's terms."""
    return is_exit(part) or part.removeprefix("heads.") in learner.weights
