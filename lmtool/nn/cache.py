"""The memory of earlier tokens: a decoder's cache of keys and values, and state carried along joined text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any
from weakref import proxy

import torch
from torch import Tensor, nn

from lmtool.nn.layout import Causal, Layout, Mask, NextTokens, PrefixLM, Recent
from lmtool.nn.prefix import LayerPrefix
from lmtool.types import Lanes, Packed, Segments, send

# The keys and values of earlier tokens in each layer of a decoder, so that a new token costs one token.
#
# Keys are stored as one row of tokens per document, with spare capacity. New tokens of empty documents attend to each
# other without a copy. In the common step, with one new token per document, the rows are read unchanged: the mask hides
# the part after a document's last token, and nothing is gathered.
#
# Shape letters: T new tokens, N documents, C capacity of a row in tokens, A heads, D head width.


# Rows grow in steps of this many tokens, at least by a quarter of their length.
_GROWTH = 16


class Cache:
    """A cache for `documents` texts of at most `capacity` tokens, without gradients.

    ahead: prefix positions before each text, in addition to the capacity. lengths: the number of tokens read of each
    text. room: positions allocated per row. fresh: whether the latest tokens are the first of all texts. layers: the
    cache of each layer, which is passed in the layer's context. new_layer: builds the cache of a layer, with the
    methods of `LayerCache`; None for keys and values.
    """

    def __init__(
        self,
        num_layers: int,
        documents: int,
        capacity: int,
        new_layer: Callable[[Cache], Any] | None = None,
        ahead: int = 0,
    ):
        self.documents = documents
        self.capacity = capacity
        self.ahead = ahead
        self.room = 0
        self.lengths = [0] * documents
        self.fresh = True
        self.layers = [(new_layer or LayerCache)(self) for _ in range(num_layers)]
        self.places_T = torch.zeros(0, dtype=torch.int64)
        self._before: Sequence[int] = ()

    def extend(self, packed: Packed) -> Tensor:
        """Makes room for new tokens and returns their positions, (T,). Called once per forward, before the layers.
        `packed` has one document for each of the cache's, possibly empty."""
        self._before = tuple(self.lengths)
        self.fresh = not any(self._before)
        self.lengths = [old + new for old, new in zip(self._before, packed.lengths, strict=True)]
        longest = max(self.lengths, default=0)
        if longest > self.capacity:
            raise ValueError(f"{longest} tokens in a cache for {self.capacity}")
        if longest + self.ahead > self.room:
            capacity = -(-max(longest + self.ahead, self.room * 5 // 4) // _GROWTH) * _GROWTH
            self.room = min(self.capacity + self.ahead, capacity)
        device, before_N = packed.tokens.device, torch.tensor(self._before)
        if _one_each(packed):
            places_T = before_N + self.ahead + torch.arange(self.documents) * self.room
            positions_T, self.places_T = send(before_N + self.ahead, device), send(places_T, device)
        else:
            positions_T = packed.positions + send(before_N + self.ahead, device)[packed.documents]
            self.places_T = positions_T + packed.documents * self.room
        return positions_T

    def layout(self, packed: Packed, mask: Mask) -> Layout:
        """Returns the layout of the new tokens' attention to all cached ones."""
        if self.fresh:
            return Layout.of(packed, mask, self.ahead)
        lengths, device = tuple(length + self.ahead for length in self.lengths), packed.tokens.device
        query_starts = tuple(before + self.ahead for before in self._before)
        if _one_each(packed) and isinstance(mask, Causal | Recent | PrefixLM):  # which hide the rest of a row
            length = lengths[0] if self.documents == 1 else self.room
            keys = Segments.packed((length,) * self.documents, device)
            return NextTokens(packed.segments, keys, mask, query_starts)
        starts = tuple(range(0, self.documents * self.room, self.room))
        return Layout(packed.segments, Segments(starts, lengths, device), mask, query_starts)

    def branch(self, rows: Sequence[int]) -> Cache:
        """Returns a cache of these documents, in this order, which leaves this one as it is. A document may be
        repeated."""
        branch = copy(self)
        branch.layers = [layer.of(branch) for layer in self.layers]
        branch.select(rows)
        return branch

    def select(self, rows: Sequence[int]) -> None:
        """Keeps only these documents, in this order; a document may be repeated."""
        self.documents = len(rows)
        self.lengths = [self.lengths[row] for row in rows]
        rows_R = send(torch.tensor(rows), self.places_T.device)
        for layer in self.layers:
            layer.select(rows_R)


def _one_each(packed: Packed) -> bool:
    return packed.lengths == (1,) * len(packed.lengths)


class LayerCache:
    """Keys and values of one layer, allocated with the type and device of the first ones. accumulates: a forward
    changes what the next one reads, so a layer must not read the same tokens twice."""

    accumulates = True

    def __init__(self, cache: Cache):
        # Strong references in both directions would keep the keys and values until Python collects cycles.
        self._cache = proxy(cache)
        self._keys_NCAD: Tensor | None = None
        self._values_NCAD: Tensor | None = None
        self._kept: list[Any] = []

    def of(self, cache: Cache) -> LayerCache:
        """Returns the same keys and values in another cache."""
        layer = copy(self)
        layer._cache = proxy(cache)
        return layer

    def keep(self, compute: Callable[[], Any]) -> Any:
        """Returns what the layer computes once for all tokens."""
        if not self._kept:
            self._kept.append(compute())
        return self._kept[0]

    def append(self, k_TAD: Tensor, v_TAD: Tensor, prefix: LayerPrefix | None = None) -> tuple[Tensor, Tensor]:
        """Appends the new tokens, the first ones after the prefix. Returns the layout's keys and values: the new ones
        if the cache was empty, otherwise all rows, (N*C, A, D)."""
        self._keys_NCAD = self._written(self._keys_NCAD, k_TAD)
        self._values_NCAD = self._written(self._values_NCAD, v_TAD)
        if prefix is not None:
            # Only once: rows that grow or are selected retain the prefix.
            self._keys_NCAD[:, : self._cache.ahead], self._values_NCAD[:, : self._cache.ahead] = prefix.heads(k_TAD)
        if self._cache.fresh:
            return (k_TAD, v_TAD) if prefix is None else prefix.prepend_to(k_TAD, v_TAD)
        return self._keys_NCAD.flatten(0, 1), self._values_NCAD.flatten(0, 1)

    def _written(self, rows_NCAD: Tensor | None, x_TAD: Tensor) -> Tensor:
        cache = self._cache
        if rows_NCAD is None or rows_NCAD.shape[1] < cache.room:
            longer_NCAD = x_TAD.new_zeros(cache.documents, cache.room, *x_TAD.shape[1:])
            if rows_NCAD is not None:
                longer_NCAD[:, : rows_NCAD.shape[1]] = rows_NCAD
            rows_NCAD = longer_NCAD
        rows_NCAD.flatten(0, 1).index_copy_(0, cache.places_T, x_TAD)
        return rows_NCAD

    def select(self, rows_R: Tensor) -> None:
        """Keeps only these documents."""
        if self._keys_NCAD is not None and self._values_NCAD is not None:
            self._keys_NCAD = self._keys_NCAD.index_select(0, rows_R)
            self._values_NCAD = self._values_NCAD.index_select(0, rows_R)


# The state that a model carries between segments of joined text: a recurrent state or a memory.
#
# Shape letters: N documents of a batch, L lanes.


State = dict[str, Tensor]
"""Tensors by name. The first dimension counts documents or lanes."""


@dataclass
class Carried:
    """The state before and after one forward, for the N documents of its batch in order.

    before: state before each document, without gradient. read: the number of tokens of its lane before each document,
    on the host; 0 if the lane starts, with the initial state. after: state after each document, of the same shapes, set
    by the forward.
    """

    before: State
    read: tuple[int, ...]
    after: State | None = None


class CarriedState(nn.Module):
    """The state of every lane, held by a learner between batches. It is not a weight: a checkpoint stores it in a
    separate file. tensors: (L, ...) each; empty before the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: State = {}

    def begin(self, lanes: Lanes, initial: Callable[[int], State]) -> Carried:
        """Returns the state before the segments of a batch. initial: builds the state of `count` new lanes.

        Raises ValueError if lanes have started but no state is held: earlier batches were skipped.
        """
        if not any(lanes.read):
            return Carried(initial(len(lanes.numbers)), lanes.read)
        if not self.tensors:
            raise ValueError(f"lanes are under way, {max(lanes.read)} tokens were read, and no state is held of them")
        if lanes.complete:
            return Carried(dict(self.tensors), lanes.read)
        return Carried({name: x.index_select(0, _rows(lanes, x)) for name, x in self.tensors.items()}, lanes.read)

    def keep(self, lanes: Lanes, carried: Carried, initial: Callable[[int], State]) -> None:
        """Stores the state that a forward left, without gradient. Tensors are replaced, never modified, because a
        backward may still need the old ones. Raises RuntimeError if the forward left no state."""
        if carried.after is None:
            raise RuntimeError("a model that carries state left none behind a segment")
        after = {name: x.detach().to(carried.before[name].dtype) for name, x in carried.after.items()}
        if not lanes.complete:
            previous = self.tensors or initial(lanes.count)
            after = {name: previous[name].index_copy(0, _rows(lanes, x), x) for name, x in after.items()}
        self.tensors = after


def _rows(lanes: Lanes, like: Tensor) -> Tensor:
    return send(torch.tensor(lanes.numbers), like.device)


def _states(model: nn.Module) -> dict[str, CarriedState]:
    return {name: module for name, module in model.named_modules() if isinstance(module, CarriedState)}


def carried_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns all carried state in a model by name, for a checkpoint; empty if there is none."""
    return {f"{path}.{name}": x for path, state in _states(model).items() for name, x in state.tensors.items()}


def load_carried(model: nn.Module, tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Restores what `carried_tensors` returned."""
    for path, state in _states(model).items():
        prefixed = {name: x for name, x in tensors.items() if name.rpartition(".")[0] == path}
        state.tensors = {name.rpartition(".")[2]: send(x, device) for name, x in prefixed.items()}


@contextmanager
def set_aside(model: nn.Module) -> Iterator[None]:
    """Clears a model's carried state inside the context and restores it afterwards: for a pass over other text in
    between."""
    previous = {state: state.tensors for state in _states(model).values()}
    for state in previous:
        state.tensors = {}
    try:
        yield
    finally:
        for state, tensors in previous.items():
            state.tensors = tensors
