"""What `lmtool inspect` reports of a mixture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from lmtool.learners.base import BaseLearner
from lmtool.learners.inspection import Inspector
from lmtool.learners.mixed_examples import MixedExamples
from lmtool.learners.tally import Tally


class MixedInspector(Inspector):
    """The inspectors of all members, and each one's share of the mixture."""

    def __init__(
        self, learner: BaseLearner, examples: MixedExamples, max_length: int, members: Mapping[str, Inspector]
    ):
        super().__init__(learner, examples, max_length)
        self.members = members

    def fact(self, tally: Tally) -> str:
        return " · ".join(f"{tally.measured(f'share of {name}') or 0:.0%} {name}" for name in self.members)

    def described(self, n: int) -> Iterator[dict[str, Any]]:
        """The first n examples of each member, with the name of the `member`."""
        for name, member in self.members.items():
            for entry in member.described(n):
                yield {"member": name, **entry}

    def measured(self, tokens: int) -> Tally:
        tally, examples = Tally(), self.examples
        drawn = np.bincount(examples.plan(0).rows["member"], minlength=len(self.members))
        for (name, member), count, share in zip(self.members.items(), drawn, examples.shares, strict=True):
            own = member.measured(max(tokens // len(drawn), 1))
            for statistic in own.statistics.values():
                title = f"{name}: {statistic.name}"
                tally.statistics[title] = replace(statistic, name=title)
            tally.remarks |= own.remarks
            tally.note(f"share of {name}", count, drawn.sum())
            # Each share is rounded to whole examples, by half of one at most, and so is their sum.
            tally.none("members off their share", abs(count - share * drawn.sum()) > 0.5 + len(drawn) / 2)
        self.check_batches(tally, tokens)
        return tally
