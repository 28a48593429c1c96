"""Which layers of its teacher a student starts from. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lmtool.distillation.configs.layers import shared_sides
from lmtool.errors import UserError
from lmtool.models.configs import ModelConfig
from lmtool.nn.configs import Side
from lmtool.terminal import counted

Initialize = Literal["none", "alternate"] | tuple[Annotated[int, Field(ge=1)], ...]
"""none: from random weights. alternate: from the teacher's first layer, its last, and those at even distances between
them: 1, 3, 5, 8, 10, 12 of 12 for 6, which are DistilBERT's. Or a layer of the teacher for each of the student's, from
the first on."""

# What two models must share so that the tensors of one are those of the other.
_SHAPES = (
    "vocab_size", "hidden_size", "embedding_size", "num_heads", "num_key_value_heads", "head_size", "feedforward_size",
    "max_positions",
)  # fmt: skip


def taken_layers(initialize: Initialize, student: ModelConfig, teacher: ModelConfig) -> dict[Side, tuple[int, ...]]:
    """For each stack that both models have, the teacher's layer of each of the student's, counted from 1; {} for none.

    UserError where the two differ in a size, which names both, and where the layers given are others than there are.
    """
    if initialize == "none":
        return {}
    for field in _SHAPES:
        own, its = getattr(student, field, None), getattr(teacher, field, None)
        if own != its:
            raise UserError(
                f"distill.initialize: the student has model.{field}={own}, its teacher {its}; tensors are copied as "
                "they are",
                f"give model.{field}={its} or distill.initialize=none" if own is not None else _NONE,
            )
    if student.shares_layers != teacher.shares_layers:
        sharing = student.name if student.shares_layers else teacher.name
        raise UserError(f"distill.initialize: model={sharing} has one layer at all depths, the other one each", _NONE)
    taken: dict[Side, tuple[int, ...]] = {}
    for side in shared_sides(student, teacher):
        own, its = student.depths[side], teacher.depths[side]
        layers = _alternate(own, its) if isinstance(initialize, str) else initialize
        if len(layers) != own or max(layers) > its:
            raise UserError(
                f"distill.initialize={list(layers)}: the student has {counted(own, 'layer')}, the teacher {its}",
                f"give distill.initialize=alternate, which is {list(_alternate(own, its))} here",
            )
        taken[side] = layers
    return taken


def _alternate(own: int, its: int) -> tuple[int, ...]:
    """The first, the last, and between them the nearest to even distances."""
    steps = max(own - 1, 1)
    return tuple(1 + (2 * number * (its - 1) + steps) // (2 * steps) for number in range(own))


_NONE = "give distill.initialize=none"
