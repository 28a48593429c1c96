"""The processes that train together: how many there are, which one this is, and what they say to each other.

One process is a group of its own; what asks a group is ready for several. Those of several processes: processes.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeVar

from torch import Tensor

Value = TypeVar("Value")


class Group(Protocol):
    """rank: of this process, from 0. size: how many there are. Every process calls the same of these methods in the
    same order, with plain objects (what pickle takes) that travel between the hosts: no device waits for them."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, counts: Mapping[str, float]) -> dict[str, float]:
        """Counts by name, added up over all processes; a name that one of them lacks is 0 there."""

    def first(self, value: Value) -> Value:
        """The value of rank 0, on all."""

    def all(self, value: Value) -> list[Value]:
        """The values of all, by rank."""

    def wait(self) -> None:
        """Return once all have called it, however long one of them works before that."""

    def add_up(self, tensor: Tensor) -> Tensor:
        """The tensor, summed in place over all processes by their devices: the host does not wait for it."""


class Alone:
    """The group of one process."""

    rank, size = 0, 1

    def sum(self, counts: Mapping[str, float]) -> dict[str, float]:
        return dict(counts)

    def first(self, value: Value) -> Value:
        return value

    def all(self, value: Value) -> list[Value]:
        return [value]

    def wait(self) -> None: ...

    def add_up(self, tensor: Tensor) -> Tensor:
        return tensor


ALONE = Alone()


def added(counts: list[Mapping[str, float]]) -> dict[str, float]:
    """Counts by name, added up in their order, so that all processes have the same sums."""
    totals: dict[str, float] = {}
    for part in counts:
        for name, count in part.items():
            totals[name] = totals.get(name, 0.0) + count
    return totals
