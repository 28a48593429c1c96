"""CPU stand-ins for torch's flash kernels, in plain formulas: forward and backward of the operators that `varlen_attn`
and jagged nested tensors call on CUDA."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch.nn.attention import SDPBackend


def wide(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


def documents(q, k, cu_q, cu_k, dropout, causal, rng, scale, left, right):
    """(rows of queries, rows of keys, scores (A, L, K), factors of dropout, scale) of each document."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    left, right = (-1 if side is None else side for side in (left, 0 if causal else right))
    generator = torch.Generator().manual_seed(int(rng))
    for begin, end, first, last in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
        queries, keys = slice(begin, end), slice(first, last)
        scores = torch.einsum("lad,kad->alk", q[queries], k[keys]) * scale
        heads, rows, columns = scores.shape
        # The window is counted from the last key.
        ahead = torch.arange(columns) - (torch.arange(rows) + columns - rows)[:, None]
        everything = rows + columns
        hidden = (ahead > (right if right >= 0 else everything)) | (ahead < -(left if left >= 0 else everything))
        kept = (torch.rand(scores.shape, generator=generator) >= dropout).to(q.dtype) / (1 - dropout)
        yield queries, keys, scores.masked_fill(hidden, -torch.inf), kept, scale


def forward(
    q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale=None, window_size_left=None,
    window_size_right=None, **others,
):  # fmt: skip
    """aten::_flash_attention_forward, in fp32 or more. Asserts the preconditions that the kernel does not check; keys
    may have unused rows after the last document."""
    assert cu_q.dtype == cu_k.dtype == torch.int32 and q.dtype == k.dtype == v.dtype
    assert max_q == cu_q.diff().max() and max_k == cu_k.diff().max()
    assert cu_q[-1] == len(q) and cu_k[-1] <= len(k) and not cu_q[0] and not cu_k[0]
    assert all(value is None for value in others.values()), others
    rng, kind = torch.randint(1 << 31, ()), q.dtype
    q, k, v = map(wide, (q, k, v))
    out, lse = torch.zeros_like(q), q.new_full((q.shape[1], q.shape[0]), torch.inf)
    parts = documents(q, k, cu_q, cu_k, dropout, causal, rng, scale, window_size_left, window_size_right)
    for queries, keys, scores, kept, _ in parts:
        if scores.shape[2]:
            lse[:, queries] = scores.logsumexp(-1)
            out[queries] = torch.einsum("alk,kad->lad", scores.softmax(-1) * kept, v[keys])
    return out.to(kind), lse, rng, torch.empty(0), torch.empty(0)


def backward(
    grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, rng, unused, *, scale=None,
    window_size_left=None, window_size_right=None,
):  # fmt: skip
    """aten::_flash_attention_backward, in fp32 or more."""
    kind = q.dtype
    grad, q, k, v, out = map(wide, (grad, q, k, v, out))
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    # `varlen_attn`, which has no dropout, keeps a pair of zeros.
    seed = rng.flatten()[0]
    parts = documents(q, k, cu_q, cu_k, dropout, causal, seed, scale, window_size_left, window_size_right)
    for queries, keys, scores, kept, factor in parts:
        weights = (scores - lse[:, queries, None]).exp()
        dv[keys] = torch.einsum("alk,lad->kad", weights * kept, grad[queries])
        flow = torch.einsum("lad,kad->alk", grad[queries], v[keys]) * kept
        flow = weights * (flow - (grad[queries] * out[queries]).sum(-1).T[..., None]) * factor
        dq[queries] = torch.einsum("alk,kad->lad", flow, k[keys])
        dk[keys] = torch.einsum("alk,lad->kad", flow, q[queries])
    return dq.to(kind), dk.to(kind), dv.to(kind)


@contextmanager
def flash_on_cpu() -> Iterator[None]:
    """Registers both operators for CPU tensors, and makes nested tensors choose them, as on CUDA."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", forward, "CPU")
        library.impl("_flash_attention_backward", backward, "CPU")
        with patch("torch.nested._internal.sdpa._select_sdp_backend", lambda *_: SDPBackend.FLASH_ATTENTION):
            yield
