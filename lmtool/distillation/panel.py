"""Several teachers as one: what they predict of the same targets is averaged, and each may teach other members of a
mixture.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lmtool.distillation.seen import Seen, Teacher
from lmtool.heads.averaged import Averaged
from lmtool.heads.predicted import Shares
from lmtool.nn.stack import Tap
from lmtool.types import Batch


@dataclass(kw_only=True)
class Panel(Teacher):
    """members: the teachers, of which the first one's learner, precision and origin are the panel's. weights: of each
    in an average, by origin. average: what is averaged."""

    members: Sequence[Teacher]
    weights: Mapping[str, float]
    average: Literal["probabilities", "logits"]

    @classmethod
    def of(cls, members: Sequence[Teacher], weights: Mapping[str, float], average: Any) -> Panel:
        """A panel of at least one."""
        first = members[0]
        return cls(first.learner, first.precision, first.origin, members=members, weights=weights, average=average)

    @property
    def teaches(self) -> frozenset[str]:
        return frozenset().union(*(teacher.teaches for teacher in self.members))

    def see(self, batch: Batch, states: Tap | None = None) -> Seen:
        """states: sees nothing; whose states they would be is not known."""
        seen = [(self.weights[teacher.origin], teacher.see(batch)) for teacher in self.members]
        predicted = dict(self._joined(seen))
        return Seen(self.learner, batch, predicted)

    def _joined(self, seen: Sequence[tuple[float, Seen]]) -> Iterator[tuple[str, Shares]]:
        for term in dict.fromkeys(term for _, each in seen for term in each.predicted):
            parts = [(weight, each.predicted[term]) for weight, each in seen if term in each.predicted]
            yield term, parts[0][1] if len(parts) == 1 else Averaged.of(parts, self.average)
