"""The base class of distillation terms, and the terms that compare predictions.

A term is one summand of the distillation loss. If the student has several losses (a mixture, or an objective with two
losses), a term over predictions has one part for each of them, which is logged separately.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor, nn

from lmtool.config.base import JsonObject
from lmtool.distillation.configs.base import TermConfig
from lmtool.distillation.configs.terms import HardConfig, InterchangeConfig, SoftConfig
from lmtool.distillation.interchange import Site, interventions, record_interchange_states, swapping_tap
from lmtool.distillation.recording import (
    LearnerPair,
    RecordedStates,
    StudentData,
    StudentOutputs,
    TeacherOutputs,
    member_batches,
    record,
)
from lmtool.errors import UserError
from lmtool.learners.mixed_examples import MixedBatch
from lmtool.models.heads.predicted import Predicted, TargetProbabilities
from lmtool.nn.stack import Tap
from lmtool.types import Batch, Target


class Term(nn.Module, ABC):
    """The base of every distillation term. Parameters of a term, such as projections, are trained together with the
    student and discarded after training."""

    def __init__(self, config: TermConfig, pair: LearnerPair):
        super().__init__()
        self.config = config

    def prepare(self, student: StudentData) -> JsonObject:
        """Called before training. Returns metadata for the first screen. Raises UserError if the term has no effect on
        the data."""
        return {}

    def tap(self, teacher: bool) -> Tap | None:
        """Returns a tap that records the states which the term compares in the next forward of the teacher, or, with
        teacher=False, of the student; None if the term compares no states."""
        return None

    @abstractmethod
    def counts(self, batch: Batch) -> dict[str, float]:
        """Returns the number of comparisons in a batch for each part of the term ("" for a single one), without running
        a model."""

    @abstractmethod
    def sums(self, student: StudentOutputs, teacher: TeacherOutputs, step: int) -> dict[str, Tensor]:
        """Returns the loss of each part, summed over its comparisons in a batch. step: for terms that sample."""

    def scales(self, weights: Mapping[str, float]) -> dict[str, float]:
        """Returns the weight of each part within the term. weights: the weights of the student's own losses."""
        return {"": 1.0}


def count_targets(target: Target, batch: Batch) -> int:
    """Returns the number of targets in a batch, which is the number of labels, of positions, or else of all tokens."""
    if target.labels is not None:
        return target.labels.numel()
    return len(batch.inputs.tokens) if target.at is None else len(target.at)


# Terms that learn the teacher's hard labels or soft targets (Hinton, Vinyals and Dean 2015).


class OutputTerm(Term):
    """The base of terms that compare predictions. Such a term has one part for each loss of the student that the
    teacher makes predictions for, with the weight of this loss."""

    def __init__(self, config: TermConfig, pair: LearnerPair):
        super().__init__(config, pair)
        terms, teacher = pair.student.loss_weights.keys(), pair.teacher
        self.parts = frozenset(terms) if teacher is None else teacher.terms_taught & terms
        self._count_student_targets, self._every_token = pair.student.counts, pair.every_token

    def counts(self, batch: Batch) -> dict[str, float]:
        """Counts all targets equally, without the class weights of the student's own loss."""
        counts = self._count_student_targets(batch)
        counts |= {term: float(count_targets(target, batch)) for term, target in batch.targets.items()}
        parts: dict[str | None, Batch] = {None: batch}
        parts |= dict(batch.members) if isinstance(batch, MixedBatch) else {}
        for term, member in self._every_token.items():
            counts[term] = float(len(parts[member].inputs.tokens)) if member in parts else 0.0
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
        """Returns the loss of one part, summed over its targets."""


class Soft(OutputTerm):
    """T^2 KL(teacher || student), summed over targets, with both distributions at temperature T."""

    config: SoftConfig

    def target_losses(self, student: Predicted, teacher: TargetProbabilities) -> Tensor:
        return student.divergence_sum(teacher, self.config.temperature)


class Hard(OutputTerm):
    """The student's own loss, with the teacher's best prediction as the label of each target."""

    config: HardConfig

    def target_losses(self, student: Predicted, teacher: TargetProbabilities) -> Tensor:
        return student.hard_loss_sum(teacher.best())


# Predictions under interchange interventions (Geiger et al. 2022, "Inducing Causal Structure for Interpretable Neural
# Networks"; Wu et al. 2022, "Causal Distillation for Language Models").


class Interchange(OutputTerm):
    """T^2 KL(teacher || student) of forwards in which both models have some states replaced by states of another text.

    The gradient flows through two forwards of the student: the ordinary one, which provides the swapped states, and the
    one with the intervention.
    """

    config: InterchangeConfig

    def __init__(self, config: InterchangeConfig, pair: LearnerPair):
        super().__init__(config, pair)
        assert pair.layers is not None
        self.teacher, student_config = pair.frozen_teacher, pair.student.backbone.config
        self.sites = [Site(*site) for site in config.sites(pair.layers, student_config)]
        self.depths = {True: self.teacher.learner.backbone.config.depths, False: student_config.depths}
        self.recorded: dict[bool, RecordedStates] = {}

    def prepare(self, student: StudentData) -> JsonObject:
        """Returns the compared layers, and the fraction of texts that have another text to swap with, estimated from
        the first step. Raises UserError if this fraction is 0."""
        first_step = next(iter(student.loader.steps(None)))
        parts = [part for batch in first_step.batches for part in member_batches(batch)]
        sizes = [len(part.inputs.lengths) for part in parts]
        paired_fraction = sum(size for size in sizes if size > 1) / max(sum(sizes), 1)
        if not paired_fraction:
            raise UserError(
                "distill.terms.interchange swaps states between two texts of a batch, but each batch of this run has "
                "one text",
                "set a larger batch_examples=, batch_tokens= or micro_batch_tokens=, or distill=soft",
            )
        sides = (f"{site.side} " if len(self.depths[False]) > 1 else "" for site in self.sites)
        pairs = (f"{side}{site.student} <- {site.teacher}" for side, site in zip(sides, self.sites, strict=True))
        return {"interchange": ", ".join(pairs)} | (
            {"interchange_fraction": paired_fraction} if paired_fraction < 1 else {}
        )

    def tap(self, teacher: bool) -> RecordedStates:
        self.recorded[teacher] = record_interchange_states(self.depths[teacher], self.sites, teacher)
        return self.recorded[teacher]

    def counts(self, batch: Batch) -> dict[str, float]:
        """Counts all targets of a batch, or none if no text of the batch has another text to swap with."""
        paired = any(len(part.inputs.lengths) > 1 for part in member_batches(batch))
        return {term: count if paired else 0.0 for term, count in super().counts(batch).items()}

    def sums(self, student: StudentOutputs, teacher: TeacherOutputs, step: int) -> dict[str, Tensor]:
        learner, batch = student.learner, student.batch
        plans = [
            interventions(part, self.sites, self.config.proportion, learner.seed, step)
            for part in member_batches(batch)
        ]
        taps = {
            of_teacher: swapping_tap(recorded, plans, self.sites, of_teacher, self.config.dimensions)
            for of_teacher, recorded in self.recorded.items()
        }
        self.recorded = {}
        if not any(plan.swapped_texts for plan in plans):
            return {}
        counterfactual = record(learner, batch, step, taps[False], losses=False)
        return super().sums(counterfactual, self.teacher.predict(batch, taps[True]), step)

    def target_losses(self, student: Predicted, teacher: TargetProbabilities) -> Tensor:
        return student.divergence_sum(teacher, self.config.temperature)
