"""The base of distillation terms, and the terms over predictions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor, nn

from lmtool.config.saved import JsonObject
from lmtool.distillation.configs import HardConfig, InterchangeConfig, SoftConfig, TermConfig
from lmtool.distillation.interchange import Site, interventions, record_interchange_states, swapped
from lmtool.distillation.recording import (
    LearnerPair,
    RecordedStates,
    StudentData,
    StudentOutputs,
    TeacherOutputs,
    parts_of,
    record,
)
from lmtool.errors import UserError
from lmtool.models.heads.predicted import Predicted, TargetProbabilities
from lmtool.nn.stack import Tap
from lmtool.types import Batch, Target


class Term(nn.Module, ABC):
    """The base of every term. Its parameters are trained with the student's, and are discarded after training."""

    def __init__(self, config: TermConfig, pair: LearnerPair):
        super().__init__()
        self.config = config

    def begin(self, student: StudentData) -> JsonObject:
        """Called before training. Returns a line for the first screen. UserError if the run's data offer nothing to
        learn."""
        return {}

    def tap(self, teacher: bool) -> Tap | None:
        """The tap that records the states of the next forward of the student or the teacher; None if the term needs
        none."""
        return None

    @abstractmethod
    def counts(self, batch: Batch) -> dict[str, float]:
        """The number of comparisons in a batch for each part of the term, computed without a forward. A single part is
        named ""."""

    @abstractmethod
    def sums(self, student: StudentOutputs, teacher: TeacherOutputs, step: int) -> dict[str, Tensor]:
        """The sum of the losses of each part."""

    def scales(self, weights: Mapping[str, float]) -> dict[str, float]:
        """The weight of each part within the term. weights: the weights of the student's own terms."""
        return {"": 1.0}


def targets_of(target: Target, batch: Batch) -> int:
    """The number of targets in a batch."""
    if target.labels is not None:
        return target.labels.numel()
    return len(batch.inputs.tokens) if target.at is None else len(target.at)


# Terms over the teacher's hard labels and soft targets (Hinton, Vinyals and Dean 2015).


class OutputTerm(Term):
    """The base of terms over predictions: one part for each term of the student that a teacher predicts, with that
    term's weight."""

    def __init__(self, config: TermConfig, pair: LearnerPair):
        super().__init__(config, pair)
        terms, teacher = pair.student.weights.keys(), pair.teacher
        self.parts = frozenset(terms) if teacher is None else teacher.teaches & terms
        self._counts_of_student = pair.student.counts

    def counts(self, batch: Batch) -> dict[str, float]:
        """Targets count equally, without the class weights of the student's own loss."""
        counts = self._counts_of_student(batch)
        counts |= {term: float(targets_of(target, batch)) for term, target in batch.targets.items()}
        return {term: count for term, count in counts.items() if term in self.parts}

    def scales(self, weights: Mapping[str, float]) -> dict[str, float]:
        return {term: weight for term, weight in weights.items() if term in self.parts}

    def sums(self, student: StudentOutputs, teacher: TeacherOutputs, step: int) -> dict[str, Tensor]:
        return {
            term: self.target_losses(predicted, teacher.predicted[term])
            for term, predicted in student.predicted.items()
            if term in teacher.predicted
        }

    @abstractmethod
    def target_losses(self, student: Predicted, teacher: TargetProbabilities) -> Tensor:
        """The sum of the losses of one term's targets."""


class Soft(OutputTerm):
    """T^2 KL(teacher || student)."""

    config: SoftConfig

    def target_losses(self, student: Predicted, teacher: TargetProbabilities) -> Tensor:
        return student.divergence_sum(teacher, self.config.temperature)


class Hard(OutputTerm):
    """The loss on the teacher's best prediction."""

    config: HardConfig

    def target_losses(self, student: Predicted, teacher: TargetProbabilities) -> Tensor:
        return student.hard_loss_sum(teacher.best())


# Predictions under interchange interventions (Geiger et al. 2022, "Inducing Causal Structure for Interpretable Neural
# Networks"; Wu et al. 2022, "Causal Distillation for Language Models").


class Interchange(OutputTerm):
    """T^2 KL(teacher || student), both with swapped states of the same tokens after aligned layers. The gradient flows
    through both forwards of the student, over the base and over the source."""

    config: InterchangeConfig

    def __init__(self, config: InterchangeConfig, pair: LearnerPair):
        super().__init__(config, pair)
        assert pair.layers is not None
        self.teacher, student_config = pair.frozen_teacher, pair.student.backbone.config
        self.sites = [Site(*site) for site in config.sites(pair.layers, student_config)]
        self.depths = {True: self.teacher.learner.backbone.config.depths, False: student_config.depths}
        self.recorded: dict[bool, RecordedStates] = {}

    def begin(self, student: StudentData) -> JsonObject:
        """Describes the layers, and the fraction of the first step's texts that have another text to swap with."""
        first = next(iter(student.loader.steps(None)))
        parts = [part for batch in first.batches for part in parts_of(batch)]
        sizes = [len(part.inputs.lengths) for part in parts]
        paired = sum(size for size in sizes if size > 1) / max(sum(sizes), 1)
        if not paired:
            raise UserError(
                "distill.terms.interchange swaps states between two texts of a forward, but each forward of this run "
                "has one text",
                "set a larger batch_examples=, batch_tokens= or micro_batch_tokens=, or distill=soft",
            )
        sides = (f"{site.side} " if len(self.depths[False]) > 1 else "" for site in self.sites)
        pairs = (f"{side}{site.student} <- {site.teacher}" for side, site in zip(sides, self.sites, strict=True))
        return {"interchange": ", ".join(pairs)} | ({"interchange_fraction": paired} if paired < 1 else {})

    def tap(self, teacher: bool) -> RecordedStates:
        self.recorded[teacher] = record_interchange_states(self.depths[teacher], self.sites, teacher)
        return self.recorded[teacher]

    def counts(self, batch: Batch) -> dict[str, float]:
        """0 if no text of a batch has another one to swap with."""
        paired = any(len(part.inputs.lengths) > 1 for part in parts_of(batch))
        return {term: count if paired else 0.0 for term, count in super().counts(batch).items()}

    def sums(self, student: StudentOutputs, teacher: TeacherOutputs, step: int) -> dict[str, Tensor]:
        learner, batch = student.learner, student.batch
        plans = [
            interventions(part, self.sites, self.config.proportion, learner.seed, step) for part in parts_of(batch)
        ]
        taps = {
            of_teacher: swapped(recorded, plans, self.sites, of_teacher, self.config.dimensions)
            for of_teacher, recorded in self.recorded.items()
        }
        self.recorded = {}
        if not any(plan.changed for plan in plans):
            return {}
        counterfactual = record(learner, batch, step, taps[False], losses=False)
        return super().sums(counterfactual, self.teacher.predict(batch, taps[True]), step)

    def target_losses(self, student: Predicted, teacher: TargetProbabilities) -> Tensor:
        return student.divergence_sum(teacher, self.config.temperature)
