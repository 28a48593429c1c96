"""The base of trackers, and the plain data about a run that their processes receive."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmtool.reporting.trackers.configs import TrackerConfig


@dataclass(frozen=True)
class RunMetadata:
    """folder: of the run. name: what it is called. group: the sweep it is a job of. command: pretrain or finetune.
    config: resolved and masked. offline: no connection may be opened. step: training continues after it, 0 at first."""

    folder: str
    name: str
    group: str | None
    command: str
    config: Mapping[str, Any]
    offline: bool
    step: int

    @property
    def path(self) -> Path:
        return Path(self.folder)


class Tracker(ABC):
    """Base of every tracker, built where its process starts. What it raises ends it, and never the run."""

    def __init__(self, config: TrackerConfig, run: RunMetadata):
        self.config, self.run = config, run

    def begin(self) -> str | None:
        """Open what is written to; returns a line for the user, or None."""
        return None

    @abstractmethod
    def write(self, row: Mapping[str, Any]) -> None:
        """A row of metrics.jsonl: its `step`, its `split` (train or validation), and what was measured."""

    def end(self, result: Mapping[str, Any] | None) -> str | None:
        """Close. result: the headline of result.json, None of a run that was stopped. Returns a line, or None."""
        return None


def numbers(row: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a row by name, those of sections as `section/name`."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from numbers(value, f"{above}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and (above or name != "step"):
            yield f"{above}{name}", value
