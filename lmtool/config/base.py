"""What every configuration class is: a frozen, strict pydantic model whose fields are all documented."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from lmtool.config.variants import Variant


class Config(BaseModel):
    """A section of a run's configuration.

    Unknown keys are refused, types are not coerced, values do not change after decoding. Every field carries a
    `description` with its unit: it is what `lmtool show KEY` prints, and a test holds that none is missing.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())

    many: ClassVar[bool] = False
    """Of a component: a run may have several of its group, each in a section under its name."""

    @classmethod
    def filled(cls, data: dict[str, Any]) -> dict[str, Any]:
        """The data of a command, or of a section, with values that follow from its other values: none."""
        return data

    @classmethod
    def variants(cls, data: dict[str, Any]) -> Iterable[Variant]:
        """Further configurations that a command's data bring along: none."""
        return ()
