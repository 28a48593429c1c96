"""One vector for a document, and what is read off it.

Shape letters: T tokens, N documents, H hidden width, C outputs.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from lmtool.models.base import Backbone
from lmtool.models.heads.base import PredictingHead
from lmtool.nn.dropout import Draws, Dropout
from lmtool.nn.feedforward import ACTIVATIONS
from lmtool.types import Packed, send


def summary_index(packed: Packed, how: Literal["first", "last"]) -> Tensor:
    """(N,) flat index of each document's first or last token."""
    starts = torch.tensor(packed.starts, dtype=torch.int64)
    if how == "last":
        starts = starts + torch.tensor(packed.lengths, dtype=torch.int64) - 1
    return send(starts, packed.tokens.device)


def summary(hidden_TH: Tensor, packed: Packed, how: Literal["first", "last", "mean", "max"]) -> Tensor:
    """(N, H): the first token's hidden state, the last one's, or the mean or the maximum over the document, special
    tokens included (Reimers and Gurevych 2019, section 3). Mean and maximum of a document without tokens are 0."""
    if how == "first" or how == "last":
        return hidden_TH[summary_index(packed, how)]
    if how == "max":
        lowest_NH = hidden_TH.new_full((len(packed.lengths), hidden_TH.shape[1]), float("-inf"))
        highest_NH = lowest_NH.scatter_reduce(0, packed.documents[:, None].expand_as(hidden_TH), hidden_TH, "amax")
        return highest_NH.masked_fill(packed.segments.cu_lengths.diff()[:, None] == 0, 0.0)
    lengths = packed.segments.cu_lengths.diff().clamp(min=1).to(hidden_TH.dtype)
    sums_NH = hidden_TH.new_zeros(len(packed.lengths), hidden_TH.shape[1]).index_add_(0, packed.documents, hidden_TH)
    return sums_NH / lengths[:, None]


class Pooler(nn.Module):
    """activation(dense(first token)): tanh (BERT, RoBERTa, ALBERT), relu (DistilBERT), gelu (ELECTRA) or its
    approximation (BigBird); normalised where there is a norm (ModernBERT). input_size: F; hidden_size where None. bias:
    whether the map has one."""

    def __init__(
        self,
        hidden_size: int,
        activation: Literal["tanh", "relu", "gelu", "gelu_tanh"] = "tanh",
        input_size: int | None = None,
        bias: bool = True,
        norm: nn.Module | None = None,
    ):
        super().__init__()
        self.activation = torch.tanh if activation == "tanh" else ACTIVATIONS[activation]
        self.dense = nn.Linear(hidden_size if input_size is None else input_size, hidden_size, bias)
        self.norm = norm

    def forward(self, first_NH: Tensor) -> Tensor:
        """(N, F) to (N, H)."""
        pooled_NH = self.activation(self.dense(first_NH))
        return pooled_NH if self.norm is None else self.norm(pooled_NH)


def pooler(backbone: Backbone) -> Pooler:
    """The pooler of a backbone's family."""
    width, bias = backbone.hidden_size, backbone.head_biases
    norm = nn.LayerNorm(width, backbone.head_norm_epsilon, bias=bias) if backbone.pooler_norm else None
    return Pooler(width, backbone.pooler_activation, backbone.feature_size, bias, norm)


class SequenceHead(PredictingHead):
    """Dropout and a linear map: classes or values of a document. dense: behind a layer of its own with tanh. tokens:
    special tokens that it brings, whose embeddings it learns, of the width `token_size`; hidden_size where None."""

    def __init__(
        self,
        hidden_size: int,
        outputs: int,
        dropout: float = 0.0,
        bias: bool = True,
        dense: bool = False,
        tokens: int = 0,
        token_size: int | None = None,
    ):
        super().__init__()
        self.tokens = nn.Embedding(tokens, token_size or hidden_size) if tokens else None
        self.dense = nn.Linear(hidden_size, hidden_size) if dense else None
        self.dropout = Dropout(dropout)
        self.output = nn.Linear(hidden_size, outputs, bias)

    def forward(self, summary_NH: Tensor, draws: Draws | None = None) -> Tensor:
        """(N, H) to (N, C). draws: those of the summarised tokens, `draws.rows(summary_index(...))`."""
        if self.dense is not None:
            summary_NH = torch.tanh(self.dense(summary_NH))
        return self.seen(self.output(self.dropout(summary_NH, draws)))
