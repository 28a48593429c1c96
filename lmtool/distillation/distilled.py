"""The learner of a distilled run, wrapped around a student that is the same as without a teacher.

The loop trains the wrapper; everything else, such as the evaluator, uses the student. In a checkpoint the student's
tensors have their usual names; modules trained only for distillation are `distill.`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn

from lmtool.config.saved import JsonObject
from lmtool.distillation.configs import DistillConfig, LayerMap, aligned_below_last, layer_map
from lmtool.distillation.interchange import Site, agreement, unmeasured, without_interchange
from lmtool.distillation.recording import StudentData, Teacher
from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner, decayed_groups
from lmtool.training.precision import Precision
from lmtool.types import Batch, ParameterGroup, StepOutput

_STUDENT = "student."


def none(config: DistillConfig, student: BaseLearner, *_: object) -> BaseLearner:
    """distill=none: the student itself."""
    return student


class Distilled(nn.Module, ABC):
    """The base of every mode. distill: modules trained besides the student, by names of the mode."""

    def __init__(self, config: DistillConfig, student: BaseLearner):
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
        """The student's, unless further learners are trained."""
        return self.student.penalties()

    def parameter_groups(self) -> list[ParameterGroup]:
        """The student's, and those of modules trained besides it."""
        added = (renamed(group, "distill_", "distill.") for group in decayed_groups(self.distill))
        return [*self.student.parameter_groups(), *added]

    def on_step(self, step: int) -> None:
        """Called before the forward of each optimizer step, counted from 1."""
        self.student.on_step(step)

    # The run's interface.

    @property
    def teachers(self) -> Sequence[Teacher]:
        """The frozen teachers in this process."""
        return ()

    def extra_models(self) -> Mapping[str, BaseLearner]:
        """By name, further trained learners, evaluated at the end like the student."""
        return {}

    def begin(self, student: StudentData) -> JsonObject:
        """Called before training. Returns a description of the preparation for the first screen."""
        description: JsonObject = {}
        for teacher in self.teachers:
            description |= teacher.begin(student)
        return description

    def metadata(self) -> JsonObject:
        """Metadata for the first screen."""
        return {}

    def results(self, batches: Iterable[Batch], precision: Precision) -> JsonObject:
        """The fields of result.json: the student's agreement with its teacher. batches: a sample of the held-out data.
        precision: the run's."""
        if len(self.teachers) != 1:
            return unmeasured(f"there are {len(self.teachers)} teachers" if self.teachers else "there is no teacher")
        (teacher,) = self.teachers
        if not teacher.reads_batches:
            return unmeasured("the teacher cannot read the student's batches")
        layers = self.aligned(teacher)
        sites = [] if isinstance(layers, str) else aligned_below_last(layers, self.student.backbone.config)
        # The teacher itself, even if training used stored outputs.
        network = Teacher(teacher.learner, teacher.precision, teacher.origin)
        fields = agreement(self.student, network, [Site(*site) for site in sites], batches, precision)
        return {**fields, **without_interchange(layers)} if isinstance(layers, str) and fields["fidelity"] else fields

    def aligned(self, teacher: Teacher) -> LayerMap | str:
        """The map of aligned layers of the student and a teacher, or the reason why there is none."""
        try:
            return layer_map("uniform", None, self.student.backbone.config, teacher.learner.backbone.config)
        except UserError as error:
            return error.message

    def named_parameters(  # the names in a checkpoint
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            yield name.removeprefix(_STUDENT), parameter


def renamed(group: ParameterGroup, title: str, prefix: str) -> ParameterGroup:
    """A parameter group with a title before its name, and a prefix before the names of its parameters."""
    parameters = [(prefix + name, parameter) for name, parameter in group.parameters]
    return replace(group, name=title + group.name, parameters=parameters)


def _without_student(module: nn.Module, state: dict[str, Tensor], prefix: str, metadata: object) -> None:
    """Maps names to checkpoint names."""
    for name in [name for name in state if name.startswith(prefix + _STUDENT)]:
        state[prefix + name.removeprefix(prefix + _STUDENT)] = state.pop(name)


def _with_student(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    """The inverse map."""
    for name in [name for name in state if name.startswith(prefix)]:
        local_name = name.removeprefix(prefix)
        if not local_name.startswith("distill."):
            state[prefix + _STUDENT + local_name] = state.pop(name)
