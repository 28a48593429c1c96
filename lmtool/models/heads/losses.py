"""Losses as sums, each divided once by the loop, and the cross entropy that never holds all its logits.

Shape letters: M targets, H hidden width, V vocabulary, C classes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lmtool.nn.regions import region

# Rows of logits in one matrix product, and of those in one softmax: a softmax's rows should stay in the cache of a
# CPU, where this takes 0.5 to 0.6 of the time of the plain way at (1000 x 256) x 30522 in bf16, and the same at
# narrow or small ones. On CUDA it bounds the memory.
_CHUNKS = {"cpu": (512, 32), "cuda": (1024, 1024)}

# Whose logarithm still has all its digits in fp32, whose smallest normal number is 1.2e-38.
_SMALLEST_SHARE = 1e-30


def loss_sum(
    logits_MC: Tensor,
    labels_M: Tensor,
    label_smoothing: float = 0.0,
    class_weights: Tensor | None = None,
    focal_gamma: float = 0.0,
) -> Tensor:
    """Sum of cross entropies in fp32, a scalar. class_weights: (C,). focal_gamma: not 0, each counts (1 - p)^gamma
    times, p the probability of its label (Lin et al. 2017, section 3); without smoothing."""
    if not focal_gamma:
        wide = _wide(logits_MC)
        return F.cross_entropy(wide, labels_M, class_weights, reduction="sum", label_smoothing=label_smoothing)
    log_p_M = _wide(logits_MC).log_softmax(-1).gather(1, labels_M[:, None])[:, 0]
    focal_M = -_power(-torch.expm1(log_p_M), focal_gamma) * log_p_M
    return (focal_M if class_weights is None else focal_M * class_weights[labels_M]).sum()


def binary_losses(
    logits_NC: Tensor,
    labels_NC: Tensor,
    label_smoothing: float = 0.0,
    gamma: float = 0.0,
    positive_weights: Tensor | None = None,
) -> Tensor:
    """(N, C) binary cross entropies in fp32, each class on its own. labels: 0 or 1, floats. label_smoothing: the share
    of a label spread over both. gamma: of the focal loss. positive_weights: (C,) of the losses where the label is 1."""
    logits_NC = _wide(logits_NC)
    targets_NC = labels_NC * (1 - label_smoothing) + label_smoothing / 2 if label_smoothing else labels_NC
    losses_NC = F.binary_cross_entropy_with_logits(logits_NC, targets_NC, pos_weight=positive_weights, reduction="none")
    if gamma:
        wrong_NC = torch.sigmoid(torch.where(labels_NC > 0, -logits_NC, logits_NC))
        losses_NC = _power(wrong_NC, gamma) * losses_NC
    return losses_NC


def _power(fractions: Tensor, gamma: float) -> Tensor:
    """shares^gamma; the slope of a root at 0 is no number."""
    return fractions.clamp_min(torch.finfo(fractions.dtype).tiny) ** gamma


def losses(logits_MC: Tensor, labels_M: Tensor) -> Tensor:
    """(M,) cross entropy of each target in fp32."""
    return F.cross_entropy(_wide(logits_MC), labels_M, reduction="none")


def linear_loss_sum(
    hidden_MH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, labels_M: Tensor, label_smoothing: float = 0.0
) -> Tensor:
    """`loss_sum(F.linear(hidden, weight, bias), labels, label_smoothing)` in chunks of rows, which keeps neither logits
    nor their gradient: the gradients of the inputs are made on the way forward (as in Hsu et al. 2024, Liger Kernel)
    and scaled on the way back. Products in the type autocast would take; softmax and sums in fp32. Differentiable
    once."""
    return _LinearLossSum.apply(hidden_MH, weight_VH, bias_V, labels_M, _product_type(hidden_MH), label_smoothing)


@torch.no_grad()
def linear_scores(
    hidden_MH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, labels_M: Tensor
) -> tuple[Tensor, Tensor]:
    """(M,) fp32 losses and (M,) int64 best classes of `F.linear(hidden, weight, bias)`, in chunks of rows."""
    rows, _ = _CHUNKS[hidden_MH.device.type]
    kind = _product_type(hidden_MH)
    weight_VH = weight_VH.to(kind)
    all_losses, best = [hidden_MH.new_zeros(0, dtype=torch.float32)], [labels_M.new_zeros(0)]
    with torch.autocast(hidden_MH.device.type, enabled=False):
        for hidden, labels in zip(hidden_MH.to(kind).split(rows), labels_M.split(rows), strict=True):
            logits = _wide(F.linear(hidden, weight_VH))
            if bias_V is not None:
                logits += bias_V
            all_losses.append(F.cross_entropy(logits, labels, reduction="none").float())
            best.append(logits.argmax(-1))
    return torch.cat(all_losses), torch.cat(best)


def _wide(x: Tensor) -> Tensor:
    """fp32 for half precision, else as it is."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _product_type(x: Tensor) -> torch.dtype:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


class MadeForward(torch.autograd.Function):
    """The base of losses over a vocabulary whose gradients are made on the way forward and kept as `ctx.gradients`:
    those of the first three inputs. Three further inputs have none. Differentiable once."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the gradient of a loss over a vocabulary can be taken once only")
        (scale,), kept = gradients, ctx.gradients
        # Scaled in place: a second tensor of the vocabulary's size costs as much as the product.
        ctx.gradients = None
        return (*(None if gradient is None else gradient.mul_(scale) for gradient in kept), None, None, None)


class _LinearLossSum(MadeForward):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        kind: torch.dtype,
        smoothing: float,
    ) -> Tensor:
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        rows, softmax_rows = _CHUNKS[hidden.device.type]
        hidden_kind, weight_kind = hidden.detach().to(kind), weight.detach().to(kind)
        hidden_gradients: list[Tensor] = []
        weight_gradient: Tensor | None = None
        bias_gradient = torch.zeros_like(bias) if bias is not None and for_bias else None
        total = hidden.new_zeros((), dtype=_wide(hidden[:0]).dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            for part, part_labels in zip(hidden_kind.split(rows), labels.split(rows), strict=True):
                logits = F.linear(part, weight_kind)
                blocks = zip(logits.split(softmax_rows), part_labels.split(softmax_rows), strict=True)
                for block, block_labels in blocks:
                    total += _to_gradient(block, bias, block_labels, bias_gradient, smoothing)
                if for_hidden:
                    hidden_gradients.append(logits @ weight_kind)
                if for_weight:
                    product = (logits.T @ part).to(weight.dtype)
                    weight_gradient = product if weight_gradient is None else weight_gradient.add_(product)
        hidden_gradient = torch.cat(hidden_gradients).to(hidden.dtype) if hidden_gradients else torch.zeros_like(hidden)
        if weight_gradient is None and for_weight:
            weight_gradient = torch.zeros_like(weight)
        ctx.gradients = (hidden_gradient if for_hidden else None, weight_gradient, bias_gradient)
        return total


@region(0, 2)
def _to_gradient(
    logits: Tensor, bias: Tensor | None, labels: Tensor, bias_gradient: Tensor | None, smoothing: float
) -> Tensor:
    """Overwrite the logits with the gradient of their losses' sum, softmax minus the (smoothed) one-hot; give that
    sum. smoothing: the share of the target that is spread over all classes (Szegedy et al. 2016)."""
    wide = _wide(logits)
    if bias is not None:
        wide += bias
    labels = labels[:, None]
    highest, picked = wide.amax(-1, keepdim=True), wide.gather(1, labels)
    mean = wide.mean(-1, keepdim=True) if smoothing else picked
    # One exponential, in the fused softmax. On a CPU in place: 4 of 12 ms less at (150, 30522) in fp32 on one thread,
    # with the pass that `_normaliser` spares.
    fractions = torch.softmax(wide, -1, out=wide) if wide.device.type == "cpu" else wide.softmax(-1)
    normaliser = _normaliser(fractions, labels, picked, highest)
    total = (1 - smoothing) * (normaliser - picked).sum()
    if smoothing:
        total = total + smoothing * (normaliser - mean).sum()
    fractions.scatter_add_(1, labels, fractions.new_full((len(labels), 1), smoothing - 1.0))
    if smoothing:
        fractions -= smoothing / fractions.shape[1]
    if bias_gradient is not None:
        bias_gradient += fractions.sum(0)
    if fractions is not logits:
        logits.copy_(fractions)
    return total


def _normaliser(fractions: Tensor, labels: Tensor, picked: Tensor, highest: Tensor) -> Tensor:
    """(R, 1) log of the sum of the exponentials, by a class's logit and share: its label's, or where that share is too
    small for it, its largest one, at least 1/V. CUDA would have to wait to know, a compiler to know ahead. picked,
    highest: the logits."""
    share = fractions.gather(1, labels)
    reads = share.device.type == "cpu" and not torch.compiler.is_compiling()
    if reads and share.numel() and float(share.min()) > _SMALLEST_SHARE:
        return picked - share.log()
    return highest - fractions.amax(-1, keepdim=True).log()
