"""Full finetuning as configuration. Imports no torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from lmtool.config.tables import component
from lmtool.tuning.configs.base import TuningConfig


@component("tuning", "full", builder="lmtool.tuning.full:FullTuning")
class FullConfig(TuningConfig):
    """Every parameter learns."""

    of_transformers: ClassVar[bool] = False

    name: Literal["full"] = Field("full", description="Every parameter learns.")
