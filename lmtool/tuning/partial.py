"""Tuning methods that add no parameters to the layers. Each trains all parameters, only the head, only the top layers,
or only biases."""

from __future__ import annotations

from collections.abc import Collection

from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner
from lmtool.models.base import Backbone
from lmtool.models.heads.features import LAYERS, LastFour, ScalarMix
from lmtool.training.optimizers import EMBEDDINGS, HEAD, levels
from lmtool.tuning.base import TuningMethod, freeze, learn_biases, stacks
from lmtool.tuning.configs.methods import FullConfig, HeadConfig, LastLayersConfig

# Full finetuning: every parameter is trained, except in frozen lower layers.


class FullTuning(TuningMethod):
    """Trains every parameter except those of the layers and embeddings that the configuration freezes."""

    config: FullConfig

    def edit(self, learner: BaseLearner, seed: int, new: Collection[str] | None = None) -> None:
        learner.requires_grad_(True)
        parameters = dict(learner.named_parameters())
        by_level = levels(parameters)
        embeddings = by_level.pop(EMBEDDINGS, [])
        # Levels are ordered from the head down, so the lowest layers are the last ones.
        layers = [names for level, names in by_level.items() if level != HEAD]
        frozen = layers[len(layers) - self.config.freeze_layers :] if self.config.freeze_layers else []
        for names in (*frozen, embeddings if self.config.freeze_embeddings else []):
            for name in names:
                parameters[name].requires_grad_(False)

    def delta_names(self, learner: BaseLearner) -> set[str]:
        """Returns the names of all tensors, because a checkpoint of full finetuning is complete."""
        return set(learner.state_dict())


# Feature extraction: the backbone is frozen, the task's head is trained.


_FEATURES = {"scalar_mix": ScalarMix, "concat_last_4": LastFour}


class HeadTuning(TuningMethod):
    """Trains only the heads and, if they read several layers, the mixture of these layers.

    A pretrained pooler is frozen as well if it reads the last layer, as in pretraining. It is trained if it was
    randomly initialized, or if it reads several layers.
    """

    config: HeadConfig

    def prepare(self, backbone: Backbone) -> None:
        if self.config.layers != "last":
            backbone.concatenated_layers = _FEATURES[self.config.layers].states

    def edit(self, learner: BaseLearner, seed: int, new: Collection[str] | None = None) -> None:
        reads_several_layers = self.config.layers != "last"
        # new: parts that were randomly initialized; None if every head was
        trains_pooler = reads_several_layers or new is None or "heads.pooler" in new
        for name, parameter in learner.named_parameters():
            in_pooler = name.startswith("heads.pooler.")
            parameter.requires_grad_(name.startswith("heads.") and (trains_pooler or not in_pooler))
        if reads_several_layers:
            read_stack = next(stack for _, stack in stacks(learner.backbone) if stack.side == learner.head_side)
            depth = sum(1 for _ in read_stack.applied_layers())
            learner.add_head(LAYERS, _FEATURES[self.config.layers](depth))

    def merge(self, learner: BaseLearner) -> None:
        """Raises UserError if the head reads several layers, which no published format supports."""
        if self.config.layers != "last":
            raise UserError(
                f"tuning.layers={self.config.layers}: the head reads several layers, which no published format "
                "supports",
                "use the run with lmtool, or train a run with tuning.layers=last",
            )


# The top layers are trained: Lee, Tang, Lin, "What Would Elsa Do? Freezing Layers During Transformer Fine-Tuning",
# 2019.


class LastLayersTuning(TuningMethod):
    """Trains the top layers of the stack that the heads read, the norm after these layers, and the task's head, but
    neither token and position embeddings nor the other stack of an encoder-decoder."""

    config: LastLayersConfig

    def edit(self, learner: BaseLearner, seed: int, new: Collection[str] | None = None) -> None:
        freeze(learner, new)
        for _, stack in stacks(learner.backbone):
            if stack.side != learner.head_side:
                continue
            depth = len(stack.layers)
            for layer in stack.layers[depth - self.config.trained_layers(depth) :]:
                layer.requires_grad_(True)
            if stack.final_norm is not None:
                stack.final_norm.requires_grad_(True)


# BitFit: Ben Zaken, Goldberg, Ravfogel, "BitFit: Simple Parameter-efficient Fine-tuning for Transformer-based Masked
# Language-models", ACL 2022.


class BitFitTuning(TuningMethod):
    """Trains all biases, including those of norms and of a pretrained pooler, and all parameters of the task's head."""

    def edit(self, learner: BaseLearner, seed: int, new: Collection[str] | None = None) -> None:
        freeze(learner, new)
        learn_biases(learner)
