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
from lmtool.distillation.seen import Teacher, see
from lmtool.distillation.terms.base import Term
from lmtool.learners.base import BaseLearner
from lmtool.nn.stack import Tap, Taps
from lmtool.types import Batch, StepOutput


class Standard(Distilled):
    """The weighted sum of the student's own loss and of terms of its teacher."""

    config: StandardConfig

    def __init__(self, config: StandardConfig, student: BaseLearner, teachers: Sequence[Teacher]):
        super().__init__(config, student)
        (self.teacher,) = teachers
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
        copied."""
        learner = self.teacher.learner
        taken = taken_layers(self.config.initialize, self.student.backbone.config, learner.backbone.config)
        return start_from(self.student, learner, self.teacher.origin, taken) if taken else None

    @property
    def teachers(self) -> Sequence[Teacher]:
        return (self.teacher,)

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
        teacher = self.teacher.see(batch, _joined([term.tap(teacher=True) for term in terms.values()]))
        student_tap = _joined([term.tap(teacher=False) for term in terms.values()])
        student = see(self.student, batch, step, student_tap, losses=self.config.gold > 0)
        sums: dict[str, Tensor] = {} if student.output is None else dict(student.output.sums)
        for name, term in terms.items():
            sums |= {self._title(name, part): total for part, total in term.sums(student, teacher, step).items()}
        return StepOutput(sums, self.weights)

    def aligned(self, teacher: Teacher) -> LayerMap | str:
        return self.layers if self.layers is not None else super().aligned(teacher)

    def facts(self) -> dict[str, Any]:
        layers = {} if self.layers is None else {"layers": self.layers.words()}
        started = {} if self.started is None else {"started from": self.started}
        return {"teacher": self.teacher.origin, **layers, **started}


def _joined(taps: Sequence[Tap | None]) -> Tap | None:
    there = [tap for tap in taps if tap is not None]
    return Taps(*there) if there else None
