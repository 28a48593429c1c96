"""Which parameters learn, as configuration. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lmtool.config.base import Config
from lmtool.config.tables import component


class TuningConfig(Config):
    """The base of every tuning method."""

    name: str = Field(description="Which tuning method.")


@component("tuning", "full", builder="lmtool.tuning.full:FullTuning")
class FullConfig(TuningConfig):
    """Every parameter learns."""

    name: Literal["full"] = Field("full", description="Every parameter learns.")


@component("tuning", "head", builder="lmtool.tuning.head:HeadTuning")
class HeadConfig(TuningConfig):
    """Feature extraction: the backbone is frozen, the task's head learns."""

    name: Literal["head"] = Field(
        "head",
        description="Feature extraction: only the task's head learns; the pooler too where it is new.",
    )
