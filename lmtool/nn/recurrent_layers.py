"""Recurrent layers in a stack: each reads the documents of a batch together, and a cache keeps its states.

Shape letters: T tokens, M of them that are read, I width of what a layer reads, P of what it gives, C of a state.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

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

    grows = True

    def __init__(self, cache: Cache):
        self.state: tuple[Tensor, ...] | None = None

    def keep(self, state: tuple[Tensor, ...]) -> None:
        """Take the state behind the new tokens: the next ones begin with it."""
        self.state = state

    def select(self, rows_R: Tensor) -> None:
        """Keep these documents alone."""
        if self.state is not None:
            self.state = tuple(part.index_select(0, rows_R) for part in self.state)


class SegmentStates(StateCache):
    """The states in front of a segment and, apart from them, those behind it: a layer may read its segment again."""

    grows = False

    def __init__(self, before: State):
        self.state: tuple[Tensor, ...] | None = before
        self.after: tuple[Tensor, ...] = before

    def keep(self, state: tuple[Tensor, ...]) -> None:
        self.after = state


class RecurrentLayer(nn.Module):
    """An LSTM as a layer of a stack, left to right, and dropout behind it."""

    def __init__(self, cell: Lstm, dropout: float):
        super().__init__()
        self.cell = cell
        self.dropout = Dropout(dropout)

    def forward(self, x_TI: Tensor, context: Context) -> Tensor:
        """(T, I) to (T, P), or (M, P) of the tokens that the context reads."""
        kept: StateCache | None = context.cache
        before = None if kept is None or kept.state is None else State(*kept.state)
        given_TP, state = self.cell(x_TI, steps_of(context.packed.segments), before)
        if kept is not None:
            kept.keep(state)
        return self.dropout(only(given_TP, context.read_M), context.read_draws)


class BidirectionalGru(nn.Module):
    """torch.nn.GRU in both directions as a layer of a stack, and dropout behind it."""

    def __init__(self, input_size: int, state_size: int, dropout: float):
        super().__init__()
        self.cell = nn.GRU(input_size, state_size, bidirectional=True)
        self.dropout = Dropout(dropout)

    def kept_values(self, keys: float = 0.0) -> float:
        """Of a token, the values that a forward keeps for its backward: what it reads, and in each direction gates, the
        parts that make them, states."""
        return self.cell.input_size + 2 * 7 * self.cell.hidden_size

    def forward(self, x_TI: Tensor, context: Context) -> Tensor:
        """(T, I) to (T, 2C), or (M, 2C) of the tokens that the context reads: the states left to right, and those right
        to left."""
        steps = steps_of(context.packed.segments)
        if len(x_TI):
            read = PackedSequence(x_TI.index_select(0, steps.tokens_T), torch.tensor(steps.sizes))
            states_TP = self.cell(read)[0].data.index_select(0, steps.places_T)
        else:
            states_TP = x_TI.new_zeros(0, 2 * self.cell.hidden_size)
        return self.dropout(only(states_TP, context.read_M), context.read_draws)
