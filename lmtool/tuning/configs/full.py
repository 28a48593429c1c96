"""Full finetuning as configuration. Imports no torch."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from lmtool.config.tables import component
from lmtool.errors import Problem
from lmtool.terminal import counted
from lmtool.tuning.configs.schemes import ByDepthConfig, OfPretrainedConfig


@component("tuning", "full", builder="lmtool.tuning.full:FullTuning")
class FullConfig(ByDepthConfig, OfPretrainedConfig):
    """Every parameter learns, but for the lowest ones where these are frozen."""

    of_transformers: ClassVar[bool] = False

    name: Literal["full"] = Field("full", description="Every parameter learns.")
    freeze_embeddings: bool = Field(
        False, description="Leave the embeddings as they are: tokens, positions, segments, their norm."
    )
    freeze_layers: int = Field(
        0,
        ge=0,
        description="Layers that stay as they are, from the first on; of an encoder-decoder the encoder's before the "
        "decoder's.",
    )

    def misfit(self, model: Any, task: Any) -> Problem | None:
        if self.freeze_layers:
            given, problem = f"tuning.freeze_layers={self.freeze_layers}", None
            layers = model.num_layers + getattr(model, "layers_of_decoder", 0)
            if model.shares_layers:
                problem = f"model={model.name} has one layer, applied at every depth", "give tuning.freeze_layers=0"
            elif not hasattr(model, "num_heads"):
                problem = f"model={model.name} is no transformer", "give tuning.freeze_layers=0"
            elif self.freeze_layers > layers:
                problem = (
                    f"model={model.name} has {counted(layers, 'layer')}",
                    f"give tuning.freeze_layers={layers} at most",
                )
            if problem is not None:
                return Problem("tuning.freeze_layers", f"{given}: {problem[0]}", problem[1])
        return super().misfit(model, task)
