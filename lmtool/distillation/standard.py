"""A student of frozen teachers (Hinton, Vinyals and Dean 2015, "Distilling the Knowledge in a Neural Network")."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

from torch import Tensor

from lmtool.config.tables import build
from lmtool.distillation.configs import LayerMap, StandardConfig
from lmtool.distillation.configs.start import taken_layers
from lmtool.distillation.distilled import Distilled, own_weights
from lmtool.distillation.initialization import start_from
from lmtool.distillation.panel import Panel
from lmtool.distillation.seen import Reading, Teacher, see
from lmtool.distillation.terms.base import Term
from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner
from lmtool.learners.mixture import Mixture
from lmtool.nn.stack import Tap, Taps
from lmtool.types import Batch, StepOutput


class Standard(Distilled):
    """The weighted sum of the student's own loss and of terms of its teacher."""

    config: StandardConfig

    def __init__(self, config: StandardConfig, student: BaseLearner, teachers: Sequence[Teacher]):
        super().__init__(config, student)
        # Labels of a file are no network.
        self._teachers = tuple(teacher for teacher in teachers if teacher.learner is not student)
        self.teacher = teachers[0] if len(teachers) == 1 else Panel.of(teachers, config.shares(), config.average)
        self._require_one_of_all()
        self.started = self._start()
        self.layers: LayerMap | None = None
        if config.compares_layers:
            self.layers = config.layer_map(student.backbone.config, self.teacher.learner.backbone.config)
        for name, section in config.terms.items():
            self.distill[name] = build(section, student, self.teacher, self.layers)
        self.weights = own_weights(student.weights, config.gold)
        for name, term in self.terms():
            for part, scale in term.scales(student.weights).items():
                self.weights[self._title(name, part)] = term.config.weight * scale

    def _start(self) -> str | None:
        """Copy layers of the teacher. A run that resumes has weights of its own, which follow. Returns what was
        copied. UserError where its embeddings are of other tokens."""
        if self.config.starts_from_teacher and not self.teacher.reads_batches:
            raise UserError(
                f"distill.initialize: distill.teacher={self.teacher.origin} has another tokenizer than the student, "
                "whose embeddings would be those of other tokens",
                "give distill.initialize=none, or tokenizer=auto",
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
        """UserError where states are compared, and no single teacher reads all that the student reads."""
        members = _members_of(self.student)
        untaught = [name for name in members if name not in _members_of(self.teacher.learner)]
        names = [name for name, term in self.config.terms.items() if not term.averages]
        if names and (len(self.teachers) > 1 or untaught):
            raise UserError(
                f"distill.terms.{names[0]} needs one teacher of all that the student learns",
                f"give distill.terms.{names[0]}=null, or such a teacher; soft and hard learn from several",
            )

    def begin(self, reading: Reading) -> dict[str, Any]:
        said = super().begin(reading) if self._teachers else self.teacher.begin(reading)
        for _, term in self.terms():
            said |= term.begin(reading)
        return said

    def terms(self) -> Iterator[tuple[str, Term]]:
        """The terms by their names."""
        yield from ((name, cast(Term, term)) for name, term in self.distill.items())

    def _title(self, name: str, part: str) -> str:
        """What a part of a term is called: by the term alone, where the student has one term."""
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
            return "the teacher reads the texts of some members alone"
        return self.layers if self.layers is not None else super().aligned(teacher)

    def facts(self) -> dict[str, Any]:
        layers = {} if self.layers is None else {"layers": self.layers.words()}
        untaught = [term for term in self.student.weights if term not in self.teacher.teaches]
        alone = {"gold alone": ", ".join(untaught)} if untaught else {}
        started = {} if self.started is None else {"started from": self.started}
        heads = {} if self.config.teaches_heads else {"heads": "learn nothing, so that scores mean nothing"}
        origins = ", ".join(teacher.origin for teacher in self._teachers or (self.teacher,))
        return {"teacher": origins, **alone, **layers, **started, **heads}


def _members_of(learner: BaseLearner) -> list[str]:
    """What a mixture is made of."""
    return [name for name, _ in learner.named()] if isinstance(learner, Mixture) else []


def _joined(taps: Sequence[Tap | None]) -> Tap | None:
    there = [tap for tap in taps if tap is not None]
    return Taps(*there) if there else None
