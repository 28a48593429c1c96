"""What a term of distillation is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lmtool.distillation.configs import LayerMap
from lmtool.distillation.seen import Reading, Seen, Teacher
from lmtool.learners.base import BaseLearner
from lmtool.nn.stack import Tap
from lmtool.types import Batch, Target


class Term(nn.Module, ABC):
    """The base of every term. Its parameters learn with the student's, and are in no model that is used later.

    layers: the teacher's layer by the student's, for a term that compares layers.
    """

    def __init__(self, config: Any, student: BaseLearner, teacher: Teacher | None, layers: LayerMap | None = None):
        super().__init__()
        self.config = config

    def begin(self, reading: Reading) -> dict[str, Any]:
        """Called before training. Returns what the first screen says of it. UserError where it has nothing to learn of
        what the run reads."""
        return {}

    def tap(self, teacher: bool) -> Tap | None:
        """What must see the states of the student's next forward, or of the teacher's; None for nothing."""
        return None

    @abstractmethod
    def counts(self, batch: Batch) -> dict[str, float]:
        """By part, how much it compares in a batch, known without a forward. A term of one part calls it ""."""

    @abstractmethod
    def sums(self, student: Seen, teacher: Seen, step: int) -> dict[str, Tensor]:
        """By part, the sum of what is lost."""

    def scales(self, weights: Mapping[str, float]) -> dict[str, float]:
        """By part, its weight within the term. weights: of the student's own terms."""
        return {"": 1.0}


def targets_of(target: Target, batch: Batch) -> int:
    """How many targets one of a batch has."""
    if target.labels is not None:
        return target.labels.numel()
    return len(batch.inputs.tokens) if target.at is None else len(target.at)
