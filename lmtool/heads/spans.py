"""Vectors of spans, and a head on them.

Shape letters: T tokens, M spans, N examples, S spans of an example, H hidden width, C classes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lmtool.heads.base import PredictingHead
from lmtool.nn.dropout import Draws, Dropout


def span_vectors(hidden_TH: Tensor, span_M2: Tensor) -> Tensor:
    """(M, 3H) [start; end; mean] of the hidden states of spans. span_M2: flat inclusive borders."""
    starts_M, ends_M = span_M2.unbind(1)
    lengths_M = ends_M - starts_M + 1
    owners = torch.arange(len(span_M2), device=span_M2.device).repeat_interleave(lengths_M)
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
