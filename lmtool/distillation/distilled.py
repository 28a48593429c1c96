"""The learner of a distilled run: around a student, which stays the learner that it is without a teacher.

The loop trains this one; everything else, the evaluator above all, knows the student. In a checkpoint the student's
tensors have the names that they have without a teacher; what learns beside it, and is in no model that is used later,
is `distill.`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from lmtool.distillation.agreement import agreement, unknown, without_interchange
from lmtool.distillation.configs import LayerMap, below_the_last, layer_map
from lmtool.distillation.interchange import Site
from lmtool.distillation.seen import StudentData, Teacher
from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner, decayed_groups
from lmtool.training.precision import Precision
from lmtool.types import Batch, ParameterGroup, StepOutput

_STUDENT = "student."


def none(config: Any, student: BaseLearner, *_: Any) -> BaseLearner:
    """distill=none: the student learns alone."""
    return student


class Distilled(nn.Module, ABC):
    """The base of every mode. distill: what learns beside the student, by names of the mode's own."""

    def __init__(self, config: Any, student: BaseLearner):
        super().__init__()
        self.config = config
        self.student = student
        self.distill = nn.ModuleDict()
        self.register_state_dict_post_hook(_without_student)
        self.register_load_state_dict_pre_hook(_with_student)

    # What the loop asks.

    @abstractmethod
    def counts(self, batch: Batch) -> dict[str, float]:
        """How much each term predicts or compares in this batch, known without a forward."""

    @abstractmethod
    def forward(self, batch: Batch, step: int) -> StepOutput:
        """The sums of the student's own terms and of those of the distillation."""

    def penalties(self) -> dict[str, Tensor]:
        """The student's."""
        return self.student.penalties()

    def parameter_groups(self) -> list[ParameterGroup]:
        """The student's, and what learns beside it."""
        beside = [
            ParameterGroup(
                f"distill_{group.name}",
                [(f"distill.{name}", parameter) for name, parameter in group.parameters],
                group.learning_rate_scale,
                group.weight_decay_scale,
            )
            for group in decayed_groups(self.distill)
        ]
        return [*self.student.parameter_groups(), *beside]

    def on_step(self, step: int) -> None:
        """The student's."""
        self.student.on_step(step)

    # What the run asks.

    @property
    def teachers(self) -> Sequence[Teacher]:
        """The frozen models that the student learns from, in this process."""
        return ()

    def beside(self) -> Mapping[str, BaseLearner]:
        """By what they are called, further learners that this run trains, scored at its end as the student is."""
        return {}

    def begin(self, reading: StudentData) -> dict[str, Any]:
        """Called before training. Returns what the first screen says of what was done for it."""
        said: dict[str, Any] = {}
        for teacher in self.teachers:
            said |= teacher.begin(reading)
        return said

    def metadata(self) -> dict[str, Any]:
        """What the first screen says of it."""
        return {}

    def results(self, batches: Iterable[Batch], precision: Precision) -> dict[str, Any]:
        """What result.json says of it at the end: how far the student agrees with its teacher. batches: a sample of the
        held-out data. precision: the run's."""
        if len(self.teachers) != 1:
            return unknown(f"{len(self.teachers)} teachers are at hand" if self.teachers else "no teacher is at hand")
        (teacher,) = self.teachers
        if not teacher.reads_batches:
            return unknown("the teacher cannot read the student's batches")
        layers = self.aligned(teacher)
        sites = [] if isinstance(layers, str) else below_the_last(layers, self.student.backbone.config)
        # Whatever it answered from in training.
        network = Teacher(teacher.learner, teacher.precision, teacher.origin)
        said = agreement(self.student, network, [Site(*site) for site in sites], batches, precision)
        return {**said, **without_interchange(layers)} if isinstance(layers, str) and said["fidelity"] else said

    def aligned(self, teacher: Teacher) -> LayerMap | str:
        """Which layer of the student stands for which of a teacher's; why none does."""
        try:
            return layer_map("uniform", None, self.student.backbone.config, teacher.learner.backbone.config)
        except UserError as error:
            return error.message

    def named_parameters(  # the names of a checkpoint
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            yield name.removeprefix(_STUDENT), parameter


def own_weights(weights: Mapping[str, float], gold: float) -> dict[str, float]:
    """The weights of the student's own terms beside a distillation. gold: of them all."""
    return {term: gold * weight for term, weight in weights.items()}


def _without_student(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """The map to checkpoint names."""
    for name in [name for name in state if name.startswith(prefix + _STUDENT)]:
        state[prefix + name.removeprefix(prefix + _STUDENT)] = state.pop(name)


def _with_student(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """The other way."""
    for name in [name for name in state if name.startswith(prefix)]:
        own = name.removeprefix(prefix)
        if not own.startswith("distill."):
            state[prefix + _STUDENT + own] = state.pop(name)
