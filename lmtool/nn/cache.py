"""Keys and values of the tokens a decoder has read, so that a new token costs one token.

A cache is a flat buffer of `capacity` tokens a document; to `attend` it is segments with room to spare.

Shape letters: T new tokens, S buffer tokens, N documents, A heads, D width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lmtool.nn.layout import Layout, Mask
from lmtool.types import Packed, Segments


class LayerCache:
    """The buffers of one layer, allocated when the first keys show type and device."""

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


class Cache:
    """One `LayerCache` a layer, for `documents` texts of at most `capacity` tokens. For use without gradients."""

    def __init__(self, num_layers: int, documents: int, capacity: int):
        self.documents = documents
        self.capacity = capacity
        self.lengths = [0] * documents
        self.layers = [LayerCache(self) for _ in range(num_layers)]
        self.places_T = torch.zeros(0, dtype=torch.int64)

    def layout(self, packed: Packed, mask: Mask) -> Layout:
        """How the new tokens stand to all, and room for them: called once a forward, before the layers. `packed` has
        a document for each of the cache's, possibly of length 0."""
        starts = tuple(number * self.capacity for number in range(self.documents))
        before = tuple(self.lengths)
        self.lengths = [old + new for old, new in zip(before, packed.lengths, strict=True)]
        if max(self.lengths, default=0) > self.capacity:
            raise ValueError(f"{max(self.lengths)} tokens in a cache for {self.capacity}")
        keys = Segments(starts, tuple(self.lengths), packed.tokens.device)
        layout = Layout(packed.segments, keys, mask, before)
        offsets = torch.tensor(starts, device=packed.tokens.device)
        self.places_T = layout.query_positions + offsets[packed.documents]
        return layout
