"""What a tuning method is: it edits a built learner, and answers for what learns in it from then on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from lmtool.learners.base import BaseLearner, decayed_groups
from lmtool.learners.exits import is_exit
from lmtool.models.base import Backbone
from lmtool.types import ParameterGroup, part_of


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
