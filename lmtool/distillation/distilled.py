"""The base class of distillation modes, which wrap the student. The student is the same as without distillation.

The training loop trains the wrapper, whose loss includes the distillation terms. Everything else, such as evaluation,
uses the student. In a checkpoint, the student's tensors have their usual names, and the names of modules that exist
only for distillation, such as projections, start with `distill.`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn

from lmtool.config.base import JsonObject
from lmtool.distillation.configs.base import DistillConfig, LayerMap, layer_map
from lmtool.distillation.configs.terms import aligned_below_last
from lmtool.distillation.interchange import Site, agreement, unmeasured, without_interchange
from lmtool.distillation.recording import StudentData, Teacher
from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner, decayed_groups
from lmtool.training.precision import Precision
from lmtool.types import Batch, ParameterGroup, StepOutput

_STUDENT = "student."


def none(config: DistillConfig, student: BaseLearner, *_: object) -> BaseLearner:
    """The builder of distill=none. Returns the student unchanged."""
    return student


class Distilled(nn.Module, ABC):
    """The base of every distillation mode. student: the learner that the run trains and saves. distill: the mode's
    modules besides the student, such as peers or projections, under names that the mode chooses."""

    def __init__(self, config: DistillConfig, student: BaseLearner):
        super().__init__()
        self.config = config
        self.student = student
        self.distill = nn.ModuleDict()
        self.register_state_dict_post_hook(_without_student)
        self.register_load_state_dict_pre_hook(_with_student)

    # Methods that the training loop calls.

    @abstractmethod
    def counts(self, batch: Batch) -> dict[str, float]:
        """Returns the number of targets or comparisons of each loss term in a batch, without running a model."""

    @abstractmethod
    def forward(self, batch: Batch, step: int) -> StepOutput:
        """Returns the sums of the student's own loss terms and of the distillation terms over a batch."""

    def penalties(self) -> dict[str, Tensor]:
        """Returns the student's penalties. Modes that train further learners add the penalties of these learners."""
        return self.student.penalties()

    def parameter_groups(self) -> list[ParameterGroup]:
        """Returns the parameter groups of the student and of the modules that are trained besides the student."""
        groups = (with_prefixes(group, "distill_", "distill.") for group in decayed_groups(self.distill))
        return [*self.student.parameter_groups(), *groups]

    def on_step(self, step: int) -> None:
        """Called before the forward of each optimizer step, counted from 1."""
        self.student.on_step(step)

    # Methods that the rest of a run calls.

    @property
    def teachers(self) -> Sequence[Teacher]:
        """The frozen teachers whose networks are loaded; empty for modes without them."""
        return ()

    def extra_models(self) -> Mapping[str, BaseLearner]:
        """Returns further trained models by name, such as peers. They are evaluated at the end, like the student."""
        return {}

    def prepare(self, student: StudentData) -> JsonObject:
        """Prepares the teachers before training. Returns a description of the preparation for the first screen."""
        description: JsonObject = {}
        for teacher in self.teachers:
            description |= teacher.prepare(student)
        return description

    def metadata(self) -> JsonObject:
        """Returns a description of the mode for the first screen."""
        return {}

    def results(self, batches: Iterable[Batch], precision: Precision) -> JsonObject:
        """Measures the student's agreement with its teacher on a sample of the held-out data. Returns the fields of
        result.json."""
        if len(self.teachers) != 1:
            return unmeasured(f"there are {len(self.teachers)} teachers" if self.teachers else "there is no teacher")
        (teacher,) = self.teachers
        if not teacher.reads_batches:
            return unmeasured("the teacher cannot read the student's batches")
        layers = self.aligned_layers(teacher)
        sites = [] if isinstance(layers, str) else aligned_below_last(layers, self.student.backbone.config)
        # The teacher's network runs even if training used its stored outputs, which do not cover the held-out data.
        network = Teacher(teacher.learner, teacher.precision, teacher.origin)
        fields = agreement(self.student, network, [Site(*site) for site in sites], batches, precision)
        return {**fields, **without_interchange(layers)} if isinstance(layers, str) and fields["fidelity"] else fields

    def aligned_layers(self, teacher: Teacher) -> LayerMap | str:
        """Returns the layers of student and teacher that correspond to each other, or the reason why there are none."""
        try:
            return layer_map("uniform", None, self.student.backbone.config, teacher.learner.backbone.config)
        except UserError as error:
            return error.message

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters under their names in a checkpoint, where the student's names lack the prefix
        `student.`."""
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            yield name.removeprefix(_STUDENT), parameter


def with_prefixes(group: ParameterGroup, group_prefix: str, parameter_prefix: str) -> ParameterGroup:
    """Returns a parameter group with a prefix added to its name, and another to the names of its parameters."""
    parameters = [(parameter_prefix + name, parameter) for name, parameter in group.parameters]
    return replace(group, name=group_prefix + group.name, parameters=parameters)


def _without_student(module: nn.Module, state: dict[str, Tensor], prefix: str, metadata: object) -> None:
    for name in [name for name in state if name.startswith(prefix + _STUDENT)]:
        state[prefix + name.removeprefix(prefix + _STUDENT)] = state.pop(name)


def _with_student(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    for name in [name for name in state if name.startswith(prefix)]:
        local_name = name.removeprefix(prefix)
        if not local_name.startswith("distill."):
            state[prefix + _STUDENT + local_name] = state.pop(name)
