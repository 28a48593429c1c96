"""Permuted windows in lanes, for a model that keeps states of their first tokens.

The windows of a lane begin `reuse` tokens apart and read on from there, over text that the next ones begin with: what
is kept of a window is of the text right before the next one (Yang et al. 2019, "XLNet", section 2.4; data_utils.py and
`reuse_len` of its published code).

Shape letters: N examples of a batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lmtool.data.assembly import Assembled
from lmtool.data.lanes import segments
from lmtool.data.plan import Plan
from lmtool.errors import UserError
from lmtool.objectives.examples.masked import MaskedWindows
from lmtool.objectives.examples.plans import numbers_of, plan_facts, some
from lmtool.objectives.examples.windows import WINDOW
from lmtool.objectives.permutation_configs import PlmConfig
from lmtool.types import Batch, Lanes


class PermutedWindows(MaskedWindows):
    """Windows of a model that carries state, joined: a loader reads them in lanes."""

    config: PlmConfig

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
        self.config, self.masks, self.masked = windows.config, windows.masks, windows.masked
        self.lanes = min(lanes, len(self.stream))
        rows = segments(len(self.stream), self.lanes, self.config.reuse)
        self._plan = some(Plan(rows, self._reads(rows) + windows.template.overhead), windows.split)

    def _reads(self, rows: np.ndarray) -> np.ndarray:
        """(N,) tokens of text that windows read."""
        return np.minimum(self._windows.room, len(self.stream) - rows["start"])

    def plan(self, epoch: int) -> Plan:
        return self._plan

    def assemble(self, rows: np.ndarray) -> Assembled:
        """The windows as they are read."""
        windows = np.zeros(len(rows), dtype=WINDOW)
        windows["start"], windows["length"] = rows["start"], self._reads(rows)
        return self._windows.assemble(windows)

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        whole = self.assemble(rows)
        masked = self.masked(whole, examples, epoch)
        return Batch(
            self.masks.packed(whole, masked),
            self.masks.targets(whole, masked),
            *numbers_of(examples),
            lanes=Lanes(tuple(rows["lane"].tolist()), tuple(rows["before"].tolist()), self.lanes),
        )

    def facts(self) -> dict[str, Any]:
        """Size of an epoch, the lanes, how many windows follow each other in one, and how far apart they begin."""
        facts = plan_facts(self._plan, self._windows.store, self._windows.split)
        along = -(-len(self._plan) // self.lanes)
        share = self.config.predicted_fraction
        own = {"lanes": self.lanes, "segments_per_lane": along, "segments_apart": self.config.reuse}
        return {**facts, "predicted_fraction": share, **own}
