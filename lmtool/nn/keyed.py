"""Self-attention in training on a CPU, with keyed dropout of its weights: one function forward and one backward.

`tiled` says the same in differentiable pieces. Here a tile's queries, keys and values come out of the joined
projection by one selection, head by head, as the products want them, and nothing is copied, padded or recorded in
between: of a finetuning step's 6,700 calls into torch 2,700 are left. Also under bf16 autocast it computes in fp32 (see
`tiled`).

Shape letters: T tokens, A heads, D width of a head, R rows of a tile, L places of a row, P places in all tiles. B: R*A.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
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
    with torch.autocast(joined_TX.device.type, enabled=False):
        return _KeyedAttention.apply(joined_TX, plan, scale, rate, draws)


@dataclass(frozen=True)
class HeadTile:
    """Documents of about the same length, one a row, each head on its own. start: number of the first of its B*L
    places. rows: B. added: what is added to its scores, 0 or -inf, (B or 1, L or 1, L); None for nothing."""

    start: int
    rows: int
    length: int
    added: Tensor | None


@dataclass(frozen=True)
class HeadPlan:
    """Where the heads of the tokens stand in the tiles; all numbers count vectors of width D.

    inputs: (3*P*A,) for each tile its queries, keys, values, (3, R, A, L): number in (T, 3, A). queries: (P*A,) the
    same of (T, A). padding: the places of `queries` that are no token. gradients: (T*3*A,) back to the tokens.
    outputs: (T*A,) back from `queries`. places_P: the token at each place, all tiles end to end.
    """

    tiles: tuple[HeadTile, ...]
    heads: int
    inputs: Tensor
    queries: Tensor
    padding: Tensor
    gradients: Tensor
    outputs: Tensor
    places_P: Tensor


def head_plan(layout: Layout, heads: int) -> HeadPlan:
    """The plan of a layout of documents to themselves, on the host."""
    starts_N, lengths_N = np.array(layout.query.starts), np.array(layout.query.lengths)
    head_A, part_3 = np.arange(heads)[:, None], np.arange(3)[:, None, None, None]
    tokens = int(lengths_N.sum())
    outputs, gradients = np.empty((tokens, heads), np.int64), np.empty((tokens, 3, heads), np.int64)
    inputs, queries, padding, places, tiles = [], [], [], [], []
    start = 0
    for numbers in layout.classes:
        lengths_R1 = lengths_N[numbers][:, None]
        # A multiple of what one number of the dropout decides.
        length = -(-int(lengths_R1.max()) // 4) * 4
        steps_L = np.arange(length)
        token_RL = starts_N[numbers][:, None] + np.minimum(steps_L, lengths_R1 - 1)
        real_RL = steps_L < lengths_R1
        place_RAL = np.arange(len(numbers) * heads * length).reshape(len(numbers), heads, length)
        inputs.append(((token_RL[:, None] * 3 + part_3) * heads + head_A).ravel())
        queries.append((token_RL[:, None] * heads + head_A).ravel())
        padding.append(start + place_RAL.transpose(0, 2, 1)[~real_RL].ravel())
        places.append(token_RL.ravel())
        real_MA, token_M = place_RAL.transpose(0, 2, 1)[real_RL], token_RL[real_RL]
        outputs[token_M] = start + real_MA
        gradients[token_M] = (3 * start + real_MA)[:, None] + np.arange(3)[:, None] * place_RAL.size
        tiles.append(HeadTile(start, len(numbers) * heads, length, _added(layout, numbers, real_RL, heads)))
        start += place_RAL.size
    return HeadPlan(
        tiles=tuple(tiles),
        heads=heads,
        inputs=_joined(inputs),
        queries=_joined(queries),
        padding=_joined(padding),
        gradients=torch.from_numpy(gradients.ravel()),
        outputs=torch.from_numpy(outputs.ravel()),
        places_P=_joined(places),
    )


def _joined(numbers: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.empty(0, np.int64), *numbers]))


def _added(layout: Layout, numbers: list[int], real_RL: np.ndarray, heads: int) -> Tensor | None:
    """What is added to the scores of a tile, (R*A or 1, L or 1, L)."""
    places_L, real_R1L = torch.arange(real_RL.shape[1]), torch.from_numpy(real_RL)[:, None]
    documents_R = torch.tensor(numbers)
    allow = layout.mask.allow(places_L[None, :, None], places_L[None, None, :], documents_R)
    # What is read left to right does not see the padding behind it.
    if not isinstance(layout.mask, Causal):
        allow = real_R1L if allow is None else allow & real_R1L
        # As in `Layout`: padding that would see nothing.
        allow = allow | ~allow.any(-1, keepdim=True)
    assert allow is not None
    if allow.all():
        return None
    added = torch.where(allow, 0.0, -torch.inf)
    return added if len(added) == 1 else added.repeat_interleave(heads, 0)


class _KeyedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, joined: Tensor, plan: HeadPlan, scale: float, rate: float, draws: TokenDraws) -> Tensor:
        size = joined.shape[1] // (3 * plan.heads)
        vectors = _wide(joined.reshape(-1, size).index_select(0, plan.inputs))
        kept, factor = draws.kept_weights(
            plan.places_P, [(tile.rows, tile.length) for tile in plan.tiles], plan.heads, rate
        )
        out = vectors.new_empty(len(plan.queries), size)
        all_weights = []
        for tile, kept_BLL in zip(plan.tiles, kept, strict=True):
            q_BLD, k_BLD, v_BLD = tile_of(vectors, tile, 3)
            weights_BLL = _scores(q_BLD, k_BLD, tile.added, scale).softmax(-1)
            torch.bmm(kept_BLL.to(weights_BLL.dtype).mul_(weights_BLL), v_BLD, out=tile_of(out, tile, 1)[0])
            all_weights.append(weights_BLL)
        ctx.save_for_backward(vectors, *all_weights, *kept)
        ctx.plan, ctx.scale, ctx.factor = plan, scale, factor
        return out.mul_(factor).to(joined.dtype).index_select(0, plan.outputs).view(len(joined), -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), plan = gradients, ctx.plan
        vectors, *saved = ctx.saved_tensors
        all_weights, kept = saved[: len(plan.tiles)], saved[len(plan.tiles) :]
        given = _wide(gradient.reshape(-1, vectors.shape[1]).index_select(0, plan.queries)).mul_(ctx.factor)
        given.index_fill_(0, plan.padding, 0.0)
        out = torch.empty_like(vectors)
        for tile, weights_BLL, kept_BLL in zip(plan.tiles, all_weights, kept, strict=True):
            (q_BLD, k_BLD, v_BLD), (given_BLD,) = tile_of(vectors, tile, 3), tile_of(given, tile, 1)
            to_q_BLD, to_k_BLD, to_v_BLD = tile_of(out, tile, 3)
            factors_BLL = kept_BLL.to(weights_BLL.dtype)
            torch.bmm((factors_BLL * weights_BLL).transpose(1, 2), given_BLD, out=to_v_BLD)
            to_weights_BLL = factors_BLL.mul_(given_BLD @ v_BLD.transpose(1, 2))
            to_scores_BLL = torch._softmax_backward_data(to_weights_BLL, weights_BLL, -1, weights_BLL.dtype)
            torch.baddbmm(to_q_BLD, to_scores_BLL, k_BLD, beta=0, alpha=ctx.scale, out=to_q_BLD)
            torch.baddbmm(to_k_BLD, to_scores_BLL.transpose(1, 2), q_BLD, beta=0, alpha=ctx.scale, out=to_k_BLD)
        out = out.to(gradient.dtype).index_select(0, plan.gradients)
        return out.view(len(gradient), -1), None, None, None, None


def tile_of(vectors: Tensor, tile: HeadTile, parts: int) -> Tensor:
    """(parts, B, L, D) of a tile, a view."""
    size = tile.rows * tile.length * parts
    return vectors[tile.start * parts : tile.start * parts + size].view(parts, tile.rows, tile.length, -1)


def _scores(q_BLD: Tensor, k_BLD: Tensor, added: Tensor | None, scale: float) -> Tensor:
    """(B, L, L) q k^T scale + added."""
    if added is None:
        return torch.baddbmm(q_BLD.new_empty(()), q_BLD, k_BLD.transpose(1, 2), beta=0, alpha=scale)
    return torch.baddbmm(added.to(q_BLD.dtype), q_BLD, k_BLD.transpose(1, 2), alpha=scale)


def _wide(x: Tensor) -> Tensor:
    """fp32 for half precision, else as it is."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
