"""What a teacher predicts: its hard labels, and its soft targets (Hinton, Vinyals and Dean 2015)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lmtool.distillation.configs import HardConfig, LayerMap, SoftConfig
from lmtool.distillation.seen import Seen, Teacher
from lmtool.distillation.terms.base import Term, targets_of
from lmtool.heads.predicted import Predicted, Shares
from lmtool.learners.base import BaseLearner
from lmtool.types import Batch


class OutputTerm(Term):
    """The base of terms over predictions: each of the student's own terms that a teacher predicts has its part, with
    its weight there."""

    def __init__(
        self, config: Any, student: BaseLearner, teacher: Teacher | None, layers: LayerMap | None = None
    ) -> None:
        super().__init__(config, student, teacher, layers)
        self.parts = frozenset(student.weights) if teacher is None else teacher.teaches & student.weights.keys()
        self._own_counts = student.counts

    def counts(self, batch: Batch) -> dict[str, float]:
        """Every target counts alike, whatever the weight of its class in the student's own loss."""
        counts = self._own_counts(batch)
        counts |= {term: float(targets_of(target, batch)) for term, target in batch.targets.items()}
        return {term: count for term, count in counts.items() if term in self.parts}

    def scales(self, weights: Mapping[str, float]) -> dict[str, float]:
        return {term: weight for term, weight in weights.items() if term in self.parts}

    def sums(self, student: Seen, teacher: Seen, step: int) -> dict[str, Tensor]:
        return {
            term: self.lost(predicted, teacher.predicted[term])
            for term, predicted in student.predicted.items()
            if term in teacher.predicted
        }

    @abstractmethod
    def lost(self, student: Predicted, teacher: Shares) -> Tensor:
        """The sum over the targets of one term."""


class Soft(OutputTerm):
    """T^2 KL(teacher || student)."""

    config: SoftConfig

    def lost(self, student: Predicted, teacher: Shares) -> Tensor:
        return student.divergence_sum(teacher, self.config.temperature)


class Hard(OutputTerm):
    """The loss against the teacher's best guess."""

    config: HardConfig

    def lost(self, student: Predicted, teacher: Shares) -> Tensor:
        return student.hard_loss_sum(teacher.best())
