"""The position-wise feed-forward part (Vaswani et al. 2017, 3.3).

Shape letters: T and M tokens, H hidden width, K fused adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtool.nn.configs import Activation as Activation
from lmtool.nn.configs import AdapterReads
from lmtool.nn.dropout import Dropout, DropoutRng
from lmtool.nn.linear import apply_linear

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    # Hendrycks and Gimpel 2016: exact (BERT), and the tanh approximation (GPT-2).
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


class FeedForward(nn.Module):
    """Two linear maps with an activation between them. dropout: applied to the activations."""

    def __init__(
        self, hidden_size: int, feedforward_size: int, activation: Activation, bias: bool = True, dropout: float = 0.0
    ):
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.fc_in = nn.Linear(hidden_size, feedforward_size, bias)
        self.fc_out = nn.Linear(feedforward_size, hidden_size, bias)
        self.dropout = Dropout(dropout)

    def activate(self, x_TH: Tensor) -> Tensor:
        """Maps (T, H) to the input of `fc_out`."""
        return self.activation(apply_linear(self.fc_in, x_TH))

    def forward(self, x_TH: Tensor, rng: DropoutRng | None = None) -> Tensor:
        """Maps (T, H) to (T, H)."""
        return apply_linear(self.fc_out, self.dropout(self.activate(x_TH), rng))


class GatedFeedForward(FeedForward):
    """The activated map gates a second one (Shazeer 2020, "GLU Variants Improve Transformer"): `fc_out(activation(
    fc_gate x) * fc_in x)`."""

    def __init__(
        self, hidden_size: int, feedforward_size: int, activation: Activation, bias: bool = True, dropout: float = 0.0
    ):
        super().__init__(hidden_size, feedforward_size, activation, bias, dropout)
        self.fc_gate = nn.Linear(hidden_size, feedforward_size, bias)

    def activate(self, x_TH: Tensor) -> Tensor:
        return self.activation(apply_linear(self.fc_gate, x_TH)) * apply_linear(self.fc_in, x_TH)


# Adapters: small trainable maps in slots between the sublayers of a layer.
#
# Every layer has a slot after its self-attention and one after its feed-forward part. Cross-attention has none, as in
# the published adapters for encoder-decoders (AdapterHub's presets; Mahabadi et al. 2021, "Compacter"). An empty slot
# returns its input.


class AdapterSlot(nn.Module):
    """The slot after a sublayer and its dropout, before the residual sum; empty."""

    def forward(
        self, out_MH: Tensor, residual_MH: Tensor, norm: nn.Module | None = None, read_MH: Tensor | None = None
    ) -> Tensor:
        """Returns (M, H): the term of the residual sum. out_MH: output of the sublayer. norm: applied after the sum, or
        None. read_MH: input of a feed-forward sublayer; None means residual_MH."""
        return out_MH


def _adapter_input(
    reads: AdapterReads, out_MH: Tensor, residual_MH: Tensor, norm: nn.Module | None, read_MH: Tensor | None
) -> Tensor:
    if reads == "output":
        return out_MH
    if reads == "input":
        return residual_MH if read_MH is None else read_MH
    sum_MH = out_MH + residual_MH
    return sum_MH if norm is None else norm(sum_MH)


class BottleneckAdapter(AdapterSlot):
    """A bottleneck with an activation, added to the sublayer's output (Houlsby et al. 2019, 2.1).

    scale: the factor of the adapter's change; None: learned, starting at 1.
    """

    def __init__(
        self, hidden_size: int, bottleneck: int, activation: Activation, reads: AdapterReads, scale: float | None = 1.0
    ):
        super().__init__()
        self.reads: AdapterReads = reads
        self.down = nn.Linear(hidden_size, bottleneck)
        self.activation = ACTIVATIONS[activation]
        self.up = nn.Linear(bottleneck, hidden_size)
        self.scale: Tensor | float = nn.Parameter(torch.ones(1)) if scale is None else scale

    def change(self, input_MH: Tensor) -> Tensor:
        """Returns (M, H): the change, which `forward` adds to the sublayer's output. input_MH: input of the adapter."""
        change_MH = self.up(self.activation(self.down(input_MH)))
        # Most adapters are not scaled, and a multiplication by 1 costs as much as any other.
        return change_MH if isinstance(self.scale, float) and self.scale == 1.0 else change_MH * self.scale

    def forward(
        self, out_MH: Tensor, residual_MH: Tensor, norm: nn.Module | None = None, read_MH: Tensor | None = None
    ) -> Tensor:
        return out_MH + self.change(_adapter_input(self.reads, out_MH, residual_MH, norm, read_MH))


class StackedAdapters(AdapterSlot):
    """A stack of adapters, each applied to the output of the one below (Pfeiffer et al. 2020, "MAD-X", 2.3): the
    adapters below are already trained; only the top one is trained."""

    def __init__(self, below: Iterable[BottleneckAdapter], top: BottleneckAdapter):
        super().__init__()
        self.below = nn.ModuleList(below)
        self.top = top

    def forward(
        self, out_MH: Tensor, residual_MH: Tensor, norm: nn.Module | None = None, read_MH: Tensor | None = None
    ) -> Tensor:
        for adapter in (*self.below, self.top):
            out_MH = adapter(out_MH, residual_MH, norm, read_MH)
        return out_MH


class FusedAdapters(AdapterSlot):
    """Several trained adapters of the same slot, mixed for each token by attention over them (Pfeiffer et al. 2021,
    "AdapterFusion", 3.2). The query is computed from the input of the adapters, keys and values from their changes."""

    def __init__(self, hidden_size: int, adapters: Sequence[BottleneckAdapter]):
        super().__init__()
        self.adapters = nn.ModuleList(adapters)
        self.reads = adapters[0].reads
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(
        self, out_MH: Tensor, residual_MH: Tensor, norm: nn.Module | None = None, read_MH: Tensor | None = None
    ) -> Tensor:
        input_MH = _adapter_input(self.reads, out_MH, residual_MH, norm, read_MH)
        changes_MKH = torch.stack([cast(BottleneckAdapter, adapter).change(input_MH) for adapter in self.adapters], 1)
        scores_MK = (self.key(changes_MKH) @ self.query(input_MH)[..., None]).squeeze(-1)
        # The value map is linear and has no bias, so it is applied to the mixture: K times less work.
        mixture_MH = (scores_MK.softmax(-1)[:, None] @ changes_MKH).squeeze(1)
        return out_MH + self.value(mixture_MH)

    def distance(self) -> Tensor:
        """Returns the squared distance of the value map from the identity, penalized in training (3.2)."""
        weight = self.value.weight
        return (weight - torch.eye(len(weight), dtype=weight.dtype, device=weight.device)).square().sum()
