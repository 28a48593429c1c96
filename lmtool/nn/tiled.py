"""Attention over tiles of documents of similar length: the path for every device, bias, mask and kind of dropout.

A tile has one document per row (`Layout`). On a CPU scores are computed in fp32 even under bf16 autocast: bf16
attention takes 1.4 to 2.0 times as long there.

Shape letters: T query tokens, S key tokens, A heads, D head width, R rows of a tile, L queries and K keys of a row, P
slots in all tiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from lmtool.nn.dropout import DropoutRng, TokenRng
from lmtool.nn.layout import Layout, MaskedRows, Tile, TileIndex
from lmtool.nn.positions import Position
from lmtool.types import send


def tiled_attention(
    q_TAD: Tensor,
    k_SAD: Tensor,
    v_SAD: Tensor,
    layout: Layout,
    bias: Position | None,
    scale: float | None,
    rate: float,
    rng: DropoutRng | None,
) -> Tensor:
    """Returns the result of `attend`, (T, A, D). rate: fraction of the weights dropped by `rng`."""
    dtype = q_TAD.dtype
    with without_autocast(q_TAD.device):
        q_TAD, k_SAD, v_SAD = widen(q_TAD, k_SAD, v_SAD)
        query_shapes = [tile.query_RL.shape for tile in layout.tiles]
        key_shapes = [tile.key_RK.shape for tile in layout.tiles]
        queries = _rows(q_TAD, layout.query_index, query_shapes)
        keys = _rows(k_SAD, layout.key_index, key_shapes)
        values = _rows(v_SAD, layout.key_index, key_shapes)
        outs = [
            _tile_attention(q, k, v, tile, bias, scale, rate, rng).transpose(1, 2).flatten(0, 1)
            for tile, q, k, v in zip(layout.tiles, queries, keys, values, strict=True)
        ]
        out_PAD = q_TAD.new_zeros(0, *q_TAD.shape[1:]) if not outs else torch.cat(outs) if len(outs) > 1 else outs[0]
        return scatter(out_PAD, layout.query_index, q_TAD.shape[0]).to(dtype)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Returns a context without autocast. Where there is none, it is empty: leaving autocast takes longer than a small
    attention."""
    enabled = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if enabled else nullcontext()


def widen(*states: Tensor) -> tuple[Tensor, ...]:
    """Converts half precision on a CPU to fp32; other tensors are unchanged."""
    half = states[0].device.type == "cpu" and states[0].dtype in (torch.bfloat16, torch.float16)
    return tuple(part.float() for part in states) if half else states


def attention_weights(
    q_TAD: Tensor, k_SAD: Tensor, layout: Layout, bias: Position | None = None, scale: float | None = None
) -> list[Tensor]:
    """Returns for each document (A, L, K), fp32 or more: softmax(q k^T scale + bias), before dropout. The
    weights are computed separately from the attention itself, whose kernels do not return them."""
    weights: dict[int, Tensor] = {}
    scale = 1 / math.sqrt(q_TAD.shape[-1]) if scale is None else scale
    dtype = torch.promote_types(q_TAD.dtype, torch.float32)
    with torch.autocast(q_TAD.device.type, enabled=False):
        queries = _rows(q_TAD.to(dtype), layout.query_index, [tile.query_RL.shape for tile in layout.tiles])
        keys = _rows(k_SAD.to(dtype), layout.key_index, [tile.key_RK.shape for tile in layout.tiles])
        for tile, numbers, q_RALD, k_RAKD in zip(layout.tiles, layout.classes, queries, keys, strict=True):
            q_RALD = q_RALD * scale
            weights_RALK = _weights(q_RALD, k_RAKD, tile, _score_bias(q_RALD, k_RAKD, tile, bias))
            for number, weights_ALK in zip(numbers, weights_RALK, strict=True):
                weights[number] = weights_ALK[:, : layout.query.lengths[number], : layout.key.lengths[number]]
    lengths = zip(layout.query.lengths, layout.key.lengths, strict=True)
    return [
        weights[number] if number in weights else q_TAD.new_zeros(q_TAD.shape[1], queries, keys, dtype=dtype)
        for number, (queries, keys) in enumerate(lengths)
    ]


class TileScores(NamedTuple):
    """The scores of a tile's rows. scores_RALK: fp32 or more, masked entries included. allow: as in `Tile`. real_RL:
    whether a query is a real token."""

    scores_RALK: Tensor
    allow: Tensor | None
    real_RL: Tensor


def tiled_scores(
    q_TAD: Tensor, k_SAD: Tensor, layout: Layout, bias: Position | None = None, scale: float | None = None
) -> Iterator[TileScores]:
    """Computes q k^T scale + bias of each tile, before softmax and dropout. scale: None for 1/sqrt(D)."""
    scale = 1 / math.sqrt(q_TAD.shape[-1]) if scale is None else scale
    dtype = torch.promote_types(q_TAD.dtype, torch.float32)
    queries = _rows(q_TAD.to(dtype), layout.query_index, [tile.query_RL.shape for tile in layout.tiles])
    keys = _rows(k_SAD.to(dtype), layout.key_index, [tile.key_RK.shape for tile in layout.tiles])
    for tile, numbers, q_RALD, k_RAKD in zip(layout.tiles, layout.classes, queries, keys, strict=True):
        q_RALD = q_RALD * scale
        # The context must not contain the yield: reading two of these generators in turn would exit their contexts in
        # the wrong order.
        with torch.autocast(q_TAD.device.type, enabled=False):
            scores_RALK = q_RALD @ k_RAKD.transpose(-1, -2)
            if bias is not None:
                scores_RALK = scores_RALK + _bias_of_tile(q_RALD, k_RAKD, tile, bias)
        lengths_R = torch.tensor([layout.query.lengths[number] for number in numbers])
        real_RL = torch.arange(tile.query_RL.shape[1]) < lengths_R[:, None]
        yield TileScores(scores_RALK, tile.allow, send(real_RL, q_TAD.device))


def score_terms(
    q_TAD: Tensor, k_SAD: Tensor, layout: Layout, bias: Position, scale: float | None = None
) -> Iterator[dict[str, Tensor]]:
    """Yields the terms (R, A, L, K) that sum to each tile's scores, by name: `content`, q k^T scale, and those of the
    bias; masked entries included."""
    scale = 1 / math.sqrt(q_TAD.shape[-1]) if scale is None else scale
    dtype = torch.promote_types(q_TAD.dtype, torch.float32)
    queries = _rows(q_TAD.to(dtype) * scale, layout.query_index, [tile.query_RL.shape for tile in layout.tiles])
    keys = _rows(k_SAD.to(dtype), layout.key_index, [tile.key_RK.shape for tile in layout.tiles])
    for tile, q_RALD, k_RAKD in zip(layout.tiles, queries, keys, strict=True):
        with torch.autocast(q_TAD.device.type, enabled=False):
            content_RALK = q_RALD @ k_RAKD.transpose(-1, -2)
            token_bias = bias.of_tokens(tile.query_RL, tile.key_RK, tile.key_positions_RK)
            terms = token_bias.terms(q_RALD, k_RAKD, tile.query_positions_RL, tile.key_positions_RK)
            terms = {"content": content_RALK, **terms}
        yield {name: term.expand_as(content_RALK) for name, term in terms.items()}


def _rows(x_TAD: Tensor, index: TileIndex, shapes: list[torch.Size]) -> list[Tensor]:
    if len(shapes) == 1:
        return [gather(x_TAD, index).view(*shapes[0], *x_TAD.shape[1:]).transpose(1, 2)]
    parts = gather(x_TAD, index).split([shape.numel() for shape in shapes])
    return [part.unflatten(0, shape).transpose(1, 2) for part, shape in zip(parts, shapes, strict=True)]


def _tile_attention(
    q_RALD: Tensor,
    k_RAKD: Tensor,
    v_RAKD: Tensor,
    tile: Tile,
    bias: Position | None,
    scale: float | None,
    rate: float,
    rng: DropoutRng | None,
) -> Tensor:
    if bias is None:
        return attend_rows(q_RALD, k_RAKD, v_RAKD, tile, scale, rate, rng)
    q_RALD = q_RALD * (1 / math.sqrt(q_RALD.shape[-1]) if scale is None else scale)
    tile_bias = _score_bias(q_RALD, k_RAKD, tile, bias)
    if not bias.weighs and not _is_keyed(rate, rng):
        return F.scaled_dot_product_attention(q_RALD, k_RAKD, v_RAKD, tile_bias, rate, scale=1.0)
    weights_RALK = _drop_weights(_weights(q_RALD, k_RAKD, tile, tile_bias), tile, rate, rng)
    out_RALD = weights_RALK @ v_RAKD
    if bias.weighs:
        bias = bias.of_tokens(tile.query_RL, tile.key_RK, tile.key_positions_RK)
        out_RALD = out_RALD + bias.value(weights_RALK, tile.query_positions_RL, tile.key_positions_RK)
    return out_RALD


def attend_rows(
    q_RALD: Tensor,
    k_RAKD: Tensor,
    v_RAKD: Tensor,
    rows: MaskedRows,
    scale: float | None,
    rate: float,
    rng: DropoutRng | None,
) -> Tensor:
    """Returns the attention of rows without a bias, (R, A, L, D), with torch's fused kernel unless keyed dropout needs
    the weights."""
    if not _is_keyed(rate, rng):
        mask = None
        if not rows.causal:  # in fp32 the kernel would build this term from `allow` again in every layer
            mask = rows.barrier if q_RALD.dtype == torch.float32 else rows.allow
        return F.scaled_dot_product_attention(q_RALD, k_RAKD, v_RAKD, mask, rate, rows.causal, scale=scale)
    q_RALD = q_RALD * (1 / math.sqrt(q_RALD.shape[-1]) if scale is None else scale)
    return _drop_weights(_weights(q_RALD, k_RAKD, rows, None), rows, rate, rng) @ v_RAKD


def _is_keyed(rate: float, rng: DropoutRng | None) -> bool:
    return rate > 0.0 and isinstance(rng, TokenRng)


def _drop_weights(weights_RALK: Tensor, rows: MaskedRows, rate: float, rng: DropoutRng | None) -> Tensor:
    if isinstance(rng, TokenRng):
        return rng.drop_weights(weights_RALK, rows.query_RL, rate) if rate > 0.0 else weights_RALK
    return F.dropout(weights_RALK, rate) if rate else weights_RALK


def _score_bias(q_RALD: Tensor, k_RAKD: Tensor, tile: Tile, bias: Position | None) -> Tensor | None:
    """Returns the sum of bias and mask; None without a bias. q_RALD: already scaled."""
    if bias is None:
        return None
    score_bias = _bias_of_tile(q_RALD, k_RAKD, tile, bias)
    return score_bias if tile.barrier is None else score_bias + tile.barrier.to(score_bias.dtype)


def _bias_of_tile(q_RALD: Tensor, k_RAKD: Tensor, tile: Tile, bias: Position) -> Tensor:
    bias = bias.of_tokens(tile.query_RL, tile.key_RK, tile.key_positions_RK)
    return bias.score(q_RALD, k_RAKD, tile.query_positions_RL, tile.key_positions_RK)


def _weights(q_RALD: Tensor, k_RAKD: Tensor, rows: MaskedRows, bias: Tensor | None) -> Tensor:
    """Returns (R, A, L, K): softmax of the scores. q_RALD: already scaled."""
    scores_RALK = q_RALD @ k_RAKD.transpose(-1, -2)
    if bias is not None:
        scores_RALK = scores_RALK + bias
    elif rows.barrier is not None:
        # In place: the product's backward does not read it.
        scores_RALK = scores_RALK.add_(rows.barrier)
    return scores_RALK.softmax(-1)


def gather(x_T: Tensor, index: TileIndex) -> Tensor:
    """Returns (P, ...): the tokens' values in their slots. Padding gets no gradient, so it must not be read."""
    if not index.identity:
        return cast(Tensor, _Gather.apply(x_T, index))
    slots = index.tokens_P.shape[0]
    # The cache of a single document may have spare capacity.
    return x_T if x_T.shape[0] == slots else x_T[:slots]


def scatter(y_P: Tensor, index: TileIndex, tokens: int) -> Tensor:
    """Returns (T, ...): the slots' values back at their tokens; zero for tokens without a slot."""
    if index.identity and y_P.shape[0] == tokens:
        return y_P
    return cast(Tensor, _Scatter.apply(y_P, index, tokens))


class _Gather(torch.autograd.Function):
    """x_T[tokens_P]. A token has at most one slot that gets a gradient, so the backward is a gather too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: TileIndex) -> Tensor:
        ctx.index, ctx.tokens = index, x.shape[0]
        return x.index_select(0, index.tokens_P)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _to_tokens(gradients[0], ctx.index, ctx.tokens), None


class _Scatter(torch.autograd.Function):
    """The slots' values back at their tokens; other tokens get zero, padding no gradient."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, index: TileIndex, tokens: int) -> Tensor:
        ctx.index = index
        return _to_tokens(y, index, tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        return gradient.index_select(0, ctx.index.tokens_P).index_fill_(0, ctx.index.padding, 0.0), None, None


def _to_tokens(y: Tensor, index: TileIndex, tokens: int) -> Tensor:
    if index.complete and tokens == len(index.tokens_M):
        return y.index_select(0, index.real_M)
    real = y.index_select(0, index.real_M)
    return y.new_zeros((tokens, *y.shape[1:])).index_copy_(0, index.tokens_M, real)


# Attention inputs for taps: weights, scores, and relations among the vectors.
#
# They are computed separately from the attention itself, whose kernels return none of them; with gradients, before
# dropout.


class AttentionInputs(NamedTuple):
    """Queries, keys and values of an attention, after rotation, including virtual tokens and a prefix's keys and
    values. layout: which tokens attend to which. bias: added to the scores. scale: None for 1/sqrt(D)."""

    q_TAD: Tensor
    k_SAD: Tensor
    v_SAD: Tensor
    layout: Layout
    bias: Position | None = None
    scale: float | None = None

    def weights(self) -> list[Tensor]:
        """Returns for each document (A, L, K), fp32 or more: softmax(q k^T scale + bias)."""
        return attention_weights(self.q_TAD, self.k_SAD, self.layout, self.bias, self.scale)

    def scores(self) -> Iterator[TileScores]:
        """Computes q k^T scale + bias, before the softmax, tile by tile."""
        return tiled_scores(self.q_TAD, self.k_SAD, self.layout, self.bias, self.scale)

    def terms(self) -> Iterator[dict[str, Tensor]]:
        """Returns the named terms that sum to each tile's scores; none without a bias."""
        if self.bias is None or not self.bias.scores:
            return iter(())
        return score_terms(self.q_TAD, self.k_SAD, self.layout, self.bias, self.scale)

    def relations(self, x_TAD: Tensor) -> Iterator[TileScores]:
        """Computes x x^T / sqrt(D) of vectors of a self-attention's tokens, where they attend to each other."""
        return tiled_scores(x_TAD, x_TAD, self.layout)
