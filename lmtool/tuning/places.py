"""Where tuning methods edit a backbone: its stacks, its layers and the linear maps in them, by their uniform names."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from torch import nn

from lmtool.models.base import Backbone
from lmtool.nn.stack import Stack

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


def replace(learner: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module in the place of the one of this name. Its parameters keep their names where the new one has them
    too."""
    learner.set_submodule(name, module)
