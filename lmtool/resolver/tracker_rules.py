"""Which trackers a run can have; what it cannot is refused before anything is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lmtool.config.rules import rule
from lmtool.errors import Problem
from lmtool.schema.run import RunConfig
from lmtool.trackers.configs import TrackerConfig


@rule(RunConfig, "logger", "offline")
def trackers_fit(logger: Mapping[str, TrackerConfig], offline: bool) -> Iterator[Problem]:
    """A run without a network has no tracker that needs it."""
    for name, config in logger.items():
        if (problem := config.misfit(f"logger.{name}", offline)) is not None:
            yield problem


@rule(RunConfig, "logger", running=True)
def trackers_are_installed(logger: Mapping[str, TrackerConfig]) -> Iterator[Problem]:
    """What a tracker needs is on this machine."""
    for name, config in logger.items():
        if (problem := config.missing(f"logger.{name}")) is not None:
            yield problem
