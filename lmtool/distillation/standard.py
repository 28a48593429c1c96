"""distill=standard: a student that learns from one or several frozen teachers.

Hinton, Vinyals and Dean 2015, "Distilling the Knowledge in a Neural Network".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from torch import Tensor

from lmtool.config.base import JsonObject
from lmtool.config.registry import build
from lmtool.distillation.configs.base import DROP_INITIALIZATION, LayerMap, initial_layers
from lmtool.distillation.configs.modes import StandardConfig
from lmtool.distillation.distilled import Distilled
from lmtool.distillation.output_terms import Term
from lmtool.distillation.recording import LearnerPair, StudentData, Teacher, record
from lmtool.distillation.teachers import TeacherEnsemble
from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner
from lmtool.learners.mixture import Mixture
from lmtool.nn.configs import Side
from lmtool.nn.stack import Stack, Tap, Taps
from lmtool.types import Batch, StepOutput, part_of
from lmtool.weights.assemble import load_into


def start_from(student: BaseLearner, teacher: BaseLearner, origin: str, layers: Mapping[Side, tuple[int, ...]]) -> str:
    """Initializes a student with a teacher's embeddings, selected layers, final norms, and heads of the same name and
    shape. Parameters that only the student has (segment embeddings, adapters) keep their initial values. Returns a
    description for the first screen. Raises UserError if the layers of the two models have different types, or if a
    tuning method added parameters to the teacher.

    layers: for each stack, named by the side of the batch that it reads, the teacher layer to copy to each student
    layer, counted from 1. origin: the teacher's checkpoint, for messages.
    """
    if teacher.added_names:
        raise UserError(
            f"distill.initialize cannot copy the parameters that a tuning method added to distill.teacher={origin}",
            f"export it, which merges them, and set distill.teacher= to the exported folder; or {DROP_INITIALIZATION}",
        )
    source_tensors = teacher.state_dict()
    tensors = {name: tensor for name, tensor in student.state_dict().items() if part_of(name) == "backbone"}
    sources = {name: name for name in tensors}
    for prefix, source_prefix in _layer_prefixes(student, teacher, layers):
        sources |= {name: source_prefix + name.removeprefix(prefix) for name in tensors if name.startswith(prefix)}
    tensors |= {name: source_tensors[source] for name, source in sources.items() if source in source_tensors}
    tensors |= {name: tensor for name, tensor in source_tensors.items() if name.startswith("heads.")}
    report = load_into(student, tensors, origin)
    copied_layers = [
        ", ".join(f"{layer} = {source}" for layer, source in enumerate(numbers, 1)) for numbers in layers.values()
    ]
    heads = ", ".join(name for name in report.loaded if name != "backbone")
    return f"embeddings; layers {'; '.join(copied_layers)}" + (f"; {heads}" if heads else "")


def _layer_prefixes(
    student: BaseLearner, teacher: BaseLearner, layers: Mapping[Side, tuple[int, ...]]
) -> Iterator[tuple[str, str]]:
    stacks = [
        {module.side: (name, module) for name, module in learner.named_modules() if isinstance(module, Stack)}
        for learner in (student, teacher)
    ]
    for side, numbers in layers.items():
        (name, stack), (source_name, source_stack) = (by_side[side] for by_side in stacks)
        source_layers = list(source_stack.applied_layers())
        for layer, source in zip(
            stack.applied_layers(), (source_layers[number - 1] for number in numbers), strict=True
        ):
            if type(layer) is not type(source):
                raise UserError(
                    f"distill.initialize: the student, model={student.backbone.config.name}, has a different kind of "
                    f"layer than its teacher, model={teacher.backbone.config.name}",
                    DROP_INITIALIZATION,
                )
            index, source_index = list(stack.layers).index(layer), list(source_stack.layers).index(source)
            yield f"{name}.layers.{index}.", f"{source_name}.layers.{source_index}."


class Standard(Distilled):
    """Trains a student on the weighted sum of its own loss and of the distillation terms."""

    config: StandardConfig

    def __init__(self, config: StandardConfig, student: BaseLearner, teachers: Sequence[Teacher]):
        super().__init__(config, student)
        # A file of labels is a teacher without a network of its own: its learner is the student.
        self._teachers = tuple(teacher for teacher in teachers if teacher.learner is not student)
        self.teacher = teachers[0]
        if len(teachers) > 1:
            self.teacher = TeacherEnsemble(
                self.teacher.learner,
                self.teacher.precision,
                self.teacher.origin,
                members=teachers,
                weights=config.weight_by_teacher,
                average=config.average,
            )
        self._require_common_teacher()
        self.initialization = self._initialize_student()
        self.layers: LayerMap | None = None
        if config.compares_layers:
            self.layers = config.layer_map(student.backbone.config, self.teacher.learner.backbone.config)
        every_token = student.predict_every_token() if config.every_token else {}
        if every_token:
            self.teacher.predict_every_token()
        pair = LearnerPair(student, self.teacher, self.layers, every_token)
        for name, section in config.terms.items():
            self.distill[name] = build(section, pair)
        self.loss_weights = {term: config.gold * weight for term, weight in student.loss_weights.items()}
        for name, term in self.terms.items():
            for part, scale in term.scales(student.loss_weights).items():
                self.loss_weights[self._loss_name(name, part)] = term.config.weight * scale

    def _initialize_student(self) -> str | None:
        """In a resumed run, the weights of the checkpoint replace the copied ones afterwards."""
        if self.config.starts_from_teacher and not self.teacher.reads_batches:
            raise UserError(
                f"distill.initialize cannot copy the embeddings of distill.teacher={self.teacher.origin}, because the "
                "teacher's tokenizer differs from the student's",
                f"{DROP_INITIALIZATION}, or tokenizer=auto",
            )
        learner = self.teacher.learner
        if learner is self.student:
            return None
        layers = initial_layers(self.config.initialize, self.student.backbone.config, learner.backbone.config)
        return start_from(self.student, learner, self.teacher.origin, layers) if layers else None

    @property
    def teachers(self) -> Sequence[Teacher]:
        return self._teachers

    def _require_common_teacher(self) -> None:
        members = _members_of(self.student)
        untaught = [name for name in members if name not in _members_of(self.teacher.learner)]
        names = [name for name, term in self.config.terms.items() if not term.supports_average]
        if names and (len(self.teachers) > 1 or untaught):
            raise UserError(
                f"distill.terms.{names[0]} needs a single teacher trained for everything that the student learns",
                f"set distill.terms.{names[0]}=null, or use such a teacher; the terms soft and hard learn from several",
            )

    def prepare(self, student: StudentData) -> JsonObject:
        description = super().prepare(student) if self._teachers else self.teacher.prepare(student)
        for term in self.terms.values():
            description |= term.prepare(student)
        return description

    @property
    def terms(self) -> dict[str, Term]:
        """The distillation terms by name."""
        return {name: cast(Term, term) for name, term in self.distill.items()}

    def _loss_name(self, name: str, part: str) -> str:
        """Returns "soft_mlm", or "soft" if there is one part."""
        return name if not part or len(self.student.loss_weights) == 1 else f"{name}_{part}"

    def counts(self, batch: Batch) -> dict[str, float]:
        counts = self.student.counts(batch)
        for name, term in self.terms.items():
            counts |= {self._loss_name(name, part): count for part, count in term.counts(batch).items()}
        return counts

    def forward(self, batch: Batch, step: int) -> StepOutput:
        terms = self.terms
        if not terms:
            return StepOutput(self.student(batch, step).sums, self.loss_weights)
        teacher = self.teacher.predict(batch, _combine_taps([term.tap(teacher=True) for term in terms.values()]))
        student_tap = _combine_taps([term.tap(teacher=False) for term in terms.values()])
        student = record(self.student, batch, step, student_tap, losses=self.config.gold > 0)
        sums: dict[str, Tensor] = {} if student.output is None else dict(student.output.sums)
        for name, term in terms.items():
            sums |= {self._loss_name(name, part): total for part, total in term.sums(student, teacher, step).items()}
        return StepOutput(sums, self.loss_weights)

    def aligned_layers(self, teacher: Teacher) -> LayerMap | str:
        if set(_members_of(self.student)) - set(_members_of(teacher.learner)):
            return "the teacher was trained for only some members of the student's mixture"
        return self.layers if self.layers is not None else super().aligned_layers(teacher)

    def metadata(self) -> JsonObject:
        layers = {} if self.layers is None else {"layers": self.layers.screen_text()}
        untaught = [term for term in self.student.loss_weights if term not in self.teacher.terms_taught]
        gold_only = {"gold only": ", ".join(untaught)} if untaught else {}
        started_from = {} if self.initialization is None else {"started from": self.initialization}
        heads = {} if self.config.teaches_heads else {"heads": "are not trained, so metrics mean nothing"}
        origins = ", ".join(teacher.origin for teacher in self._teachers or (self.teacher,))
        return {"teacher": origins, **gold_only, **layers, **started_from, **heads}


def _members_of(learner: BaseLearner) -> list[str]:
    return [name for name, _ in learner.named_members()] if isinstance(learner, Mixture) else []


def _combine_taps(taps: Sequence[Tap | None]) -> Tap | None:
    active = [tap for tap in taps if tap is not None]
    return Taps(*active) if active else None
