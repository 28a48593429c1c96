"""Tuning methods that train a part of the unchanged model: all of it, its head, its last layers, or its biases."""

from __future__ import annotations

from collections.abc import Collection

from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner
from lmtool.models.base import Backbone
from lmtool.models.heads.features import LAYERS, LastFour, ScalarMix
from lmtool.training.optimizers import EMBEDDINGS, HEAD, levels
from lmtool.tuning.base import TuningMethod, freeze, learn_biases, stacks
from lmtool.tuning.configs import FullConfig, HeadConfig, LastLayersConfig

# Every parameter is trained, except for frozen lowest layers.


class FullTuning(TuningMethod):
    """Does not change the model; every parameter that is not frozen is trained."""

    config: FullConfig

    def edit(self, learner: BaseLearner, seed: int, new: Collection[str] | None = None) -> None:
        learner.requires_grad_(True)
        named = dict(learner.named_parameters())
        by_level = levels(named)
        embeddings = by_level.pop(EMBEDDINGS, [])
        layers = [members for title, members in by_level.items() if title != HEAD]
        frozen = layers[len(layers) - self.config.freeze_layers :] if self.config.freeze_layers else []
        for members in (*frozen, embeddings if self.config.freeze_embeddings else []):
            for name in members:
                named[name].requires_grad_(False)

    def delta(self, learner: BaseLearner) -> set[str]:
        """All names: its checkpoints are complete."""
        return set(learner.state_dict())


# Feature extraction: the backbone is frozen, the task's head is trained.


_FEATURES = {"scalar_mix": ScalarMix, "concat_last_4": LastFour}


class HeadTuning(TuningMethod):
    """Trains only heads, and the mixture of the layers that they read.

    A pretrained pooler belongs to the last layer's features and is frozen with them; a new one is random and trained
    with the head, and so is one that reads other features.
    """

    config: HeadConfig

    def prepare(self, backbone: Backbone) -> None:
        if self.config.layers != "last":
            backbone.states_read = _FEATURES[self.config.layers].states

    def edit(self, learner: BaseLearner, seed: int, new: Collection[str] | None = None) -> None:
        several = self.config.layers != "last"
        pooler_learns = several or new is None or "heads.pooler" in new
        for name, parameter in learner.named_parameters():
            in_pooler = name.startswith("heads.pooler.")
            parameter.requires_grad_(name.startswith("heads.") and (pooler_learns or not in_pooler))
        if several:
            depth = next(
                len(list(stack.depth())) for _, stack in stacks(learner.backbone) if stack.side == learner.head_side
            )
            learner.add_head(LAYERS, _FEATURES[self.config.layers](depth))

    def merge(self, learner: BaseLearner) -> None:
        """UserError if the head reads several layers, which no published format supports."""
        if self.config.layers != "last":
            raise UserError(
                f"tuning.layers={self.config.layers}: the head reads several layers, which no published format "
                "supports",
                "use the run with lmtool, or train one with tuning.layers=last",
            )


# The top layers are trained: Lee, Tang, Lin, "What Would Elsa Do? Freezing Layers During Transformer Fine-Tuning",
# 2019.


class LastLayersTuning(TuningMethod):
    """Trains the top layers of the stack that the heads read, the norm after them, and the task's head. Embeddings,
    with their positions, are frozen, and in an encoder-decoder the other stack."""

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


# BitFit: Ben Zaken, Goldberg, Ravfogel, "BitFit: Simple Parameter-efficient Fine-tuning for Transformer-based Masked
# Language-models", ACL 2022.


class BitFitTuning(TuningMethod):
    """Trains the biases, including those of norms and of a pretrained pooler, and the task's complete head."""

    def edit(self, learner: BaseLearner, seed: int, new: Collection[str] | None = None) -> None:
        freeze(learner, new)
        learn_biases(learner)
