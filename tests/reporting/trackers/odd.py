"""A plugin with a tracker that fails in a configurable way."""

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
    """Writes the step of each row into a file, and fails where configured."""

    package: ClassVar[str | None] = None
    file: str = Field("steps", description="Name of the file in the run's folder.")
    at: str = Field("", description="Failing method: begin, write or end.")
    how: str = Field("raise", description="raise, hang or leave (the process ends).")
    second: str = Field("", description="Failing method after a restart.")

    def fallback(self) -> TrackerConfig | None:
        return self.model_copy(update={"at": self.second, "second": ""}) if self.second else None


class Odd(Tracker):
    config: OddConfig

    def start(self) -> str | None:
        self._fail_at("begin")
        return "begun"

    def write(self, row: Mapping[str, Any]) -> None:
        self._fail_at("write")
        with (Path(self.run.folder) / self.config.file).open("a") as file:
            file.write(f"{row['step']}\n")

    def end(self, result: Mapping[str, Any] | None) -> str | None:
        self._fail_at("end")
        return f"ended with {result}"

    def _fail_at(self, place: str) -> None:
        if self.config.at != place:
            return
        if self.config.how == "hang":
            time.sleep(1000)
        if self.config.how == "leave":
            os._exit(0)
        print("a library's own words")
        raise RuntimeError(f"odd {place}")
