"""The position-wise feed-forward part (Vaswani et al. 2017, 3.3).

Shape letters: T tokens, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from lmtool.nn.configs import Activation as Activation
from lmtool.nn.dropout import Draws, Dropout

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    # Hendrycks and Gimpel 2016: with the error function (BERT), and by its tanh approximation (GPT-2).
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


class FeedForward(nn.Module):
    """Two linear maps with an activation between. dropout: of what the activation gives."""

    def __init__(
        self, hidden_size: int, feedforward_size: int, activation: Activation, bias: bool = True, dropout: float = 0.0
    ):
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.fc_in = nn.Linear(hidden_size, feedforward_size, bias)
        self.fc_out = nn.Linear(feedforward_size, hidden_size, bias)
        self.dropout = Dropout(dropout)

    def inner(self, x_TH: Tensor) -> Tensor:
        """(T, H) to what `fc_out` reads."""
        return self.activation(self.fc_in(x_TH))

    def forward(self, x_TH: Tensor, draws: Draws | None = None) -> Tensor:
        """(T, H) to (T, H)."""
        return self.fc_out(self.dropout(self.inner(x_TH), draws))


class GatedFeedForward(FeedForward):
    """The activated map gates a second one (Shazeer 2020, "GLU Variants Improve Transformer"): `fc_out(activation(
    fc_gate x) * fc_in x)`."""

    def __init__(
        self, hidden_size: int, feedforward_size: int, activation: Activation, bias: bool = True, dropout: float = 0.0
    ):
        super().__init__(hidden_size, feedforward_size, activation, bias, dropout)
        self.fc_gate = nn.Linear(hidden_size, feedforward_size, bias)

    def inner(self, x_TH: Tensor) -> Tensor:
        return self.activation(self.fc_gate(x_TH)) * self.fc_in(x_TH)
