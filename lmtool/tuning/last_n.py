"""The top layers learn: Lee, Tang, Lin, "What Would Elsa Do? Freezing Layers During Transformer Fine-Tuning", 2019."""

from __future__ import annotations

from collections.abc import Collection

from lmtool.learners.base import BaseLearner
from lmtool.tuning.base import TuningMethod, freeze
from lmtool.tuning.configs import LastLayersConfig
from lmtool.tuning.places import stacks


class LastLayersTuning(TuningMethod):
    """The top layers of the stack that the heads read learn, the norm behind them, and the task's head. Embeddings,
    with their positions, are frozen, and in an encoder-decoder all of the stack that the heads do not read."""

    config: LastLayersConfig

    def edit(self, learner: BaseLearner, seed: int, new: Collection[str] | None = None) -> None:
        freeze(learner, new)
        for _, stack in stacks(learner.backbone):
            if stack.side != learner.head_side:
                continue
            for layer in stack.layers[len(stack.layers) - self.config.learning(len(stack.layers)) :]:
                layer.requires_grad_(True)
            if stack.final_norm is not None:
                stack.final_norm.requires_grad_(True)
