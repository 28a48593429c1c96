"""The base classes of trackers and of their configurations, and the plain data about a run that they receive."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from lmtool.config.base import Config, JsonMapping
from lmtool.errors import Problem


class TrackerConfig(Config):
    """Base of every tracker's configuration: a run has any number of trackers, each under its name in `logger`."""

    package: ClassVar[str | None] = None
    """The Python package that the tracker needs in addition to lmtool's own."""
    extra: ClassVar[str] = "trackers"
    """The extra of lmtool that installs the package."""

    @property
    def needs_network(self) -> bool:
        """Whether the tracker cannot work without a connection."""
        return False

    def missing(self, key: str) -> Problem | None:
        """Returns the problem if its package or API key is missing; found without importing the package."""
        if self.package is None or importlib.util.find_spec(self.package) is not None:
            return None
        message = f"{key} needs the Python package {self.package}, which is not installed"
        return Problem(key, message, f"pip install 'lmtool[{self.extra}]'")

    def fallback(self) -> TrackerConfig | None:
        """Returns the configuration to try if this one cannot start; None to give up."""
        return None

    def unwritten_rows(self, folder: str) -> str:
        """Returns a sentence about rows that were not written when the run ended. folder: the run's folder."""
        return "its last rows may be missing, but metrics.jsonl has every row"


def require_offline_trackers(logger: Mapping[str, TrackerConfig], offline: bool) -> Iterator[Problem]:
    for name, config in logger.items():
        if offline and config.needs_network:
            key = f"logger.{name}.mode"
            yield Problem(key, f"{key}=online contradicts offline=true", f"set {key}=offline, or offline=false")


def require_installed_trackers(logger: Mapping[str, TrackerConfig]) -> Iterator[Problem]:
    for name, config in logger.items():
        if (problem := config.missing(f"logger.{name}")) is not None:
            yield problem


@dataclass(frozen=True)
class RunMetadata:
    """A run as its trackers see it. group: the sweep that the run is a job of. config: resolved, with secrets masked.
    offline: whether connections are forbidden. step: the step after which training continues, 0 for a new run."""

    folder: str
    name: str
    group: str | None
    command: str
    config: JsonMapping
    offline: bool
    step: int


class Tracker(ABC):
    """Base of every tracker, built in a process of its own. An exception ends the tracker, never the run."""

    def __init__(self, config: TrackerConfig, run: RunMetadata):
        self.config, self.run = config, run

    def start(self) -> str | None:
        """Opens the files or the connection. Returns a line for the user, or None."""
        return None

    @abstractmethod
    def write(self, row: JsonMapping) -> None:
        """Writes a row of metrics.jsonl: `step`, `split` (train or validation) and measurements."""

    def end(self, result: JsonMapping | None) -> str | None:
        """Closes the tracker. result: the headline of result.json; None if the run was stopped. Returns a line for the
        user, or None."""
        return None


def numbers(row: JsonMapping, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yields the numbers of a row by name; numbers in a section are named `section/name`."""
    for name, value in row.items():
        if isinstance(value, dict):
            yield from numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and (prefix or name != "step"):
            yield f"{prefix}{name}", value
