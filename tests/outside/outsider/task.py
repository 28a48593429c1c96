"""A regression with the Huber loss (Huber 1964) on the mean of all layers' hidden states, as with ELMo (Peters et al.
2018)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lmtool.models.base import Backbone
from lmtool.models.heads.sequence import summary
from lmtool.nn.dropout import DropoutRng
from lmtool.nn.stack import Tap, TapPoint
from lmtool.tasks.kinds.regression import Regression, RegressionLearner
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, StepOutput


class Layers(Tap):
    """Records the hidden states after the embedding and after each layer."""

    def __init__(self) -> None:
        self.states: list[Tensor] = []

    def __call__(self, place: TapPoint, x_TH: Tensor) -> Tensor:
        self.states.append(x_TH)
        return x_TH


class GradedLearner(RegressionLearner):
    def _summary(self, batch: Batch, rng: DropoutRng | None) -> Tensor:
        """(N, H): mean over layers and tokens."""
        layers = Layers()
        self.backbone(batch.inputs, rng, tap=layers)
        assert len(layers.states) == 1 + self.backbone.config.num_layers
        return summary(torch.stack(layers.states).mean(0), batch.inputs, "mean")

    def forward(self, batch: Batch, step: int) -> StepOutput:
        values_N: Tensor = self.outputs(batch, step)[:, 0].float()
        delta = self.config.forgiveness
        total = F.huber_loss(values_N, self.labels(batch), reduction="sum", delta=delta)
        return StepOutput({self.term: total}, self.loss_weights)


class Graded(Regression):
    def learner(self, backbone: Backbone, tokenizer: Tokenizer, seed: int) -> GradedLearner:
        return GradedLearner(self, backbone, tokenizer, seed)
