"""distill=self: a model whose early exits learn from its last layer.

An early exit predicts with heads after a layer below the last. Zhang, Song, Gao, Chen, Bao, Ma, "Be Your Own Teacher:
Improve the Performance of Convolutional Neural Networks via Self Distillation", ICCV 2019, section 3. The loss of an
exit is (1 - a) times its loss on the labels, plus a times its divergence from the predictions of the last layer, plus b
times the squared difference between its features and those of the last layer. The last layer learns from the labels
only. Here a is distill.soft and b is distill.states. The features are the hidden states of all tokens after the final
norm; all layers have the same width, so no projection is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from torch import Tensor

from lmtool.config.base import JsonObject
from lmtool.distillation.configs.modes import SelfConfig
from lmtool.distillation.configs.terms import SoftConfig
from lmtool.distillation.distilled import Distilled
from lmtool.distillation.output_terms import Soft
from lmtool.distillation.recording import LearnerPair, StudentOutputs, record
from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner
from lmtool.learners.model import Segment, at_exit, exits_of
from lmtool.models.heads.features import LayerFeatures
from lmtool.nn.stack import Stack
from lmtool.types import Batch, StepOutput


class SelfDistillation(Distilled):
    """Trains all exits in one forward pass, in which the heads of each exit read the hidden states after its layer."""

    config: SelfConfig

    def __init__(self, config: SelfConfig, student: BaseLearner, teachers: Sequence[object] = ()):
        super().__init__(config, student)
        if (
            any(isinstance(head, LayerFeatures) for head in student.heads.values())
            or student.backbone.concatenated_layers > 1
        ):
            raise UserError(
                "distill=self adds exits whose heads read one layer each, but with this tuning method the heads read "
                "several layers",
                "set tuning.layers=last, another tuning=, or distill=none",
            )
        self.exits = exits_of(student)
        self.soft = Soft(SoftConfig(temperature=config.temperature), LearnerPair(student))
        self.loss_weights = dict(student.loss_weights)
        for depth in self.exits:
            for term, weight in student.loss_weights.items():
                self.loss_weights[f"exit_{depth}_{term}"] = (1 - config.soft) * weight
            for part, scale in self.soft.scales(student.loss_weights).items():
                self.loss_weights[self._soft_name(depth, part)] = config.soft * scale
            self.loss_weights[f"exit_{depth}_states"] = config.states

    def _soft_name(self, depth: int, part: str) -> str:
        several = part and len(self.student.loss_weights) > 1
        return f"exit_{depth}_soft_{part}" if several else f"exit_{depth}_soft"

    def counts(self, batch: Batch) -> dict[str, float]:
        task_counts, soft_counts = self.student.counts(batch), self.soft.counts(batch)
        counts = dict(task_counts)
        for depth in self.exits:
            counts |= {f"exit_{depth}_{term}": count for term, count in task_counts.items()}
            counts |= {self._soft_name(depth, part): count for part, count in soft_counts.items()}
            counts[f"exit_{depth}_states"] = float(sum(batch.inputs.lengths))
        return counts

    def forward(self, batch: Batch, step: int) -> StepOutput:
        student, start, states = self.student, 0, None
        recorded: dict[int, tuple[StudentOutputs, Tensor]] = {}
        # Each segment of the forward runs the layers from one exit to the next, starting from the recorded states.
        for depth in (*self.exits, student.backbone.config.num_layers):
            view = at_exit(student, depth) if depth in self.exits else student
            segment = Segment(start, states, depth)
            outputs = record(view, batch, step, segment)
            assert segment.recorded is not None
            start, states = depth, segment.recorded
            recorded[depth] = outputs, states
        deepest, last_TH = recorded.pop(student.backbone.config.num_layers)
        assert deepest.output is not None
        sums = dict(deepest.output.sums)
        target_TH = self._normalized(last_TH).detach()
        for depth, (outputs, x_TH) in recorded.items():
            assert outputs.output is not None
            sums |= {f"exit_{depth}_{term}": total for term, total in outputs.output.sums.items()}
            for term, predicted in outputs.predicted.items():
                sums[self._soft_name(depth, term)] = self.soft.target_losses(predicted, deepest.predicted[term])
            difference_TH = self._normalized(x_TH).float() - target_TH.float()
            sums[f"exit_{depth}_states"] = difference_TH.square().mean(-1).sum()
        return StepOutput(sums, self.loss_weights)

    def _normalized(self, x_TH: Tensor) -> Tensor:
        return cast(Stack, self.student.backbone).leave(x_TH)

    def extra_models(self) -> Mapping[str, BaseLearner]:
        """Returns the model as it predicts at each exit, the deepest exit first."""
        return {f"exit {depth}": at_exit(self.student, depth) for depth in reversed(self.exits)}

    def metadata(self) -> JsonObject:
        layers = self.student.backbone.config.num_layers
        return {"exits": f"after layers {', '.join(map(str, self.exits))} of {layers}"}
