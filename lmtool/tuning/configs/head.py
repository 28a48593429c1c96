"""Feature extraction as configuration. Imports no torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from lmtool.config.tables import component
from lmtool.tuning.configs.base import TuningConfig


@component("tuning", "head", builder="lmtool.tuning.head:HeadTuning")
class HeadConfig(TuningConfig):
    """Feature extraction: the backbone is frozen, the task's head learns."""

    of_transformers: ClassVar[bool] = False

    name: Literal["head"] = Field(
        "head",
        description="Feature extraction: only the task's head learns; the pooler too where it is new.",
    )
