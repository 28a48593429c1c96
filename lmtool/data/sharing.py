"""How the processes that train together share the examples of a step, so that all of them have as much to do.

Each computes all shares from the lengths of the step, and needs no word from the others. Shape letters: N examples of
the step, S of a share, B its forwards.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lmtool.data.plan import batch_borders


@dataclass(frozen=True)
class Share:
    """What one process reads of a step. places: (S,) of its examples, in the order of the step. borders: (B+1,) of its
    forwards in them. idle: how many forwards others have more."""

    places: np.ndarray
    borders: np.ndarray
    idle: int


def share_of(lengths: np.ndarray, rank: int, ranks: int, micro_batch_tokens: int | None) -> Share:
    """The share of a process. lengths: (N,) tokens of each example. micro_batch_tokens: in one forward, at most."""
    places = [np.arange(len(lengths))] if ranks == 1 else dealt(lengths, ranks)
    borders = [batch_borders(lengths[own], None, micro_batch_tokens) for own in places]
    most = max(map(len, borders))
    return Share(places[rank], borders[rank], most - len(borders[rank]))


def dealt(lengths: np.ndarray, ranks: int) -> list[np.ndarray]:
    """By process, the places of its examples: the longest are dealt first, in turns that go back and forth, so that
    shares differ by one example at most, and by little more than the spread of lengths in a turn in tokens."""
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")
    turn, seat = np.divmod(np.arange(len(order)), ranks)
    owner = np.empty(len(order), dtype=np.int64)
    owner[order] = np.where(turn % 2, ranks - 1 - seat, seat)
    return [np.flatnonzero(owner == rank) for rank in range(ranks)]
