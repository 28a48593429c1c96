"""Measured statistics beside their definitions, with intervals that hold together.

A statistic is a sum of independent draws whose expectation and variance the definition gives. By Bernstein's
inequality the sum is farther than sqrt(2 V L) + b L / 3 from its expectation with a probability of 2 exp(-L) at most,
V the variance and b the most by which one draw exceeds its mean: no approximation, whatever the number of draws. With
m statistics and L = log(2 m / 0.001) all of them hold together in 999 of 1,000 measurements at least.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log, sqrt

import numpy as np

FAMILY = 0.001
"""Chance that any of the intervals of one measurement does not hold."""


@dataclass
class Statistic:
    """One line of the table.

    total: the sum of the draws, of which there are `count` (0: a number that is reported as it is). expected, variance,
    bound: of the sum; None for what has no definition and is only reported. exact: the sum must be what is expected.
    is_share: whether it lies between 0 and 1.
    """

    name: str
    total: float = 0.0
    count: float = 0.0
    expected: float | None = None
    variance: float = 0.0
    bound: float = 0.0
    exact: bool = False
    is_share: bool = False

    @property
    def measured(self) -> float:
        """The mean of the draws."""
        return self.total / (self.count or 1.0)

    @property
    def defined(self) -> float | None:
        """What it should be."""
        return None if self.expected is None else self.expected / (self.count or 1.0)

    def half_width(self, tested: int) -> float:
        """Of the interval around the measured mean, one of `tested` that hold together."""
        spread = log(2 * max(tested, 1) / FAMILY)
        return (sqrt(2 * self.variance * spread) + self.bound * spread / 3) / (self.count or 1.0)

    def interval(self, tested: int) -> tuple[float, float]:
        """Around the measured mean, one of `tested` that hold together."""
        half = self.half_width(tested)
        low, high = self.measured - half, self.measured + half
        return (max(low, 0.0), min(high, 1.0)) if self.is_share else (low, high)

    @property
    def checks_itself(self) -> bool:
        """Whether it counts what must never be."""
        return self.exact and self.expected == 0

    def holds(self, tested: int) -> bool:
        """Whether the definition lies in the interval."""
        if self.expected is None or self.defined is None:
            return True
        if self.exact:
            return self.total == self.expected
        return abs(self.measured - self.defined) <= self.half_width(tested)


class Tally:
    """Statistics that grow batch by batch, in the order of their first mention."""

    def __init__(self) -> None:
        self.statistics: dict[str, Statistic] = {}
        self.remarks: dict[str, str] = {}
        """What a definition is, by the statistic's name, where it is no number of the configuration."""

    def _of(self, name: str) -> Statistic:
        return self.statistics.setdefault(name, Statistic(name))

    def share(self, name: str, hits: float, of: float, share: float | np.ndarray) -> None:
        """`hits` of `of` draws, each with a chance of `share`, or with chances of their own (an array)."""
        chances = np.full(1, share) if np.isscalar(share) else np.asarray(share)
        times = of / max(len(chances), 1)
        self.mean(name, hits, of, float(chances.sum() * times), float((chances * (1 - chances)).sum() * times), 1.0)
        self.statistics[name].is_share = True

    def mean(self, name: str, total: float, count: float, expected: float, variance: float, bound: float) -> None:
        """A sum of draws with its expectation and variance; bound: how far one draw can be from its mean."""
        statistic = self._of(name)
        statistic.total += float(total)
        statistic.count += float(count)
        statistic.expected = (statistic.expected or 0.0) + expected
        statistic.variance += variance
        statistic.bound = max(statistic.bound, bound)

    def exact(self, name: str, total: float, expected: float, of: float = 0.0) -> None:
        """A number that must be what is expected; of: what it is a share of."""
        statistic = self._of(name)
        statistic.exact, statistic.expected = True, (statistic.expected or 0.0) + float(expected)
        statistic.total += float(total)
        statistic.count += float(of)

    def none(self, name: str, times: float, of: float = 0.0) -> None:
        """Something that must never be."""
        self.exact(name, times, 0.0, of)

    def note(self, name: str, total: float, count: float, is_share: bool = False) -> None:
        """A mean that is reported and has no definition."""
        statistic = self._of(name)
        statistic.is_share = is_share
        statistic.total += float(total)
        statistic.count += float(count)

    def measured(self, name: str) -> float | None:
        """The mean of a statistic by its name; None where nothing of it was drawn."""
        statistic = self.statistics.get(name)
        return statistic.measured if statistic is not None and statistic.count else None

    @property
    def tested(self) -> int:
        """How many intervals hold together."""
        return sum(statistic.expected is not None and not statistic.exact for statistic in self.statistics.values())

    def broken(self) -> list[Statistic]:
        """Those that do not hold."""
        return [statistic for statistic in self.statistics.values() if not statistic.holds(self.tested)]
