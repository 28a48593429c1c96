"""Linear maps of a changing number of tokens.

On a CPU oneDNN computes products in half precision, and generates code for every new shape of their operands: 2 to 4 ms
for a product that takes 0.3 to 0.8 ms (one thread with AMX). Packed batches have a new number of tokens in nearly every
step, so here such products have a multiple of `ROW_MULTIPLE` rows, and the shapes repeat. Products in fp32 need no code
of their own.

Shape letters: T tokens, I inputs, O outputs, R rows: T and padding.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtool.nn.regions import is_plain

ROW_MULTIPLE = 64
_HALF = (torch.bfloat16, torch.float16)


def product_type(x: Tensor) -> torch.dtype:
    """The type of products with x: that of autocast, or its own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def aligned_rows(x_TI: Tensor, dtype: torch.dtype) -> Tensor:
    """(R, I) in this type: on a CPU in half precision with rows of zeros at the end. Fewer rows than `ROW_MULTIPLE`
    come in few numbers, and stay as many."""
    tokens = len(x_TI)
    extra = -tokens % ROW_MULTIPLE
    if not extra or tokens < ROW_MULTIPLE or x_TI.device.type != "cpu" or dtype not in _HALF:
        return x_TI.to(dtype)
    x_RI = x_TI.new_empty((tokens + extra, *x_TI.shape[1:]), dtype=dtype)
    x_RI[:tokens].copy_(x_TI)
    x_RI[tokens:].zero_()
    return x_RI


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """(T, O) `F.linear`, under autocast too."""
    if torch.compiler.is_compiling() or x_TI.dim() != 2 or x_TI.device.type != "cpu":
        return F.linear(x_TI, weight_OI, bias_O)
    dtype = product_type(x_TI)
    if dtype not in _HALF or len(x_TI) < ROW_MULTIPLE:
        return F.linear(x_TI, weight_OI, bias_O)
    return cast(Tensor, _AlignedLinear.apply(x_TI, weight_OI, bias_O, dtype))


def apply_linear(module: nn.Module, x_TI: Tensor) -> Tensor:
    """(T, O) the map of a module; an edited or observed one is called."""
    return linear(x_TI, module.weight, module.bias) if is_plain(module, nn.Linear) else cast(Tensor, module(x_TI))


class _AlignedLinear(torch.autograd.Function):
    """`F.linear` of aligned rows. Gradients have the types of their tensors, as those of autocast's copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        rows, weight_dtype = aligned_rows(x, dtype), weight.to(dtype)
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, weight_dtype)
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        return F.linear(rows, weight_dtype, None if bias is None else bias.to(dtype))[: len(x)]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (rows, weight) = gradients, ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad[:3]
        gradient_rows = aligned_rows(gradient, weight.dtype)
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        return (
            (gradient_rows @ weight)[: len(gradient)].to(x_dtype) if for_x else None,
            (gradient_rows.T @ rows).to(weight_dtype) if for_weight else None,
            gradient.sum(0).to(bias_dtype) if for_bias else None,
            None,
        )
