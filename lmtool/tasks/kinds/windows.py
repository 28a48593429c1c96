"""Long texts as overlapping windows: which tokens each window holds, and which of them it answers for.

A pure function of lengths: neither texts nor labels are seen here.

Shape letters: E texts, W windows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Windows:
    """(W,) int64 each, the windows of a text side by side and in order.

    text: the number of the window's text. part: the window's number within it, from 0. start, end: the tokens
    [start, end) that the window holds. own_start, own_end: the tokens of these that it answers for; over the windows
    of a text they follow one another from its first token to its last, so that every token has one owner.
    """

    text: np.ndarray
    part: np.ndarray
    start: np.ndarray
    end: np.ndarray
    own_start: np.ndarray
    own_end: np.ndarray

    def __len__(self) -> int:
        return len(self.text)

    @property
    def lengths(self) -> np.ndarray:
        """(W,) tokens of each window."""
        return self.end - self.start


def windows(lengths: np.ndarray, room: int | np.ndarray, overlap: int | np.ndarray = 0) -> Windows:
    """The windows of E texts of these lengths in tokens.

    room: tokens of a window at most, a number or (E,), above `overlap`. overlap: tokens that neighbours share. The last
    window ends with its text and may be shorter. A text of no token has one empty window.

    Of two neighbours that hold a token the one answers for it in which it stands further from the edge: their border is
    the middle of what they share (the maximum context of Devlin et al. 2019, `run_squad.py`). ValueError where windows
    would not advance.
    """
    lengths_E = np.asarray(lengths, dtype=np.int64)
    room_E = np.broadcast_to(np.asarray(room, dtype=np.int64), lengths_E.shape)
    step_E = room_E - np.asarray(overlap, dtype=np.int64)
    if len(lengths_E) and (step_E.min() < 1 or np.min(overlap) < 0):
        raise ValueError(f"windows of {room_E.min()} tokens cannot share {np.max(overlap)}")
    counts_E = 1 + np.maximum(0, -(-(lengths_E - room_E) // step_E))
    text = np.repeat(np.arange(len(lengths_E)), counts_E)
    part = np.arange(len(text)) - np.repeat(np.cumsum(counts_E) - counts_E, counts_E)
    start = part * step_E[text]
    end = np.minimum(start + room_E[text], lengths_E[text])
    own_start, own_end = start.copy(), end.copy()
    later = np.flatnonzero(part > 0)
    borders = (start[later] + end[later - 1] + 1) // 2
    own_start[later], own_end[later - 1] = borders, borders
    return Windows(text, part, start, end, own_start, own_end)
