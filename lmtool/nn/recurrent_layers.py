"""Recurrent layers in a stack: each reads the documents of a batch together, and a cache keeps its states.

Shape letters: T tokens, M of them that are read, I width of what a layer reads, P of what it gives.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch import Tensor, nn

from lmtool.nn.attention import only
from lmtool.nn.cache import Cache
from lmtool.nn.context import Context
from lmtool.nn.dropout import Dropout
from lmtool.nn.recurrent import Lockstep, Lstm, State
from lmtool.types import Segments


@lru_cache(maxsize=8)
def steps_of(texts: Segments, reverse: bool = False) -> Lockstep:
    """The steps of packed texts, left to right, or right to left: once for all layers that read a batch."""
    return Lockstep.of(texts, reverse)


class StateCache:
    """The states of a recurrent layer behind the tokens it has read, in the place of keys and values."""

    def __init__(self, cache: Cache):
        self.state: State | None = None

    def select(self, rows_R: Tensor) -> None:
        """Keep these documents alone."""
        if self.state is not None:
            self.state = State(*(part.index_select(0, rows_R) for part in self.state))


class RecurrentLayer(nn.Module):
    """An LSTM as a layer of a stack, left to right, and dropout behind it."""

    def __init__(self, cell: Lstm, dropout: float):
        super().__init__()
        self.cell = cell
        self.dropout = Dropout(dropout)

    def forward(self, x_TI: Tensor, context: Context) -> Tensor:
        """(T, I) to (T, P), or (M, P) of the tokens that the context reads."""
        kept: Any = context.cache
        given_TP, state = self.cell(x_TI, steps_of(context.packed.segments), None if kept is None else kept.state)
        if kept is not None:
            kept.state = state
        return self.dropout(only(given_TP, context.read_M), context.read_draws)
