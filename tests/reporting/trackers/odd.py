"""A plugin with trackers that go wrong, each in its own way."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from lmtool.config.registry import component
from lmtool.reporting.trackers.base import Tracker, TrackerConfig


@component("logger", "odd", builder="tests.reporting.trackers.odd:Odd")
class OddConfig(TrackerConfig):
    """Writes each row's step into a file, and fails where it is asked to."""

    package: ClassVar[str | None] = None
    file: str = Field("steps", description="What is written, in the run's folder.")
    at: str = Field("", description="Where it goes wrong: begin, write or end.")
    how: str = Field("raise", description="raise, hang or leave (the process ends).")
    second: str = Field("", description="Where it goes wrong when it is tried again.")

    def fallback(self) -> TrackerConfig | None:
        return self.model_copy(update={"at": self.second, "second": ""}) if self.second else None


class Odd(Tracker):
    config: OddConfig

    def begin(self) -> str | None:
        self._wrong("begin")
        return "begun"

    def write(self, row: Mapping[str, Any]) -> None:
        self._wrong("write")
        with (Path(self.run.folder) / self.config.file).open("a") as file:
            file.write(f"{row['step']}\n")

    def end(self, result: Mapping[str, Any] | None) -> str | None:
        self._wrong("end")
        return f"ended with {result}"

    def _wrong(self, place: str) -> None:
        if self.config.at != place:
            return
        if self.config.how == "hang":
            time.sleep(1000)
        if self.config.how == "leave":
            os._exit(0)
        print("a library's own words")
        raise RuntimeError(f"odd {place}")
