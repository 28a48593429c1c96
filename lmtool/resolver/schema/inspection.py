"""The keys that the commands about a run have of their own, beside those of the run. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from lmtool.errors import ConfigError, UserError
from lmtool.resolver.schema.base import DEVICE
from lmtool.runs.files import output_errors
from lmtool.training.devices import device_of


@dataclass(frozen=True)
class RunKeys:
    """The keys of a command about a run: whole numbers, true or false, and `output`, a path. at_least: the smallest
    number, 1 where none is named."""

    at_least: ClassVar[dict[str, int]] = {}

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Those that the run has not."""
        return tuple(field.name for field in fields(cls))

    @classmethod
    def has(cls, word: str) -> bool:
        """Whether a word of the command line is one of these."""
        return word.partition("=")[0] in cls.names()

    @classmethod
    def of(cls, words: Sequence[str]) -> Self:
        """From KEY=VALUE words. UserError where a value is no number."""
        values: dict[str, Any] = {}
        for word in dict.fromkeys(words):
            key, _, value = word.partition("=")
            if key in values:
                raise UserError(f"{word}: {key} is given twice", "keep one of them")
            if key == "output":
                values[key] = value
                continue
            if isinstance(getattr(cls, key), bool):
                if value not in ("true", "false"):
                    raise UserError(f"{word}: {key} is true or false", f"give {key}=true")
                values[key] = value == "true"
                continue
            number, least = value.replace("_", "").replace(",", ""), cls.at_least.get(key, 1)
            if not number.isdigit() or int(number) < least:
                said = f"a whole number, at least {least}" if least else "a whole number"
                raise UserError(f"{word}: {key} is {said}", f"give {key}={getattr(cls, key)}")
            values[key] = int(number)
        return cls(**values)


@dataclass(frozen=True)
class PlanKeys(RunKeys):
    """device: a published one, or None for what the run names. measure: whether a few of its steps are run."""

    device: str | None = None
    measure: bool = False

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Those that the run has not."""
        return ("measure",)

    @classmethod
    def has(cls, word: str) -> bool:
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


@dataclass(frozen=True)
class Looking(RunKeys):
    """n: examples to print. tokens: how many are measured. brief: only what stands out, and whether all checks hold.
    output: file for the examples as JSON lines, or, ending in .html, for a page with all that is printed, or None."""

    at_least: ClassVar[dict[str, int]] = {"n": 0}

    n: int = 3
    tokens: int = 200_000
    brief: bool = False
    output: str | None = None

    def __post_init__(self) -> None:
        """ConfigError where the output cannot be written, before any text is read."""
        if errors := list(output_errors(self.output)):
            raise ConfigError(errors)


@dataclass(frozen=True)
class Profiling(RunKeys):
    """steps: how many are profiled. output: the new folder of the trace and the table, or None: runs/profile-..."""

    steps: int = 5
    output: str | None = None
