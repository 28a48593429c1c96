"""What the states of layers are: those behind the last (DistilBERT), between the layers (TinyBERT, Patient Knowledge
Distillation), and behind the embedding (TinyBERT). Where widths differ, a projection learns with the student.

Shape letters: T tokens, R of them that are compared, H hidden width.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtool.config.tables import entry_of
from lmtool.distillation.configs import LayerMap
from lmtool.distillation.configs.layers import shared_sides
from lmtool.distillation.kept import Kept
from lmtool.distillation.seen import Teacher
from lmtool.distillation.terms.layers import LayerTerm, Pair, last_places, texts_of
from lmtool.learners.base import BaseLearner
from lmtool.nn.initialization import materialize
from lmtool.nn.stack import Place, Stack
from lmtool.types import Batch, Packed


class StateTerm(LayerTerm):
    """The base of terms over states. projection: one for all layers, as TinyBERT's W_h; None where the student is as
    wide as its teacher."""

    def __init__(self, config: Any, student: BaseLearner, teacher: Teacher | None, layers: LayerMap | None = None):
        super().__init__(config, student, teacher, layers)
        assert teacher is not None
        own, its = student.backbone.hidden_size, teacher.learner.backbone.hidden_size
        self.projection: nn.Linear | None = None
        if own != its:
            projection = materialize(lambda: nn.Linear(own, its, bias=False))
            student.backbone.initialize(projection, student.seed, f"distill.{entry_of(config).name}.projection.")
            self.projection = projection.to(student.device)

    def lost(self, student: Kept, teacher: Kept, pair: Pair, batch: Batch) -> tuple[Tensor, int]:
        own, its = student.states[pair[0]], teacher.states[pair[1]]
        if not own:
            return torch.zeros(()), 0
        texts = texts_of(batch, pair[0].side)
        x_RH, y_RH = self.read(own, texts), self.read(its, texts)
        if self.projection is not None:
            x_RH = self.projection(x_RH)
        return self.distance(x_RH.float(), y_RH.float(), pair), len(x_RH)

    def read(self, states: Sequence[Tensor], texts: Sequence[Packed]) -> Tensor:
        """(R, H) the states that are compared, of all forwards."""
        return states[0] if len(states) == 1 else torch.cat(list(states))

    @abstractmethod
    def distance(self, x_RH: Tensor, y_RH: Tensor, pair: Pair) -> Tensor:
        """How far the student's states x are from the teacher's y, summed over R."""


class States(StateTerm):
    """The sum over tokens of 1 - cos(h_student, h_teacher) of the last hidden states, behind the final norm where a
    family has one (Sanh et al. 2019, section 3, "cosine embedding loss"; in their code the mean over the tokens that
    are no padding, special ones included)."""

    def __init__(self, config: Any, student: BaseLearner, teacher: Teacher | None, layers: LayerMap | None = None):
        super().__init__(config, student, teacher, layers)
        assert teacher is not None
        self._norms = {False: _final_norms(student), True: _final_norms(teacher.learner)}

    def compared(self, student: BaseLearner, teacher: BaseLearner, layers: LayerMap | None) -> Iterator[Pair]:
        return last_places(student, teacher)

    def lost(self, student: Kept, teacher: Kept, pair: Pair, batch: Batch) -> tuple[Tensor, int]:
        for of_teacher, kept in ((False, student), (True, teacher)):
            place = pair[of_teacher]
            norm = self._norms[of_teacher].get(place.side)
            if norm is not None:
                kept.states[place] = [norm(x_TH) for x_TH in kept.states[place]]
        return super().lost(student, teacher, pair, batch)

    def distance(self, x_RH: Tensor, y_RH: Tensor, pair: Pair) -> Tensor:
        return (1 - F.cosine_similarity(x_RH, y_RH, dim=-1)).sum()


class Hidden(StateTerm):
    """The squared error of hidden states, its mean over the width, summed over tokens and layers: MSE(H_student W_h,
    H_teacher) (Jiao et al. 2020, equation 9, summed over layers by equation 11 with weights of 1)."""

    def distance(self, x_RH: Tensor, y_RH: Tensor, pair: Pair) -> Tensor:
        return (x_RH - y_RH).square().mean(-1).sum()


class Embedded(Hidden):
    """The same behind the embedding: MSE(E_student W_e, E_teacher) (Jiao et al. 2020, equation 10)."""

    def compared(self, student: BaseLearner, teacher: BaseLearner, layers: LayerMap | None) -> Iterator[Pair]:
        for side in shared_sides(student.backbone.config, teacher.backbone.config):
            yield Place(0, side), Place(0, side)


class Patience(StateTerm):
    """The squared distance of the unit vectors of each text's class token, its mean over the width and over the layers,
    summed over texts: equation 7 of Sun et al. 2019 adds up width and layers, their code takes the mean of both, and
    the weights that they report (10 to 1000) are for that. A text that is read left to right is summed up by its last
    token."""

    def __init__(self, config: Any, student: BaseLearner, teacher: Teacher | None, layers: LayerMap | None = None):
        super().__init__(config, student, teacher, layers)
        self._last = student.backbone.config.summary == "last"

    def counts(self, batch: Batch) -> dict[str, float]:
        sides = [packed for packed in (batch.inputs, batch.outputs) if packed is not None]
        return {"": float(sum(length > 0 for packed in sides for length in packed.lengths))}

    def read(self, states: Sequence[Tensor], texts: Sequence[Packed]) -> Tensor:
        pairs = zip(states, texts, strict=True)
        return torch.cat([x_TH.index_select(0, self._class_tokens(packed)) for x_TH, packed in pairs])

    def _class_tokens(self, packed: Packed) -> Tensor:
        occupied = packed.segments.occupied
        return occupied.cu_lengths[1:].long() - 1 if self._last else occupied.cu_lengths[:-1].long()

    def distance(self, x_RH: Tensor, y_RH: Tensor, pair: Pair) -> Tensor:
        layers = sum(own.side == pair[0].side for own, _ in self.pairs)
        return (F.normalize(x_RH, dim=-1) - F.normalize(y_RH, dim=-1)).square().mean(-1).sum() / layers


def _final_norms(learner: BaseLearner) -> dict[str, nn.Module | None]:
    """By side, what stands behind the last layer of a stack. Not held as a submodule: it is the learner's."""
    stacks = [module for module in learner.backbone.modules() if isinstance(module, Stack)]
    return {stack.side: stack.final_norm for stack in stacks}
