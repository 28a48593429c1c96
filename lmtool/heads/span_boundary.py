"""Predict the tokens of a span from its two neighbours (Joshi et al., "SpanBERT", 2020, section 3.2).

Shape letters: T tokens, M tokens to predict, H hidden width, B width of a place's vector, V rows of the table, W its
width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lmtool.heads.lm import LMHead
from lmtool.nn.feedforward import ACTIVATIONS, Activation


class SpanBoundaryHead(LMHead):
    """y = norm(gelu(W2 norm(gelu(W1 [left; right; place])))), then the tied table and a bias.

    targets: the most tokens of a span that are predicted: rows of the places' vectors. position_size: B.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        targets: int,
        position_size: int,
        activation: Activation = "gelu",
        norm_epsilon: float = 1e-12,
        table_width: int | None = None,
    ):
        super().__init__()
        width = hidden_size if table_width is None else table_width
        self.position = nn.Embedding(targets, position_size)
        self.dense1 = nn.Linear(2 * hidden_size + position_size, hidden_size)
        self.norm1 = nn.LayerNorm(hidden_size, norm_epsilon)
        self.dense2 = nn.Linear(hidden_size, width)
        self.norm2 = nn.LayerNorm(width, norm_epsilon)
        self.activation = ACTIVATIONS[activation]
        self.bias = nn.Parameter(torch.zeros(vocab_size))

    def features(self, borders_M2H: Tensor, places_M: Tensor) -> Tensor:
        """(M, 2H+B) what `loss_sum` and `scores` read. borders_M2H: hidden states of the token before and behind the
        span of each target. places_M: the target's number in its span, from 0."""
        return torch.cat([borders_M2H.flatten(1), self.position(places_M).to(borders_M2H.dtype)], dim=-1)

    def transform(self, hidden_MH: Tensor) -> Tensor:
        inner_MH = self.norm1(self.activation(self.dense1(hidden_MH)))
        return self.norm2(self.activation(self.dense2(inner_MH)))
