"""Attention kernels: variable-length ones on CUDA, and one with keyed dropout on a CPU."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lmtool.nn.dropout import TokenRng
from lmtool.nn.layout import Causal, Full, Layout
from lmtool.nn.linear import at_least_fp32
from lmtool.types import Segments

# CUDA attention kernels for documents of any length.
#
# Both read packed tokens and their cumulative lengths. `flash_attention` is torch's variable-length function, the
# fastest, without dropout; `jagged_attention` is scaled dot product attention on jagged nested tensors, with dropout in
# the same kernel. For biases, dropout keyed by token (`nn/dropout.py`) and masks that are not windows, attention is
# computed in tiles (`nn/tiled.py`) instead.
#
# Shape letters: T query tokens, S key tokens, A heads, D head width, N documents, L tokens of a document.


Kernel = Literal["flash", "jagged"]
AMPERE = (8, 0)

# The first jagged tensor causes a warning about a function of torch.fx that torch itself calls, in 2.11 to 2.13.
logging.getLogger("torch.fx._symbolic_trace").addFilter(lambda record: "is_fx_tracing" not in record.getMessage())


@lru_cache
def has_flash(device: torch.device) -> bool:
    """Whether flash attention runs on the device: CUDA, Ampere or newer."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= AMPERE


def kernel_for(device: torch.device, dtype: torch.dtype, head_size: int, dropout: float) -> Kernel | None:
    """Returns the kernel for attention without a bias; None for tiles. dropout: the fraction of the weights that is
    dropped with torch's own generator."""
    if dtype not in (torch.float16, torch.bfloat16) or head_size % 8 or head_size > 256 or not has_flash(device):
        return None
    return "jagged" if dropout else "flash"


def has_window(kernel: Kernel, window: tuple[int, int] | None) -> bool:
    """Whether a kernel supports this window. None: the mask is not a window."""
    return window is not None and (kernel == "flash" or window in (Causal.window, Full.window))


def serves(kernel: Kernel, layout: Layout) -> bool:
    """Whether a kernel supports this layout: its mask, and the positions of queries and keys."""
    window = layout.mask.window
    if (
        not has_window(kernel, window)
        or not layout.packed
        or not any(layout.query.lengths)
        or not any(layout.key.lengths)
    ):
        return False
    if kernel == "flash":
        return window == Full.window or layout.ends_together
    if window == Causal.window:  # torch aligns this mask at the first key, so queries and keys need the same lengths
        return layout.ends_together and layout.query.lengths == layout.key.lengths
    # A nested tensor cannot contain an empty document, which can be left out only if it has neither queries nor keys.
    return layout.paired


def flash_attention(q_TAD: Tensor, k_SAD: Tensor, v_SAD: Tensor, layout: Layout, scale: float | None) -> Tensor:
    """Returns the attention, (T, A, D), with zeros for queries whose document has no keys."""
    # Imported here: the newest part of torch in use, and few machines need it.
    from torch.nn.attention.varlen import varlen_attn

    out_TAD = varlen_attn(
        q_TAD,
        k_SAD.to(q_TAD.dtype),
        v_SAD.to(q_TAD.dtype),
        layout.query.cu_lengths,
        layout.key.cu_lengths,
        max(layout.query.lengths),
        max(layout.key.lengths),
        scale=scale,
        window_size=cast(tuple[int, int], layout.mask.window),
    )
    # A tensor, because `return_aux` is not set.
    return cast(Tensor, out_TAD)


def jagged_attention(
    q_TAD: Tensor, k_SAD: Tensor, v_SAD: Tensor, layout: Layout, scale: float | None, dropout: float
) -> Tensor:
    """Returns the attention, (T, A, D). The device's generator drops a fraction `dropout` of the weights."""
    query, key = layout.query.occupied, layout.key.occupied

    def nested(x_TAD: Tensor, segments: Segments) -> Tensor:
        shortest, longest = min(segments.lengths), max(segments.lengths)
        x_NLAD = torch.nested.nested_tensor_from_jagged(
            x_TAD.to(q_TAD.dtype), segments.cu_lengths, min_seqlen=shortest, max_seqlen=longest
        )
        return x_NLAD.transpose(1, 2)

    causal = layout.mask.window == Causal.window
    out_NALD = F.scaled_dot_product_attention(
        nested(q_TAD, query), nested(k_SAD, key), nested(v_SAD, key), None, dropout, causal, scale=scale
    )
    return out_NALD.transpose(1, 2).values()


# Self-attention in training on a CPU, with keyed dropout of its weights: one function forward and one backward.
#
# `nn/tiled.py` computes the same with differentiable operations. Here one `index_select` gathers the queries, keys and
# values of all tiles in the layout that the products need, and autograd records a single operation: a finetuning step
# calls torch 5,400 instead of 6,700 times. If the last layer computes its outputs for some tokens only, only those are
# queries. Under bf16 autocast it computes in fp32 (see `nn/tiled.py`).
#
# Shape letters: T tokens, M query tokens, A heads, D head width, R documents of a tile, L queries and K keys of a
# document, B rows of a tile (R*A), P queries and C keys of all tiles with padding, W columns of a tile (L or K), N
# documents of the batch, X the concatenated vectors of a token.


def fused_attention(
    joint_TX: Tensor, heads: int, layout: Layout, scale: float | None, rate: float, rng: TokenRng
) -> Tensor:
    """Returns (T, A*D): softmax(q k^T scale) v within each document. joint_TX: (T, 3*A*D), queries, keys and values of
    all heads, concatenated. layout: self-attention within packed documents. scale: None for 1/sqrt(D). rate: fraction
    of the weights dropped by `rng`."""
    plan = layout.plans.get(heads)
    if plan is None:
        plan = layout.plans[heads] = head_plan(layout, heads)
    scale = 1 / math.sqrt(joint_TX.shape[1] // (3 * heads)) if scale is None else scale
    return _apply(None, joint_TX, plan, scale, rate, rng)


def fused_attention_of(
    query_MX: Tensor,
    joint_TX: Tensor,
    selected_M: Tensor,
    heads: int,
    layout: Layout,
    scale: float | None,
    rate: float,
    rng: TokenRng,
) -> Tensor:
    """Returns (M, A*D): the attention of M selected tokens, at least one, in any order. query_MX: (M, A*D) their
    queries. joint_TX: (T, 2*A*D) the keys and values of all tokens. selected_M: the indices of these tokens. The
    other arguments are those of `fused_attention`.

    If a tenth of the tokens is selected, attention takes 0.78 times as long as `fused_attention`, including the plan,
    and a step of a model with four layers 0.987 times as long.
    """
    scale = 1 / math.sqrt(query_MX.shape[1] // heads) if scale is None else scale
    return _apply(query_MX, joint_TX, head_plan(layout, heads, selected_M.numpy()), scale, rate, rng)


def _apply(query_MX: Tensor | None, joint_TX: Tensor, *arguments: Any) -> Tensor:
    with torch.autocast(joint_TX.device.type, enabled=False):
        return _FusedAttention.apply(query_MX, joint_TX, *arguments)


@dataclass(frozen=True)
class HeadTile:
    """Documents of similar length, one per row, with separate rows for each head. row_count: B. query_count: L.
    key_count: K. query_offset: the offset of the tile's first vector among the queries of all tiles. key_offset: its
    offset among the keys and values of all tiles. bias: (B or 1, L or 1, K) the term added to scores, 0 or -inf; None
    if all keys are visible."""

    row_count: int
    query_count: int
    key_count: int
    query_offset: int
    key_offset: int
    bias: Tensor | None

    def of_queries(self, vectors: Tensor) -> Tensor:
        """Returns the queries of the tile: a view (B, L, D) of `vectors`, (P*A, D)."""
        return vectors[self.query_offset :][: self.row_count * self.query_count].view(
            self.row_count, self.query_count, -1
        )

    def of_keys(self, vectors: Tensor) -> Tensor:
        """Returns the keys and values of the tile: a view (2, B, K, D) of `vectors`, (2*C*A, D)."""
        return vectors[self.key_offset :][: 2 * self.row_count * self.key_count].view(
            2, self.row_count, self.key_count, -1
        )


@dataclass(frozen=True)
class HeadPlan:
    """The index in the tiles of the vector of each head of each token. All indices refer to vectors of width D.

    queries: (P*A,) the index in (M, A) of each query, tile after tile, each in the order (R, A, L). padding: the
    entries of `queries` that repeat a token as padding. inverse_queries: (M*A,) the entry of `queries` for each index
    in (M, A). keys: (2*C*A,) the index in (T, 2, A) of each key and value, tile after tile, each in the order
    (2, R, A, K). inverse_keys: (T*2*A,) the entry of `keys` for each index in (T, 2, A). unused: the indices in
    (T, 2, A) of documents without queries, which are in no tile. tokens_P: the token of each query.
    """

    tiles: tuple[HeadTile, ...]
    heads: int
    queries: Tensor
    padding: Tensor
    inverse_queries: Tensor
    keys: Tensor
    inverse_keys: Tensor
    unused: Tensor
    tokens_P: Tensor

    @cached_property
    def inputs(self) -> Tensor:
        """`queries` and `keys` concatenated as indices into (T, 3, A), if all tokens are queries."""
        parts = (self.queries, self.heads, 0), (self.keys, 2 * self.heads, self.heads)
        return torch.cat([part // width * (3 * self.heads) + part % width + before for part, width, before in parts])

    @cached_property
    def inverse_inputs(self) -> Tensor:
        """(T*3*A,) the entry of `inputs` for each index in (T, 3, A)."""
        keys = self.inverse_keys.view(-1, 2 * self.heads) + len(self.queries)
        return torch.cat([self.inverse_queries.view(-1, self.heads), keys], 1).flatten()


def head_plan(layout: Layout, heads: int, selected_M: np.ndarray | None = None) -> HeadPlan:
    """Returns the plan for self-attention within packed documents, on the host. selected_M: the tokens that are
    queries; None: all."""
    starts_N, lengths_N = np.array(layout.query.starts, np.int64), np.array(layout.query.lengths, np.int64)
    documents_T = np.repeat(np.arange(len(lengths_N)), lengths_N)
    query_M = np.arange(len(documents_T)) if selected_M is None else selected_M
    counts_N = np.bincount(documents_T[query_M], minlength=len(lengths_N))
    first_N, order_M = np.cumsum(counts_N) - counts_N, np.argsort(documents_T[query_M], kind="stable")
    inverse_queries, inverse_keys = np.empty((len(query_M), heads), np.int64), np.full((len(documents_T), 2, heads), -1)
    queries, padding, keys, token_numbers, tiles = [], [], [], [], []
    query_offset = key_offset = 0
    for documents in layout.classes:  # of similar length
        documents_R = np.array(documents)[counts_N[documents] > 0]
        if not len(documents_R):
            continue
        # Rounded up to a multiple of 4, because one hash of `TokenRng` decides on 4 weights.
        width = -(-int(lengths_N[documents_R].max()) // 4) * 4
        key_RK, real_RK, place_RKA = _rows(starts_N[documents_R], lengths_N[documents_R], width, heads)
        width = width if selected_M is None else int(counts_N[documents_R].max())
        index_RL, real_RL, place_RLA = _rows(first_N[documents_R], counts_N[documents_R], width, heads)
        query_RL = order_M[index_RL]
        queries.append(query_RL[:, None] * heads + np.arange(heads)[:, None])
        padding.append(query_offset + place_RLA[~real_RL])
        inverse_queries[query_RL[real_RL]] = query_offset + place_RLA[real_RL]
        parts_2RAK = np.stack([key_RK[:, None] * 2 * heads + np.arange(heads)[:, None]] * 2)
        parts_2RAK[1] += heads
        keys.append(parts_2RAK)
        key_and_value = np.array([[0], [key_RK.size * heads]])
        inverse_keys[key_RK[real_RK]] = key_offset + place_RKA[real_RK][:, None] + key_and_value
        token_numbers.append(query_M[query_RL])
        # If all tokens are queries, all documents have the same positions, so one mask serves them all.
        positions_RL = (
            np.arange(width)[None] if selected_M is None else token_numbers[-1] - starts_N[documents_R][:, None]
        )
        bias = _mask_bias(layout, documents_R, positions_RL, real_RK, heads)
        sizes = len(documents_R) * heads, index_RL.shape[1], key_RK.shape[1]
        tiles.append(HeadTile(*sizes, query_offset, key_offset, bias))
        query_offset, key_offset = query_offset + queries[-1].size, key_offset + keys[-1].size
    return HeadPlan(
        tiles=tuple(tiles),
        heads=heads,
        queries=_flat(queries),
        padding=_flat(padding),
        inverse_queries=_flat([inverse_queries]),
        keys=_flat(keys),
        inverse_keys=_flat([inverse_keys.clip(0)]),
        unused=_flat([np.flatnonzero(inverse_keys < 0)]),
        tokens_P=_flat(token_numbers),
    )


def _rows(first_R: np.ndarray, counts_R: np.ndarray, width: int, heads: int) -> tuple[np.ndarray, ...]:
    """Arranges ranges as rows, shorter ones repeating their last number. Returns (R, W) the numbers; (R, W) bool, which
    are not repeated; and (R, W, A) the flat index of each in (R, A, W)."""
    steps_W, counts_R1 = np.arange(width), counts_R[:, None]
    index_RAW = np.arange(len(counts_R) * heads * width).reshape(len(counts_R), heads, width)
    numbers_RW = first_R[:, None] + np.minimum(steps_W, counts_R1 - 1)
    return numbers_RW, steps_W < counts_R1, index_RAW.transpose(0, 2, 1)


def _flat(numbers: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.empty(0, np.int64), *(part.ravel() for part in numbers)]))


def _mask_bias(
    layout: Layout, documents_R: np.ndarray, positions_RL: np.ndarray, real_RK: np.ndarray, heads: int
) -> Tensor | None:
    """Returns the mask as a term added to a tile's scores, (R*A or 1, L or 1, K). positions_RL: the positions of the
    queries."""
    key_positions_1K, real_R1K = torch.arange(real_RK.shape[1])[None], torch.from_numpy(real_RK)[:, None]
    allow = layout.mask.allow(
        torch.from_numpy(positions_RL)[:, :, None], key_positions_1K[:, None], torch.from_numpy(documents_R)
    )
    # A causal mask hides the padding, which comes last.
    if not isinstance(layout.mask, Causal):
        allow = real_R1K if allow is None else allow & real_R1K
        # Padding without a visible key attends to all keys, as in `Layout`, so that its softmax is not NaN.
        allow = allow | ~allow.any(-1, keepdim=True)
    assert allow is not None
    if allow.all():
        return None
    bias = torch.where(allow, 0.0, -torch.inf)
    return bias if len(bias) == 1 else bias.repeat_interleave(heads, 0)


class _FusedAttention(torch.autograd.Function):
    """Attention with keyed dropout, for all tiles of a plan. query: None if the queries are part of `joint`."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor | None, joint: Tensor, plan: HeadPlan, scale: float, rate: float, rng: TokenRng
    ) -> Tensor:
        size = joint.shape[1] // ((3 if query is None else 2) * plan.heads)
        if query is None:
            vectors = at_least_fp32(joint.reshape(-1, size).index_select(0, plan.inputs))
        else:
            sources = (query.reshape(-1, size), plan.queries), (joint.reshape(-1, size), plan.keys)
            vectors = torch.cat([at_least_fp32(source.index_select(0, numbers)) for source, numbers in sources])
        queries, keys = vectors.split([len(plan.queries), len(plan.keys)])
        shapes = [(tile.row_count, tile.query_count, tile.key_count) for tile in plan.tiles]
        masks, factor = rng.weight_masks(plan.tokens_P, shapes, plan.heads, rate)
        out, all_weights = torch.empty_like(queries), []
        for tile, mask_BLK in zip(plan.tiles, masks, strict=True):
            k_BKD, v_BKD = tile.of_keys(keys)
            weights_BLK = _scores(tile.of_queries(queries), k_BKD, tile.bias, scale).softmax(-1)
            torch.bmm(mask_BLK.to(weights_BLK.dtype).mul_(weights_BLK), v_BKD, out=tile.of_queries(out))
            all_weights.append(weights_BLK)
        ctx.save_for_backward(vectors, *all_weights, *masks)
        ctx.plan, ctx.scale, ctx.factor, ctx.subset = plan, scale, factor, query is not None
        return out.mul_(factor).to(joint.dtype).index_select(0, plan.inverse_queries).view(-1, plan.heads * size)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (grad_output,), plan = gradients, ctx.plan
        vectors, *saved = ctx.saved_tensors
        all_weights, masks = saved[: len(plan.tiles)], saved[len(plan.tiles) :]
        sizes, size = [len(plan.queries), len(plan.keys)], vectors.shape[1]
        grad_out = at_least_fp32(grad_output.reshape(-1, size).index_select(0, plan.queries)).mul_(ctx.factor)
        grad_out.index_fill_(0, plan.padding, 0.0)
        grad_vectors = torch.empty_like(vectors)
        (queries, keys), (grad_queries, grad_keys) = vectors.split(sizes), grad_vectors.split(sizes)
        for tile, weights_BLK, mask_BLK in zip(plan.tiles, all_weights, masks, strict=True):
            grad_out_BLD, q_BLD, (k_BKD, v_BKD) = (
                tile.of_queries(grad_out),
                tile.of_queries(queries),
                tile.of_keys(keys),
            )
            grad_q_BLD, (grad_k_BKD, grad_v_BKD) = tile.of_queries(grad_queries), tile.of_keys(grad_keys)
            factors_BLK = mask_BLK.to(weights_BLK.dtype)
            torch.bmm((factors_BLK * weights_BLK).transpose(1, 2), grad_out_BLD, out=grad_v_BKD)
            grad_weights_BLK = factors_BLK.mul_(grad_out_BLD @ v_BKD.transpose(1, 2))
            grad_scores_BLK = torch._softmax_backward_data(grad_weights_BLK, weights_BLK, -1, weights_BLK.dtype)
            torch.baddbmm(grad_q_BLD, grad_scores_BLK, k_BKD, beta=0, alpha=ctx.scale, out=grad_q_BLD)
            torch.baddbmm(grad_k_BKD, grad_scores_BLK.transpose(1, 2), q_BLD, beta=0, alpha=ctx.scale, out=grad_k_BKD)
        width = plan.heads * size
        if not ctx.subset:
            grad_joint = grad_vectors.to(grad_output.dtype).index_select(0, plan.inverse_inputs).view(-1, 3 * width)
            return None, grad_joint, None, None, None, None
        grad_query = grad_queries.to(grad_output.dtype).index_select(0, plan.inverse_queries).view(-1, width)
        grad_joint = grad_keys.to(grad_output.dtype).index_select(0, plan.inverse_keys).index_fill_(0, plan.unused, 0.0)
        return grad_query, grad_joint.view(-1, 2 * width), None, None, None, None


def _scores(q_BLD: Tensor, k_BKD: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    if bias is None:
        return torch.baddbmm(q_BLD.new_empty(()), q_BLD, k_BKD.transpose(1, 2), beta=0, alpha=scale)
    return torch.baddbmm(bias.to(q_BLD.dtype), q_BLD, k_BKD.transpose(1, 2), alpha=scale)
