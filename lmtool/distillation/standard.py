"""A student of frozen teachers (Hinton, Vinyals and Dean 2015, "Distilling the Knowledge in a Neural Network")."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from torch import Tensor

from lmtool.config.tables import build
from lmtool.distillation.configs import LayerMap, StandardConfig
from lmtool.distillation.configs.modes import taken_layers
from lmtool.distillation.distilled import Distilled, gold_weights
from lmtool.distillation.seen import RecordedOutputs, StudentData, Teacher, see
from lmtool.distillation.terms.outputs import Term
from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner
from lmtool.learners.mixture import Mixture
from lmtool.models.heads.predicted import Averaged, TargetProbabilities
from lmtool.nn.configs import Side
from lmtool.nn.stack import Stack, Tap, Taps
from lmtool.types import Batch, StepOutput, part_of
from lmtool.weights.assemble import load_into

_NONE = "set distill.initialize=none"


def start_from(student: BaseLearner, teacher: BaseLearner, origin: str, taken: Mapping[Side, tuple[int, ...]]) -> str:
    """Copies a teacher's embeddings, the selected layers of its stacks, their final norms, and heads of equal names and
    shapes.

    Parameters that only the student has (a segment table, adapters) keep their initial values.

    Args:
        student: The learner to initialize.
        teacher: The trained learner.
        origin: The teacher's checkpoint, for messages.
        taken: By side, the teacher's layer for each of the student's, counted from 1.

    Returns:
        A description for the first screen.

    Raises:
        UserError: If the layers are of different kinds, or the teacher was tuned by added parameters, which cannot be
            copied.
    """
    if teacher.added:
        raise UserError(
            f"distill.initialize copies layers, and distill.teacher={origin} has added tuning parameters",
            f"export it, which merges them, and give the folder as distill.teacher=; or {_NONE}",
        )
    student_value, teacher_value = student.state_dict(), teacher.state_dict()
    tensors = {name: tensor for name, tensor in student_value.items() if part_of(name) == "backbone"}
    sources = {name: name for name in tensors}
    for first, second in _layers(student, teacher, taken):
        sources |= {name: second + name.removeprefix(first) for name in tensors if name.startswith(first)}
    for name, source in sources.items():
        if source in teacher_value:
            tensors[name] = teacher_value[source]
    tensors |= {name: tensor for name, tensor in teacher_value.items() if name.startswith("heads.")}
    report = load_into(student, tensors, origin)
    layers = [
        ", ".join(f"{student_value} = {teacher_value}" for student_value, teacher_value in enumerate(numbers, 1))
        for numbers in taken.values()
    ]
    heads = ", ".join(name for name in report.loaded if name != "backbone")
    return f"embeddings; layers {'; '.join(layers)}" + (f"; {heads}" if heads else "")


def _layers(
    student: BaseLearner, teacher: BaseLearner, taken: Mapping[Side, tuple[int, ...]]
) -> Iterator[tuple[str, str]]:
    """Name prefixes of the student's layers, each with that of the teacher's layer to copy."""
    stacks = [
        {module.side: (name, module) for name, module in learner.named_modules() if isinstance(module, Stack)}
        for learner in (student, teacher)
    ]
    for side, numbers in taken.items():
        (first, student_value), (second, teacher_value) = (stacks_of[side] for stacks_of in stacks)
        pairs = zip(student_value.depth(), (list(teacher_value.depth())[number - 1] for number in numbers), strict=True)
        for layer, source in pairs:
            if type(layer) is not type(source):
                raise UserError(
                    f"distill.initialize: the student, model={student.backbone.config.name}, has a different kind of "
                    f"layer than its teacher, model={teacher.backbone.config.name}",
                    _NONE,
                )
            places = [
                list(stack.layers).index(module) for stack, module in ((student_value, layer), (teacher_value, source))
            ]
            yield f"{first}.layers.{places[0]}.", f"{second}.layers.{places[1]}."


# A teacher ensemble: predictions of the same targets are averaged; each teacher may know different members of a
# mixture.


@dataclass(kw_only=True)
class Panel(Teacher):
    """members: the teachers; learner, precision and origin are the first one's. weights: of each in the average, by
    origin. average: what is averaged."""

    members: Sequence[Teacher]
    weights: Mapping[str, float]
    average: Literal["probabilities", "logits"]

    @classmethod
    def of(cls, members: Sequence[Teacher], weights: Mapping[str, float], average: Any) -> Panel:
        """An ensemble of at least one teacher."""
        first = members[0]
        return cls(first.learner, first.precision, first.origin, members=members, weights=weights, average=average)

    @property
    def teaches(self) -> frozenset[str]:
        return frozenset().union(*(teacher.teaches for teacher in self.members))

    def see(self, batch: Batch, states: Tap | None = None) -> RecordedOutputs:
        """states: not recorded, since they would belong to several teachers."""
        seen = [(self.weights[teacher.origin], teacher.see(batch)) for teacher in self.members]
        predicted = dict(self._joined(seen))
        return RecordedOutputs(self.learner, batch, predicted)

    def _joined(self, seen: Sequence[tuple[float, RecordedOutputs]]) -> Iterator[tuple[str, TargetProbabilities]]:
        for term in dict.fromkeys(term for _, each in seen for term in each.predicted):
            parts = [(weight, each.predicted[term]) for weight, each in seen if term in each.predicted]
            yield term, parts[0][1] if len(parts) == 1 else Averaged.of(parts, self.average)


class Standard(Distilled):
    """The weighted sum of the student's own loss and the terms of its teacher."""

    config: StandardConfig

    def __init__(self, config: StandardConfig, student: BaseLearner, teachers: Sequence[Teacher]):
        super().__init__(config, student)
        # Labels of a file have no network.
        self._teachers = tuple(teacher for teacher in teachers if teacher.learner is not student)
        self.teacher = teachers[0] if len(teachers) == 1 else Panel.of(teachers, config.shares(), config.average)
        self._require_one_of_all()
        self.started = self._start()
        self.layers: LayerMap | None = None
        if config.compares_layers:
            self.layers = config.layer_map(student.backbone.config, self.teacher.learner.backbone.config)
        for name, section in config.terms.items():
            self.distill[name] = build(section, student, self.teacher, self.layers)
        self.weights = gold_weights(student.weights, config.gold)
        for name, term in self.terms():
            for part, scale in term.scales(student.weights).items():
                self.weights[self._title(name, part)] = term.config.weight * scale

    def _start(self) -> str | None:
        """Copies layers of the teacher and returns their description. A resumed run then loads its own weights.
        UserError if the vocabularies differ."""
        if self.config.starts_from_teacher and not self.teacher.reads_batches:
            raise UserError(
                f"distill.initialize: distill.teacher={self.teacher.origin} has another tokenizer than the student, "
                "so that its embeddings belong to other tokens",
                "set distill.initialize=none, or tokenizer=auto",
            )
        learner = self.teacher.learner
        if learner is self.student:
            return None
        taken = taken_layers(self.config.initialize, self.student.backbone.config, learner.backbone.config)
        return start_from(self.student, learner, self.teacher.origin, taken) if taken else None

    @property
    def teachers(self) -> Sequence[Teacher]:
        return self._teachers

    def _require_one_of_all(self) -> None:
        """UserError if states are compared, but no single teacher reads everything that the student reads."""
        members = _members_of(self.student)
        untaught = [name for name in members if name not in _members_of(self.teacher.learner)]
        names = [name for name, term in self.config.terms.items() if not term.averages]
        if names and (len(self.teachers) > 1 or untaught):
            raise UserError(
                f"distill.terms.{names[0]} needs one teacher for everything that the student learns",
                f"set distill.terms.{names[0]}=null, or such a teacher; soft and hard learn from several",
            )

    def begin(self, reading: StudentData) -> dict[str, Any]:
        description = super().begin(reading) if self._teachers else self.teacher.begin(reading)
        for _, term in self.terms():
            description |= term.begin(reading)
        return description

    def terms(self) -> Iterator[tuple[str, Term]]:
        """The terms by their names."""
        yield from ((name, cast(Term, term)) for name, term in self.distill.items())

    def _title(self, name: str, part: str) -> str:
        """The name of a term's part: the term itself if the student has one term."""
        return name if not part or len(self.student.weights) == 1 else f"{name}_{part}"

    def counts(self, batch: Batch) -> dict[str, float]:
        counts = self.student.counts(batch)
        for name, term in self.terms():
            counts |= {self._title(name, part): count for part, count in term.counts(batch).items()}
        return counts

    def forward(self, batch: Batch, step: int) -> StepOutput:
        terms = dict(self.terms())
        if not terms:
            return StepOutput(self.student(batch, step).sums, self.weights)
        teacher = self.teacher.see(batch, _joined([term.tap(teacher=True) for term in terms.values()]))
        student_tap = _joined([term.tap(teacher=False) for term in terms.values()])
        student = see(self.student, batch, step, student_tap, losses=self.config.gold > 0)
        sums: dict[str, Tensor] = {} if student.output is None else dict(student.output.sums)
        for name, term in terms.items():
            sums |= {self._title(name, part): total for part, total in term.sums(student, teacher, step).items()}
        return StepOutput(sums, self.weights)

    def aligned(self, teacher: Teacher) -> LayerMap | str:
        if set(_members_of(self.student)) - set(_members_of(teacher.learner)):
            return "the teacher reads the texts of only some members"
        return self.layers if self.layers is not None else super().aligned(teacher)

    def metadata(self) -> dict[str, Any]:
        layers = {} if self.layers is None else {"layers": self.layers.words()}
        untaught = [term for term in self.student.weights if term not in self.teacher.teaches]
        gold_only = {"gold alone": ", ".join(untaught)} if untaught else {}
        started = {} if self.started is None else {"started from": self.started}
        heads = {} if self.config.teaches_heads else {"heads": "are not trained, so that metrics mean nothing"}
        origins = ", ".join(teacher.origin for teacher in self._teachers or (self.teacher,))
        return {"teacher": origins, **gold_only, **layers, **started, **heads}


def _members_of(learner: BaseLearner) -> list[str]:
    """The members of a mixture, or the learner itself."""
    return [name for name, _ in learner.named()] if isinstance(learner, Mixture) else []


def _joined(taps: Sequence[Tap | None]) -> Tap | None:
    active = [tap for tap in taps if tap is not None]
    return Taps(*active) if active else None
