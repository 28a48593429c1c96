"""The keys that `lmtool inspect` has of its own, beside those of the run it looks into. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lmtool.errors import UserError

KEYS = ("n", "tokens", "output")


@dataclass(frozen=True)
class Looking:
    """n: examples to print. tokens: how many are measured. output: file for the examples as JSON lines, or None."""

    n: int = 3
    tokens: int = 200_000
    output: str | None = None

    @classmethod
    def of(cls, words: Sequence[str]) -> Looking:
        """From KEY=VALUE words. UserError where a value is no number."""
        values: dict[str, Any] = {}
        for word in dict.fromkeys(words):
            key, _, value = word.partition("=")
            if key in values:
                raise UserError(f"{word}: {key} is given twice", "keep one of them")
            if key == "output":
                values[key] = value
                continue
            number = value.replace("_", "").replace(",", "")
            if not number.isdigit() or (key == "tokens" and int(number) < 1):
                raise UserError(f"{word}: {key} is a whole number", f"give {key}={getattr(cls, key)}")
            values[key] = int(number)
        return cls(**values)
