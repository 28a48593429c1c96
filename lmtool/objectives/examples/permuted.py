"""Permuted windows in lanes, for a model that keeps states of their first tokens.

The windows of a lane begin `reuse` tokens apart and read on from there, over text that the next ones begin with: what
is kept of a window is of the text right before the next one (Yang et al. 2019, "XLNet", section 2.4; data_utils.py and
`reuse_len` of its published code).

Shape letters: N examples of a batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lmtool.data.lanes import segments
from lmtool.data.plan import Plan
from lmtool.errors import UserError
from lmtool.objectives.examples.masked import MaskedWindows
from lmtool.objectives.examples.plans import numbers_of, plan_facts, some
from lmtool.types import Batch, Lanes


class PermutedWindows(MaskedWindows):
    """Windows of a model that carries state, joined: a loader reads them in lanes."""

    def in_lanes(self, lanes: int) -> PermutedSegments:
        """See `data.lanes.CutInLanes`. UserError where a window holds nothing but what is reused."""
        reuse = self.config.reuse
        if reuse >= self.room:
            raise UserError(
                f"objective.reuse={reuse} leaves nothing of the {self.room} tokens of text of a window",
                f"objective.reuse={max(1, self.room // 2)}, or a longer max_length=",
            )
        return PermutedSegments(self, lanes)


class PermutedSegments:
    """The same windows in lanes."""

    def __init__(self, windows: PermutedWindows, lanes: int):
        self._windows, self.stream = windows, windows.stream
        self.lanes = min(lanes, len(self.stream))
        rows = segments(len(self.stream), self.lanes, windows.config.reuse)
        self._plan = some(Plan(rows, self._reads(rows) + windows.template.overhead), windows.split)

    def _reads(self, rows: np.ndarray) -> np.ndarray:
        """(N,) tokens of text that windows read."""
        return np.minimum(self._windows.room, len(self.stream) - rows["start"])

    def plan(self, epoch: int) -> Plan:
        return self._plan

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        windows = self._windows
        read = np.zeros(len(rows), dtype=[("start", "i8"), ("length", "i8")])
        read["start"], read["length"] = rows["start"], self._reads(rows)
        whole = windows.assemble(read)
        masked = windows.masked(whole, examples, epoch)
        return Batch(
            windows.masks.packed(whole, masked),
            windows.masks.targets(whole, masked),
            *numbers_of(examples),
            lanes=Lanes(tuple(rows["lane"].tolist()), tuple(rows["before"].tolist()), self.lanes),
        )

    def facts(self) -> dict[str, Any]:
        """Size of an epoch, the lanes, and how many windows follow each other in one."""
        windows = self._windows
        facts = plan_facts(self._plan, windows.store, windows.split)
        along = -(-len(self._plan) // self.lanes)
        share = windows.config.predicted_fraction
        return {**facts, "predicted_fraction": share, "lanes": self.lanes, "segments_per_lane": along}
