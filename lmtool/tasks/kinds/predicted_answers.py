"""Pieces of a context as answers: what a window says, and what a row is predicted, in arrays.

Shape letters: K answers that are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Span(NamedTuple):
    """Characters [start, end) of the context, and the score of its start and its end; characters 0 to 0 stand for no
    answer."""

    start: int
    end: int
    score: float


SPANS = np.dtype([("start", "i4"), ("end", "i4"), ("score", "f4")])
"""Of an array with a `Span` in each place: of every row so many are kept that objects would fill the memory."""


class WindowAnswers(NamedTuple):
    """What a window says: its best spans, (K,) SPANS, falling, and the score of no answer."""

    best: np.ndarray
    null: float


@dataclass(frozen=True, slots=True)
class PredictedAnswer:
    """What a row is predicted. kept: (K,) SPANS, falling by score; empty where the context has no text. null: the score
    of no answer, the lowest of the windows. given: whether the best span is the answer."""

    kept: np.ndarray
    null: float
    given: bool = True

    @property
    def best(self) -> tuple[Span, ...]:
        """The spans that are kept."""
        return tuple(map(Span._make, self.kept.tolist()))

    @property
    def null_difference(self) -> float:
        """How much better no answer is than the best span."""
        return self.null - float(self.kept[0]["score"]) if len(self.kept) else np.inf

    @property
    def span(self) -> tuple[int, int]:
        """The characters of the answer that is given."""
        return self.first if self.given else (0, 0)

    @property
    def first(self) -> tuple[int, int]:
        """The characters of the best span, given or not."""
        return (int(self.kept[0]["start"]), int(self.kept[0]["end"])) if len(self.kept) else (0, 0)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PredictedAnswer) and self.span == other.span

    __hash__ = None  # type: ignore[assignment]
