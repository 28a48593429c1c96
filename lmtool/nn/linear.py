"""Linear maps of packed batches, whose number of tokens changes from step to step.

On a CPU, oneDNN computes products in half precision and compiles a kernel for every new shape of the operands. This
takes 2 to 4 ms for a product of 0.3 to 0.8 ms (one thread with AMX). Here the tokens of these products are padded to a
multiple of `ROW_MULTIPLE` rows, so that shapes repeat. Products in fp32 need no compilation. In generation, those of
few tokens are divided among the threads.

Shape letters: T tokens, I inputs, O outputs, R rows (T padded to a multiple of `ROW_MULTIPLE`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtool.nn.regions import is_plain

ROW_MULTIPLE = 64
_FEW = 48  # tokens; more gain nothing from `few_rows`
_PARTS = 8
_HALF = (torch.bfloat16, torch.float16)


def product_type(x: Tensor) -> torch.dtype:
    """Returns the type in which products with x are computed: the type of autocast, otherwise the type of x."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def at_least_fp32(x: Tensor) -> Tensor:
    """Returns a tensor of half precision in fp32, and others unchanged."""
    return x.float() if x.dtype in _HALF else x


def aligned_rows(x_TI: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts x to `dtype`, and pads it with zeros to R rows if this is half precision on a CPU. Fewer than
    `ROW_MULTIPLE` rows are not padded, because they have few different shapes."""
    tokens = len(x_TI)
    extra = -tokens % ROW_MULTIPLE
    if not extra or tokens < ROW_MULTIPLE or x_TI.device.type != "cpu" or dtype not in _HALF:
        return x_TI.to(dtype)
    x_RI = x_TI.new_empty((tokens + extra, *x_TI.shape[1:]), dtype=dtype)
    x_RI[:tokens].copy_(x_TI)
    x_RI[tokens:].zero_()
    return x_RI


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Computes `F.linear` (T, O), with and without autocast."""
    if torch.compiler.is_compiling() or x_TI.dim() != 2 or x_TI.device.type != "cpu":
        return F.linear(x_TI, weight_OI, bias_O)
    tokens, dtype = x_TI.shape[0], product_type(x_TI)
    if _divides and 0 < tokens <= _FEW and dtype == torch.float32:
        return few_rows(x_TI, weight_OI, bias_O)
    if dtype not in _HALF or tokens < ROW_MULTIPLE:
        return F.linear(x_TI, weight_OI, bias_O)
    return cast(Tensor, _AlignedLinear.apply(x_TI, weight_OI, bias_O, dtype))


_divides = False


@contextmanager
def divided_products() -> Iterator[None]:
    """Divides the products of few tokens in fp32 among the threads of a CPU inside the context, without gradients. This
    rounds differently, and so is not the default: elsewhere a row has the same result in every batch."""
    global _divides
    previous, _divides = _divides, True
    try:
        yield
    finally:
        _divides = previous


def few_rows(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """`F.linear` of a decoding step, with the rows of the weight in `_PARTS` products that the threads share.

    With MKL on AVX2 and two threads, 1 to 8 tokens take .45 to .75 times as long, and generating 16 or 32 texts takes
    .75 times as long. On one thread 2 to 8 tokens gain as much, and others nothing.
    """
    outputs, inputs = weight_OI.shape
    rest = outputs % _PARTS
    if outputs == rest or not weight_OI.is_contiguous():
        return F.linear(x_TI, weight_OI, bias_O)
    if rest:
        sizes = [outputs - rest, rest]
        biases = (None, None) if bias_O is None else bias_O.split(sizes)
        return torch.cat([few_rows(x_TI, *part) for part in zip(weight_OI.split(sizes), biases, strict=True)], 1)
    columns, parts = x_TI.t().expand(_PARTS, -1, -1), weight_OI.view(_PARTS, -1, inputs)
    out = torch.bmm(parts, columns) if bias_O is None else torch.baddbmm(bias_O.view(_PARTS, -1, 1), parts, columns)
    return out.view(outputs, -1).t().contiguous()


def apply_linear(module: nn.Module, x_TI: Tensor) -> Tensor:
    """Returns the output (T, O) of a linear module; an edited module or one with hooks is called."""
    return linear(x_TI, module.weight, module.bias) if is_plain(module, nn.Linear) else cast(Tensor, module(x_TI))


class _AlignedLinear(torch.autograd.Function):
    """`F.linear` on padded rows. Gradients have the types of the original tensors, as under autocast."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        x_rows, cast_weight = aligned_rows(x, dtype), weight.to(dtype)
        ctx.save_for_backward(x_rows if ctx.needs_input_grad[1] else None, cast_weight)
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        return F.linear(x_rows, cast_weight, None if bias is None else bias.to(dtype))[: len(x)]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (x_rows, weight) = gradients, ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        gradient_rows = aligned_rows(gradient, weight.dtype)
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        return (
            (gradient_rows @ weight)[: len(gradient)].to(x_dtype) if needs_x else None,
            (gradient_rows.T @ x_rows).to(weight_dtype) if needs_weight else None,
            gradient.sum(0).to(bias_dtype) if needs_bias else None,
            None,
        )
