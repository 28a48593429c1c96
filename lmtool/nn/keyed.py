"""Self-attention in training on a CPU, with keyed dropout of its weights: one function forward and one backward.

`tiled` says the same in differentiable pieces. Here a tile's queries, keys and values come out of the projections by a
selection, head by head, as the products want them, and nothing is copied, padded or recorded in between: of 6,700 calls
into torch that a finetuning step made, 5,400 are left. Where a stack reads some tokens
alone of its last layer, these alone ask. Also under bf16 autocast it computes in fp32 (see `tiled`).

Shape letters: T tokens, M of them that ask, A heads, D width of a head, R rows of a tile, L queries and K keys of a
row, P places of queries in all tiles, S places of keys. B: R*A.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmtool.nn.dropout import TokenDraws
from lmtool.nn.layout import Causal, Layout


def keyed_attention(
    joined_TX: Tensor, heads: int, layout: Layout, scale: float | None, rate: float, draws: TokenDraws
) -> Tensor:
    """(T, A*D) softmax(q k^T scale) v within each document. joined_TX: (T, 3*A*D), the queries, keys and values of all
    heads side by side. layout: of packed documents to themselves. scale: 1/sqrt(D) where None. rate: of the weights
    that the draws drop."""
    plan = layout.plans.get(heads)
    if plan is None:
        plan = layout.plans[heads] = head_plan(layout, heads)
    scale = 1 / math.sqrt(joined_TX.shape[1] // (3 * heads)) if scale is None else scale
    return _apply(None, joined_TX, plan, scale, rate, draws)


def keyed_attention_of(
    query_MX: Tensor,
    joined_TX: Tensor,
    read_M: Tensor,
    heads: int,
    layout: Layout,
    scale: float | None,
    rate: float,
    draws: TokenDraws,
) -> Tensor:
    """(M, A*D) of some tokens, one at least, in any order. query_MX: (M, A*D) their queries. joined_TX: (T, 2*A*D) the
    keys and values of all. read_M: which tokens they are. The rest as in `keyed_attention`.

    Where a tenth of the tokens ask, an attention takes 0.78 of the time, plan included; a step of four layers 0.987.
    """
    scale = 1 / math.sqrt(query_MX.shape[1] // heads) if scale is None else scale
    return _apply(query_MX, joined_TX, head_plan(layout, heads, read_M.numpy()), scale, rate, draws)


def _apply(query_MX: Tensor | None, joined_TX: Tensor, *further: Any) -> Tensor:
    with torch.autocast(joined_TX.device.type, enabled=False):
        return _KeyedAttention.apply(query_MX, joined_TX, *further)


@dataclass(frozen=True)
class HeadTile:
    """Documents of about the same length, one a row, each head on its own. rows: B. queries, keys: L, K. query, key:
    number of the first vector among the queries of all tiles, and among the keys and values. added: what is added to
    its scores, 0 or -inf, (B or 1, L or 1, K); None for nothing."""

    rows: int
    queries: int
    keys: int
    query: int
    key: int
    added: Tensor | None

    def of_queries(self, vectors: Tensor) -> Tensor:
        """(B, L, D) of (P*A, D), a view."""
        return vectors[self.query :][: self.rows * self.queries].view(self.rows, self.queries, -1)

    def of_keys(self, vectors: Tensor) -> Tensor:
        """(2, B, K, D), keys and values, of (2*S*A, D), a view."""
        return vectors[self.key :][: 2 * self.rows * self.keys].view(2, self.rows, self.keys, -1)


@dataclass(frozen=True)
class HeadPlan:
    """Where the heads of the tokens stand in the tiles; all numbers count vectors of width D.

    queries: (P*A,) for each tile (R, A, L): number in (M, A). padding: the places of `queries` that are no token.
    outputs: (M*A,) back from there. keys: (2*S*A,) for each tile (2, R, A, K): number in (T, 2, A). to_keys: (T*2*A,)
    back from there. unseen: numbers in (T, 2, A) of documents that nobody asks about, which are in no tile. places_P:
    the token at each place of queries.
    """

    tiles: tuple[HeadTile, ...]
    heads: int
    queries: Tensor
    padding: Tensor
    outputs: Tensor
    keys: Tensor
    to_keys: Tensor
    unseen: Tensor
    places_P: Tensor

    @cached_property
    def inputs(self) -> Tensor:
        """`queries` and `keys` one after the other as numbers in (T, 3, A), where all tokens ask."""
        parts = (self.queries, self.heads, 0), (self.keys, 2 * self.heads, self.heads)
        return torch.cat([part // width * (3 * self.heads) + part % width + before for part, width, before in parts])

    @cached_property
    def gradients(self) -> Tensor:
        """(T*3*A,) back from `inputs`."""
        keys = self.to_keys.view(-1, 2 * self.heads) + len(self.queries)
        return torch.cat([self.outputs.view(-1, self.heads), keys], 1).flatten()


def head_plan(layout: Layout, heads: int, read_M: np.ndarray | None = None) -> HeadPlan:
    """The plan of a layout of documents to themselves, on the host. read_M: the tokens that ask, all where None."""
    starts_N, lengths_N = np.array(layout.query.starts, np.int64), np.array(layout.query.lengths, np.int64)
    documents_T = np.repeat(np.arange(len(lengths_N)), lengths_N)
    asking_M = np.arange(len(documents_T)) if read_M is None else read_M
    counts_N = np.bincount(documents_T[asking_M], minlength=len(lengths_N))
    firsts_N, order_M = np.cumsum(counts_N) - counts_N, np.argsort(documents_T[asking_M], kind="stable")
    outputs, to_keys = np.empty((len(asking_M), heads), np.int64), np.full((len(documents_T), 2, heads), -1)
    queries, padding, keys, places, tiles = [], [], [], [], []
    query = key = 0
    for numbers in layout.classes:
        rows_R = np.array(numbers)[counts_N[numbers] > 0]
        if not len(rows_R):
            continue
        # A multiple of what one number of the dropout decides.
        width = -(-int(lengths_N[rows_R].max()) // 4) * 4
        key_RK, real_RK, at_RAK = _rows(starts_N[rows_R], lengths_N[rows_R], width, heads)
        width = width if read_M is None else int(counts_N[rows_R].max())
        place_RL, real_RL, at_RAL = _rows(firsts_N[rows_R], counts_N[rows_R], width, heads)
        asking_RL = order_M[place_RL]
        queries.append(asking_RL[:, None] * heads + np.arange(heads)[:, None])
        padding.append(query + at_RAL[~real_RL])
        outputs[asking_RL[real_RL]] = query + at_RAL[real_RL]
        parts_2RAK = np.stack([key_RK[:, None] * 2 * heads + np.arange(heads)[:, None]] * 2)
        parts_2RAK[1] += heads
        keys.append(parts_2RAK)
        to_keys[key_RK[real_RK]] = key + at_RAK[real_RK][:, None] + np.array([[0], [key_RK.size * heads]])
        places.append(asking_M[asking_RL])
        # Where all ask, positions are those of one row, so that one mask may stand for all.
        asked_RL = np.arange(width)[None] if read_M is None else places[-1] - starts_N[rows_R][:, None]
        added = _added(layout, rows_R, asked_RL, real_RK, heads)
        tiles.append(HeadTile(len(rows_R) * heads, place_RL.shape[1], key_RK.shape[1], query, key, added))
        query, key = query + queries[-1].size, key + keys[-1].size
    return HeadPlan(
        tiles=tuple(tiles),
        heads=heads,
        queries=_flat(queries),
        padding=_flat(padding),
        outputs=_flat([outputs]),
        keys=_flat(keys),
        to_keys=_flat([to_keys.clip(0)]),
        unseen=_flat([np.flatnonzero(to_keys < 0)]),
        places_P=_flat(places),
    )


def _rows(firsts_R: np.ndarray, counts_R: np.ndarray, width: int, heads: int) -> tuple[np.ndarray, ...]:
    """Runs of numbers as rows: (R, W) the numbers, the last one repeated to the width; (R, W) which are real; (R, W, A)
    the place of each head where they stand as (R, A, W)."""
    steps_W, counts_R1 = np.arange(width), counts_R[:, None]
    places_RAW = np.arange(len(counts_R) * heads * width).reshape(len(counts_R), heads, width)
    numbers_RW = firsts_R[:, None] + np.minimum(steps_W, counts_R1 - 1)
    return numbers_RW, steps_W < counts_R1, places_RAW.transpose(0, 2, 1)


def _flat(numbers: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.empty(0, np.int64), *(part.ravel() for part in numbers)]))


def _added(layout: Layout, rows_R: np.ndarray, asked_RL: np.ndarray, real_RK: np.ndarray, heads: int) -> Tensor | None:
    """What is added to the scores of a tile, (R*A or 1, L or 1, K). asked_RL: positions of the queries."""
    seen_1K, real_R1K = torch.arange(real_RK.shape[1])[None], torch.from_numpy(real_RK)[:, None]
    allow = layout.mask.allow(torch.from_numpy(asked_RL)[:, :, None], seen_1K[:, None], torch.from_numpy(rows_R))
    # What is read left to right does not see the padding behind it.
    if not isinstance(layout.mask, Causal):
        allow = real_R1K if allow is None else allow & real_R1K
        # As in `Layout`: padding that would see nothing.
        allow = allow | ~allow.any(-1, keepdim=True)
    assert allow is not None
    if allow.all():
        return None
    added = torch.where(allow, 0.0, -torch.inf)
    return added if len(added) == 1 else added.repeat_interleave(heads, 0)


class _KeyedAttention(torch.autograd.Function):
    """query: None where the queries stand in `joined`."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor | None, joined: Tensor, plan: HeadPlan, scale: float, rate: float, draws: TokenDraws
    ) -> Tensor:
        size = joined.shape[1] // ((3 if query is None else 2) * plan.heads)
        if query is None:
            vectors = _wide(joined.reshape(-1, size).index_select(0, plan.inputs))
        else:
            sources = (query.reshape(-1, size), plan.queries), (joined.reshape(-1, size), plan.keys)
            vectors = torch.cat([_wide(source.index_select(0, numbers)) for source, numbers in sources])
        queries, keys = vectors.split([len(plan.queries), len(plan.keys)])
        shapes = [(tile.rows, tile.queries, tile.keys) for tile in plan.tiles]
        kept, factor = draws.kept_weights(plan.places_P, shapes, plan.heads, rate)
        out, all_weights = torch.empty_like(queries), []
        for tile, kept_BLK in zip(plan.tiles, kept, strict=True):
            k_BKD, v_BKD = tile.of_keys(keys)
            weights_BLK = _scores(tile.of_queries(queries), k_BKD, tile.added, scale).softmax(-1)
            torch.bmm(kept_BLK.to(weights_BLK.dtype).mul_(weights_BLK), v_BKD, out=tile.of_queries(out))
            all_weights.append(weights_BLK)
        ctx.save_for_backward(vectors, *all_weights, *kept)
        ctx.plan, ctx.scale, ctx.factor, ctx.apart = plan, scale, factor, query is not None
        return out.mul_(factor).to(joined.dtype).index_select(0, plan.outputs).view(-1, plan.heads * size)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), plan = gradients, ctx.plan
        vectors, *saved = ctx.saved_tensors
        all_weights, kept = saved[: len(plan.tiles)], saved[len(plan.tiles) :]
        boundaries, size = [len(plan.queries), len(plan.keys)], vectors.shape[1]
        given = _wide(gradient.reshape(-1, size).index_select(0, plan.queries)).mul_(ctx.factor)
        given.index_fill_(0, plan.padding, 0.0)
        out = torch.empty_like(vectors)
        (queries, keys), (to_queries, to_keys) = vectors.split(boundaries), out.split(boundaries)
        for tile, weights_BLK, kept_BLK in zip(plan.tiles, all_weights, kept, strict=True):
            given_BLD, q_BLD, (k_BKD, v_BKD) = tile.of_queries(given), tile.of_queries(queries), tile.of_keys(keys)
            to_q_BLD, (to_k_BKD, to_v_BKD) = tile.of_queries(to_queries), tile.of_keys(to_keys)
            factors_BLK = kept_BLK.to(weights_BLK.dtype)
            torch.bmm((factors_BLK * weights_BLK).transpose(1, 2), given_BLD, out=to_v_BKD)
            to_weights_BLK = factors_BLK.mul_(given_BLD @ v_BKD.transpose(1, 2))
            to_scores_BLK = torch._softmax_backward_data(to_weights_BLK, weights_BLK, -1, weights_BLK.dtype)
            torch.baddbmm(to_q_BLD, to_scores_BLK, k_BKD, beta=0, alpha=ctx.scale, out=to_q_BLD)
            torch.baddbmm(to_k_BKD, to_scores_BLK.transpose(1, 2), q_BLD, beta=0, alpha=ctx.scale, out=to_k_BKD)
        width = plan.heads * size
        if not ctx.apart:
            joined = out.to(gradient.dtype).index_select(0, plan.gradients).view(-1, 3 * width)
            return None, joined, None, None, None, None
        to_query = to_queries.to(gradient.dtype).index_select(0, plan.outputs).view(-1, width)
        to_joined = to_keys.to(gradient.dtype).index_select(0, plan.to_keys).index_fill_(0, plan.unseen, 0.0)
        return to_query, to_joined.view(-1, 2 * width), None, None, None, None


def _scores(q_BLD: Tensor, k_BKD: Tensor, added: Tensor | None, scale: float) -> Tensor:
    """(B, L, K) q k^T scale + added."""
    if added is None:
        return torch.baddbmm(q_BLD.new_empty(()), q_BLD, k_BKD.transpose(1, 2), beta=0, alpha=scale)
    return torch.baddbmm(added.to(q_BLD.dtype), q_BLD, k_BKD.transpose(1, 2), alpha=scale)


def _wide(x: Tensor) -> Tensor:
    """fp32 for half precision, else as it is."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
