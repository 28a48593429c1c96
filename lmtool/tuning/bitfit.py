"""BitFit: Ben Zaken, Goldberg, Ravfogel, "BitFit: Simple Parameter-efficient Fine-tuning for Transformer-based Masked
Language-models", ACL 2022."""

from __future__ import annotations

from collections.abc import Collection

from lmtool.learners.base import BaseLearner
from lmtool.tuning.base import TuningMethod, freeze, learn_biases


class BitFitTuning(TuningMethod):
    """The biases learn, those of norms and of a pretrained pooler too, and the task's head whole."""

    def edit(self, learner: BaseLearner, seed: int, new: Collection[str] | None = None) -> None:
        freeze(learner, new)
        learn_biases(learner)
