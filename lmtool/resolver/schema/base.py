"""The base class of the commands' configurations. Imports no torch."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from lmtool.config.base import Config

DEVICE = r"^(auto|cpu|cuda(:\d+)?)$"


class CommandConfig(Config):
    """The keys that every command shares."""

    verbatim: ClassVar[tuple[str, ...]] = ()
    """Keys whose value is text as typed: commas, quotes and brackets have no special meaning in it."""
    alternatives: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Pairs of keys that exclude each other."""

    starts_with_checkpoint: ClassVar[bool] = True
    """Whether sections may come from the checkpoint, whose configuration is then read first."""

    plugins: tuple[str, ...] = Field(
        (), description="Python modules whose components are added; typed with --plugin, never read from a file."
    )
