"""The base of what every command reads. Imports no torch."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from lmtool.config.base import Config

DEVICE = r"^(auto|cpu|cuda(:\d+)?)$"


class CommandConfig(Config):
    """The keys that every command shares."""

    verbatim: ClassVar[tuple[str, ...]] = ()
    """Keys whose value is text as it is typed: commas, quotes and brackets mean nothing in it."""
    alternatives: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Pairs of keys of which one is typed: the other would not be read."""

    starts_with_checkpoint: ClassVar[bool] = True
    """Whether sections may be taken from what checkpoint= names: it is opened before the command begins."""

    plugins: tuple[str, ...] = Field(
        (), description="Python modules whose components are added; typed with --plugin, never read from a file."
    )
