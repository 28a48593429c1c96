"""The processes that train together: how many there are, which one this is, and what they add up.

One process is a group of its own; what asks a group is ready for several.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Group(Protocol):
    """rank: of this process, from 0. size: how many there are."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, counts: Mapping[str, float]) -> dict[str, float]:
        """Counts by name, added up over all processes; a name that one of them lacks is 0 there."""


class Alone:
    """The group of one process."""

    rank, size = 0, 1

    def sum(self, counts: Mapping[str, float]) -> dict[str, float]:
        return dict(counts)


ALONE = Alone()
