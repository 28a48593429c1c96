"""A teacher whose predictions over a vocabulary are cut to its most probable words."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lmtool.distillation.seen import Seen, Teacher
from lmtool.heads.cut import cut
from lmtool.nn.stack import Tap
from lmtool.types import Batch


@dataclass(kw_only=True)
class CutTeacher(Teacher):
    """top_k: words that are kept of a vocabulary. temperatures: at which they are learned."""

    top_k: int
    temperatures: tuple[float, ...]

    def see(self, batch: Batch, states: Tap | None = None) -> Seen:
        seen = super().see(batch, states)
        with self.precision.autocast():
            predicted = {term: cut(each, self.top_k, self.temperatures) for term, each in seen.predicted.items()}
        return replace(seen, predicted=predicted)
