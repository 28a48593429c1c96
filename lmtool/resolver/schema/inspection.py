"""The additional keys of commands about a run. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Self

from lmtool.config.base import DEVICE, JsonObject
from lmtool.errors import ConfigError, UserError
from lmtool.runs.files import output_errors
from lmtool.training.devices import device_of


@dataclass(frozen=True)
class RunKeys:
    """The additional keys of a command about a run: integers, booleans, and `output`, a path. at_least: minimum of each
    integer, 1 by default."""

    at_least: ClassVar[dict[str, int]] = {}

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Returns the keys that the run does not have."""
        return tuple(field.name for field in fields(cls))

    @classmethod
    def has(cls, word: str) -> bool:
        """Whether a word of the command line sets one of these keys."""
        return word.partition("=")[0] in cls.names()

    @classmethod
    def of(cls, words: Sequence[str]) -> Self:
        """Decodes KEY=VALUE arguments. Raises UserError for an invalid value."""
        values: JsonObject = {}
        for word in dict.fromkeys(words):
            key, _, value = word.partition("=")
            if key in values:
                raise UserError(f"{word}: {key} is set twice", "keep one of them")
            if key == "output":
                values[key] = value
                continue
            if isinstance(getattr(cls, key), bool):
                if value not in ("true", "false"):
                    raise UserError(f"{word}: {key} must be true or false", f"set {key}=true")
                values[key] = value == "true"
                continue
            number, least = value.replace("_", "").replace(",", ""), cls.at_least.get(key, 1)
            if not number.isdigit() or int(number) < least:
                allowed = f"a whole number, at least {least}" if least else "a whole number"
                raise UserError(f"{word}: {key} must be {allowed}", f"set {key}={getattr(cls, key)}")
            values[key] = int(number)
        return cls(**values)


@dataclass(frozen=True)
class PlanKeys(RunKeys):
    """device: a device of the table, or None for the device of the run. measure: whether a few steps are run."""

    device: str | None = None
    measure: bool = False

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Returns the keys that the run does not have."""
        return ("measure",)

    @classmethod
    def has(cls, word: str) -> bool:
        """Whether a word of the command line sets one of these keys."""
        key, _, value = word.partition("=")
        return key == "measure" or (key == "device" and re.fullmatch(DEVICE, value) is None)

    @classmethod
    def of(cls, words: Sequence[str]) -> PlanKeys:
        """Decodes KEY=VALUE arguments. Raises UserError for an unknown device, and for measuring on a device type."""
        values: dict[str, str] = {}
        for word in words:
            key, _, value = word.partition("=")
            if values.setdefault(key, value) != value:
                raise UserError(f"{word}: {key} is set twice", "keep one of them")
        measure, device = values.get("measure", "false").lower(), values.get("device")
        if measure not in ("true", "false"):
            raise UserError(f"measure={measure}: measure must be true or false", "set measure=true")
        if device is not None:
            device_of(device)
            if measure == "true":
                raise UserError(
                    f"device={device} measure=true: steps can be measured only on a device of this machine",
                    f"omit one of them, measure=true or device={device}",
                )
        return cls(device, measure == "true")


@dataclass(frozen=True)
class InspectKeys(RunKeys):
    """Keys of `inspect`. n: examples to print. tokens: tokens to measure. brief: print only deviations and the result
    of the checks. output: file for the examples as JSON lines, or a page if it ends in .html, or None."""

    at_least: ClassVar[dict[str, int]] = {"n": 0}

    n: int = 3
    tokens: int = 200_000
    brief: bool = False
    output: str | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError if the output cannot be written, before any text is read."""
        if errors := list(output_errors(self.output)):
            raise ConfigError(errors)


@dataclass(frozen=True)
class ProfileKeys(RunKeys):
    """steps: steps to profile. output: new folder for the trace and the table, or None: runs/profile-..."""

    steps: int = 5
    output: str | None = None
