"""IA3 as configuration. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lmtool.config.tables import component
from lmtool.tuning.configs.schemes import ByDepthConfig


@component("tuning", "ia3", builder="lmtool.tuning.ia3:Ia3Tuning")
class Ia3Config(ByDepthConfig):
    """Inner activations are rescaled by learned vectors (Liu et al. 2022)."""

    name: Literal["ia3"] = Field(
        "ia3", description="Vectors learn that rescale keys, values and what the feed-forward part's last map reads."
    )
