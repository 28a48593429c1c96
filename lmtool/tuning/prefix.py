"""Prefix tuning (Li and Liang 2021): keys and values in front of every text learn, in every attention.

Shape letters: P rows of a prefix, W width of all heads, L layers of a stack.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from lmtool.learners.base import BaseLearner
from lmtool.nn.prefix import KeyPrefix
from lmtool.nn.stack import Stack
from lmtool.tuning.base import TuningMethod, freeze
from lmtool.tuning.initial import draw_as_torch, made_for
from lmtool.tuning.places import stacks


class MappedPrefix(KeyPrefix):
    """A prefix that is computed (4.3): `weight`, (P, E), through a layer with tanh to (P, L * 2 * W)."""

    def __init__(self, count: int, depth: int, width: int, embedding_size: int, inner_size: int):
        nn.Module.__init__(self)
        self.depth = depth
        self.weight = nn.Parameter(torch.zeros(count, embedding_size))
        self.inner = nn.Linear(embedding_size, inner_size)
        self.output = nn.Linear(inner_size, depth * 2 * width)

    def rows(self) -> Tensor:
        # In full precision, as what it is folded to.
        with torch.autocast(self.weight.device.type, enabled=False):
            return self.output(torch.tanh(self.inner(self.weight)))


class PrefixTuning(TuningMethod):
    """A prefix for every stack, one more for its cross-attention, and the heads of what is learned."""

    def edit(self, learner: BaseLearner, seed: int, new: Collection[str] | None = None) -> None:
        freeze(learner, new)
        add_prefixes(learner, seed, self.config.length, self.config.inner_size if self.config.reparametrize else None)

    def fold(self, learner: BaseLearner) -> Any:
        """The maps by what they compute."""
        fold_prefixes(learner)
        return self.config.model_copy(update={"reparametrize": False})


class PrefixPlace(NamedTuple):
    """Where a stack has a prefix, and the name of its parameters' module in a checkpoint."""

    name: str
    stack: Stack
    attribute: Literal["prefix", "cross_prefix"]


def places(learner: nn.Module) -> Iterator[PrefixPlace]:
    """All of them: the self-attention of every stack, and the cross-attention of one that has it."""
    backbone: Any = learner.backbone
    for name, stack in stacks(backbone):
        yield PrefixPlace(f"{name}.prefix", stack, "prefix")
        if any(hasattr(layer, "cross_attn") for layer in stack.layers):
            yield PrefixPlace(f"{name}.cross_prefix", stack, "cross_prefix")


def add_prefixes(learner: BaseLearner, seed: int, length: int, inner_size: int | None) -> None:
    """Give every attention a prefix of this length. inner_size: inside its map; None: it learns by itself."""
    config: Any = learner.backbone.config
    width, hidden_size = config.key_value_heads * config.width_of_head, learner.backbone.hidden_size
    for place in places(learner):
        depth = len(list(place.stack.depth()))
        prefix = (
            made_for(learner, KeyPrefix, length, depth, width)
            if inner_size is None
            else made_for(learner, MappedPrefix, length, depth, width, hidden_size, inner_size)
        )
        draw_as_torch(prefix, seed, f"{place.name}.")
        setattr(place.stack, place.attribute, prefix)


@torch.no_grad()
def fold_prefixes(learner: BaseLearner) -> None:
    """Put what the maps compute in the place of the maps: outputs stay as they are."""
    for place in places(learner):
        mapped: KeyPrefix = getattr(place.stack, place.attribute)
        rows = mapped.rows()
        folded = made_for(learner, KeyPrefix, len(rows), mapped.depth, rows.shape[1] // (2 * mapped.depth))
        folded.weight.copy_(rows)
        setattr(place.stack, place.attribute, folded)
    learner.added = frozenset(f"{place.name}.weight" for place in places(learner))
