"""BitFit: Ben Zaken, Goldberg, Ravfogel, "BitFit: Simple Parameter-efficient Fine-tuning for Transformer-based Masked
Language-models", ACL 2022."""

from __future__ import annotations

from collections.abc import Collection

from lmtool.learners.base import BaseLearner
from lmtool.tuning.base import TuningMethod, freeze


class BitFitTuning(TuningMethod):
    """The biases learn, those of norms and of a pretrained pooler too, and the task's head whole."""

    def edit(self, learner: BaseLearner, seed: int, new: Collection[str] | None = None) -> None:
        freeze(learner, new)
        for name, parameter in learner.named_parameters():
            if name.endswith(".bias"):
                parameter.requires_grad_(True)
