"""What a decoder keeps of the tokens it has read, so that a new token costs one token: keys and values, a layer each.

Keys are a flat buffer of `capacity` tokens a document; to `attend` it is segments with room to spare.

Shape letters: T new tokens, S buffer tokens, N documents, A heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lmtool.nn.layout import Layout, Mask
from lmtool.types import Packed, Segments


class Cache:
    """For `documents` texts of at most `capacity` tokens, without gradients.

    lengths: tokens read of each. layers: what each layer keeps, given to it in its context; new_layer makes one of the
    cache, keys and values where None.
    """

    def __init__(self, num_layers: int, documents: int, capacity: int, new_layer: Callable[[Cache], Any] | None = None):
        self.documents = documents
        self.capacity = capacity
        self.lengths = [0] * documents
        self.layers = [(new_layer or LayerCache)(self) for _ in range(num_layers)]
        self.places_T = torch.zeros(0, dtype=torch.int64)
        self._starts = tuple(number * capacity for number in range(documents))
        self._before: Sequence[int] = ()

    def extend(self, packed: Packed) -> Tensor:
        """Make room for new tokens and give their positions, (T,): once a forward, before the layers. `packed` has a
        document for each of the cache's, possibly of length 0."""
        self._before = tuple(self.lengths)
        self.lengths = [old + new for old, new in zip(self._before, packed.lengths, strict=True)]
        if max(self.lengths, default=0) > self.capacity:
            raise ValueError(f"{max(self.lengths)} tokens in a cache for {self.capacity}")
        device, documents_T = packed.tokens.device, packed.documents
        positions_T = packed.positions + torch.tensor(self._before, device=device)[documents_T]
        self.places_T = positions_T + torch.tensor(self._starts, device=device)[documents_T]
        return positions_T

    def layout(self, packed: Packed, mask: Mask) -> Layout:
        """How the new tokens stand to all that are there."""
        keys = Segments(self._starts, tuple(self.lengths), packed.tokens.device)
        return Layout(packed.segments, keys, mask, tuple(self._before))


class LayerCache:
    """The keys and values of one layer, allocated when the first ones show type and device."""

    def __init__(self, cache: Cache):
        self._cache = cache
        self._keys_SAD: Tensor | None = None
        self._values_SAD: Tensor | None = None

    def append(self, k_TAD: Tensor, v_TAD: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new tokens behind the old ones; give both buffers, (S, A, D)."""
        if self._keys_SAD is None or self._values_SAD is None:
            shape = (self._cache.documents * self._cache.capacity, *k_TAD.shape[1:])
            self._keys_SAD, self._values_SAD = k_TAD.new_zeros(shape), v_TAD.new_zeros(shape)
        self._keys_SAD[self._cache.places_T] = k_TAD
        self._values_SAD[self._cache.places_T] = v_TAD
        return self._keys_SAD, self._values_SAD
