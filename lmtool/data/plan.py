"""The plan of an epoch: which examples there are and how long each is, before any of them is made.

Shape letters: E examples of an epoch, N examples of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from lmtool.types import Batch


@dataclass(frozen=True)
class Plan:
    """rows: (E,) records, all that is needed to make each example; their fields are the planner's own business.
    lengths: (E,) packed tokens of each example with its special tokens, exact or the largest it can have."""

    rows: np.ndarray
    lengths: np.ndarray

    def __post_init__(self) -> None:
        if len(self.rows) != len(self.lengths):
            raise ValueError(f"{len(self.rows)} rows and {len(self.lengths)} lengths")

    def __len__(self) -> int:
        return len(self.rows)

    def facts(self) -> dict[str, Any]:
        """How many examples, their tokens, and their mean and longest length."""
        return {
            "examples": len(self),
            "tokens": int(self.lengths.sum(dtype=np.int64)),
            "mean_length": float(self.lengths.mean()),
            "longest": int(self.lengths.max()),
        }


@runtime_checkable
class Examples(Protocol):
    """What a loader reads: an objective's or a task's examples. Everything is a pure function of its arguments."""

    def plan(self, epoch: int) -> Plan:
        """The plan of an epoch; cached by whoever makes it where it is dear."""

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        """The batch of (N,) rows of the plan, whose numbers in it are `examples` (N,)."""

    def facts(self) -> dict[str, Any]:
        """What the screens say: truncated fraction, skipped documents, ..."""


def batch_borders(lengths: np.ndarray, examples: int | None = None, tokens: int | None = None) -> np.ndarray:
    """Borders (B+1,) of consecutive batches over (E,) lengths, in their order.

    examples: that many a batch, fewer in the last. tokens: as many examples as fit, at least one, so that an example
    longer than the budget is a batch by itself. Both: whichever is reached first. None of both: one batch.
    """
    count = len(lengths)
    if count == 0:
        return np.zeros(1, dtype=np.int64)
    if tokens is None:
        stride = count if examples is None else examples
        return np.append(np.arange(0, count, stride, dtype=np.int64), count)
    ends = np.cumsum(lengths, dtype=np.int64)
    borders, at = [0], 0
    while at < count:
        fitting = int(np.searchsorted(ends, (ends[at - 1] if at else 0) + tokens, side="right"))
        at = max(fitting, at + 1) if examples is None else min(max(fitting, at + 1), at + examples, count)
        borders.append(at)
    return np.array(borders, dtype=np.int64)
