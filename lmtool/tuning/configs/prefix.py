"""Prefix tuning as configuration. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lmtool.config.tables import component
from lmtool.tuning.configs.base import TuningConfig


@component("tuning", "prefix", builder="lmtool.tuning.prefix:PrefixTuning")
class PrefixConfig(TuningConfig):
    """Prefix tuning (Li and Liang 2021): keys and values in front of every text learn, in each layer's attention, of an
    encoder-decoder also in front of what its cross-attention reads; the model is frozen.

    A prefix is what a model keeps of tokens that it has read before: it takes the first positions.
    """

    name: Literal["prefix"] = Field("prefix", description="Keys and values in front of every text, in each layer.")
    length: int = Field(10, ge=1, le=100_000, description="Rows of the prefix, which take positions.")
    reparametrize: bool = Field(
        True,
        description="Learn the prefix through a map: vectors as wide as the model, a layer with tanh, and one to all "
        "keys and values. It is needed in training alone.",
    )
    inner_size: int = Field(512, ge=1, le=1_000_000, description="Width inside that map.")

    @property
    def positions(self) -> int:
        return self.length
