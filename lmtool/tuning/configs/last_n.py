"""Finetuning of the last layers as configuration. Imports no torch."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from lmtool.config.tables import component
from lmtool.errors import Problem
from lmtool.tuning.configs.base import depth_read, sides_read
from lmtool.tuning.configs.schemes import ByDepthConfig, OfPretrainedConfig


@component("tuning", "last_n", builder="lmtool.tuning.last_n:LastLayersTuning")
class LastLayersConfig(ByDepthConfig, OfPretrainedConfig):
    """The top layers and the head learn, what is below them is frozen."""

    of_transformers: ClassVar[bool] = False
    of_stacks: ClassVar[bool] = True

    name: Literal["last_n"] = Field("last_n", description="The top layers learn.")
    layers: int | None = Field(
        None,
        ge=1,
        description="How many layers learn, with the norm behind them: the top ones of the stack that the head reads, "
        "in an encoder-decoder the decoder's (the encoder's where words are tagged by its states). Null: a quarter, "
        "rounded up (Lee, Tang and Lin 2019).",
    )

    def learning(self, depth: int) -> int:
        """How many of `depth` layers learn."""
        return -(-depth // 4) if self.layers is None else self.layers

    def misfit(self, model: Any, task: Any) -> Problem | None:
        problem = super().misfit(model, task)
        if problem is not None:
            return problem
        if model.shares_layers:
            return Problem(
                "tuning",
                f"tuning=last_n: one layer stands at every depth of model={model.name}",
                "give tuning=full, tuning=lora or tuning=head",
            )
        if len(sides_read(model, task)) > 1:
            message = f"tuning=last_n: the members of task={task.name} read different stacks of model={model.name}"
            return Problem("tuning", message, "give tuning=full or tuning=lora")
        depth = depth_read(model, task)
        if self.learning(depth) > depth:
            return Problem(
                "tuning.layers",
                f"tuning.layers={self.layers}: {depth} layers stand before the head of model={model.name}",
                f"give tuning.layers={depth} or less, or tuning=full",
            )
        return None
