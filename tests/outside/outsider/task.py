"""A regression that forgives outliers (Huber 1964)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from lmtool.models.base import Backbone
from lmtool.tasks.kinds.regression import Regression, RegressionLearner
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, StepOutput


class GradedLearner(RegressionLearner):
    def forward(self, batch: Batch, step: int) -> StepOutput:
        values_N: Tensor = self.outputs(batch, step)[:, 0].float()
        delta = self.config.forgiveness
        total = F.huber_loss(values_N, self.labels(batch), reduction="sum", delta=delta)
        return StepOutput({self.term: total}, self.weights)


class Graded(Regression):
    def learner(self, backbone: Backbone, tokenizer: Tokenizer, seed: int) -> GradedLearner:
        return GradedLearner(self, backbone, tokenizer, seed)
