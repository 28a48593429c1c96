"""What a tuning method is: it edits a built learner, and answers for what learns in it from then on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Any

from torch import Tensor

from lmtool.learners.base import BaseLearner, decayed_groups
from lmtool.types import ParameterGroup


class TuningMethod(ABC):
    """The base of every method. It may freeze parameters, add modules under names of their own (names that are there
    are never changed), add penalties, and act on each step."""

    def __init__(self, config: Any):
        self.config = config

    @abstractmethod
    def edit(self, learner: BaseLearner, seed: int, new: Collection[str] | None = None) -> None:
        """Edit a learner whose base weights are in.

        seed: of the run, for what is added. new: the parts that did not come from the checkpoint ("heads.pooler",
        ...); None: not known, and every head is taken to be new.
        """

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
        return {name for name, parameter in learner.named_parameters() if parameter.requires_grad}
