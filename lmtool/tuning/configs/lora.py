"""LoRA as configuration. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from lmtool.config.tables import component
from lmtool.errors import Problem
from lmtool.tuning.configs.schemes import ByDepthConfig

Projection = Literal["q_proj", "k_proj", "v_proj", "out_proj", "fc_in", "fc_gate", "fc_out"]


@component("tuning", "lora", builder="lmtool.tuning.lora:LoraTuning")
class LoraConfig(ByDepthConfig):
    """Low-rank adaptation (Hu et al. 2021): W0 x + (alpha / rank) B A x, of which A and B learn."""

    name: Literal["lora"] = Field("lora", description="Low-rank updates of the layers' linear maps learn.")
    rank: int = Field(8, ge=1, description="Rows of A and columns of B; the paper's for RoBERTa.")
    alpha: Annotated[float, Field(gt=0)] = Field(
        16.0, description="Scale of the update, divided by the rank; the published commands' for RoBERTa base."
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="Share of what A reads that is dropped in training.")
    projections: tuple[Projection, ...] = Field(
        ("q_proj", "v_proj"),
        min_length=1,
        description="The maps that have an update, in self-attention and in cross-attention: q_proj, k_proj, v_proj, "
        "out_proj, and fc_in, fc_gate (where the family has it), fc_out of the feed-forward part.",
    )
    rank_stabilised: bool = Field(
        False, description="Scale by alpha / sqrt(rank), for high ranks (Kalajdzievski 2023)."
    )
    dora: bool = Field(
        False,
        description="DoRA (Liu et al. 2024): the updated map gives directions, and a length of each output learns.",
    )
    bias: Literal["none", "lora_only", "all"] = Field(
        "none",
        description="The biases that learn too: none; lora_only: those of the maps that have an update; all: those of "
        "the model, as with tuning=bitfit.",
    )

    @field_validator("projections")
    @classmethod
    def _differ(cls, projections: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(projections)) != len(projections):
            raise ValueError(f"projections={list(projections)} names a map twice")
        return projections

    @property
    def scale(self) -> float:
        """What B A x is multiplied with."""
        return self.alpha / (self.rank**0.5 if self.rank_stabilised else self.rank)

    def misfit(self, model: Any, task: Any) -> Problem | None:
        problem = super().misfit(model, task)
        if problem is not None:
            return problem
        if self.bias != "none" and not model.has_biases:
            message = f"tuning.bias={self.bias} trains biases; model={model.name} has none"
            return Problem("tuning.bias", message, "give tuning.bias=none")
        if "fc_gate" not in self.projections or model.gated:
            return None
        others = ",".join(name for name in self.projections if name != "fc_gate") or "fc_in"
        return Problem(
            "tuning.projections",
            f"tuning.projections names fc_gate; the feed-forward part of model={model.name} has no gate",
            f"give 'tuning.projections=[{others}]'",
        )

    def warnings(self, optimizer: Any, model: Any) -> list[str]:
        """A product of two matrices has no more ranks than the smallest side of the map."""
        heads = {"k_proj": model.key_value_heads, "v_proj": model.key_value_heads}
        sides = {
            name: model.feedforward_size
            if name.startswith("fc_")
            else model.width_of_head * heads.get(name, model.num_heads)
            for name in self.projections
        }
        name, side = min(sides.items(), key=lambda item: item[1])
        most = min(side, model.hidden_size)
        if self.rank <= most:
            return []
        return [
            f"tuning.rank={self.rank}: an update of {name} ({model.hidden_size} and {side} wide) has {most} ranks at "
            f"most; tuning.rank={most} has all that it can learn"
        ]
