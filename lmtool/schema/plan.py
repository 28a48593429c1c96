"""The keys that `lmtool plan` has of its own, beside those of the run it plans. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lmtool.errors import UserError
from lmtool.schema.base import DEVICE
from lmtool.training.devices import device_of


@dataclass(frozen=True)
class PlanKeys:
    """device: a published one, or None for what the run names. measure: whether a few of its steps are run."""

    device: str | None = None
    measure: bool = False

    @staticmethod
    def names() -> tuple[str, ...]:
        """Those that the run has not."""
        return ("measure",)

    @staticmethod
    def has(word: str) -> bool:
        """Whether a word of the command line is one of these."""
        key, _, value = word.partition("=")
        return key == "measure" or (key == "device" and re.fullmatch(DEVICE, value) is None)

    @classmethod
    def of(cls, words: Sequence[str]) -> PlanKeys:
        """From KEY=VALUE words. UserError for a device nobody knows, and where measuring needs one that is not here."""
        values: dict[str, str] = {}
        for word in words:
            key, _, value = word.partition("=")
            if values.setdefault(key, value) != value:
                raise UserError(f"{word}: {key} is given twice", "keep one of them")
        measure, device = values.get("measure", "false").lower(), values.get("device")
        if measure not in ("true", "false"):
            raise UserError(f"measure={measure}: measure is true or false", "give measure=true")
        if device is not None:
            device_of(device)
            if measure == "true":
                raise UserError(
                    f"device={device} measure=true: steps are measured on a device that is here",
                    f"leave out one of the two: lmtool plan ... device={device}",
                )
        return cls(device, measure == "true")
