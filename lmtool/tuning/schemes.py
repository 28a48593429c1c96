"""What a scheme is: beside the tuning method it says when parameters learn, and what holds them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor

from lmtool.learners.base import BaseLearner
from lmtool.types import ParameterGroup


class Scheme:
    """The base of every scheme; this one does nothing. All that it does in a step is a function of the step's number
    and of weights, so that a run resumes."""

    def __init__(self, config: Any):
        self.config = config

    def attach(self, learner: BaseLearner, new: Collection[str] | None) -> None:
        """Called behind the method's edit, where the weights are those that the run starts from. new: the parts that
        did not come from a checkpoint; None: not known, and the learner is not trained."""

    def begin(self, steps_in_epoch: Callable[[int], int]) -> None:
        """Called before training. steps_in_epoch: optimizer steps of a pass over the training examples, by its number
        from 0."""

    def first_step(self, name: str, steps: int) -> int | None:
        """The step from which a parameter learns; None where it does not within these many steps."""
        return 1

    def groups(self, groups: list[ParameterGroup]) -> list[ParameterGroup]:
        """What learns, from what the method says of it."""
        return groups

    def on_step(self, learner: BaseLearner, step: int) -> None:
        """Called before the forward of each optimizer step, with its number from 1."""

    def penalties(self, learner: BaseLearner) -> dict[str, Tensor]:
        """Terms added once a step."""
        return {}
