"""P-tuning, both versions, as configuration. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from lmtool.config.tables import component
from lmtool.tuning.configs.base import TuningConfig


@component("tuning", "ptuning", builder="lmtool.tuning.ptuning:PTuning")
class PTuningConfig(TuningConfig):
    """P-tuning: soft prompts behind an encoder of their own that learns (Liu et al. 2021, "GPT Understands, Too"); with
    `deep`, prompts in every layer and no encoder (Liu et al. 2022, "P-Tuning v2"), which is a prefix without a map. The
    model is frozen.
    """

    name: Literal["ptuning"] = Field("ptuning", description="Soft prompts behind an encoder, or in every layer.")
    length: int = Field(20, ge=1, le=100_000, description="Virtual tokens of a text, which take positions.")
    encoder: Literal["lstm", "mlp"] = Field(
        "lstm",
        description="What the prompts pass through, needed in training alone: an LSTM of two layers in both directions "
        "and two maps, or three maps.",
    )
    deep: bool = Field(False, description="Prompts in every layer, as keys and values, instead of at the input.")

    @property
    def recipe_name(self) -> str:
        return f"{self.name}_deep" if self.deep else self.name

    @property
    def positions(self) -> int:
        return self.length

    @model_validator(mode="after")
    def _deep_prompts_have_no_encoder(self) -> PTuningConfig:
        if self.deep and self.encoder != "lstm":
            raise ValueError(f"encoder={self.encoder} is of prompts at the input; with deep=true there is none")
        return self
