"""What the terms between layers share: which places they compare, and what they keep of a step's forwards."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lmtool.distillation.configs import LayerMap
from lmtool.distillation.configs.layers import shared_sides
from lmtool.distillation.interchange import parts_of
from lmtool.distillation.kept import Kept
from lmtool.distillation.seen import Seen, Teacher
from lmtool.distillation.terms.base import Term
from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner
from lmtool.nn.configs import Side
from lmtool.nn.stack import Place, Tap
from lmtool.types import Batch, Packed

Pair = tuple[Place, Place]
"""A place of the student, and the teacher's that it learns from."""


class LayerTerm(Term):
    """The base of terms between layers: the mean over tokens of what is lost at each pair of places, summed over the
    pairs. In an encoder-decoder the tokens of both sides count alike.

    UserError where nothing learns that has layers, and where a forward shows that the two read different texts.
    """

    of_attention: ClassVar[bool] = False

    def __init__(self, config: Any, student: BaseLearner, teacher: Teacher | None, layers: LayerMap | None = None):
        super().__init__(config, student, teacher, layers)
        assert teacher is not None
        if student.extracts and not any(name.startswith("backbone.") for name in student.learning):
            raise UserError(
                "distill.terms: no layer of the student learns, and terms between layers need one that does",
                "give tuning=full, or take terms over what is predicted: distill=soft",
            )
        self.pairs = tuple(self.compared(student, teacher.learner, layers))
        self._kept: dict[bool, Kept] = {}

    def compared(self, student: BaseLearner, teacher: BaseLearner, layers: LayerMap | None) -> Iterator[Pair]:
        """The places that are compared: by the layer map."""
        yield from ((Place(own, side), Place(its, side)) for side, own, its in layers or ())

    def tap(self, teacher: bool) -> Tap:
        places = [pair[teacher] for pair in self.pairs]
        self._kept[teacher] = Kept(attention=places) if self.of_attention else Kept(states=places)
        return self._kept[teacher]

    def counts(self, batch: Batch) -> dict[str, float]:
        return {"": float(batch.tokens)}

    def sums(self, student: Seen, teacher: Seen, step: int) -> dict[str, Tensor]:
        own, its = self._kept.pop(False), self._kept.pop(True)
        total = torch.zeros((), device=student.batch.inputs.tokens.device)
        rows: dict[Side, int] = {}
        for pair in self.pairs:
            if own.tokens(pair[0]) != its.tokens(pair[1]):
                raise UserError(
                    "distill.terms: layers are compared token by token, and here the student reads other texts than "
                    "its teacher, such as those of another domain",
                    "take terms over what is predicted: distill=soft",
                )
            lost, rows[pair[0].side] = self.lost(own, its, pair, student.batch)
            total = total + lost
        # A learner may read an input more than once, or one side alone.
        return {"": total * (self.counts(student.batch)[""] / max(sum(rows.values()), 1))}

    @abstractmethod
    def lost(self, student: Kept, teacher: Kept, pair: Pair, batch: Batch) -> tuple[Tensor, int]:
        """What is lost at a pair of places, summed over tokens, and their number."""


def last_places(student: BaseLearner, teacher: BaseLearner) -> Iterator[Pair]:
    """The last layers of the stacks that both have."""
    own, its = student.backbone.config, teacher.backbone.config
    for side in shared_sides(own, its):
        yield Place(own.depths[side], side), Place(its.depths[side], side)


def texts_of(batch: Batch, side: Side) -> Sequence[Packed]:
    """What the stack of a side reads of a batch, a forward after the other."""
    texts = [part.inputs if side == "inputs" else part.outputs for part in parts_of(batch)]
    return [packed for packed in texts if packed is not None]
