"""What a teacher predicts under interchange interventions (Geiger et al. 2022, "Inducing Causal Structure for
Interpretable Neural Networks"; Wu et al. 2022, "Causal Distillation for Language Models")."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lmtool.distillation.configs import InterchangeConfig, LayerMap
from lmtool.distillation.interchange import Site, interventions, kept_for, parts_of, swapped
from lmtool.distillation.kept import Kept
from lmtool.distillation.seen import Reading, Seen, Teacher, see
from lmtool.distillation.terms.outputs import OutputTerm
from lmtool.errors import UserError
from lmtool.heads.predicted import Predicted, Shares
from lmtool.learners.base import BaseLearner
from lmtool.types import Batch


class Interchange(OutputTerm):
    """T^2 KL(teacher || student), both with the states of the same tokens of another text behind aligned layers. The
    gradient reaches both forwards of the student's, that over the base and that over the source."""

    config: InterchangeConfig

    def __init__(
        self, config: InterchangeConfig, student: BaseLearner, teacher: Teacher | None, layers: LayerMap | None = None
    ):
        super().__init__(config, student, teacher, layers)
        assert teacher is not None and layers is not None
        self.teacher = teacher
        self.sites = [Site(*site) for site in config.sites(layers, student.backbone.config)]
        self.depths = {True: teacher.learner.backbone.config.depths, False: student.backbone.config.depths}
        self.kept: dict[bool, Kept] = {}

    def begin(self, reading: Reading) -> dict[str, Any]:
        """How many texts of the first step have another one beside them to be swapped with."""
        first = next(iter(reading.loader.steps(None)))
        parts = [part for batch in first.batches for part in parts_of(batch)]
        sizes = [len(part.inputs.lengths) for part in parts]
        paired = sum(size for size in sizes if size > 1) / max(sum(sizes), 1)
        if not paired:
            raise UserError(
                "distill.terms.interchange swaps states of two texts of a forward, and here each is read by itself",
                "give a larger batch_examples=, batch_tokens= or micro_batch_tokens=, or distill=soft",
            )
        sides = (f"{site.side} " if len(self.depths[False]) > 1 else "" for site in self.sites)
        pairs = (f"{side}{site.student} <- {site.teacher}" for side, site in zip(sides, self.sites, strict=True))
        return {"interchange": ", ".join(pairs)} | ({"interchange_fraction": paired} if paired < 1 else {})

    def tap(self, teacher: bool) -> Kept:
        self.kept[teacher] = kept_for(self.depths[teacher], self.sites, teacher)
        return self.kept[teacher]

    def counts(self, batch: Batch) -> dict[str, float]:
        """None where no text of a batch has another one beside it."""
        paired = any(len(part.inputs.lengths) > 1 for part in parts_of(batch))
        return {term: count if paired else 0.0 for term, count in super().counts(batch).items()}

    def sums(self, student: Seen, teacher: Seen, step: int) -> dict[str, Tensor]:
        learner, batch = student.learner, student.batch
        plans = [
            interventions(part, self.sites, self.config.proportion, learner.seed, step) for part in parts_of(batch)
        ]
        taps = {
            of_teacher: swapped(kept, plans, self.sites, of_teacher, self.config.dimensions)
            for of_teacher, kept in self.kept.items()
        }
        self.kept = {}
        if not any(plan.changed for plan in plans):
            return {}
        counterfactual = see(learner, batch, step, taps[False], losses=False)
        return super().sums(counterfactual, self.teacher.see(batch, taps[True]), step)

    def lost(self, student: Predicted, teacher: Shares) -> Tensor:
        return student.divergence_sum(teacher, self.config.temperature)
