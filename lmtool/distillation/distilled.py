"""The learner of a distilled run, wrapped around a student that is the same as without a teacher.

The loop trains the wrapper; everything else, such as the evaluator, uses the student. In a checkpoint the student's
tensors have their usual names; modules trained only for distillation are `distill.`.
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
    """distill=none: the student itself."""
    return student


class Distilled(nn.Module, ABC):
    """The base of every mode. distill: modules trained besides the student, by names of the mode."""

    def __init__(self, config: Any, student: BaseLearner):
        super().__init__()
        self.config = config
        self.student = student
        self.distill = nn.ModuleDict()
        self.register_state_dict_post_hook(_without_student)
        self.register_load_state_dict_pre_hook(_with_student)

    # The training loop's interface.

    @abstractmethod
    def counts(self, batch: Batch) -> dict[str, float]:
        """The number of predictions or comparisons of each term in this batch, without a forward."""

    @abstractmethod
    def forward(self, batch: Batch, step: int) -> StepOutput:
        """The sums of the student's own terms and of the distillation terms."""

    def penalties(self) -> dict[str, Tensor]:
        """The student's."""
        return self.student.penalties()

    def parameter_groups(self) -> list[ParameterGroup]:
        """The student's, and those of modules trained besides it."""
        extra_models = [
            ParameterGroup(
                f"distill_{group.name}",
                [(f"distill.{name}", parameter) for name, parameter in group.parameters],
                group.learning_rate_scale,
                group.weight_decay_scale,
            )
            for group in decayed_groups(self.distill)
        ]
        return [*self.student.parameter_groups(), *extra_models]

    def on_step(self, step: int) -> None:
        """The student's."""
        self.student.on_step(step)

    # The run's interface.

    @property
    def teachers(self) -> Sequence[Teacher]:
        """The frozen teachers in this process."""
        return ()

    def extra_models(self) -> Mapping[str, BaseLearner]:
        """By name, further trained learners, evaluated at the end like the student."""
        return {}

    def begin(self, reading: StudentData) -> dict[str, Any]:
        """Called before training. Returns a description of the preparation for the first screen."""
        description: dict[str, Any] = {}
        for teacher in self.teachers:
            description |= teacher.begin(reading)
        return description

    def metadata(self) -> dict[str, Any]:
        """Metadata for the first screen."""
        return {}

    def results(self, batches: Iterable[Batch], precision: Precision) -> dict[str, Any]:
        """The fields of result.json: the student's agreement with its teacher. batches: a sample of the held-out data.
        precision: the run's."""
        if len(self.teachers) != 1:
            return unknown(f"there are {len(self.teachers)} teachers" if self.teachers else "there is no teacher")
        (teacher,) = self.teachers
        if not teacher.reads_batches:
            return unknown("the teacher cannot read the student's batches")
        layers = self.aligned(teacher)
        sites = [] if isinstance(layers, str) else below_the_last(layers, self.student.backbone.config)
        # The teacher itself, even if training used stored outputs.
        network = Teacher(teacher.learner, teacher.precision, teacher.origin)
        description = agreement(self.student, network, [Site(*site) for site in sites], batches, precision)
        return (
            {**description, **without_interchange(layers)}
            if isinstance(layers, str) and description["fidelity"]
            else description
        )

    def aligned(self, teacher: Teacher) -> LayerMap | str:
        """Which layers of the student and a teacher are aligned, and the reason if none are."""
        try:
            return layer_map("uniform", None, self.student.backbone.config, teacher.learner.backbone.config)
        except UserError as error:
            return error.message

    def named_parameters(  # the names in a checkpoint
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            yield name.removeprefix(_STUDENT), parameter


def gold_weights(weights: Mapping[str, float], gold: float) -> dict[str, float]:
    """The weights of the student's own terms, scaled by `gold`."""
    return {term: gold * weight for term, weight in weights.items()}


def _without_student(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Maps names to checkpoint names."""
    for name in [name for name in state if name.startswith(prefix + _STUDENT)]:
        state[prefix + name.removeprefix(prefix + _STUDENT)] = state.pop(name)


def _with_student(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """The inverse map."""
    for name in [name for name in state if name.startswith(prefix)]:
        local_name = name.removeprefix(prefix)
        if not local_name.startswith("distill."):
            state[prefix + _STUDENT + local_name] = state.pop(name)
