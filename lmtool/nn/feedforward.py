"""The position-wise feed-forward part (Vaswani et al. 2017, 3.3).

Shape letters: T tokens, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

Activation = Literal["relu", "gelu", "gelu_tanh"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    # Hendrycks and Gimpel 2016: with the error function (BERT), and by its tanh approximation (GPT-2).
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class FeedForward(nn.Module):
    """Two linear maps with an activation between."""

    def __init__(self, hidden_size: int, feedforward_size: int, activation: Activation):
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.fc_in = nn.Linear(hidden_size, feedforward_size)
        self.fc_out = nn.Linear(feedforward_size, hidden_size)

    def forward(self, x_TH: Tensor) -> Tensor:
        return self.fc_out(self.activation(self.fc_in(x_TH)))
