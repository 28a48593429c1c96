"""Attention by distance (Dai, Yang, Yang, Carbonell, Le, Salakhutdinov, "Transformer-XL", ACL 2019, section 3.3):

    score_ij = ((q_i + u) k_j + (q_i + v) r_(i-j)) / sqrt(D)

with queries q, keys k, and vectors r, which each layer projects from sinusoids of the distance; u and v are learned and
shared by all layers. Keys may include earlier states of each text, its memory.

Shape letters: T query tokens, S key tokens, N texts, F memory states, R rows of a tile, L queries and K keys of a row,
A heads, D head width, P distances, H hidden width.
"""

from __future__ import annotations

import math
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from lmtool.nn.attention import SelfAttention
from lmtool.nn.context import Context
from lmtool.nn.layout import Layout
from lmtool.nn.positions import Position, sinusoids
from lmtool.nn.regions import region


def relative_shift(products_RALP: Tensor, keys: int) -> Tensor:
    """Returns the term (R, A, L, K) of each query and key, from the products of each query with decreasing distances.

    The term of query i and key j is `products_RALP[..., i, L - 1 - i + j]`. Each row starts one index before the row
    above it, so the result is a view of the same memory (appendix B). P must be at least K + 1. Keys after their query
    get arbitrary values, which a mask hides.
    """
    queries, distances = products_RALP.shape[-2:]
    flat = products_RALP.flatten(-2)[..., queries - 1 : queries * distances - 1]
    return flat.unflatten(-1, (queries, distances - 1))[..., :keys]


def prepend_memory(memory_NFH: Tensor, x_TH: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Returns (S, H): the states of each text, preceded by its memory."""
    pairs = zip(memory_NFH.unbind(), x_TH.split(lengths), strict=True)
    return torch.cat([states for pair in pairs for states in pair])


class Distances(Position):
    """The parts of relative positions that all layers of a model share: u and v, the (A, D) parameters `content_bias`
    and `place_bias`, and the sinusoids of distances; unlike in the original code, without dropout. clamp: the maximum
    distance in evaluation, or None."""

    scores: ClassVar[bool] = True

    def __init__(self, hidden_size: int, num_heads: int, clamp: int | None = None):
        super().__init__()
        self.hidden_size, self.clamp = hidden_size, clamp
        self.content_bias = nn.Parameter(torch.empty(num_heads, hidden_size // num_heads))
        self.place_bias = nn.Parameter(torch.empty(num_heads, hidden_size // num_heads))
        self._cached_rows: tuple[tuple[object, ...], Tensor] | None = None

    def rows(self, farthest: int, like: Tensor) -> Tensor:
        """Returns (P, H): the sinusoids of the distances from `farthest` down to 0, in the type of `like` or a wider
        one."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        key = farthest, self.training, like.device, dtype
        # All layers of a forward use the same rows.
        if self._cached_rows is None or self._cached_rows[0] != key:
            distances_P = torch.arange(farthest, -1, -1, device=like.device)
            if self.clamp is not None and not self.training:
                distances_P = distances_P.clamp(max=self.clamp)
            self._cached_rows = key, sinusoids(distances_P, self.hidden_size).to(dtype)
        return self._cached_rows[1]


class DistanceScores(Position):
    """The term that distances add to the scores of one layer. rows_PAD: the projected distances, decreasing to 0.
    bias_difference_A1D: v - u, scaled, which is added to queries that already include u."""

    scores: ClassVar[bool] = True

    def __init__(self, rows_PAD: Tensor, bias_difference_A1D: Tensor, layout: Layout):
        super().__init__()
        self._rows_PAD, self._bias_difference_A1D = rows_PAD, bias_difference_A1D
        self._same_start = len(set(layout.query_start)) <= 1
        self._max_queries = max(layout.query.lengths, default=0)

    def score(self, q_RALD: Tensor, k_RAKD: Tensor, query_positions_RL: Tensor, key_positions_RK: Tensor) -> Tensor:
        queries, keys = q_RALD.shape[-2], k_RAKD.shape[-2]
        query_RALD, last = q_RALD + self._bias_difference_A1D.to(q_RALD.dtype), len(self._rows_PAD) - 1
        # If all texts start at the same position, query i and key j have the same distance in each. `_rows_PAD` begins
        # with the distance from the last query of the longest text to the first key, so fewer queries begin later.
        if self._same_start:
            first = self._max_queries - queries
            index_P = torch.arange(first, first + keys + 1, device=q_RALD.device)
            rows_PAD = self._rows_PAD.index_select(0, index_P.clamp(max=last))
            return relative_shift(query_RALD @ rows_PAD.to(q_RALD.dtype).permute(1, 2, 0), keys)
        products_RALP = query_RALD @ self._rows_PAD.to(q_RALD.dtype).permute(1, 2, 0)
        distances_RLK = query_positions_RL[:, :, None] - key_positions_RK[:, None, :]
        index_RLK = (last - distances_RLK).clamp(0, last)
        return products_RALP.gather(-1, index_RLK[:, None].expand(*q_RALD.shape[:-1], keys))


class RelativeAttention(SelfAttention):
    """Self-attention by distance to earlier tokens. No projection has a bias."""

    table_maps: ClassVar[tuple[str, ...]] = ("pos_proj",)

    def __init__(self, hidden_size: int, num_heads: int, dropout: float):
        super().__init__(hidden_size, num_heads, dropout, bias=False)
        self.pos_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def saved_for_positions(self, keys: float) -> tuple[float, float, float]:
        return 0.0, 1.0, 0.0  # the row of each distance

    @region(1)
    def project_queries(self, x_TH: Tensor, content_AD: Tensor, norm: nn.Module | None) -> Tensor:
        """Returns (T, A, D): the queries, with u added."""
        q_TAD = self.heads(self.q_proj(x_TH if norm is None else norm(x_TH)))
        return q_TAD + content_AD.to(q_TAD.dtype)

    @region(1)
    def project_keys_values(self, x_SH: Tensor, norm: nn.Module | None) -> tuple[Tensor, Tensor]:
        """Returns (S, A, D): the keys and values."""
        x_SH = x_SH if norm is None else norm(x_SH)
        return self.heads(self.k_proj(x_SH)), self.heads(self.v_proj(x_SH))

    def forward(
        self, x_TH: Tensor, context: Context, read_M: Tensor | None = None, norm: nn.Module | None = None
    ) -> Tensor:
        distances, memory_NFH = cast(Distances, context.position), context.memory_NFH
        x_SH = x_TH if memory_NFH is None else prepend_memory(memory_NFH, x_TH, context.packed.lengths)
        q_TAD = self.project_queries(x_TH, distances.content_bias, norm)
        k_SAD, v_SAD = self.project_keys_values(x_SH, norm)
        if context.cache is not None:
            k_SAD, v_SAD = context.cache.append(k_SAD, v_SAD, context.prefix)
        elif context.prefix is not None:
            k_SAD, v_SAD = context.prefix.prepend_to(k_SAD, v_SAD)
        bias = self.distance_scores(distances, context.layout, x_TH)
        return self.attend_and_project(q_TAD, k_SAD, v_SAD, context.layout, bias, context, read_M)

    def distance_scores(self, distances: Distances, layout: Layout, like: Tensor) -> DistanceScores:
        """Returns the term that distances add to the scores of this layer."""
        ends = [start + length for start, length in zip(layout.query_start, layout.query.lengths, strict=True)]
        rows_PAD = self.heads(self.pos_proj(distances.rows(max(ends, default=1) - 1, like)))
        difference_AD = (distances.place_bias - distances.content_bias) / math.sqrt(self.head_size)
        return DistanceScores(rows_PAD, difference_AD[:, None], layout)
