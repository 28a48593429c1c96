"""What a tuning method is: it edits a built learner, and answers for what is trained in it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from lmtool.learners.base import BaseLearner, decayed_groups
from lmtool.learners.model import is_exit
from lmtool.models.base import Backbone
from lmtool.nn.initialization import generator_for, materialize
from lmtool.nn.stack import Stack
from lmtool.types import ParameterGroup, part_of

# Where tuning methods edit a backbone: its stacks, its layers and the linear maps in them, by their uniform names.


BACKBONE = "backbone"


class LayerPlace(NamedTuple):
    """A layer, its name in a checkpoint ("backbone.decoder.layers.3"), the stack it belongs to, and its number there
    from 0. A layer that is applied at several depths (ALBERT) is one place."""

    name: str
    layer: nn.Module
    stack: Stack
    number: int


def stacks(backbone: Backbone) -> Iterator[tuple[str, Stack]]:
    """The stacks of a backbone by their names in a checkpoint, the encoder before the decoder."""
    for name, module in backbone.named_modules(prefix=BACKBONE):
        if isinstance(module, Stack):
            yield name, module


def layers(backbone: Backbone) -> Iterator[LayerPlace]:
    """The layers of all stacks, each once, those nearest to the embedding of a stack first."""
    for name, stack in stacks(backbone):
        for number, layer in enumerate(stack.layers):
            yield LayerPlace(f"{name}.layers.{number}", layer, stack, number)


def norms(backbone: Backbone) -> Iterator[nn.Module]:
    """The norms of the layers, and those behind the last layers. That of an embedding is none of them: where it learns,
    backward goes through the lowest layer's attention for its sake alone."""
    for place in layers(backbone):
        yield from (part for name, part in place.layer.named_children() if name.startswith("norm"))
    yield from (stack.final_norm for _, stack in stacks(backbone) if stack.final_norm is not None)


def linears(backbone: Backbone, names: Collection[str]) -> Iterator[tuple[str, nn.Linear]]:
    """The linear maps in the layers that are called one of these names ("q_proj", "fc_out", ...), with their names in a
    checkpoint."""
    for place in layers(backbone):
        for name, module in place.layer.named_modules(prefix=place.name):
            if isinstance(module, nn.Linear) and name.rpartition(".")[2] in names:
                yield name, module


def replace_module(learner: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module in the place of the one of this name. Its parameters keep their names where the new one has them
    too."""
    learner.set_submodule(name, module)


# The modules that tuning methods put into a model: made where it is, and drawn from keyed streams.


AnyModule = TypeVar("AnyModule", bound=nn.Module)


def made_for(learner: nn.Module, kind: Callable[..., AnyModule], *arguments: Any) -> AnyModule:
    """A new module, `kind(*arguments)`, on the device of a learner. Its values are undefined until they are drawn."""
    return materialize(partial(kind, *arguments)).to(next(learner.parameters()).device)


@torch.no_grad()
def draw_as_torch(module: nn.Module, seed: int, prefix: str) -> None:
    """The initial values that torch gives: tables standard normal, maps and LSTMs uniform within 1/sqrt of their inputs
    or states; each tensor by its name. prefix: what stands before the names of this module's tensors."""
    for place, part in module.named_modules():
        for kind, parameter in part.named_parameters(recurse=False):
            if parameter.is_meta:
                continue
            generator = generator_for(seed, f"{prefix}{place}.{kind}" if place else prefix + kind)
            values = torch.empty(parameter.shape)
            if isinstance(part, nn.Linear | nn.LSTM):
                bound = 1 / math.sqrt(part.in_features if isinstance(part, nn.Linear) else part.hidden_size)
                parameter.copy_(values.uniform_(-bound, bound, generator=generator))
            else:
                parameter.copy_(values.normal_(generator=generator))


# What a tuning method is: it edits a built learner, and answers for what learns in it from then on.


class TuningMethod(ABC):
    """The base of every method. It may freeze parameters, add modules under names of their own (names that are there
    are never changed), add penalties, and act on each step."""

    def __init__(self, config: Any):
        self.config = config

    def prepare(self, backbone: Backbone) -> None:  # noqa: B027 most methods leave the heads as they are
        """Called before the heads are built on a backbone: tell it what these will read, where that is not its last
        hidden states."""

    @abstractmethod
    def edit(self, learner: BaseLearner, seed: int, new: Collection[str] | None = None) -> None:
        """Edit a learner whose base weights are in.

        seed: of the run, for what is added. new: the parts that did not come from the checkpoint ("heads.pooler",
        ...); None: not known, and every head is taken to be new.
        """

    def build_on(  # noqa: B027 most methods build on nothing
        self, learner: BaseLearner, earlier: Sequence[tuple[str, Mapping[str, Tensor]]]
    ) -> None:
        """Take what the runs of its configuration's `builds_on` added to the model, before training; not where a
        trained learner is built again, whose checkpoint holds it. earlier: the origin of each, and its tensors.
        UserError where they do not fit."""

    def merge(self, learner: BaseLearner) -> None:  # noqa: B027 most methods add nothing
        """Fold what was added into the weights of the base, so that the model is a plain one again. UserError, which
        names a way to export it, where that cannot be."""

    def fold(self, learner: BaseLearner) -> Any:
        """Replace what training alone needs (the map of a prefix) by what it computes; outputs stay as they are.
        Returns the configuration that builds the learner as it is then."""
        return self.config

    def parameter_groups(self, learner: BaseLearner) -> list[ParameterGroup]:
        """What learns, with learning rates and decay of its own."""
        return decayed_groups(learner)

    def penalties(self, learner: BaseLearner) -> dict[str, Tensor]:
        """Terms added once a step: none."""
        return {}

    def on_step(self, learner: BaseLearner, step: int) -> None:  # noqa: B027 most methods do nothing here
        """Called before the forward of each optimizer step: nothing moves with the steps."""

    def delta(self, learner: BaseLearner) -> set[str]:
        """Names of the tensors that tell the tuned learner from its base: what learns, and what was added."""
        return {*learner.learning, *learner.added}


def freeze(learner: BaseLearner, new: Collection[str] | None) -> None:
    """Freeze what came from a checkpoint, all but the heads of what is learned: these learn, those of early exits too,
    and so do parts that are new (a pooler that the checkpoint lacked; random, it is a part of the head). A pretrained
    pooler and a pretrained language model's head stay as they are. new: as in `TuningMethod.edit`."""
    for name, parameter in learner.named_parameters():
        part = part_of(name)
        parameter.requires_grad_(part != "backbone" and (new is None or part in new or _is_learned(part, learner)))


def learn_biases(learner: BaseLearner, modules: Collection[str] | None = None) -> None:
    """Let biases learn: those of the modules of these names, or all, of norms and of a pretrained pooler too."""
    for name, parameter in learner.named_parameters():
        module, _, kind = name.rpartition(".")
        if kind == "bias" and (modules is None or module in modules):
            parameter.requires_grad_(True)


def _is_learned(part: str, learner: BaseLearner) -> bool:
    """Whether a part is the head of something that a learner learns."""
    return is_exit(part) or part.removeprefix("heads.") in learner.weights
