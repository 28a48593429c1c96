"""Vectors of spans and heads on them, and SpanBERT's span boundary objective."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lmtool.heads.base import PredictingHead
from lmtool.heads.lm import LMHead
from lmtool.nn.dropout import Draws, Dropout
from lmtool.nn.feedforward import ACTIVATIONS, Activation
from lmtool.types import on_host

# Vectors of spans, and a head on them.
#
# Shape letters: T tokens, M spans, N examples, S spans of an example, H hidden width, C classes.


def span_vectors(hidden_TH: Tensor, span_M2: Tensor) -> Tensor:
    """(M, 3H) [start; end; mean] of the hidden states of spans. span_M2: flat inclusive borders."""
    starts_M, ends_M = span_M2.unbind(1)
    lengths_M = ends_M - starts_M + 1
    first_M, last_M = on_host(span_M2).unbind(1)
    tokens = int((last_M - first_M + 1).sum())  # with the size said, the device is not asked for it
    owners = torch.arange(len(span_M2), device=span_M2.device).repeat_interleave(lengths_M, output_size=tokens)
    before_M = lengths_M.cumsum(0) - lengths_M
    places = torch.arange(len(owners), device=span_M2.device) - before_M[owners] + starts_M[owners]
    sums_MH = hidden_TH.new_zeros(len(span_M2), hidden_TH.shape[1]).index_add_(0, owners, hidden_TH[places])
    return torch.cat([hidden_TH[starts_M], hidden_TH[ends_M], sums_MH / lengths_M[:, None].to(sums_MH.dtype)], dim=1)


class SpanHead(PredictingHead):
    """Classes of S spans: a dense layer with tanh over their vectors side by side, dropout, and a linear map (the
    two-layer classifier of Tenney et al. 2019, section 3, of spans as in Lee et al. 2017, section 4)."""

    def __init__(self, hidden_size: int, spans: int, outputs: int, dropout: float = 0.0):
        super().__init__()
        self.dense = nn.Linear(3 * spans * hidden_size, hidden_size)
        self.dropout = Dropout(dropout)
        self.output = nn.Linear(hidden_size, outputs)

    def forward(self, spans_ND: Tensor, draws: Draws | None = None) -> Tensor:
        """(N, 3SH) to (N, C). draws: those of the examples' first tokens."""
        return self.seen(self.output(self.dropout(torch.tanh(self.dense(spans_ND)), draws)))


# Predict the tokens of a span from its two neighbours (Joshi et al., "SpanBERT", 2020, section 3.2).
#
# Shape letters: T tokens, M tokens to predict, H hidden width, B width of a place's vector, V rows of the table, W
# its width.


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
