"""The attention kernels of CUDA that take documents of any lengths: which one serves, and how it is called.

Both read packed tokens and their cumulative lengths. `flash_attention` is torch's variable-length call, the fastest,
and without dropout; `jagged_attention` is its scaled dot product of jagged nested tensors, which carries dropout into
the same kernel. What neither can do (a bias, draws keyed by token, a mask that is no window) is left to tiles.

Shape letters: T query tokens, S key tokens, A heads, D width of a head.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from lmtool.nn.layout import Causal, Full, Layout, Sides
from lmtool.types import Segments

Kernel = Literal["flash", "jagged"]
AMPERE = (8, 0)

# The first jagged tensor warns of a function of torch.fx that torch itself calls, in 2.11 to 2.13.
logging.getLogger("torch.fx._symbolic_trace").addFilter(lambda record: "is_fx_tracing" not in record.getMessage())


@lru_cache
def has_flash(device: torch.device) -> bool:
    """Whether flash attention runs on the device: CUDA, Ampere or newer."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= AMPERE


def kernel_for(device: torch.device, dtype: torch.dtype, head_size: int, dropout: float) -> Kernel | None:
    """The kernel for attention of this kind without a bias; None where tiles serve. dropout: share of the weights that
    a device's generator drops."""
    if dtype not in (torch.float16, torch.bfloat16) or head_size % 8 or head_size > 256 or not has_flash(device):
        return None
    return "jagged" if dropout else "flash"


def has_window(kernel: Kernel, window: Sides | None) -> bool:
    """Whether a kernel has a window of this kind. None: of a mask that is no window."""
    return window is not None and (kernel == "flash" or window in (Causal.window, Full.window))


def serves(kernel: Kernel, layout: Layout) -> bool:
    """Whether a kernel can do this layout: its mask, and where queries and keys lie."""
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
    if window == Causal.window:  # counted from the first key, so both sides must be alike
        return layout.ends_together and layout.query.lengths == layout.key.lengths
    # Nested tensors have no empty documents: one is left out on both sides, or it cannot be.
    return layout.paired


def flash_attention(q_TAD: Tensor, k_SAD: Tensor, v_SAD: Tensor, layout: Layout, scale: float | None) -> Tensor:
    """(T, A, D). Zeros for queries whose document has no keys."""
    # Imported where it is called: the newest part of torch that is used here, and one that few machines need.
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
    # With `return_aux` it would give a pair.
    return cast(Tensor, out_TAD)


def jagged_attention(
    q_TAD: Tensor, k_SAD: Tensor, v_SAD: Tensor, layout: Layout, scale: float | None, dropout: float
) -> Tensor:
    """(T, A, D), with this share of the weights dropped by the device's generator."""
    query, key = layout.query.occupied, layout.key.occupied

    def nested(x_TAD: Tensor, segments: Segments) -> Tensor:
        """(N, A, L, D), L that of each document."""
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
